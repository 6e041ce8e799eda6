"""Reads a rollout's records back: calls as they were, whole or as far as they got.

Knows the entries that `recorder` writes. Must not know sockets.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from openenv.errors import CaptureError
from openenv.rollout.capture import sse
from openenv.rollout.capture.dialects import DIALECTS
from openenv.rollout.capture.dialects.base import Completion, DialectModule, Odd
from openenv.rollout.capture.encoding import Json, load_object, loads
from openenv.rollout.capture.journal import Entry, read_entries
from openenv.rollout.task import Dialect

FILE = "calls.log"
"""The name of the records in a rollout's folder."""


@dataclass(slots=True)
class Call:
    """One model call of a rollout."""

    number: int
    """From 1, in the order in which the calls came."""
    dialect: Dialect
    """How the agent spoke."""
    endpoint_dialect: Dialect
    """How the endpoint was spoken to; `sent` and `response` are in this one."""
    path: str
    streamed: bool
    request: Json
    """What the agent asked, in full."""
    sent: Json
    """What the endpoint was asked."""
    started_at: float
    response: Json | None = None
    """The endpoint's answer; of a stream, what it comes to, as far as it got."""
    status: int | None = None
    """The endpoint's HTTP status; None where it never answered."""
    error: Json | None = None
    ended: str | None = None
    """`complete`, `failed` (the endpoint answered with an error), `unreachable`, `timeout`, `broken` (the answer did
    not come whole), `agent_gone`, `revoked`, `record_failed`; None where the proxy was killed in the middle."""
    attempts: int = 1
    latency_s: float = 0.0
    first_byte_s: float | None = None
    policy_version: str | None = None
    prompt_ids_asked: bool = False
    """Whether the engine named the prompt's ids apart from its answer, when it was asked for them."""
    completion: Completion = field(default_factory=Completion)

    @property
    def sampled(self) -> bool:
        """Say whether a model said anything in this call."""
        return (self.response is not None and self.error is None) or len(self.completion.sampled) > 0

    @property
    def module(self) -> DialectModule:
        """Return the dialect module that reads `sent` and `response`."""
        return DIALECTS[self.endpoint_dialect]


@dataclass(slots=True)
class Recording:
    """All that is on disk of one rollout."""

    rollout_id: str
    path: Path
    opened_at: float = 0.0
    metadata: Json = field(default_factory=dict)
    model: Json = field(default_factory=dict)
    budget: Json = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    stops: list[Json] = field(default_factory=list)
    """Calls that the budget answered."""
    notes: list[Json] = field(default_factory=list)
    torn_bytes: int = 0
    """How many bytes at the end were no whole entry: the writer was killed while it wrote."""


def read(path: Path | str) -> Recording:
    """Read the records of a rollout: its folder, or the file in it.

    Raises:
        CaptureError: there are none, or they are not such records.
    """
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    found = read_entries(file)
    if not found.entries or found.entries[0].head.get("k") != "open":
        raise CaptureError(f"{file} does not hold records of a rollout.")
    opening = found.entries[0].head
    recording = Recording(
        rollout_id=str(opening.get("rollout_id", "")),
        path=file,
        opened_at=opening.get("at", 0.0),
        metadata=opening.get("metadata") or {},
        model=opening.get("model") or {},
        budget=opening.get("budget") or {},
        torn_bytes=found.torn,
    )
    items: list[Any] = []
    prompts: dict[int, list[int]] = {}
    drafts: dict[int, _Draft] = {}
    for entry in found.entries[1:]:
        kind, number = entry.head.get("k"), entry.head.get("n")
        if kind == "call":
            drafts[entry.head["n"]] = _Draft(_call(entry, items))
        elif kind == "stop":
            recording.stops.append(entry.head)
        elif kind == "note":
            recording.notes.append(entry.head)
        elif kind == "prompt":
            ids = prompts.get(entry.head["base"], [])[: entry.head["keep"]] + entry.head["ids"]
            prompts[entry.head["n"]] = drafts[entry.head["n"]].prompt_ids = ids
            drafts[entry.head["n"]].begun.prompt_ids_asked = bool(entry.head.get("asked"))
        elif number in drafts and kind == "resent":
            _resend(drafts[number].begun, loads(entry.payload), items)
        elif number in drafts:
            drafts[number].feed(entry)
    recording.calls = [draft.call() for draft in drafts.values()]
    return recording


def _call(entry: Entry, items: list[Any]) -> Call:
    head, body = entry.head, loads(entry.payload)
    items.extend(body["new"])
    asked = _unpack(body["asked"], items)
    call = Call(
        number=head["n"],
        dialect=cast("Dialect", head["dialect"]),
        endpoint_dialect=cast("Dialect", head["to"]),
        path=head.get("path", ""),
        streamed=bool(head.get("stream")),
        request=asked,
        sent=asked,
        started_at=head["at"],
    )
    _resend(call, {**body, "new": []}, items)
    return call


def _resend(call: Call, body: Json, items: list[Any]) -> None:
    """Take note of what was really sent: the request, with some things set and others left out."""
    items.extend(body["new"])
    unset = set(body["sent"]["unset"])
    call.sent = {key: value for key, value in call.request.items() if key not in unset}
    call.sent.update(_unpack(body["sent"]["set"], items))


def _unpack(packed: Json, items: list[Any]) -> Json:
    body: Json = {}
    for key, value in packed.items():
        if isinstance(value, dict) and len(value) == 1:
            if "$items" in value:
                value = [items[start + index] for start, count in value["$items"] for index in range(count)]
            elif "$item" in value:
                value = items[value["$item"]]
            elif "$plain" in value:
                value = value["$plain"]
        body[key] = value
    return body


class _Draft:
    """A call whose entries are being read."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._events: list[bytes] = []
        self._body: bytes | None = None
        self._last_at = call.started_at
        self.prompt_ids: list[int] | None = None

    @property
    def begun(self) -> Call:
        """Return the call as it began."""
        return self._call

    def feed(self, entry: Entry) -> None:
        head, call = entry.head, self._call
        kind = head["k"]
        self._last_at = head.get("at", self._last_at)
        if kind == "try":
            call.attempts += 1
            call.status, call.error = head.get("status"), head.get("error")
        elif kind == "head":
            call.status, call.error = head["status"], None
            call.first_byte_s = head["at"] - call.started_at
            call.policy_version = head.get("policy")
        elif kind == "up":
            self._events.append(entry.payload)
        elif kind == "body":
            self._body = entry.payload
        elif kind == "end":
            call.ended = head["how"]
            call.error = head.get("error") or call.error
            if call.error is not None and call.error.get("status") is not None:
                call.status = call.error["status"]
            call.policy_version = head.get("policy") or call.policy_version
            call.attempts = head.get("attempts", call.attempts)

    def call(self) -> Call:
        call = self._call
        call.latency_s = max(0.0, self._last_at - call.started_at)
        response = load_object(self._body) if self._body is not None else self._assembled()
        if response is None:
            return call
        if self.prompt_ids is not None:
            response["prompt_token_ids"] = self.prompt_ids
        call.response = response
        if call.status is not None and call.status >= 400:
            return call
        try:
            call.completion = call.module.completion(response)
        except Odd as exc:
            call.error = call.error or {"message": f"the answer cannot be read: {exc}"}
        call.error = call.error or call.completion.error
        call.policy_version = call.policy_version or call.completion.policy_version
        return call

    def _assembled(self) -> Json | None:
        if not self._events:
            return None
        assembler = self._call.module.assembler()
        splitter = sse.Splitter()
        for event in splitter.feed(b"".join(self._events)):
            data = sse.data_of(event)
            chunk = load_object(data) if data is not None and data != sse.DONE else None
            if chunk is not None:
                with contextlib.suppress(*Odd):  # what else the engine said can still be read
                    assembler.feed(chunk)
        return assembler.response()
