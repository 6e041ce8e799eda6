"""Draw the curves of training runs, and print their figures: python examples/shell_agent/plot.py OUT.png LOG..."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, Any]
TARGET = 0.85
FAMILIES = ("append", "count", "delete", "fix", "rename", "write")


def read(log: Path) -> tuple[list[Row], list[Row]]:
    """Return the updates and the evaluations of a run."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row for row in rows if "train/reward" in row], [row for row in rows if "eval/reward" in row]


def figures(log: Path) -> dict[str, str]:
    """Return the figures of a run, for a table."""
    updates, evaluations = read(log)
    totals = {name.removeprefix("total/"): value for name, value in updates[-1].items() if name.startswith("total/")}
    seconds = evaluations[-1]["time/since_start_s"]
    spent = {
        "waiting for rollouts": sum(row["time/rollouts_s"] for row in updates),
        "updates": sum(row["time/update_s"] for row in updates),
        "evaluations": sum(row["time/evaluation_s"] for row in evaluations),
    }
    last = evaluations[-1]
    reached = next((row["time/since_start_s"] for row in evaluations if row["eval/reward"] >= TARGET), None)
    families = [f"{name} {last[f'eval/{name}']:.2f}" for name in FAMILIES]
    trusts = [f"{name.removeprefix('trust/')} {count:.0f}" for name, count in totals.items() if "trust/" in name]
    return {
        "updates, seconds": f"{len(updates)}, {seconds:.0f}",
        "held-out reward, first": f"{evaluations[0]['eval/reward']:.3f}",
        "held-out reward, last": "{eval/reward:.3f} [{eval/reward_low:.3f}, {eval/reward_high:.3f}]".format(**last),
        f"seconds to {TARGET}": "-" if reached is None else f"{reached:.0f}",
        "by family": ", ".join(families),
        "rollouts per second": f"{totals['rollouts'] / seconds:.0f}",
        "time": ", ".join(f"{name} {100 * value / seconds:.0f} %" for name, value in spent.items()),
        "rewards by trust label": ", ".join(trusts),
        "excluded sequences": f"{totals['excluded_sequences']:.0f} of {totals['rollouts']:.0f} rollouts",
        "gap of log-probabilities": f"{fmean(row['update/gap'] for row in updates if 'update/gap' in row):.4f}",
        "attempts to cheat": f"{totals.get('cheats', 0):.0f}",
        "of them with a reward": f"{totals.get('cheats_with_reward', 0):.0f}",
        "of them solved": f"{totals.get('cheats_solved', 0):.0f}",
    }


def draw(out: Path, logs: list[Path]) -> None:
    """Draw training and held-out rewards over the minutes."""
    import matplotlib  # only where a picture is wanted

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(logs), figsize=(4 * len(logs), 3.2), sharey=True, squeeze=False)
    for plot, log in zip(axes[0], logs, strict=True):
        updates, evaluations = read(log)
        for rows, name, label, style in (
            (updates, "all/reward", "training", {"color": "#9dc1f5"}),
            (evaluations, "eval/reward", "held-out tasks", {"color": "#1f6feb", "marker": "o", "markersize": 3}),
        ):
            minutes = [row["time/since_start_s"] / 60 for row in rows]
            plot.plot(minutes, [row[name] for row in rows], label=label, **style)
        plot.axhline(TARGET, color="#888", linestyle=":")
        plot.set(xlabel="minutes", ylim=(0, 1.02), title=log.stem.removeprefix("log-"))
        plot.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("reward")
    axes[0][0].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main(out: str, *names: str) -> None:
    logs = [Path(name) for name in names]
    table = {log.stem.removeprefix("log-"): figures(log) for log in logs}
    print("| | " + " | ".join(table) + " |")
    print("|---|" + "---|" * len(table))
    for row in next(iter(table.values())):
        print(f"| {row} | " + " | ".join(column[row] for column in table.values()) + " |")
    draw(Path(out), logs)


if __name__ == "__main__":
    main(*sys.argv[1:])
