"""Shortest routes in a network of roads. Every shortest route passes."""

from __future__ import annotations

import heapq
from random import Random

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import ANSWER, WORDS

# The roads come from a verify file: the agent may change its own copy.
_CHECK = """import csv
import json
import sys

with open("/home/user/checks/roads.csv", newline="") as file:
    roads = {frozenset((row["from"], row["to"])): int(row["km"]) for row in csv.DictReader(file)}
with open("/home/user/checks/route.json") as file:
    wanted = json.load(file)
with open("answer.txt") as file:
    towns = file.read(4000).split()
right = len(towns) > 1 and towns[0] == wanted["from"] and towns[-1] == wanted["to"]
length = 0
for a, b in zip(towns, towns[1:]):
    right = right and frozenset((a, b)) in roads
    length += roads.get(frozenset((a, b)), 0)
sys.exit(0 if right and length == wanted["km"] else 1)
"""
_Roads = dict[tuple[str, str], int]


def _roads(random: Random, towns: list[str]) -> _Roads:
    """Return a connected network: each town has a road to an earlier one, and some more."""
    roads: _Roads = {}
    for index, town in enumerate(towns[1:], 1):
        roads[towns[random.randrange(index)], town] = random.randint(5, 60)
    for _ in range(len(towns)):
        a, b = sorted(random.sample(range(len(towns)), 2))
        roads.setdefault((towns[a], towns[b]), random.randint(5, 60))
    return roads


def _shortest(roads: _Roads, start: str, end: str) -> tuple[int, list[str]]:
    """Return the length of a shortest route, and its towns (Dijkstra)."""
    neighbours: dict[str, list[tuple[str, int]]] = {}
    for (a, b), km in roads.items():
        neighbours.setdefault(a, []).append((b, km))
        neighbours.setdefault(b, []).append((a, km))
    queue, visited = [(0, [start])], set()
    while True:
        length, route = heapq.heappop(queue)
        if route[-1] == end:
            return length, route
        if route[-1] not in visited:
            visited.add(route[-1])
            for town, km in neighbours[route[-1]]:
                heapq.heappush(queue, (length + km, [*route, town]))


def _draw(random: Random) -> Task:
    towns = random.sample(WORDS, random.randint(7, 14))
    roads = _roads(random, towns)
    start, end = random.sample(towns, 2)
    length, route = _shortest(roads, start, end)
    # A route of two or three towns could be guessed.
    while len(route) < 4:
        roads = _roads(random, towns)
        start, end = random.sample(towns, 2)
        length, route = _shortest(roads, start, end)
    table = "from,to,km\n" + "".join(f"{a},{b},{km}\n" for (a, b), km in roads.items())
    return Task(
        instruction=f"""roads.csv lists roads between towns with the columns from, to and km. Every road can be used in
both directions. Find a shortest route from {start} to {end}. Write the names of its towns into {ANSWER}, in order, one
per line, with {start} first and {end} last.
""",
        files={"roads.csv": table},
        verify=("python3 /home/user/checks/route.py",),
        verify_files={
            "/home/user/checks/route.py": _CHECK,
            "/home/user/checks/roads.csv": table,
            "/home/user/checks/route.json": f'{{"from": "{start}", "to": "{end}", "km": {length}}}\n',
        },
        solution=("printf '%s\\n' " + " ".join(route) + f" > {ANSWER}",),
        metadata={"answer": ANSWER, "towns": len(towns)},
    )


GRAPHS = TaskSet("graphs", "a shortest route in a network of roads", "isolated", _draw)
