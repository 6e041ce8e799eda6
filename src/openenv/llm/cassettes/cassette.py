"""A cassette: recorded calls of a model endpoint in a file of JSON lines.

Knows the file. Must not know servers. No request header is ever in it, and no key.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import OpenEnvError
from .matching import Mode, difference, key_of, loose_shape, similarity, strict_shape

FORMAT = 1


class CassetteError(OpenEnvError, ValueError):
    """The file is no cassette, or not of a version that is known here."""

    code = "CASSETTE_ERROR"


class CassetteMiss(OpenEnvError, LookupError):
    """A request that was not recorded; `nearest` says what the most similar recorded one has otherwise."""

    code = "CASSETTE_MISS"

    def __init__(self, method: str, path: str, cassette: str, nearest: str | None) -> None:
        self.method, self.path, self.cassette, self.nearest = method, path, cassette, nearest
        told = (
            "nothing was recorded for this path" if nearest is None else f"the nearest recorded one differs: {nearest}"
        )
        super().__init__(f"{method} {path} is not in {cassette}; {told}")

    @property
    def details(self) -> dict[str, Any]:
        """What was asked for, and what it differs in."""
        return {"method": self.method, "path": self.path, "nearest": self.nearest}


class Piece(BaseModel):
    """A piece of a streamed reply, and how long after the one before it came."""

    after_s: float
    data: str


class Recording(BaseModel):
    """One request and its reply."""

    model_config = ConfigDict(extra="forbid")

    method: str
    path: str
    request: Any = None
    status: int
    content_type: str = "application/json"
    headers: dict[str, str] = Field(default_factory=dict)
    """The few response headers that a client may need, such as `retry-after`."""
    first_byte_s: float = 0.0
    """From the request to the head of the reply."""
    pieces: list[Piece] = Field(default_factory=list)
    complete: bool = True
    """False when the endpoint broke off."""

    @property
    def text(self) -> str:
        """The whole reply."""
        return "".join(piece.data for piece in self.pieces)


class _Head(BaseModel):
    cassette: int
    upstream: str = ""


class Cassette:
    """Reads and appends recordings; safe to use from several threads.

    Args:
        path: The file; made with the first recording.
        mode: How requests are compared.

    Raises:
        CassetteError: The file is no cassette.
    """

    def __init__(self, path: str | Path, *, mode: Mode = "strict") -> None:
        self.path = Path(path)
        self.mode: Mode = mode
        self.recordings: list[Recording] = []
        self._by_key: dict[str, list[Recording]] = {}
        self._played: dict[str, int] = {}
        self._lock = threading.Lock()
        if self.path.exists():
            self._read()

    def append(self, recording: Recording, *, upstream: str = "") -> None:
        """Write one recording to the end of the file."""
        with self._lock:
            new = not self.path.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                if new:
                    file.write(_Head(cassette=FORMAT, upstream=upstream).model_dump_json() + "\n")
                file.write(recording.model_dump_json(exclude_defaults=True) + "\n")
            self._add(recording)

    def find(self, method: str, path: str, body: Any) -> Recording:
        """Return the recording of a request; of several, each in its turn, then the last again.

        Raises:
            CassetteMiss: It was not recorded.
        """
        key = key_of(method, path, body, self.mode)
        with self._lock:
            found = self._by_key.get(key)
            if found:
                number = self._played.get(key, 0)
                self._played[key] = number + 1
                return found[min(number, len(found) - 1)]
            raise CassetteMiss(method, path, str(self.path), self._nearest(method, path, body))

    def _nearest(self, method: str, path: str, body: Any) -> str | None:
        shape = strict_shape if self.mode == "strict" else loose_shape
        asked = shape(body)
        same = [one for one in self.recordings if (one.method, one.path) == (method, path)]
        if not same:
            return None
        shapes = [shape(one.request) for one in same]
        return difference(max(shapes, key=lambda one: similarity(one, asked)), asked)

    def _add(self, recording: Recording) -> None:
        self.recordings.append(recording)
        key = key_of(recording.method, recording.path, recording.request, self.mode)
        self._by_key.setdefault(key, []).append(recording)

    def _read(self) -> None:
        with self.path.open(encoding="utf-8") as file:
            try:
                head = _Head.model_validate_json(file.readline())
                if head.cassette != FORMAT:
                    raise CassetteError(f"{self.path} has format {head.cassette}; this release reads {FORMAT}")
                for line in file:
                    if line.endswith("\n"):  # a line without its end was cut off while it was written
                        self._add(Recording.model_validate_json(line))
            except ValidationError as exc:
                raise CassetteError(f"{self.path} is no cassette: {exc}") from exc
