"""The episode that a visitor plays: where it stands, and its newest actions, as custom pages and frames show them.

Entries are kept as JSON text, so that a step is encoded once however many look on. Knows shapes; must not know
sessions, sockets or environments.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from ..protocol.json_values import encode
from .page_operations import EncodedObservation, Render

MAX_ENTRIES: Final = 1000
_MAX_BYTES: Final = 32 * 1024 * 1024


class ActionLog(BaseModel):
    """One action and what it led to.

    Args:
        timestamp: When it was taken.
        action: Its fields.
        observation: What was observed after it.
        reward: What it earned.
        done: Whether it ended the episode.
        step_count: The episode's steps with it.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    timestamp: str
    action: dict[str, Any]
    observation: dict[str, Any]
    reward: float | None = None
    done: bool
    step_count: int


class EpisodeState(BaseModel):
    """Where an episode stands.

    Args:
        episode_id: Its name, if it has one.
        step_count: Steps taken.
        current_observation: The last observation.
        action_logs: The newest actions.
        is_reset: Whether no step was taken since the last reset.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    episode_id: str | None = None
    step_count: int
    current_observation: dict[str, Any] | None = None
    action_logs: list[ActionLog] = []
    is_reset: bool = True


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An entry of the log, without its closing brace: how long it took is for the page only."""

    text: bytes
    duration_ms: float
    is_step: bool = True

    @classmethod
    def of_step(
        cls, timestamp: str, action: bytes, outcome: EncodedObservation, *, step_count: int, duration_ms: float
    ) -> HistoryEntry:
        """Write down a step."""
        head = b'{"timestamp":' + encode(timestamp) + b',"action":' + action + b',"observation":' + outcome.observation
        return cls(head + outcome.tail + b',"step_count":' + str(step_count).encode(), duration_ms)

    @classmethod
    def of_call(cls, timestamp: str, fields: dict[str, Any], *, duration_ms: float) -> HistoryEntry:
        """Write down the call of a tool."""
        return cls(encode({"timestamp": timestamp, **fields})[:-1], duration_ms, is_step=False)

    def json(self) -> bytes:
        """Return it as the page reads it."""
        return self.text + b',"duration_ms":' + str(round(self.duration_ms, 1)).encode() + b"}"

    def action_log(self) -> bytes:
        """Return it as an `ActionLog`."""
        return self.text + b"}"


@dataclass(slots=True)
class VisitorEpisode:
    """An episode and its log, which holds the newest entries only."""

    episode_id: str | None = None
    step_count: int = 0
    has_begun: bool = False
    last: EncodedObservation | None = None
    render: bytes = field(default_factory=lambda: Render().json())
    entries: deque[HistoryEntry] = field(default_factory=deque)
    _bytes: int = 0

    def add(self, entry: HistoryEntry) -> None:
        """Append an entry; the oldest go when there are too many, or too much."""
        self.entries.append(entry)
        self._bytes += len(entry.text)
        while len(self.entries) > MAX_ENTRIES or (self._bytes > _MAX_BYTES and len(self.entries) > 1):
            self._bytes -= len(self.entries.popleft().text)

    @property
    def size(self) -> int:
        """How much of it is kept, in bytes."""
        return self._bytes + len(self.render) + (0 if self.last is None else len(self.last.observation))

    def json(self) -> bytes:
        """Return where it stands, for the page."""
        outcome = self.last or EncodedObservation(b"null", b"null", None, False)
        head = encode({"episode_id": self.episode_id, "step_count": self.step_count, "is_reset": self.has_begun})
        return head[:-1] + b',"current_observation":' + outcome.observation + outcome.tail + b"}"

    def log(self) -> bytes:
        """Return the entries, for the page."""
        return b"[" + b",".join(entry.json() for entry in self.entries) + b"]"

    def state(self) -> bytes:
        """Return it as an `EpisodeState`."""
        steps = [entry.action_log() for entry in self.entries if entry.is_step]
        observation = b"null" if self.last is None else self.last.observation
        head = encode({"episode_id": self.episode_id, "step_count": self.step_count})[:-1]
        logs = b'"action_logs":[' + b",".join(steps) + b"]"
        is_reset = b"false" if steps else b"true"
        return head + b',"current_observation":' + observation + b"," + logs + b',"is_reset":' + is_reset + b"}"
