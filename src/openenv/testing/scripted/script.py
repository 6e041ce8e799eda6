"""Scripts: the replies of a scripted model as values in Python, YAML or JSON.

Knows shapes only. Must not know dialects, servers or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

PREFIX = "scripted/"
"""The prefix of all model names, so that nobody takes a record for one of a real model."""


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedCall(_Value):
    """A tool call; its strings may contain placeholders (see `Turn`).

    `arguments` is an object for an ordinary tool, and a text for a free-form one, such as Codex's `apply_patch`.
    """

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class StatusFailure(_Value):
    """Answer with an HTTP error instead."""

    kind: Literal["status"] = "status"
    status: int = 500
    message: str = "a failure that the script asks for"
    retry_after_s: float | None = None
    attempts: int | None = 1
    """The number of requests for this turn that fail; None for all."""


class CutFailure(_Value):
    """Break the connection after this number of chunks; without streaming, before the answer."""

    kind: Literal["cut"] = "cut"
    after_chunks: int = 0
    attempts: int | None = 1


class HangFailure(_Value):
    """Wait, then answer; None waits until the caller leaves or the server stops."""

    kind: Literal["hang"] = "hang"
    seconds: float | None = None
    after_chunks: int = 0
    attempts: int | None = 1


Failure = Annotated[StatusFailure | CutFailure | HangFailure, Field(discriminator="kind")]


class Turn(_Value):
    """One answer: a text, tool calls, or both.

    In texts and arguments, `${cwd}` is the working folder from the agent's prompt, `${task}` the text of the task,
    `${task:REGEX}` the first group of a match in it, `${result}` the last tool result, `${turn}` the number of this
    turn from 0, `${model}` the model's name, and `${seed}` the request's seed. Other texts, such as the shell's
    `${HOME}`, do not change.
    """

    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    first_token_delay_s: float = 0.0
    token_delay_s: float = 0.0
    failures: tuple[Failure, ...] = ()
    """Failures in this order; each handles as many requests for this turn as its `attempts` allow."""


class Script(_Value):
    """The replies of one scripted model, turn by turn.

    The number of answers in the request's conversation decides the turn. One server can therefore play any number of
    conversations at once, and a repeated request gets the same answer.
    """

    name: str = "script"
    key: str | None = None
    """A text in a user message that selects this script; turns count from the last message with it."""
    turns: tuple[Turn, ...] = ()
    ending: str = "Done."
    """The answer after all turns."""
    side_answer: str = "Scripted answer"
    """The answer to a request without tools, such as one for a title, if the script calls tools."""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        plain = name.removeprefix(PREFIX)
        if not re.fullmatch(r"[\w.:-]+", plain):
            raise ValueError("a script's name has letters, digits and _ . : - only")
        return plain

    @property
    def model_name(self) -> str:
        """The model name for requests."""
        return PREFIX + self.name

    @property
    def calls_tools(self) -> bool:
        """Whether any turn calls a tool."""
        return any(turn.calls for turn in self.turns)


Scripts = Script | Mapping[str, Any] | str | Path | Iterable[Script | Mapping[str, Any]]
"""Input for a scripted model: scripts, their values, or a file with them."""


def load_scripts(source: Scripts) -> tuple[Script, ...]:
    """Read one or several scripts from values or from a YAML or JSON file.

    A file holds one script, a list of scripts, or an object whose `scripts` is such a list.

    Raises:
        ValueError: The input contains no script, or two scripts with the same name.
    """
    value: Any = source
    if isinstance(source, str | Path):
        value = yaml.safe_load(Path(source).read_text(encoding="utf-8")) or ()
    if isinstance(value, Mapping):
        value = value.get("scripts", [value])
    listed = [value] if isinstance(value, Script) else list(value)
    scripts = tuple(one if isinstance(one, Script) else Script.model_validate(one) for one in listed)
    names = [script.name for script in scripts]
    if not scripts:
        raise ValueError("a scripted model needs a script")
    if len(set(names)) < len(names):
        raise ValueError(f"two scripts have the same name: {sorted(names)}")
    return scripts
