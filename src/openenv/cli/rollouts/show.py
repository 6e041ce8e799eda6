"""`openenv rollouts show`: one rollout in the terminal, with its checks, transcript, tokens and changed files.

Agents, models and tools wrote all of these texts, so control characters are printed as escapes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..command import printable
from .selection import Json, Store, Verdict, open_store, reward_text

if TYPE_CHECKING:
    from openenv.rollout.capture.transcript import Transcript, TranscriptMessage, TranscriptPart, TranscriptToken
    from openenv.rollout.store.changes import TreeChanges
    from openenv.rollout.store.store import Record, RolloutStore
    from openenv.rollout.tasks.task import CommandResult

# `_part_lines` shows the first lines of a message, `_show_command` the last lines of an output, where errors stand.
_LINES = 12
_OUTPUT_LINES = 20
_EXCERPT = 240  # characters of a difference
_COLORS = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
_MARKS = {"+": "green", "-": "red", "@": "cyan"}


def show_difference(
    first: Annotated[str, typer.Argument(metavar="A", help="A store, or the ID of a rollout in --store.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Show where two rollouts, or the rollouts of two stores, differ first.

    Times, durations and random IDs in texts do not count; sampled tokens count exactly. Exits with 1 if they differ.

    Examples:

      openenv rollouts diff 3f2a 77b0
      openenv rollouts diff runs/monday runs/tuesday
    """
    from openenv.rollout.store.comparison import compare_rollouts, compare_stores

    if Path(first).is_dir() and Path(second).is_dir():
        with open_store(Path(first)) as one, open_store(Path(second)) as other:
            result = compare_stores(one, other)
    else:
        with open_store(store) as opened:
            result = compare_rollouts((opened, opened.get(first)), (opened, opened.get(second)))
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
    # Sample of the output:
    #
    #   sum 2: answer 3
    #     A: ...the sum of 4 and 5 is 9
    #     B: ...the sum of 4 and 5 is 10
    #   7 rollouts are equal, 1 differs
    for difference in [] if as_json else result.differences:
        typer.echo(printable(f"{difference.name}: {difference.place}"))
        for side, text in zip("AB", _first_difference(difference.first, difference.second), strict=True):
            typer.echo(printable(f"  {side}: {text}"))
    if not as_json:
        typer.echo(f"{result.equal} equal, {len(result.differences)} different")
        typer.echo("\n".join(f"{side}: sha256 {value}" for side, value in zip("AB", result.digests, strict=True)))
    if result.differences:
        raise typer.Exit(1)


def _first_difference(*values: object) -> list[str]:
    """Return excerpts of two values around the first different character."""
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    start = max(0, same - _EXCERPT // 3)
    before = "..." if start else ""
    return [before + text[start : start + _EXCERPT] + ("..." if text[start + _EXCERPT :] else "") for text in texts]


def show_rollout(
    rollout_id: Annotated[str, typer.Argument(metavar="ID", help="The rollout; a unique prefix of its ID is enough.")],
    store: Store = None,
    verdict: Verdict = "first",
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Show the sampled tokens: likely ones green, unlikely red, without a loss dim."),
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Show long texts and changes completely.")] = False,
    as_json: Json = False,
) -> None:
    """Show one rollout: status, reward, every check, the transcript, and the files that the agent changed.

    `openenv view` shows the same in the browser.

    Examples:

      openenv rollouts show 3f2a
      openenv rollouts show 3f2a --tokens --full
      openenv rollouts show 3f2a --verdict last --json
    """
    with open_store(store) as opened:
        chosen = opened.get(rollout_id, verdict=verdict)
        # Sample of the output:
        #
        #   rollout   3f2a91c0
        #   task      binary_search
        #   agent     opencode, model qwen3-8b, sandbox local
        #   status    ok
        #   reward    1 (judged)
        #   seconds   setup 0.3, agent 38.1, verify 1.2
        #   verify    [0] python3 -m pytest -q
        #   turn 1: 212 tokens in 3.10 s, tool_calls
        #   assistant write {"path": "search.py", ...}
        #   changes   ...
        others = [record for record in opened.history(chosen.rollout_id) if record.record_id != chosen.record_id]
        history = [chosen, *reversed(others)]
        if as_json:
            typer.echo(json.dumps([_record_document(record) for record in history], indent=2))
            return
        _show_outcome(history)
        _show_work(opened, chosen, tokens=tokens, full=full)


def _record_document(record: Record) -> dict[str, object]:
    return {
        "record_id": record.record_id,
        "kind": record.kind,
        "verdict": record.verdict,
        "stored_at": record.stored_at,
        "task": record.task.model_dump(mode="json"),
        "outcome": record.outcome.model_dump(mode="json"),
    }


def _show_outcome(history: list[Record]) -> None:
    outcome = history[0].outcome
    _line("rollout", outcome.rollout_id)
    _line("task", f"{outcome.task_id or '-'}{f', group {history[0].group}' if history[0].group else ''}")
    _line("agent", f"{outcome.agent}, model {outcome.model or '-'}, sandbox {outcome.sandbox}")
    why = f" in {outcome.phase}: {outcome.reason}" if outcome.reason and outcome.status != "ok" else ""
    _line("status", f"{outcome.status}{why}")
    # The verdict's name appears only if the reward is not the rollout's first one.
    later = "" if history[0].kind == "rollout" else f", verdict {history[0].verdict}"
    _line(
        "reward",
        f"{reward_text(outcome.reward, outcome.reason)}{f' ({outcome.trust})' if outcome.trust else ''}{later}",
    )
    _line("seconds", ", ".join(f"{phase} {spent:.1f}" for phase, spent in outcome.phase_s.items()))
    for title, results in (("setup", outcome.setup_results), ("verify", outcome.verify_results)):
        for result in results:
            _show_command(title, result)
    # Older and newer verdicts of the same work tree, for comparison.
    for record in history[1:]:
        when = datetime.fromtimestamp(record.stored_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        _line(
            "verdict", f"{record.verdict}, {when}: {record.outcome.status}, reward {reward_text(record.outcome.reward)}"
        )


def _show_work(store: RolloutStore, record: Record, *, tokens: bool, full: bool) -> None:
    """Print the model calls and the changed files; without a recording, the figures of the record."""
    from openenv.rollout.capture.export import sequences, token_counts, turns
    from openenv.rollout.capture.transcript import transcript
    from openenv.rollout.store.changes import compare_trees
    from openenv.rollout.store.exports import recording

    captured, outcome = recording(store, record), record.outcome
    # Rollouts without a capture proxy, and stores without the recording, still have figures per turn.
    if captured is not None:
        _show_transcript(transcript(captured), tokens=tokens, full=full)
        counts = token_counts(turns(captured), sequences(captured))
        reasons = "".join(f", {count:,} {reason}" for reason, count in sorted(counts.excluded.items()))
        _line("sampled", f"{counts.sampled:,} tokens: {counts.trained:,} trainable{reasons}")
    else:
        for turn in outcome.turns:
            end = printable(turn.finish_reason or "no end")
            typer.echo(f"turn {turn.turn}: {len(turn.completion_tokens)} tokens in {turn.latency_s:.2f} s, {end}")
    worktree = store.file(record.rollout_id, "worktree.tar")
    if worktree is not None:
        _show_changes(compare_trees(worktree, store.file(record.rollout_id, "baseline.tar")), full=full)
    else:
        for path in (*outcome.files, *outcome.files_extra):
            _line("file", path)


def _line(title: str, text: str) -> None:
    """Print a line; agents and models may have written parts of it."""
    typer.echo(f"{title:9} {printable(text)}")


def _show_command(title: str, result: CommandResult) -> None:
    # A judged check has two commands in two sandboxes: the agent's code runs in one, the judge in the other.
    #
    #   check     ./a.out: 3 cases
    #   run       [0] ./a.out
    #   judge     [0] grep -q 9 "$OUTPUT/stdout"
    if result.run is not None:
        if result.name:
            _line(title, result.name)
        _show_command("run", result.run)
        title = "judge"
    command = "\n".join(printable(line) for line in result.cmd.split("\n"))  # a task's command may have several lines
    typer.echo(f"{title:9} [{result.exit_code}] {command}")
    # Only line feeds end a line: at a carriage return, a terminal would overwrite the line's beginning.
    lines = (result.stdout + result.stderr).replace("\r\n", "\n").removesuffix("\n").split("\n")
    for text in lines[-_OUTPUT_LINES:] if lines != [""] else ():
        _line("", f"  {text}")
    if result.score is not None:
        _line("", f"  score {result.score:g}")
    if result.note is not None:
        _line("", f"  ({result.note})")


def _show_transcript(transcript: Transcript, *, tokens: bool, full: bool) -> None:
    """Print every model call: the new messages of the request, and the reply."""
    for turn in transcript.turns:
        # Sample: `turn 3: 41 tokens in 0.52 s, stop, retry, mean log-probability -0.113`.
        facts = [
            f"{turn.sampled_tokens} tokens in {turn.latency_s:.2f} s",
            turn.finish_reason or "no end",
            *([] if turn.branch == "main" else [turn.branch]),
            *([] if turn.mean_logprob is None else [f"mean log-probability {turn.mean_logprob:.3f}"]),
            *([] if turn.mean_entropy is None else [f"entropy {turn.mean_entropy:.3f}"]),
            *(["not trained on"] if turn.sampled_tokens and not turn.trained_tokens else []),
        ]
        typer.secho(f"turn {turn.number}: {printable(', '.join(facts))}", bold=True)
        for message in (*turn.messages, turn.reply):
            _show_message(message, full=full)
        if turn.error is not None:
            typer.secho(f"          {printable(turn.error)}", fg="red")
        if tokens and turn.tokens:
            _show_tokens(turn.tokens)
    for finding in transcript.findings:
        if finding.severity != "INFO":
            place = "" if finding.call is None else f" (turn {finding.call})"
            label = "excluded from training:" if finding.severity == "FATAL" else "note     "
            typer.secho(f"{label} {printable(finding.message)}{place}", fg="yellow")


def _show_message(message: TranscriptMessage, *, full: bool) -> None:
    title = typer.style(f"{printable(message.role)[:9]:9}", fg=_COLORS.get(message.role))
    # The role stands in the first line only:
    #
    #   assistant thinks: The user wants a square.
    #             write {"path": "square.py"}
    for part in message.parts:
        for line in _part_lines(part, full=full):
            typer.echo(f"{title} {line}")
            title = " " * 9


def _part_lines(part: TranscriptPart, *, full: bool) -> Iterator[str]:
    if part.kind == "image":
        yield "(an image)"
        return
    name = {"call": f"{printable(part.name)} ", "reasoning": "thinks: ", "result": ""}.get(part.kind, "")
    text = part.text.replace("\r\n", "\n").strip("\n")
    lines = text.split("\n")
    shown = lines if full else lines[:_LINES]
    for number, line in enumerate(shown):
        # A line of minified code or base64 can have thousands of characters.
        yield f"{name if number == 0 else ''}{printable(line if full else line[:400])}"
    if len(lines) > len(shown):
        yield typer.style(f"... {len(lines) - len(shown)} more lines", dim=True)


def _show_tokens(tokens: list[TranscriptToken]) -> None:
    """Print tokens: likely ones green, unlikely ones red, tokens without a loss dimmed."""
    pieces = []
    for token in tokens:
        # A token may be half of a UTF-8 character and have no text; then its ID stands for it.
        text = printable(token.text.replace("\n", "⏎")) or f"<{token.token_id}>"
        pieces.append(typer.style(text, fg=_heat(token.logprob), dim=not token.is_trained))
    typer.echo("tokens    " + typer.style("│", dim=True).join(pieces))


def _heat(logprob: float | None) -> str | None:
    if logprob is None:
        return None
    # Log-probabilities are natural logarithms: -0.105 is 90 %.
    chance = math.exp(logprob)
    if chance > 0.9:
        return "green"
    return "yellow" if chance > 0.5 else "red"


def _show_changes(changes: TreeChanges, *, full: bool) -> None:
    """Print the files that the agent changed, line by line."""
    if changes.note:
        typer.echo(f"changes   {printable(changes.note)}")
    for file in changes.files:
        typer.secho(f"{file.change:9} {printable(file.path)} +{file.added} -{file.removed}", bold=True)
        # A diff also has context lines, so its limit is higher than a message's.
        shown = file.lines if full else file.lines[: 3 * _LINES]
        for line in shown:
            typer.secho(f"          {line.mark} {printable(line.text)}", fg=_MARKS.get(line.mark))
        left = len(file.lines) - len(shown)
        if left or file.note:
            typer.secho(f"          {file.note or f'... {left} more lines'}", dim=True)
    if changes.left_out:
        typer.echo(f"changes   {changes.left_out} more files")
