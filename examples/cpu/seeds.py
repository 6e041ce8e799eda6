"""Run an example with several seeds, and draw all curves: python examples/cpu/seeds.py cartpole_ppo --plot curves.png

Prints the best value of each seed. All other options go to the example, such as `--updates 100`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
AXES = {
    "gridworld_grpo": ("update", "unseen", "share of the best reward, unseen maps"),
    "cartpole_ppo": ("steps", "return", "mean return"),
}
"""The names of both axes in each example's log, and the label of the second."""


def run(example: str, seed: int, log: Path, options: list[str]) -> list[dict[str, float]]:
    """Run the example with a seed, and return its log."""
    command = [sys.executable, str(FOLDER / f"{example}.py"), "--seed", str(seed), "--log", str(log), *options]
    subprocess.run(command, check=True)
    return [json.loads(line) for line in log.read_text().splitlines()]


def draw(example: str, logs: dict[int, list[dict[str, float]]], path: Path) -> None:
    """Draw a curve per seed."""
    import matplotlib  # only where a picture is wanted

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x, y, label = AXES[example]
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for seed, rows in logs.items():
        axes.plot([row[x] for row in rows], [row[y] for row in rows], linewidth=1.5, label=f"seed {seed}")
    axes.set(xlabel=x, ylabel=label, title=example)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all seeds, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=sorted(AXES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--logs", type=Path, default=Path("runs"), help="a folder for the logs")
    parser.add_argument("--plot", type=Path, help="a file for the curves")
    chosen, options = parser.parse_known_args()
    chosen.logs.mkdir(parents=True, exist_ok=True)
    logs = {
        seed: run(chosen.example, seed, chosen.logs / f"{chosen.example}-{seed}.jsonl", options)
        for seed in chosen.seeds
    }
    y = AXES[chosen.example][1]
    for seed, rows in logs.items():
        print(f"seed {seed}: best {y} {max(row[y] for row in rows):.3f}")
    if chosen.plot is not None:
        draw(chosen.example, logs, chosen.plot)


if __name__ == "__main__":
    main()
