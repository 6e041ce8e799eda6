import tempfile

from openenv.rollout import RolloutStore, Task, reverify, run_many

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
    outcomes = run_many(tasks, agent="oracle", store=store, concurrency=4)
    print(sum(outcome.reward or 0 for outcome in outcomes))

    row = store.find(task_id="write-3")[0]
    again = reverify(store, row.rollout_id, lines=["test -s answer.txt", "grep -q 4 answer.txt"])
    print([record.outcome.reward for record in store.history(row.rollout_id)])
