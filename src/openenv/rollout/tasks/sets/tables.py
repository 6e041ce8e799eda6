"""Data frames: filter, join, group and aggregate CSV files into one."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from random import Random

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import WORDS

_FILE = "result.csv"
_CHECK = """import csv
import math
import sys

with open("result.csv", newline="") as file:
    rows = [row for row in csv.reader(file) if row]
with open("/home/user/checks/expected.csv", newline="") as file:
    expected = list(csv.reader(file))
right = [row[:1] for row in rows] == [row[:1] for row in expected] and rows[0] == expected[0]
for row, wanted in zip(rows[1:], expected[1:]):
    value = float(row[1]) if len(row) == 2 else math.nan
    if not (math.isfinite(value) and abs(value - float(wanted[1])) < 0.011):
        right = False
sys.exit(0 if right else 1)
"""
_SOLUTION = """import csv

with open("shops.csv", newline="") as file:
    regions = {{row["shop"]: row["region"] for row in csv.DictReader(file)}}
groups = {{}}
with open("sales.csv", newline="") as file:
    for row in csv.DictReader(file):
        row["region"] = regions[row["shop"]]
        if row["amount"] and int(row["amount"]) >= {least}:
            groups.setdefault(row["{key}"], []).append(int(row["amount"]) * int(row["price"]))
with open("result.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["{key}", "{name}"])
    for key, values in sorted(groups.items()):
        writer.writerow([key, {expression}])
"""

_Row = dict[str, str]
# The aggregates: their descriptions, their Python expressions for the solution, and their functions.
_AGGREGATES: dict[str, tuple[str, str, Callable[[list[int]], float]]] = {
    "total": ("the sum", "sum(values)", sum),
    "largest": ("the maximum", "max(values)", max),
    "smallest": ("the minimum", "min(values)", min),
    "sales": ("the number", "len(values)", len),
    "mean": (
        "the mean, rounded to two decimal places,",
        "round(sum(values) / len(values), 2)",
        lambda values: round(sum(values) / len(values), 2),
    ),
}


def _csv(rows: list[_Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _draw(random: Random) -> Task:
    shops, regions, items = random.sample(WORDS, 6), random.sample(WORDS, 3), random.sample(WORDS, 5)
    region_of = {shop: random.choice(regions) for shop in shops}
    sales = [
        {
            "day": str(random.randint(1, 28)),
            "shop": random.choice(shops),
            "item": random.choice(items),
            # Some amounts are missing.
            "amount": random.choice(("", *map(str, range(1, 10)))),
            "price": str(random.randint(1, 99)),
        }
        for _ in range(120)
    ]
    key, name, least = random.choice(("shop", "item", "region")), random.choice(list(_AGGREGATES)), random.randint(2, 4)
    description, expression, aggregate = _AGGREGATES[name]
    groups: dict[str, list[int]] = {}
    for row in sales:
        if row["amount"] and int(row["amount"]) >= least:
            value = int(row["amount"]) * int(row["price"])
            groups.setdefault(region_of[row["shop"]] if key == "region" else row[key], []).append(value)
    rows = [{key: group, name: f"{aggregate(values):g}"} for group, values in sorted(groups.items())]
    program = _SOLUTION.format(least=least, key=key, name=name, expression=expression)
    return Task(
        instruction=f"""sales.csv has the columns day, shop, item, amount and price; shops.csv has the region of each
shop. The turnover of a sale is amount times price. Use the sales with an amount of at least {least}; some amounts are
missing. Write {_FILE} with the columns {key} and {name}: for each {key} {description} of the turnovers of its sales,
sorted by {key}.
""",
        files={"sales.csv": _csv(sales), "shops.csv": _csv([{"shop": s, "region": region_of[s]} for s in shops])},
        verify=("python3 /home/user/checks/compare.py",),
        verify_files={"/home/user/checks/compare.py": _CHECK, "/home/user/checks/expected.csv": _csv(rows)},
        solution=(f"python3 - <<'END'\n{program}END",),
        metadata={"aggregate": name},
    )


TABLES = TaskSet("tables", "CSV files filtered, joined, grouped and aggregated", "isolated", _draw)
