"""Draw the curves of training runs: python examples/guess_number/plot.py OUT.png LOG..."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

BEST = 0.5875
"""The mean reward of halving what is left."""


def main(out: str, *logs: str) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for number, log in enumerate(logs):
        rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
        updates = range(1, len(rows) + 1)
        curves = (
            (left, "mean reward of 512 episodes", [row["reward"] for row in rows], "#1f6feb"),
            (right, "numbers found", [row["found"] for row in rows], "#2da44e"),
            (right, "turns / 8", [row["turns"] / 8 for row in rows], "#bf8700"),
        )
        for axes, label, values, colour in curves:
            style = {"label": label} if number == 0 else {"linestyle": "--", "linewidth": 1.0}
            axes.plot(updates, values, color=colour, **style)
    left.axhline(BEST, color="#888", linestyle=":", label="best possible")
    left.set(xlabel="update", ylabel="reward", ylim=(0, 0.65))
    left.legend(loc="lower right", frameon=False)
    right.set(xlabel="update", ylim=(0, 1.02))
    right.legend(loc="lower right", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
