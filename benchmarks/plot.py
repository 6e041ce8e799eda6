"""The plot of the report: steps per second by sessions, both axes logarithmic. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

# colour, marker and line of each series in turn: the published ones grey and dashed, ours in colour
STYLES = (
    ("#9a9a9a", "o", "--"),
    ("#4d4d4d", "s", "--"),
    ("#0b6fb8", "o", "-"),
    ("#d1495b", "D", "-"),
    ("#3a9d5d", "^", "-"),
)


def draw(series: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> bool:
    """Draw labelled series of (sessions, rate); return whether there was anything to draw."""
    levels = sorted({sessions for points in series.values() for sessions, _ in points})
    if not levels:
        return False
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for (label, points), (color, marker, line) in zip(series.items(), STYLES, strict=True):
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, label=label, color=color, marker=marker, linestyle=line, linewidth=1.8, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="sessions", ylabel="steps per second")
    axes.set_title("WebSocket steps per second, echo environment", fontsize=11, loc="left")
    axes.set_xticks(levels, labels=[f"{level:,}" for level in levels])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.3, high * 1.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    return True
