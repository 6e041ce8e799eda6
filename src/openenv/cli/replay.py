"""`openenv replay`: replay a recorded episode on a server and print the differences; without one, print the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from openenv import settings
from openenv.errors import OpenEnvError, ServerError

from .command import failure, printable

# A missing key is not a null value: `recorded nothing, now None` is a difference.
_ABSENT: Final = object()
# Characters of a value in a line; observations may be long texts or arrays.
_SHOWN: Final = 60
# Seconds to wait for one reply.
_STAY_S: Final = 60.0


# Printed below the name of the step:
#
#   step 2 differs
#     observation.total: recorded 9, now 4
#     reward: recorded 2.0, now 1.0
class Difference(NamedTuple):
    """A value that differs from the recording."""

    where: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.where}: recorded {_short(self.recorded)}, now {_short(self.now)}"


# The way of an episode:
#
#   openenv serve ──records──> episode.jsonl ──> openenv replay ──reset, step──> another server (a new version)
#                                                     │  <──────replies──────────┘
#                                                     └──> differences, exit code 0 or 1
#
# Without a server, it lists the steps and stops, which needs no environment on this machine:
#
#       reset  {'seed': 7}  reward None
#      step 1  {'amount': 2}  reward 1.0
#      step 2  {'fail': True}  failed: ValueError: asked to fail
def replay(
    file: Path = typer.Argument(
        ...,
        metavar="FILE",
        help="A recorded episode: a download of the Episodes tab, or a file of the server's folder.",
    ),
    url: str | None = typer.Argument(None, metavar="URL", help="The server to play it against."),
    token: str | None = typer.Option(
        None,
        metavar="TOKEN",
        help="A token of the server. Better set OPENENV_TOKEN, which others on this machine cannot see.",
    ),
    ignore: list[str] = typer.Option(
        [], metavar="PATH", help="Do not compare this: observation.time, reward; may be repeated."
    ),
    tolerance: float = typer.Option(1e-9, metavar="X", min=0.0, help="How far numbers may be apart."),
    keep_going: bool = typer.Option(False, "--all", help="Go on after the first step that differs."),
) -> None:
    """Replay a recorded episode: the same reset, the same actions. Prints differences in the server's replies.

    A step that failed when it was recorded has to fail again. Exits with 0 if all is the same, and with 1 if not.

      openenv replay episode.jsonl                          print its steps
      openenv replay episode.jsonl http://localhost:8000
      openenv replay episode.jsonl http://localhost:8000 --ignore observation.clock
    """
    from openenv.server.web.episode_files import summarise

    rows = _rows_of(file)
    summary = summarise(rows)
    typer.echo(
        f"{printable(summary.env)}: {summary.steps} steps, {summary.errors} failed, return {summary.total:g}, "
        f"seed {_short(summary.seed)}"
    )
    if url is None:
        for row in rows:
            if row["kind"] in ("reset", "step", "call"):
                typer.echo(printable(_line(row)))
        return
    # None if the file has no reset.
    begins = next((row for row in rows if row["kind"] == "reset"), None)
    # A copy of another session starts in its middle, so the steps before it are unknown.
    if begins is None or begins.get("arguments") is None or "error" in begins:
        raise failure(
            "The episode does not begin with a reset that worked (it may be a copy of another session): it cannot be "
            "played again from its start"
        )
    # With --ignore observation.time, the whole value below that path is left out.
    comparison = Comparison(tolerance, frozenset(ignore))
    try:
        count, different = _play(rows, url, token or settings.client_token(), comparison, keep_going=keep_going)
    # The server is not reachable, refuses the token, or has no free session. A failing step is compared instead.
    except OpenEnvError as exc:
        raise failure(exc) from None
    # Exit code 1 lets a CI job fail when an environment changed its behaviour.
    if different:
        typer.secho(f"{different} of {count} differ", fg="red", err=True)
        raise typer.Exit(1)
    typer.secho(f"The same: {count} of {count}", fg="green", err=True)


def _rows_of(file: Path) -> list[dict[str, Any]]:
    """Read a recorded episode, or end the command if the file is something else."""
    from openenv.server.web.episode_files import EpisodeError, read_rows

    try:
        rows = list(read_rows(file))
    # The file does not exist, cannot be read, or has a line that is not JSON.
    except EpisodeError as exc:
        raise failure(exc) from None
    # For example a results.jsonl of `openenv collect`, which is JSON Lines as well.
    if not rows or rows[0]["kind"] != "episode":
        raise failure(f"{file} is not a recorded episode: its first line is not a header")
    # A newer version may have rows with another meaning; comparing them would report wrong differences.
    if rows[0].get("version") != 1:
        raise failure(f"{file} is of version {rows[0].get('version')}, and this is made for version 1")
    return rows


def _play(
    rows: list[dict[str, Any]], url: str, token: str | None, comparison: Comparison, *, keep_going: bool
) -> tuple[int, int]:
    """Repeat the rows; return how many were, and how many answers differ."""
    from openenv.client.env_client import GenericEnvClient

    count = different = 0
    # Untyped: recorded actions are plain JSON, and the client needs none of the environment's classes.
    with GenericEnvClient(url, token=token, message_timeout_s=_STAY_S).sync() as env:
        for row in rows:
            # Tool calls went through MCP beside reset and step; they have no recorded reward to compare.
            if row["kind"] == "call":
                typer.echo(f"{printable(_name(row))} is a tool call beside the episode; it is not repeated")
                continue
            # `episode`, `picture` and `end` rows: the header, rendered images and the figures.
            if row["kind"] not in ("reset", "step"):
                continue
            try:
                result = env.reset(**row["arguments"]) if row["kind"] == "reset" else _step(env, row)
                now = {"observation": result.observation, "reward": result.reward, "done": result.done}
            # The environment raised, or refused the action. If the recorded step failed too, both agree.
            except ServerError as exc:
                now = {"error": {"message": str(exc)}}
            count += 1
            differences = comparison.of(row, now)
            if differences:
                different += 1
                typer.echo(f"{printable(_name(row))} differs")
                for difference in differences:
                    typer.echo(f"  {printable(difference)}")
                # After the first difference the states differ, so later differences usually follow from it.
                if not keep_going:
                    break
    return count, different


def _step(env: Any, row: dict[str, Any]) -> Any:
    return env.step(row["action"], **(row.get("kwargs") or {}))


class Comparison(NamedTuple):
    """How answers are compared.

    Args:
        tolerance: How far numbers may be apart, relative to the larger one or at all.
        ignored: Paths that are not compared.
    """

    tolerance: float
    ignored: frozenset[str]

    def of(self, row: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
        """Compare a row with the server's reply now."""
        from openenv.protocol.json_values import decode, encode

        # Compares four cases:
        #
        #   recorded   now      result
        #   reply      reply    every value below observation, reward and done
        #   error      error    the same, also with different texts
        #   reply      error    a difference: recorded None, now ...
        #   error      reply    a difference: recorded ..., now None
        recorded, failed = row.get("error"), now.get("error")
        if recorded is not None or failed is not None:
            texts = [None if each is None else str(each.get("message", "")) for each in (recorded, failed)]
            # What the server sends has the code beside the text; whether both failed is what counts.
            return [] if None not in texts else [Difference("error", *texts)]
        # Through our JSON once, as the recording went: tuples become lists, and arrays their encoded form.
        current = decode(encode(now))
        names = ("observation", "reward", "done")
        return [found for name in names for found in self._compare(name, row.get(name), current.get(name))]

    def _compare(self, where: str, recorded: Any, now: Any) -> Iterator[Difference]:
        # `where` is the path so far, such as observation.board[3].
        if where in self.ignored:
            return
        if isinstance(recorded, dict) and isinstance(now, dict):
            for name in sorted({*recorded, *now}):
                left, right = recorded.get(name, _ABSENT), now.get(name, _ABSENT)
                if name == "metadata" and not (left is not _ABSENT and left) and not (right is not _ABSENT and right):
                    continue  # an empty one need not be there
                yield from self._compare(f"{where}.{name}", left, right)
        # Lists of different lengths are one difference, not one for each shifted element.
        elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
            for index, (left, right) in enumerate(zip(recorded, now, strict=True)):
                yield from self._compare(f"{where}[{index}]", left, right)
        elif not self._are_equal(recorded, now):
            yield Difference(where, recorded, now)

    def _are_equal(self, recorded: Any, now: Any) -> bool:
        # 1 and 1.0 are equal here, but True is not 1: in Python bool is a subclass of int.
        numbers = isinstance(recorded, int | float) and isinstance(now, int | float)
        if numbers and not isinstance(recorded, bool) and not isinstance(now, bool):
            return math.isclose(recorded, now, rel_tol=self.tolerance, abs_tol=self.tolerance)
        return bool(type(recorded) is type(now) and recorded == now)


def _name(row: dict[str, Any]) -> str:
    return "reset" if row["kind"] == "reset" else f"{row['kind']} {row.get('n')}"


def _line(row: dict[str, Any]) -> str:
    # See the sample in `replay`.
    subject = {"reset": "arguments", "step": "action", "call": "name"}[row["kind"]]
    if "error" in row:
        outcome = f"failed: {row['error'].get('type')}: {printable(row['error'].get('message'))}"
    elif row["kind"] == "call":
        outcome = ""
    else:
        outcome = f"reward {_short(row.get('reward'))}" + (", done" if row.get("done") else "")
    return f"{_name(row):>9}  {_short(row.get(subject))}  {outcome}".rstrip()


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = printable(value if isinstance(value, str) else repr(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
