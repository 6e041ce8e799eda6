from openenv.rollout import Task, run_rollout

task = Task(
    instruction="Write square.py. Its function square(n) returns the square of n.",
    files={"README.md": "# Squares\n"},
    setup=("mkdir -p results",),
    verify=(
        "python3 -c 'from square import square; assert square(7) == 49'",
        "python3 check.py",
    ),
    verify_files={"check.py": "from square import square\nassert [square(n) for n in range(4)] == [0, 1, 4, 9]\n"},
    solution=("echo 'def square(n): return n * n' > square.py",),
)

solved = run_rollout(task, agent="oracle")  # runs the task's own solution
print(solved.status, solved.reward)
idle = run_rollout(task, agent="noop")  # does nothing
print(idle.status, idle.reward, [result.exit_code for result in idle.verify_results])
