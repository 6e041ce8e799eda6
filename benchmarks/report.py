"""The written report: Markdown tables with ratios to the better published configuration, and the raw JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configurations import BEFORE, LABELS, OURS
from samples import Samples
from targets import HIGHER_IS_BETTER, Judgement, judgements, ratio, show_ratio


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a table; with a title for its ratio if that is to be shown."""

    title: str
    metric: str
    digits: int = 0
    ratio_title: str = ""
    worst: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the report."""

    title: str
    section: str
    case_title: str
    columns: Sequence[Column]
    note: str = ""
    least_sessions: int = 0


TABLES = (
    Table(
        "WebSocket step",
        "ws",
        "sessions",
        (
            Column("steps/s", "steps_per_s", ratio_title="ratio"),
            Column("p50 ms", "p50_ms", 2),
            Column("p99 ms", "p99_ms", 2, ratio_title="p99 ratio"),
            Column("server CPU us/step", "server_cpu_us_per_step", 1),
            Column("errors", "errors", worst=True),
        ),
        "One request in flight per session, 100-character message. One server process lives through all levels of a "
        "round.",
    ),
    Table(
        "The same server on 1, 2 and 8 cores",
        "cores",
        "sessions, cores",
        (
            Column("steps/s", "steps_per_s"),
            Column("p99 ms", "p99_ms", 2),
            Column("server CPU us/step", "server_cpu_us_per_step", 1),
            Column("errors", "errors", worst=True),
        ),
        "One process; the cores are those that it may use. The default runner is compared with the inline one.",
    ),
    Table(
        "Connect and reset",
        "ws",
        "sessions",
        (Column("connect + reset/s", "setup_per_s", ratio_title="ratio"),),
        "Sessions opened (connect, upgrade, reset) 32 at a time.",
        least_sessions=64,
    ),
    Table(
        "Memory, threads and errors",
        "ws",
        "sessions",
        (
            Column("RSS MB", "server_rss_mb", 1, ratio_title="ratio"),
            Column("KB/session", "rss_kb_per_session", 1),
            Column("threads", "server_threads"),
            Column("errors", "errors", worst=True),
        ),
        "KB/session is the server's growth since its start, earlier levels included. Errors: the worst round.",
        least_sessions=1000,
    ),
    Table(
        "HTTP POST /step",
        "http",
        "connections",
        (
            Column("steps/s", "steps_per_s", ratio_title="ratio"),
            Column("p99 ms", "p99_ms", 2, ratio_title="p99 ratio"),
            Column("server CPU us/step", "server_cpu_us_per_step", 1),
            Column("errors", "errors", worst=True),
        ),
        "The published server is stateless over HTTP; ours continues a session named by `X-OpenEnv-Session` unless "
        "marked stateless.",
    ),
    Table(
        "MCP tool call, 64 sessions",
        "mcp",
        "way",
        (
            Column("calls/s", "steps_per_s", ratio_title="ratio"),
            Column("p99 ms", "p99_ms", 2, ratio_title="p99 ratio"),
            Column("server CPU us/call", "server_cpu_us_per_step", 1),
            Column("errors", "errors", worst=True),
        ),
        "One FastMCP tool that returns its 100-character argument. POST /mcp names a session that "
        "`openenv/session/create` has opened; without a session, 16 calls at once each build an environment.",
    ),
    Table(
        "Many sessions as one",
        "vector",
        "what",
        (
            Column("steps/s", "steps_per_s", ratio_title="ratio"),
            Column("p99 ms", "p99_ms", 2),
            Column("server CPU us/step", "server_cpu_us_per_step", 1),
            Column("client CPU us/step", "client_cpu_us_per_step", 1),
            Column("bytes/step", "bytes_per_step"),
            Column("errors", "errors", worst=True),
        ),
        "256 echo sessions, and 64 sessions that answer an image. Compared: `VectorEnv` over 4 connections "
        "(MessagePack unless marked); a socket per session under the load generator, which is cheaper than any "
        "client; and async clients of the same package in one process, all steps gathered, as in a trainer without "
        "`VectorEnv`. All clients use dicts. For clients and `VectorEnv`, p99 covers a whole batch. "
        '"The first 64 that are ready": `step_wait(k=64)`, each slot gets its next action as soon as its '
        "result arrived, while others still step. The published package has sockets only.",
    ),
    Table(
        "Client import",
        "import",
        "import",
        (
            Column("CPU s", "cpu_s", 3, ratio_title="ratio"),
            Column("modules", "modules"),
            Column("RSS MB", "rss_mb", 1, ratio_title="RSS ratio"),
        ),
        "`from openenv.core import GenericEnvClient` in a fresh interpreter, bytecode cached.",
    ),
    Table(
        "Start to first healthy /health",
        "start",
        "start",
        (
            Column("wall s", "wall_s", 2, ratio_title="ratio"),
            Column("CPU s", "cpu_s", 2, ratio_title="CPU ratio"),
            Column("RSS MB", "rss_mb", 1),
        ),
    ),
    Table(
        "Client round trip",
        "clients",
        "client and server",
        (
            Column("median us", "median_us", 1, ratio_title="ratio"),
            Column("p99 us", "p99_us", 1),
            Column("client CPU us", "client_cpu_us", 1),
        ),
        "One session. `stub`: a server that costs next to nothing, so that the client alone shows; `published`: both "
        "against openenv 0.10.0 with uvloop, which adds its time to both figures; `own`: each against its own server.",
    ),
    Table(
        "Large messages, 8 sessions",
        "messages",
        "message",
        (
            Column("steps/s", "steps_per_s", ratio_title="ratio"),
            Column("p99 ms", "p99_ms", 2, ratio_title="p99 ratio"),
            Column("server CPU us/step", "server_cpu_us_per_step", 1),
            Column("errors", "errors", worst=True),
        ),
    ),
)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table, figures to the right."""
    align = ["---" if title in ("what", "configuration", "target", "verdict", "value") else "---:" for title in header]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, align, *rows]) + "\n"


def cells(samples: Samples, table: Table, *, subject: str, case: str) -> list[str]:
    """Format one subject's figures and ratios."""
    out = []
    for column in table.columns:
        take = samples.worst if column.worst else samples.median
        value = take(table.section, subject, case=case, metric=column.metric)
        out.append("-" if value is None else f"{value:,.{column.digits}f}")
        if column.ratio_title:
            out.append(show_ratio(ratio(samples, table.section, subject, case=case, metric=column.metric)))
    return out


def verdicts(table: Table, judged: Sequence[Judgement], *, subject: str, case: str) -> str:
    """Collect the verdicts that belong to a row."""
    metrics = {column.metric for column in table.columns}
    fitting = [
        j for j in judged
        if j.target.section == table.section and j.target.metric in metrics and (j.subject, j.case) == (subject, case)
    ]  # fmt: skip
    named = len(fitting) > 1
    return "; ".join(f"{j.target.what + ' ' if named else ''}{j.target.text}: **{j.verdict}**" for j in fitting)


def render_table(samples: Samples, table: Table, judged: Sequence[Judgement]) -> str:
    """Render one table with its heading, note and rows; failures take the place of figures."""
    header = [table.case_title, "configuration"]
    for column in table.columns:
        header += [column.title] + ([column.ratio_title] if column.ratio_title else [])
    subjects = list(dict.fromkeys(s.subject for s in samples.all if s.section == table.section))
    rows: list[list[str]] = []
    failures: dict[str, list[str]] = {}
    for case in samples.cases(table.section):
        if table.least_sessions and int(case) < table.least_sessions:
            continue
        for subject in sorted(subjects, key=list(LABELS).index):
            failure = samples.failure(table.section, subject, case)
            if not failure and not samples.of(table.section, subject, case):
                continue
            if failure and not failure.startswith("not available"):
                failures.setdefault(f"{LABELS[subject]}: {failure}", []).append(case)
            figures = cells(samples, table, subject=subject, case=case)
            if failure and set(figures) == {"-"}:
                figures[0] = "not available" if failure.startswith("not available") else "failed"
            rows.append([case, LABELS[subject], *figures, verdicts(table, judged, subject=subject, case=case)])
    if not rows:
        return ""
    lines = [f"- {line} ({', '.join(cases)})" for line, cases in failures.items()]
    parts = [f"## {table.title}\n", f"{table.note}\n" if table.note else "", markdown([*header, "target"], rows)]
    return "\n".join(part for part in [*parts, "Failures:\n\n" + "\n".join(lines) + "\n" if lines else ""] if part)


def render_summary(judged: Sequence[Judgement]) -> str:
    """Render the list of targets with verdicts."""
    rows = [[j.target.what, LABELS[j.subject], j.case, j.target.text, j.measured, f"**{j.verdict}**"] for j in judged]
    counts = {verdict: sum(j.verdict == verdict for j in judged) for verdict in ("PASS", "MISS", "n/a")}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    intro = f"{summary or 'none measured'}. A figure with errors in it is a MISS."
    return f"## Targets\n\n{intro}\n\n" + markdown(
        ["what", "configuration", "case", "target", "measured", "verdict"], rows
    )


def render_change(samples: Samples) -> str:
    """Render what changed since the other checkout: each figure divided by the older one, better is above 1."""
    rows = []
    for table in TABLES:
        subjects = list(dict.fromkeys(s.subject for s in samples.all if s.section == table.section))
        for case in samples.cases(table.section):
            if table.least_sessions and int(case) < table.least_sessions:
                continue
            for subject in (s for s in subjects if s.startswith(OURS)):
                for column in (c for c in table.columns if c.ratio_title):
                    where = {"case": case, "metric": column.metric}
                    now = samples.median(table.section, subject, **where)
                    then = samples.median(table.section, subject.replace(OURS, BEFORE, 1), **where)
                    if now and then:
                        gain = now / then if column.metric in HIGHER_IS_BETTER else then / now
                        figures = [f"{then:,.{column.digits}f}", f"{now:,.{column.digits}f}", show_ratio(gain)]
                        rows.append([f"{table.title}: {column.title}", LABELS[subject], case, *figures])
    if not rows:
        return ""
    intro = "Beside the other checkout in the same run. Above 1x is better than before: more per second, or less time."
    header = ["what", "configuration", "case", "before", "now", "gain"]
    return f"## Change\n\n{intro}\n\n" + markdown(header, rows)


def render_report(samples: Samples, facts: Mapping[str, str], *, plot: str | None) -> str:
    """Render the whole report.

    Args:
        facts: what the run was (command, date, versions, machine), shown first.
        plot: the plot's file name beside the report, if there is one.
    """
    judged = judgements(samples)
    foreign = [s.values["foreign_cores"] for s in samples.all if "foreign_cores" in s.values]
    shown = dict(facts)
    if foreign:
        shown["other load"] = f"{statistics.median(foreign):.2f} cores (median), {max(foreign):.2f} (highest)"
    head = (
        "# Benchmark results\n\n"
        "Ours beside the published package, in one interleaved run on one machine. The table names the cores of "
        "servers and load generators; without names they share all. Absolute figures move from run to run: compare "
        "ratios. A ratio divides a configuration's figure by the better published figure in the same case. All "
        "figures are medians over rounds. MORE_RESULTS.md has a run on 16 cores.\n\n"
    )
    facts_table = markdown(["what", "value"], [[name, value] for name, value in shown.items()])
    tables = [render_table(samples, table, judged) for table in TABLES if table.section in samples.sections()]
    image = f"![steps per second by sessions]({plot})\n" if plot else ""
    return head + "\n".join(
        part for part in [facts_table, render_summary(judged), render_change(samples), image, *tables] if part
    )


def write_json(path: Path, samples: Samples, facts: Mapping[str, str]) -> None:
    """Write every sample and the facts of the run."""
    lines = ",\n".join("  " + json.dumps(sample) for sample in samples.dump())
    path.write_text(f'{{"facts": {json.dumps(dict(facts), indent=1)},\n"samples": [\n{lines}\n]}}\n', encoding="utf-8")
