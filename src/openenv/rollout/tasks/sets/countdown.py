"""The numbers game: reach a target with given numbers and + - * /. Every correct way passes."""

from __future__ import annotations

from random import Random

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import ANSWER

# Each line uses two of the remaining numbers and adds its result to them. The results have digits only, so none is
# negative. No line is evaluated as code.
_CHECK = """import json
import re
import sys

with open("/home/user/checks/game.json") as file:
    game = json.load(file)
with open("answer.txt") as file:
    text = file.read(2000)
left, last, right = game["numbers"], None, True
for line in text.split("\\n"):
    step = re.fullmatch(r"\\s*(\\d{1,9}) *([-+*/]) *(\\d{1,9}) *= *(\\d{1,9})\\s*", line, re.ASCII)
    if step is None:
        right = right and not line.strip()
        continue
    a, sign, b, last = int(step[1]), step[2], int(step[3]), int(step[4])
    for number in (a, b):
        if number in left:
            left.remove(number)
        else:
            right = False
    value = a + b if sign == "+" else a - b if sign == "-" else a * b
    if sign == "/":
        value = a // b if b != 0 and a % b == 0 else -1
    right = right and value == last
    left.append(value)
sys.exit(0 if right and last == game["target"] else 1)
"""


def _game(random: Random) -> tuple[list[int], list[str], int]:
    """Return the numbers, the steps of one solution, and the target."""
    numbers = [random.randint(2, 10) for _ in range(random.randint(2, 3))] + [random.choice((25, 50, 75, 100))]
    left, steps, value = list(numbers), [], 0
    while len(left) > 1:
        a, b = sorted(random.sample(left, 2), reverse=True)
        sign = random.choice("+-**" if a - b > 0 else "+*")
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        steps.append(f"{a} {sign} {b} = {value}")
        left.remove(a)
        left.remove(b)
        left.append(value)
    return numbers, steps, value


def _draw(random: Random) -> Task:
    numbers, steps, target = _game(random)
    # A small target could be one of the numbers, and a large one has only one way.
    while not 101 <= target <= 999:
        numbers, steps, target = _game(random)
    listed = ", ".join(map(str, random.sample(numbers, len(numbers))))
    solution = "\n".join(steps)
    return Task(
        instruction=f"""Reach {target} with the numbers {listed}. Each number may be used at most once. Write one step
per line into {ANSWER}, such as `6 * 4 = 24`: two of the remaining numbers, one of + - * /, and the result, which is a
whole number of at least 0 and can be used once in a later step. The result of the last step is {target}.
""",
        verify=("python3 /home/user/checks/game.py",),
        verify_files={
            "/home/user/checks/game.py": _CHECK,
            "/home/user/checks/game.json": f'{{"numbers": {numbers}, "target": {target}}}\n',
        },
        solution=(f"cat > {ANSWER} <<'END'\n{solution}\nEND",),
        metadata={"answer": ANSWER, "numbers": len(numbers)},
    )


COUNTDOWN = TaskSet("countdown", "steps from given numbers to a target number", "isolated", _draw)
