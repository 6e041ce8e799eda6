import sys

from openenv.rollout import load_tasks, run_many

tasks = load_tasks(sys.argv[1])  # a Harbor task folder, or a folder of them
for agent in ("oracle", "noop"):
    outcomes = run_many(tasks, agent=agent, sandbox="docker")
    print(agent, [outcome.reward for outcome in outcomes])
