from openenv import GenericEnvClient
from openenv.errors import SessionLost

with (
    GenericEnvClient(base_url="http://localhost:8000").sync() as careless,
    GenericEnvClient(base_url="http://localhost:8000").sync() as careful,
):
    careless.reset()
    careful.reset()  # in another process, if the machine has more than one core
    try:
        careless.step({"button": "red"})
    except SessionLost as exc:
        print(exc.reason)
    print(careless.reset().done)
