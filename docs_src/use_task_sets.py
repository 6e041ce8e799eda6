from random import Random

from openenv.rollout import Task, TaskSet, run_many, task_set, task_set_names

print(len(task_set_names()), "sets")
tasks = task_set("sudoku").tasks(4, seed=7)  # the same tasks on every machine
print([outcome.reward for outcome in run_many(tasks, agent="oracle")])


def draw(random: Random) -> Task:
    a, b = random.randint(100, 999), random.randint(100, 999)
    return Task(
        instruction=f"Write the sum of {a} and {b} into answer.txt.",
        verify=(f'[ "$(cat answer.txt)" = {a + b} ]',),
        solution=(f"echo {a + b} > answer.txt",),
        metadata={"answer": "answer.txt"},
    )


SUMS = TaskSet("sums", "the sum of two numbers", "isolated", draw)
print(SUMS.task(12, seed=3).task_id)
