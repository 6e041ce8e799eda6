from openenv.rollout import Check, Task, run_rollout
from openenv.rollout.agents import Shell

task = Task(
    instruction="Write add.py. It reads two numbers from standard input and prints their sum.",
    verify=(
        Check(run="python3 add.py < cases/1.in", judge='diff "$OUTPUT/stdout" cases/1.out'),
        Check(run="python3 add.py < cases/2.in", judge='diff "$OUTPUT/stdout" cases/2.out'),
    ),
    verify_files={"cases/1.in": "2 3\n", "cases/1.out": "5\n", "cases/2.in": "-1 1\n", "cases/2.out": "0\n"},
    solution=("echo 'print(sum(map(int, input().split())))' > add.py",),
)

print(run_rollout(task, agent="oracle").reward)
quits = run_rollout(task, agent=Shell(["echo 'import os; os._exit(0)' > add.py"]))
print(quits.reward, [result.exit_code for result in quits.verify_results])
