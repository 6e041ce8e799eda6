"""Notebook output: results as small HTML tables, and a hint for a client call that was not awaited.

Knows values only. All text is escaped: observations and file names come from environments and agents.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from html import escape
from types import CoroutineType
from typing import Any

_LONGEST_TEXT = 2000
_MOST_ITEMS = 20
_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values below a title, as HTML."""
    body = "".join(
        f'<tr><th style="{_CELL}">{escape(name)}</th><td style="{_CELL}">{html_value(value)}</td></tr>'
        for name, value in rows
    )
    return f"<div><strong>{escape(title)}</strong><table>{body}</table></div>"


def html_value(value: object) -> str:
    """Return a value as HTML: text as it is, arrays by their shape, models and mappings by their fields."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return escape(f"array of shape {shape}, {dtype}")
    if isinstance(value, str):
        return _preformatted(value)
    if isinstance(value, bytes | bytearray):
        return f"{len(value):,} bytes"
    fields = _fields_of(value)
    if fields is None:
        return f"<code>{escape(_shortened(repr(value)))}</code>"
    if not fields:
        return ""
    shown = list(fields.items())[:_MOST_ITEMS]
    lines = [f"<b>{escape(str(name))}</b>: {html_value(item)}" for name, item in shown]
    if len(fields) > len(shown):
        lines.append(f"… {len(fields) - len(shown)} more")
    return "<br>".join(lines)


def _fields_of(value: object) -> Mapping[Any, object] | None:
    if isinstance(value, Mapping):
        return value
    fields = getattr(type(value), "model_fields", None)  # a pydantic model
    return None if fields is None else {name: getattr(value, name) for name in fields}


def _preformatted(text: str) -> str:
    tag = "pre" if "\n" in text else "span"
    return f'<{tag} style="margin:0">{escape(_shortened(text))}</{tag}>'


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}… ({len(text):,} characters)"


def hint_for(call: CoroutineType[Any, Any, Any]) -> str:
    """Return a coroutine's text in a notebook; for a client call that was not awaited, a hint to await it."""
    client, _, method = call.__qualname__.partition(".")
    if client != "EnvClient":
        return repr(call)
    return (
        f"{method}() was not awaited, so nothing was sent. In a notebook write `await env.{method}(...)`, or make a "
        "blocking client once: `env = env.sync()`."
    )


def add_hints() -> None:
    """Let IPython show `hint_for` in place of `<coroutine object ...>`; does nothing outside IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    plain = shell.display_formatter.formatters["text/plain"]
    if CoroutineType not in plain.type_printers:
        plain.for_type(CoroutineType, lambda call, printer, cycle: printer.text(hint_for(call)))
