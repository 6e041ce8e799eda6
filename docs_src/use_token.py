from openenv import GenericEnvClient
from openenv.errors import AccessDenied

with GenericEnvClient("http://localhost:8000", token="trainer-1c7f").sync() as env:
    print(env.reset().done)

try:
    GenericEnvClient("http://localhost:8000", token="wrong").sync().connect()
except AccessDenied as exc:
    print(exc.code)
