from openenv import GenericEnvClient
from openenv.providers import DaytonaProvider

with DaytonaProvider(image="snapshot:sums") as provider:  # the key is in DAYTONA_API_KEY
    url = provider.start_container()
    provider.wait_for_ready(url)
    with GenericEnvClient(base_url=url).sync() as env:
        env.reset(seed=3)
        print(env.step({"text": "hello"}).reward)
