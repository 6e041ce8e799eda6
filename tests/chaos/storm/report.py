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
does; an observation in answer to that is a silent reset, unless the client has reported a new episode (`Renewed`,
which `on_session_lost="reset"` and the policy `restart` do). Half of the episodes of the first table are played by the
asynchronous client, half by the blocking one; half of the environments are coroutines. An episode that met several
kinds of faults is in several rows. Whatever else is left of a storm is counted too: threads, child processes, sockets
and temporary files of the process that it ran in. The code is in `tests/chaos`, where `test_judge.py` shows that
servers and clients that lie are found out."""

NAMES = {
    "ours": "this package",
    "vector": "this package, `VectorEnv` with 4 sessions over 2 connections",
    "http": "this package, over stateful HTTP with `Idempotency-Key`",
    "tools": "this package, each step a tool call in an `mcp` frame",
    "keys": "this package, `POST /sessions`, keys and `request_id`, HTTP and WebSocket in turn",
    "mcp": "this package, each step a tool call over `POST /mcp` with a key, both eras of MCP and plain JSON-RPC",
    "workers": "this package, `process` runner, workers killed in the middle of steps",
    "server-workers": "this package, `openenv serve --workers 3`, workers killed in the middle of steps",
    "gateway": "this package, two servers behind `openenv gateway`, which is stopped or killed and started again",
    "first-k": "this package, `VectorEnv` that waits for the first k of 4, on 2 servers, with each failure policy",
    "restarts": "this package, server stopped or killed and started again on the same port",
    "queue": "this package, two servers with a queue, clients that vanish from it",
    "published": "openenv 0.10.0",
}

EPISODES = {
    "ours": 1000,
    "vector": 200,
    "http": 300,
    "tools": 300,
    "keys": 400,
    "mcp": 300,
    "workers": 300,
    "server-workers": 300,
    "gateway": 100,
    "first-k": 200,
    "restarts": 150,
    "queue": 400,
    "published": 1000,
}
"""How many there are of each by default."""


def table(result: Mapping[str, Any]) -> str:
    """One row per kind of fault; an episode that met several kinds is in several rows."""
    outcomes = [outcome.value for outcome in Outcome if result["outcomes"].get(outcome.value)]
    rows = [["fault", "times", *outcomes]]
    for kind in sorted(result["table"], key=_place):
        found = result["table"].get(kind)
        if found:
            rows.append([kind, result["faults"].get(kind, ""), *(found.get(outcome, 0) for outcome in outcomes)])
    total = [result["outcomes"].get(outcome, 0) for outcome in outcomes]
    rows.append(["**episodes**", sum(result["faults"].values()), *(f"**{count}**" for count in total)])
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines)


def _place(name: str) -> int:
    """Where a row belongs: faults in their order, then other mishaps, then nothing."""
    order = [kind.value for kind in Kind]
    return order.index(name) if name in order else len(order) + (name == "none came true")


def left_behind(result: Mapping[str, Any]) -> str:
    """What was left when all clients were gone."""
    threads, others = result["threads_left"], result["others_left"]
    parts = f"{result['sessions_left']} sessions, {result['environments_left']} environments, {len(threads)} threads"
    parts += f", {len(others)} processes, sockets or files"
    return parts + (f" ({', '.join([*threads, *others])})" if threads or others else "")


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
