"""Files: sort a folder by rules about names and contents."""

from __future__ import annotations

import json
from random import Random

from openenv.rollout.tasks.checks import Check
from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import WORDS

_CHECK = """import json
import os
import sys

top = sys.argv[1]
with open("checks/expected.json") as file:
    expected = json.load(file)
names, contents = [], {}
for folder, folders, files in os.walk(top):
    for name in files:
        path = os.path.join(folder, name)
        relative = os.path.relpath(path, top)
        names.append(relative)
        with open(path, errors="replace") as file:
            contents[relative] = file.read(1000)
sys.exit(0 if len(names) == len(expected) and contents == expected else 1)
"""
_KINDS = ("txt", "csv", "md", "log")


def _draw(random: Random) -> Task:
    years = random.sample(range(2015, 2026), 3)
    by = random.choice(("extension", "year", "first letter"))
    dropped = random.choice(_KINDS)
    files: dict[str, str] = {}
    expected: dict[str, str] = {}
    moves = []
    kept = random.choice([kind for kind in _KINDS if kind != dropped])
    # At least one file is copied: an empty result must not pass.
    kinds = [kept, *random.choices(_KINDS, k=13)]
    for word, kind in zip(random.sample(WORDS, 14), kinds, strict=True):
        year = random.choice(years)
        # Sample: Cedar-2019.CSV
        name = f"{word.capitalize()}-{year}.{random.choice((kind, kind.upper()))}"
        files[f"inbox/{name}"] = f"{' '.join(random.sample(WORDS, 3))}\n"
        if kind == dropped:
            continue
        folder = {"extension": kind, "year": str(year), "first letter": word[0]}[by]
        expected[f"{folder}/{name.lower()}"] = files[f"inbox/{name}"]
        moves.append(f"mkdir -p sorted/{folder} && cp inbox/{name} sorted/{folder}/{name.lower()}")
    meaning = {
        "extension": "their extension in small letters, such as `csv`",
        "year": "the year in their name, such as `2019`",
        "first letter": "the first letter of their name in small letters, such as `c`",
    }[by]
    return Task(
        instruction=f"""The folder inbox has files such as Cedar-2019.CSV. Copy them into subfolders of a new folder
`sorted`, named by {meaning}. The copies have the same contents, and their names are in small letters, such as
cedar-2019.csv. Leave out all files with the extension {dropped}, in small or capital letters. The folder `sorted` has
no other files.
""",
        files=files,
        verify=(Check(run="ls sorted", judge='python3 checks/tree.py "$OUTPUT/files/sorted"', keep=("sorted",)),),
        verify_files={"checks/tree.py": _CHECK, "checks/expected.json": json.dumps(expected, indent=0)},
        solution=("\n".join(moves),),
        metadata={"by": by},
    )


FILES = TaskSet("files", "a folder of files sorted by a rule", "judged", _draw)
