"""What verification costs: the verify phase of a five-line task, here and in another checkout.

    python benchmarks/verify.py --before ../checkout-of-main

Each round runs the task once per checkout, in a process of its own and in turns, so that a busy machine slows both. The
figure to look at is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
_CHILD = """
import json, sys
from openenv.rollout import Task, run_rollout

task, sandbox, runs = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
seconds = []
for _ in range(runs + 1):  # the first finds and compiles what all others share
    outcome = run_rollout(Task.model_validate(task), agent="oracle", sandbox=sandbox)
    assert outcome.reward == 1.0, outcome
    seconds.append(outcome.phase_s["verify"])
print(json.dumps(seconds[1:]))
"""
_PYTEST = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest -q"
_TEST = "from calc import square\n\n\ndef test_square():\n    assert square(7) == 49\n"
TASKS: dict[str, dict[str, object]] = {
    "pytest": {  # the usual case: lines that start an interpreter
        "verify": [f"{_PYTEST} tests/test_{n}.py" for n in range(5)],
        "verify_files": {f"tests/test_{n}.py": _TEST for n in range(5)},
    },
    "python": {"verify": ["python3 -c 'from calc import square; assert square(7) == 49'"] * 5},
    "shell": {"verify": ["grep -q square calc.py"] * 5},  # the worst case: lines that take no time themselves
}


def measure(checkout: Path, task: dict[str, object], *, sandbox: str, runs: int) -> list[float]:
    """Return the seconds of the verify phase, in one process."""
    fields = {
        "instruction": "Write calc.py.",
        "files": {f"lib/data_{n}.txt": "x" * 1000 for n in range(50)},
        "solution": "printf 'def square(n):\\n    return n * n\\n' > calc.py",
        **task,
    }
    command = [sys.executable, "-c", _CHILD, json.dumps(fields), sandbox, str(runs)]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=5, help="verifications per round and checkout")
    arguments = parser.parse_args()
    checkouts = {"now": HERE} | ({"before": arguments.before.resolve()} if arguments.before else {})
    print(f"| five lines of | {' | '.join(f'{name}, ms' for name in checkouts)} | ratio |")
    for name, task in TASKS.items():
        seconds: dict[str, list[float]] = {key: [] for key in checkouts}
        for _ in range(arguments.rounds):
            for key, checkout in checkouts.items():
                seconds[key] += measure(checkout, task, sandbox=arguments.sandbox, runs=arguments.runs)
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        ratio = f"{medians['now'] / medians['before']:.2f}" if "before" in medians else ""
        print(f"| {name} | {' | '.join(f'{value * 1000:.0f}' for value in medians.values())} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
