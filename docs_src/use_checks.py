from openenv.rollout import Case, Task, case_check, pytest_check, read_task, run_rollout
from openenv.rollout.agents import Shell

TESTS = """
from square import square

def test_square():
    assert [square(n) for n in (0, 3, -7)] == [0, 9, 49]
"""

task = Task(
    instruction="Write square.py: square(n) returns the square of n; run as a program, it reads n and prints that.",
    verify=(
        pytest_check("tests/test_square.py", of="square"),
        case_check("python3 square.py", (Case(stdin="3", stdout="9"), Case(stdin="x", exit_code=1))),
    ),
    verify_files={"tests/test_square.py": TESTS},
    solution=(
        "echo 'def square(n): return n * n' > square.py",
        "echo 'if __name__ == \"__main__\": print(square(int(input())))' >> square.py",
    ),
    min_trust="judged",
)

print([reading.trust for reading in read_task(task)])
solved = run_rollout(task, agent="oracle")
print(solved.reward, solved.trust)
liar = "class Yes(int):\n    def __eq__(self, other): return True\ndef square(n): return Yes(0)"
print(run_rollout(task, agent=Shell([f"cat > square.py <<'END'\n{liar}\nEND"])).reward)
