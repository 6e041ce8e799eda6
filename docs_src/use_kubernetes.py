from openenv import VectorEnv
from openenv.providers import KubernetesProvider

with KubernetesProvider(ready_timeout_s=600) as provider:
    url = provider.start_container(
        "gridworld", replicas=2, env_vars={"OPENENV_MAX_SESSIONS": "16"}, cpu_request=1, memory_limit="1Gi"
    )
    provider.wait_for_ready(url)
    with VectorEnv(provider.urls(), n=8) as vector:
        vector.reset(seed=3)
        batch = vector.step([{"move": "right"}] * 8)
        print(len(batch.rewards))
