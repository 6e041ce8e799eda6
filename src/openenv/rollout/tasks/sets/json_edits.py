"""JSON editing: three to six changes to a configuration file."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import WORDS

_FILE = "config.json"
# Compared as texts, because Python's `==` takes 1, 1.0 and True for the same.
_CHECK = """import json
import sys

with open("config.json") as file:
    config = json.load(file)
with open("/home/user/checks/expected.json") as file:
    expected = json.load(file)
sys.exit(0 if json.dumps(config, sort_keys=True) == json.dumps(expected, sort_keys=True) else 1)
"""

# A configuration; `Any` because JSON is.
_Config = dict[str, Any]


def _config(random: Random) -> _Config:
    names = random.sample(WORDS, 4)
    return {
        "version": random.randint(1, 40),
        "services": {name: _service(random) for name in names},
        "owners": random.sample(WORDS, 3),
    }


def _service(random: Random) -> _Config:
    return {
        "port": random.randint(1024, 9999),
        "enabled": random.random() < 0.5,
        "tags": random.sample(WORDS, 3),
        "limits": {"memory_mb": random.choice((128, 256, 512)), "timeout_s": random.randint(1, 60)},
        "note": " ".join(random.sample(WORDS, 2)),
    }


def _edit(random: Random, config: _Config, name: str, kind: str) -> str:
    """Change one service, or the whole document, in place, and return the description."""
    service, word = config["services"][name], random.choice(WORDS)
    if kind == "port":
        service["port"] = random.randint(10_000, 60_000)
        return f"Set the port of the service {name} to {service['port']}."
    if kind == "toggle":
        service["enabled"] = not service["enabled"]
        return f"{'Enable' if service['enabled'] else 'Disable'} the service {name}."
    if kind == "tag":
        tag = f"{word}-{random.randint(1, 9)}"
        service["tags"].append(tag)
        return f"Append the tag '{tag}' to the tags of {name}."
    if kind == "untag":
        tag = service["tags"].pop(random.randrange(len(service["tags"])))
        return f"Remove the tag '{tag}' of {name}."
    if kind == "note":
        del service["note"]
        return f"Remove the key 'note' of {name}."
    if kind == "double":
        service["limits"]["memory_mb"] *= 2
        return f"Double the memory_mb of {name}."
    if kind == "rename":
        new = f"{word}-{name}"
        config["services"][new] = config["services"].pop(name)
        return f"Rename the service {name} to {new}; keep its settings."
    config["version"] += 1
    return "Increase the version by 1."


def _draw(random: Random) -> Task:
    before = _config(random)
    after = copy.deepcopy(before)
    # Each service is changed at most once, so the order of the changes has no effect.
    kinds = random.sample(("port", "toggle", "tag", "untag", "note", "double", "rename"), random.randint(2, 4))
    names = random.sample(list(before["services"]), len(kinds))
    edits = [_edit(random, after, name, kind) for name, kind in zip(names, kinds, strict=True)]
    edits.append(_edit(random, after, names[0] if "rename" not in kinds else next(iter(after["services"])), "version"))
    expected = json.dumps(after, indent=2)
    listed = "\n".join(f"- {edit}" for edit in edits)
    return Task(
        instruction=f"Change {_FILE} as follows, and change nothing else in it:\n\n{listed}\n",
        files={_FILE: json.dumps(before, indent=2) + "\n"},
        verify=("python3 /home/user/checks/compare.py",),
        verify_files={"/home/user/checks/compare.py": _CHECK, "/home/user/checks/expected.json": expected},
        solution=(f"cat > {_FILE} <<'END'\n{expected}\nEND",),
        metadata={"answer": _FILE, "edits": len(edits)},
    )


JSON_EDITS = TaskSet("json", "several changes to a JSON file", "isolated", _draw)
