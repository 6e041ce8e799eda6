"""Scripts: what a scripted model says, as a value that can be written in Python, YAML or JSON.

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
"""Every model name of a scripted model begins with this, so that no record can pass for a real model's."""


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedCall(_Value):
    """A tool call; its strings may hold placeholders (see `Turn`).

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
    """How many requests for this turn fail; None is all of them."""


class CutFailure(_Value):
    """Break the connection after so many chunks of the stream; without streaming, before the answer."""

    kind: Literal["cut"] = "cut"
    after_chunks: int = 0
    attempts: int | None = 1


class HangFailure(_Value):
    """Say nothing for a while, then answer; None is until the caller leaves or the server stops."""

    kind: Literal["hang"] = "hang"
    seconds: float | None = None
    after_chunks: int = 0
    attempts: int | None = 1


Failure = Annotated[StatusFailure | CutFailure | HangFailure, Field(discriminator="kind")]


class Turn(_Value):
    """One answer: a text, tool calls, or both.

    In texts and arguments `${cwd}` is the folder that the agent says it works in, `${task}` the text of the task,
    `${task:REGEX}` the first group of a match in it, `${result}` the last tool result, `${turn}` the number of this
    turn from 0, `${model}` the model's name. Everything else, such as the shell's `${HOME}`, stays as it is.
    """

    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    first_token_delay_s: float = 0.0
    token_delay_s: float = 0.0
    failures: tuple[Failure, ...] = ()
    """Tried in this order; each takes the requests for this turn that its `attempts` allow."""


class Script(_Value):
    """What one scripted model says, turn by turn.

    Which turn is played follows from the conversation in the request: the answers that it already holds. So one server
    plays for any number of conversations at once, and a repeated request gets the same answer.
    """

    name: str = "script"
    key: str | None = None
    """Text in a user message that selects this script; turns are counted from the last message that has it."""
    turns: tuple[Turn, ...] = ()
    ending: str = "Done."
    """The answer when all turns have been played."""
    side_answer: str = "Scripted answer"
    """The answer to a request without tools, such as one for a title, when the script itself calls tools."""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        plain = name.removeprefix(PREFIX)
        if not re.fullmatch(r"[\w.:-]+", plain):
            raise ValueError("a script's name has letters, digits and _ . : - only")
        return plain

    @property
    def model_name(self) -> str:
        """The name that requests ask for."""
        return PREFIX + self.name

    @property
    def calls_tools(self) -> bool:
        """Whether any turn calls a tool."""
        return any(turn.calls for turn in self.turns)


Scripts = Script | Mapping[str, Any] | str | Path | Iterable[Script | Mapping[str, Any]]
"""What a scripted model can be made of: scripts, what they are written as, or a file of them."""


def load_scripts(source: Scripts) -> tuple[Script, ...]:
    """Read one or several scripts from values or from a YAML or JSON file.

    A file holds one script, a list of scripts, or an object whose `scripts` is such a list.

    Raises:
        ValueError: There is no script in it, or two have the same name.
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
