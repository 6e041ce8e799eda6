"""A rollout in the terminal: its transcript, tokens coloured by log-probability, and what the agent changed.

Agents, models and tools wrote all of it: control characters are shown as escapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from .command import printable

if TYPE_CHECKING:
    from openenv.rollout.capture.transcript import Transcript, TranscriptMessage, TranscriptPart, TranscriptToken
    from openenv.rollout.store.changes import TreeChanges

_LINES = 12
_COLORS = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
_MARKS = {"+": "green", "-": "red", "@": "cyan"}


def show_transcript(transcript: Transcript, *, tokens: bool, full: bool) -> None:
    """Print every model call: what was new in its question, and its answer."""
    for turn in transcript.turns:
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
            typer.secho(f"{finding.severity.lower():9} {printable(finding.message)}{place}", fg="yellow")


def _show_message(message: TranscriptMessage, *, full: bool) -> None:
    title = typer.style(f"{printable(message.role)[:9]:9}", fg=_COLORS.get(message.role))
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
        yield f"{name if number == 0 else ''}{printable(line if full else line[:400])}"
    if len(lines) > len(shown):
        yield typer.style(f"... {len(lines) - len(shown)} more lines", dim=True)


def _show_tokens(tokens: list[TranscriptToken]) -> None:
    """Print tokens, greener the more likely, those outside of the loss dimmed."""
    pieces = []
    for token in tokens:
        text = printable(token.text.replace("\n", "⏎")) or f"<{token.token_id}>"
        pieces.append(typer.style(text, fg=_heat(token.logprob), dim=not token.is_trained))
    typer.echo("tokens    " + typer.style("│", dim=True).join(pieces))


def _heat(logprob: float | None) -> str | None:
    if logprob is None:
        return None
    chance = math.exp(logprob)
    return "green" if chance > 0.9 else "yellow" if chance > 0.5 else "red"


def show_changes(changes: TreeChanges, *, full: bool) -> None:
    """Print what the agent changed, line by line."""
    if changes.note:
        typer.echo(f"changes   {printable(changes.note)}")
    for file in changes.files:
        typer.secho(f"{file.change:9} {printable(file.path)} +{file.added} -{file.removed}", bold=True)
        shown = file.lines if full else file.lines[: 3 * _LINES]
        for line in shown:
            typer.secho(f"          {line.mark} {printable(line.text)}", fg=_MARKS.get(line.mark))
        left = len(file.lines) - len(shown)
        if left or file.note:
            typer.secho(f"          {file.note or f'... {left} more lines'}", dim=True)
    if changes.left_out:
        typer.echo(f"changes   {changes.left_out} more files")
