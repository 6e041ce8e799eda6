"""Draw the curve of a training run: python examples/guess_number/plot.py LOG OUT.png"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

BEST = 0.5875
"""The mean reward of halving what is left."""


def main(log: str, out: str) -> None:
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    minutes, passed = [], 0.0
    for row in rows:
        passed += row["iteration_s"] / 60
        minutes.append(passed)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    left.plot(minutes, [row["reward"] for row in rows], color="#1f6feb", label="mean reward of 512 episodes")
    left.axhline(BEST, color="#888", linestyle=":", label="best possible")
    left.set(xlabel="minutes", ylabel="reward", ylim=(0, 0.65))
    left.legend(loc="lower right", frameon=False)
    right.plot(minutes, [row["found"] for row in rows], color="#2da44e", label="numbers found")
    right.plot(minutes, [row["turns"] / 8 for row in rows], color="#bf8700", label="turns / 8")
    right.set(xlabel="minutes", ylim=(0, 1.02))
    right.legend(loc="lower right", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
