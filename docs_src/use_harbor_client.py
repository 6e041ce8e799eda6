import sys

from openenv.harbor.client import HarborEnv

with HarborEnv(base_url=sys.argv[1]) as env:
    dataset = env.splits()[0]["name"]
    print(env.get_task(dataset, 0).task_name)
    result = env.run_rollout(split=dataset, task_index=0, harness="oracle", sandbox="docker")
    print(result.reward, result.ok)
