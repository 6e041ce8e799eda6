"""For all commands: plain help texts that fit the terminal, failures in one line, cleanup on SIGTERM.

Indented paragraphs of a help text stay as they are; others are wrapped. Must not know a single command.
"""

from __future__ import annotations

import re
import shutil
import signal
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from openenv import settings

# The widest help text, in columns.
_WIDEST = 100
# Labels above this width, such as `--share-endpoint, --no-share-endpoint`, stand alone in a line.
_LABELS = 26
_GAP = 2
_OPTIONS = "Options"


# Typer's help draws boxes with rich. Plain text is easy to copy and to search.
class _PlainHelp:
    """Writes the help with `_help`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help(self, ctx))


class HelpCommand(_PlainHelp, TyperCommand):
    """A command with help as plain text."""


class HelpGroup(_PlainHelp, TyperGroup):
    """A group of commands with help as plain text."""


# One name per meaning in all commands, so `play --llm-url` and `rollouts run --llm-url` are the same; scripts with the
# name an option had before go on working:
#
#   typer.Option("--llm-url", OldName("--base-url"))      the help shows --llm-url only
class OldName(str):
    """An earlier spelling of an option: accepted, but not shown."""


def shown_names(option: Any) -> list[str]:
    """Return an option's names for the help, the long form first: `--port`, `-p`."""
    names = [name for name in option.opts if not isinstance(name, OldName)]
    return [*sorted(names, key=len, reverse=True), *option.secondary_opts]


def command_group(help_text: str) -> typer.Typer:
    """Return a group of commands; its own texts stay plain, too."""
    return typer.Typer(
        cls=HelpGroup, help=help_text, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )


def _help(command: Any, ctx: Any) -> str:
    # The layout:
    #
    #   Usage: openenv gc [OPTIONS]
    #
    #   Remove leftover servers and sandboxes: ...
    #
    #     openenv gc --dry-run                 <- an indented paragraph stays as it is
    #
    #   Options:
    #     --only PLACE      docker, podman, ...
    #     --dry-run         Print the leftovers and remove nothing.
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    parameters = [one for one in command.get_params(ctx) if not getattr(one, "hidden", False)]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    usage = ["[OPTIONS]", *usage_of(arguments)]
    sections: dict[str, list[tuple[str, str]]] = {}
    for one in arguments:
        # Sections appear in the order of their first row: arguments, commands, options, then the panels.
        sections.setdefault("Arguments", []).append((_metavar(one), _explanation(one)))
    if commands := getattr(command, "commands", None):
        usage.append("COMMAND")
        for name in command.list_commands(ctx):
            title = commands[name].rich_help_panel or "Commands"
            sections.setdefault(title, []).append((name, first_sentence(commands[name].help or "")))
    for one in parameters:
        if one.param_type_name == "option":
            sections.setdefault(getattr(one, "rich_help_panel", None) or _OPTIONS, []).append(
                (_label(one), _explanation(one))
            )
    column = _column(label for rows in sections.values() for label, _ in rows)
    parts = [f"{_heading('Usage')} {ctx.command_path} {' '.join(usage)}"]
    parts += _paragraphs(command.help or "", width)
    parts += [f"{_heading(title)}\n{_table(rows, column, width)}" for title, rows in sections.items()]
    return "\n\n".join(parts) + "\n"


def usage_of(arguments: Iterable[Any]) -> list[str]:
    """Return arguments for a usage line: `FOLDER`, or `[FOLDER]` if it is optional."""
    return [_metavar(one) if one.required else f"[{_metavar(one)}]" for one in arguments]


def _heading(text: str) -> str:
    return typer.style(f"{text}:", bold=True)


def _paragraphs(text: str, width: int) -> Iterable[str]:
    # An empty line separates paragraphs; a paragraph that begins with a blank is an example.
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if paragraph.startswith(" "):
            yield paragraph
        elif paragraph:
            yield textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False)


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text."""
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip("\n"))[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _label(option: Any) -> str:
    names = ", ".join(shown_names(option))
    return names if option.is_flag else f"{names} {_metavar(option)}"


def _explanation(parameter: Any) -> str:
    """Return a parameter's help, with its default in brackets unless that is empty or a flag."""
    text = parameter.help or ""
    default = parameter.default
    # None, "" and empty lists would say nothing to the user.
    if parameter.required or default is None or isinstance(default, bool) or default in ("", (), []):
        return text
    # 600.0 is shown as 600.
    value = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{text} [{value}]"


def _column(labels: Iterable[str]) -> int:
    """Return the column of the explanations, after the longest label; very long labels get a line alone."""
    return max((len(label) for label in labels if len(label) <= _LABELS), default=0) + 2 * _GAP


def _table(rows: Iterable[tuple[str, str]], column: int, width: int) -> str:
    lines = []
    for label, text in rows:
        # Words with hyphens are often option names, which must stay in one piece.
        wrapped = textwrap.wrap(text, max(20, width - column), break_on_hyphens=False)
        head = " " * _GAP + label
        # Otherwise the explanation begins in the next line.
        if len(head) + _GAP <= column and wrapped:
            head = f"{head:<{column}}{wrapped.pop(0)}"
        lines += [head, *(" " * column + line for line in wrapped)]
    return "\n".join(lines)


# printable("\x1b[31mred\r") is `\x1b[31mred\r`, with visible backslashes.
def printable(text: object) -> str:
    """Return untrusted text with escapes for control characters: `\\x1b`, `\\r`, `\\u202e`.

    Escape sequences, carriage returns and marks of writing direction could make a terminal show a different text. Tabs
    stay.
    """
    return "".join(
        character.encode("unicode_escape").decode() if _is_control(character) else character for character in str(text)
    )


def printable_lines(text: object) -> str:
    """Return untrusted text of several lines with `printable` lines."""
    return "\n".join(map(printable, str(text).split("\n")))


def _is_control(character: str) -> bool:
    # Cc: control characters. Cf: format characters, such as marks of direction. Cs: surrogates, not printable.
    # Zl, Zp: line and paragraph separators.
    return character != "\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def failure(reason: object, code: int = 1) -> typer.Exit:
    """Print the reason of a failure on standard error; return the exception to raise.

    Servers and packages may have written the reason, so it is printed with `printable`, line by line.
    """
    typer.secho(f"Error: {printable_lines(reason)}", fg="red", err=True)
    return typer.Exit(code)


def check_choice(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Raise if an option's value is not one of its choices."""
    if value is not None and value not in choices:
        # Exit code 2: `Error: Invalid value for --mode: 'x' is not one of simulation, production`.
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}", param_hint=option)


def name_values(option: str, words: Iterable[str]) -> dict[str, str]:
    """Return the names and values of a repeated option NAME=VALUE."""
    values = {}
    for word in words:
        # Only the first = separates: `--env URL=http://host/?a=b`. An empty value is allowed, a missing = is not.
        name, sign, value = word.partition("=")
        if not name.strip() or not sign:
            raise typer.BadParameter(f"{word!r} is not NAME=VALUE", param_hint=option)
        values[name.strip()] = value
    return values


def secret_values(option: str, words: Iterable[str]) -> dict[str, str]:
    """Return the names and values of secrets: NAME=VALUE, or NAME for the environment variable of that name.

    Messages do not repeat the argument, because a mistyped one may be the secret itself.
    """
    values = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not name.strip():
            raise typer.BadParameter(
                "a value has no name; write NAME=VALUE, or the NAME of a variable", param_hint=option
            )
        try:
            # `--secret API_KEY` reads the variable, so that the secret is neither in the shell's history nor in `ps`.
            values[name.strip()] = value if sign else settings.secret(word)
        # `from None`: the original error would quote the argument.
        except ValueError:
            raise typer.BadParameter(
                "an argument is neither NAME=VALUE nor the name of an environment variable", param_hint=option
            ) from None
    return values


@contextmanager
def target_failures() -> Iterator[None]:
    """End the command if its target cannot be loaded; print the complete traceback of the target's code."""
    from openenv.server.loading import TargetError, TargetFailed  # most commands need no server

    try:
        yield
    except TargetError as exc:
        # TargetFailed: the user's code raised, so its traceback helps. TargetError alone: a missing file or attribute.
        if isinstance(exc, TargetFailed) and not exc.is_logged:
            typer.echo(exc.report(), err=True)
        raise failure(exc) from None


@contextmanager
def tidy_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C: context managers exit, and the exit code is 143."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        # 143 for SIGTERM: the shell's convention for a program that a signal ended.
        raise SystemExit(128 + signum)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # only the main thread can handle signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
