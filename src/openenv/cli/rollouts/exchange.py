"""`openenv rollouts export` and `import`: files for training and for other programs, and logs of Inspect AI."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ..command import check_choice, failure
from ..options import flags_class, options_of
from .selection import SelectionFlags, Store, open_store, print_exclusions

if TYPE_CHECKING:
    from openenv.rollout.store.exports import Format

# The rows of each format:
#
#   jsonl     one rollout per line, for any program
#   parquet   one training sequence per row; a rollout may have several
#   inspect   one sample per rollout, for `inspect view`
#   sft, preferences   one conversation, or pair of them, per line, for TRL
FORMATS = ("jsonl", "parquet", "inspect", "sft", "preferences")


def _checked_format(kind: str | None) -> str | None:
    check_choice("--to", kind, FORMATS)
    return kind


@flags_class
class ExportFlags:
    """Options of `openenv rollouts export`."""

    target: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="The file to write; .parquet for training sequences, .eval for a log of Inspect AI, else JSONL.",
        ),
    ]
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            callback=_checked_format,
            help=f"The format, if the file's name does not decide: {', '.join(FORMATS)}.",
        ),
    ] = None
    store: Store = None
    selection: SelectionFlags
    messages: Annotated[bool, typer.Option("--messages", help="Include complete requests and responses (JSONL).")] = (
        False
    )


@options_of(ExportFlags)
def export(flags: ExportFlags) -> None:
    """Write rollouts, with their tokens and log-probabilities, to a file.

    Task, group, agent, model, status, reward, trust and verdict are top-level keys, or columns. A log of Inspect AI has
    one agent and one model; for several, --to inspect writes a log each into a folder.

    Examples:

      openenv rollouts export all.jsonl --messages
      openenv rollouts export good.parquet --status ok --min-trust judged
      openenv rollouts export good.jsonl --to sft --min-reward 1
      openenv rollouts export pairs.jsonl --to preferences
      openenv rollouts export logs --to inspect && inspect view --log-dir logs
    """
    from openenv.rollout.store.exports import export_rollouts

    target = flags.target
    # --to wins over the ending, so that `export rollouts.txt --to jsonl` works.
    kind = flags.to or {".parquet": "parquet", ".eval": "inspect"}.get(target.suffix, "jsonl")
    # The option would have no effect; silence would look like a successful export with messages.
    if flags.messages and kind != "jsonl":
        raise failure(f"--messages is for JSONL; {kind} stores messages in its own form")

    with open_store(flags.store) as store:
        where = flags.selection.filter(store)
        if kind == "inspect":
            count = _inspect_logs().write_inspect_logs(store, target, where)
        else:
            excluded: list[list[str]] = []
            count = export_rollouts(
                store,
                target,
                kind=cast("Format", kind),
                messages=flags.messages,
                where=where,
                on_excluded=excluded.append,
            )
            print_exclusions(excluded)
        noun = {"parquet": "row", "sft": "conversation", "preferences": "pair"}.get(kind, "rollout")
        typer.echo(f"{count} {noun}{'' if count == 1 else 's'} in {target}")


def import_logs(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Logs of Inspect AI: .eval or .json.")],
    scorer: Annotated[
        str | None, typer.Option(metavar="NAME", help="The score to use as reward; by default the first.")
    ] = None,
    store: Store = None,
) -> None:
    """Add the samples of Inspect AI's logs as rollouts; `openenv view` shows them.

    An error in Inspect becomes a rollout without a reward, not with a reward of 0. Stored samples are skipped, so you
    can import a log again.

    Examples:

      openenv rollouts import logs/2026-11-17T05-23-13_served-env.eval
      openenv rollouts import logs/*.eval --scorer includes
    """
    module = _inspect_logs()
    with open_store(store, create=True) as opened:
        for log in logs:
            # Sample: `logs/a.eval: 12 rollouts added, 3 known already`.
            done = module.import_inspect_log(log, opened, scorer=scorer)
            skipped = f", {done.known} known already" if done.known else ""
            typer.echo(f"{log}: {done.added} rollout{'' if done.added == 1 else 's'} added{skipped}")


def _inspect_logs() -> ModuleType:
    """Return the module for Inspect's logs; inspect-ai is an extra."""
    try:
        from openenv.adapters.inspect import logs as inspect_logs
    # The error names the command that installs the extra.
    except ModuleNotFoundError as exc:
        raise failure(str(exc)) from exc
    return inspect_logs
