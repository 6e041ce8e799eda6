import tempfile

from openenv.rollout import RayCluster, RolloutStore, Task, run_many

tasks = [
    Task(
        instruction=f"Write {n} into answer.txt.",
        verify=(f"grep -qx {n} answer.txt",),
        solution=(f"echo {n} > answer.txt",),
        task_id=f"write-{n}",
    )
    for n in range(8)
]

with tempfile.TemporaryDirectory() as folder, RolloutStore(folder) as store:
    outcomes = run_many(tasks, agent="oracle", store=store, on=RayCluster(cpus=0.5), concurrency=8)
    print(sum(outcome.reward or 0 for outcome in outcomes), len(store.find(status="ok")))
    print(sorted(outcomes[0].metadata["ray"]))
