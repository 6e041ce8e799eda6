"""Sudoku with 4, 6 or 9 rows. Every grid that keeps the rules and the given digits passes."""

from __future__ import annotations

from random import Random

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import ANSWER

_CHECK = """import json
import sys

with open("/home/user/checks/puzzle.json") as file:
    puzzle = json.load(file)
with open("answer.txt") as file:
    lines = [line.strip() for line in file.read(2000).split("\\n")]
rows = [line.replace(" ", "") for line in lines if line]
given, height, width = puzzle["rows"], puzzle["height"], puzzle["width"]
size = height * width
digits = sorted("123456789"[:size])
right = len(rows) == size and all(len(row) == size for row in rows)
if right:
    right = all(sorted(row) == digits for row in rows)
    right = right and all(sorted(row[c] for row in rows) == digits for c in range(size))
    for r in range(0, size, height):
        for c in range(0, size, width):
            box = [rows[r + i][c + j] for i in range(height) for j in range(width)]
            right = right and sorted(box) == digits
    right = right and all(g in (".", d) for line, row in zip(given, rows) for g, d in zip(line, row))
sys.exit(0 if right else 1)
"""
# Height and width of a box, and how many cells are empty. A box has as many cells as a row.
_SIZES = ((2, 2, (6, 10)), (2, 3, (12, 22)), (3, 3, (30, 50)))


def _grid(random: Random, height: int, width: int) -> list[str]:
    """Return a solved grid: a pattern that keeps the rules, with shuffled rows, columns and digits."""
    size = height * width
    digits = random.sample("123456789"[:size], size)

    # Rows stay in their band and columns in their stack, so the boxes keep their digits.
    def shuffled(groups: int, length: int) -> list[int]:
        order = random.sample(range(groups), groups)
        return [group * length + index for group in order for index in random.sample(range(length), length)]

    rows, columns = shuffled(width, height), shuffled(height, width)
    return ["".join(digits[(width * (r % height) + r // height + c) % size] for c in columns) for r in rows]


def _draw(random: Random) -> Task:
    height, width, (low, high) = random.choice(_SIZES)
    solved = _grid(random, height, width)
    size = height * width
    empty = set(random.sample(range(size * size), random.randint(low, high)))
    given = [
        "".join("." if r * size + c in empty else digit for c, digit in enumerate(row)) for r, row in enumerate(solved)
    ]
    grid, solution = "\n".join(given), "\n".join(solved)
    rows = ", ".join(f'"{row}"' for row in given)
    return Task(
        instruction=f"""Solve this Sudoku: each row, each column and each box of {height} rows and {width} columns has
every digit from 1 to {size} once. A dot is an empty cell.

{grid}

Write the {size} rows of digits into {ANSWER}, and nothing else.
""",
        verify=("python3 /home/user/checks/grid.py",),
        verify_files={
            "/home/user/checks/grid.py": _CHECK,
            "/home/user/checks/puzzle.json": f'{{"height": {height}, "width": {width}, "rows": [{rows}]}}\n',
        },
        solution=(f"cat > {ANSWER} <<'END'\n{solution}\nEND",),
        metadata={"answer": ANSWER, "size": size, "empty": len(empty)},
    )


SUDOKU = TaskSet("sudoku", "a Sudoku with 4, 6 or 9 rows", "isolated", _draw)
