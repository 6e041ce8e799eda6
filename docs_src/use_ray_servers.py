from openenv import VectorEnv
from openenv.providers import RayProvider

with (
    RayProvider("gridworld_env.server.app:app", env_vars={"OPENENV_MAX_SESSIONS": "64"}) as provider,
    VectorEnv(provider.urls, n=16, token=provider.token, on_failure="restart") as vector,
):
    vector.reset(seed=3)
    batch = vector.step([{"move": "right"}] * 16)
    print(len(provider.urls()), len(batch.rewards))
