"""The outcome of storms as text: a table of faults and what became of the episodes that met them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .faults import Kind
from .verdict import Outcome

EXPLANATION = """\
Each episode is played twice with the same requests: once undisturbed, and once through a proxy that breaks the
connection at points decided by the seed. The environment counts its steps and hashes its history, and the server keeps
a book of what each environment did, so an episode is *identical* only if every observation is, and if each step ran
once, in order, in one environment. After an error the client takes one more step, as a training loop that logs errors
does; an observation in answer to that is a silent reset. Half of the episodes are played by the asynchronous client,
half by the blocking one; half of the environments are coroutines. An episode that met several kinds of faults is in
several rows. The code is in `tests/chaos`."""

NAMES = {
    "ours": "this package",
    "vector": "this package, `VectorEnv` with 4 sessions over 2 connections",
    "http": "this package, over stateful HTTP with `Idempotency-Key`",
    "tools": "this package, each step a tool call in an `mcp` frame",
    "published": "openenv 0.10.0",
}


def table(result: Mapping[str, Any]) -> str:
    """One row per kind of fault; an episode that met several kinds is in several rows."""
    outcomes = [outcome.value for outcome in Outcome if result["outcomes"].get(outcome.value)]
    rows = [["fault", "times", *outcomes]]
    for kind in [*(kind.value for kind in Kind), "none came true"]:
        found = result["table"].get(kind)
        if found:
            rows.append([kind, result["faults"].get(kind, ""), *(found.get(outcome, 0) for outcome in outcomes)])
    total = [result["outcomes"].get(outcome, 0) for outcome in outcomes]
    rows.append(["**episodes**", sum(result["faults"].values()), *(f"**{count}**" for count in total)])
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines)


def left_behind(result: Mapping[str, Any]) -> str:
    """What was left when all clients were gone."""
    threads = result["threads_left"]
    told = f"{result['sessions_left']} sessions, {result['environments_left']} environments, {len(threads)} threads"
    return told + (f" ({', '.join(threads)})" if threads else "")


def errors(result: Mapping[str, Any]) -> str:
    """The errors by class and reason."""
    listed = sorted(result["errors"].items(), key=lambda item: -item[1])
    shown = [f"{count} x `{name}`" for name, count in listed[:12]]
    return "; ".join(shown) + (f"; {len(listed) - 12} more" if len(listed) > 12 else "") if listed else "none"


def document(results: Mapping[str, Mapping[str, Any]], *, command: str, date: str) -> str:
    """The report as Markdown."""
    parts = ["# Episodes through broken connections", "", f"`{command}`, {date}.", "", EXPLANATION, ""]
    for package, result in results.items():
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        parts += [
            f"## {NAMES[package]}",
            "",
            f"{result['episodes']} episodes, seeds {result['first_seed']} to {result['last_seed']}, "
            f"{result['seconds']:.0f} s. {versions}.",
            "",
            table(result),
            "",
            f"Left behind: {left_behind(result)}. Errors: {errors(result)}.",
            "",
        ]
    return "\n".join(parts)
