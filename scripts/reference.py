"""Write docs/reference/cli.md from the commands' help and docs/reference/settings.md from `openenv.settings`.

usage: python scripts/reference.py [--check]

With --check, write nothing and exit with 1 if a page differs. The text of both pages stands in the code: change the
help of a command, or the declaration of a variable, and run this script.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from openenv import settings
from openenv.cli.__main__ import build
from openenv.cli.command import shown_names

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"

_CLI_HEAD = """\
# Command line

`python -m openenv` is the same as `openenv`. Exit codes: 0; 1 after a failure, with one line on stderr; 2 for a wrong
option; 130 after Ctrl-C. `openenv --install-completion` teaches your shell to complete commands and options. Other
packages can [add commands](../howto/plugins.md).

## Options of several commands

{shared}
"""

# An option of so many commands, with the same text in all of them, is described once.
_SHARED_BY = 3

_SETTINGS_HEAD = """\
# Environment variables

Options of the command line and arguments in code win over variables, and variables over `openenv.yaml`.

| variable | read by | meaning | default |
|---|---|---|---|
"""

_SETTINGS_TAIL = """
Clients also use the usual proxy variables, except for addresses on this machine. Container engines read further
variables, such as `DOCKER_HOST`. [Kubernetes](../howto/kubernetes.md) is found as `kubectl` finds it; HF_TOKEN and
MODAL_TOKEN_ID belong to the packages that read them.
"""


def cli_page() -> str:
    """Return the page of all commands, in alphabetical order."""
    root = typer.main.get_command(build())
    commands = sorted(root.commands.items())  # type: ignore[attr-defined]
    shared = _shared_rows([command for _, command in commands])
    parts = [_CLI_HEAD.replace("{shared}", _table(shared))]
    for name, command in commands:
        parts += _command(command, ("openenv", name), shared)
    return "\n".join(parts)


def _shared_rows(commands: list[Any]) -> list[str]:
    """Return the rows that many commands have, except if an option has more than one such row."""
    counts: Counter[str] = Counter()

    def visit(command: Any) -> None:
        children = getattr(command, "commands", {}).values()
        counts.update([] if children else _rows(command))
        for child in children:
            visit(child)

    for command in commands:
        visit(command)
    repeated = [row for row, count in counts.items() if count >= _SHARED_BY]
    meanings = Counter(_name(row) for row in repeated)
    return [row for row in repeated if meanings[_name(row)] == 1]


def _command(command: Any, path: tuple[str, ...], shared: list[str]) -> Iterator[str]:
    """Yield the section of a command; those of a group's commands follow it."""
    yield f"{'#' * len(path)} {' '.join(path)}\n"
    yield from _help(command.help or "")
    children = getattr(command, "commands", {})
    for name, child in children.items():
        yield from _command(child, (*path, name), shared)
    if children:
        return
    rows = _rows(command)
    if own := [row for row in rows if row not in shared]:
        yield _table(own) + "\n"
    if others := [_name(row) for row in rows if row in shared]:
        yield f"{'Also' if own else 'Options:'} {', '.join(others)} ([shared](#options-of-several-commands)).\n"


def _rows(command: Any) -> list[str]:
    """Return the rows of a command's table, without hidden options and `--help`."""
    visible = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    return [_row(parameter) for parameter in visible if parameter.name != "help"]


def _name(row: str) -> str:
    """Return the first name in a row, in backticks."""
    return row.removeprefix("| ").split(" ")[0].rstrip(",")


def _table(rows: list[str]) -> str:
    return "| option | default | meaning |\n|---|---|---|\n" + "\n".join(rows)


def _help(text: str) -> Iterator[str]:
    """Yield a help text's paragraphs; indented ones are examples."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if paragraph.startswith(" "):
            lines = paragraph.split("\n")
            indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
            yield "```\n" + "\n".join(line[indent:] for line in lines) + "\n```\n"
        else:
            yield _escaped(" ".join(paragraph.split())) + "\n"


def _row(parameter: Any) -> str:
    """Return a row of the table: names with their value, default, help text."""
    metavar = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        names = f"`{metavar}`"
    else:
        words = shown_names(parameter)
        names = ", ".join(f"`{word}`" for word in words) + ("" if parameter.is_flag else f" {metavar}")
    return f"| {_cell(names)} | {_cell(_default(parameter))} | {_cell(_escaped(parameter.help or ''))} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, "", [], ()) or parameter.default is False:
        return ""
    if parameter.default is True:
        return "on"
    return f"`{parameter.default:g}`" if isinstance(parameter.default, float) else f"`{parameter.default}`"


def settings_page() -> str:
    """Return the page of all variables, in the order of their declaration."""
    rows = []
    for setting in vars(settings).values():
        if isinstance(setting, settings.Setting) and setting.meaning:
            cells = (f"`{setting.name}`", setting.readers, setting.meaning, setting.default)
            rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return _SETTINGS_HEAD + "\n".join(dict.fromkeys(rows)) + "\n" + _SETTINGS_TAIL


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _escaped(text: str) -> str:
    """Keep `*` and `<` of a help text from being read as Markdown; text in backticks stays."""
    pieces = text.split("`")
    pieces[::2] = [
        re.sub(r"([*<_])", r"\\\1", piece) if "*" in piece or "<" in piece else piece for piece in pieces[::2]
    ]
    return "`".join(pieces)


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    check = parser.parse_args().check
    stale = False
    for name, text in (("cli.md", cli_page()), ("settings.md", settings_page())):
        page = REFERENCE / name
        if page.is_file() and page.read_text(encoding="utf-8") == text:
            continue
        stale = True
        if not check:
            page.write_text(text, encoding="utf-8")
        print(f"{page.name} {'is stale: run python scripts/reference.py' if check else 'written'}")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
