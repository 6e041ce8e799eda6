"""What happens to the bytes of a stream on their way from the endpoint to the agent: written down, stripped, counted.

Knows events and dialects. Must not know sockets: it takes bytes, and returns those that the agent is to see.
"""

from __future__ import annotations

from openenv.rollout.capture import prompts, sse
from openenv.rollout.capture.dialects.base import TOKEN_IDS, DialectModule, Odd, StreamTranslator
from openenv.rollout.capture.encoding import Json, dumps, load_object
from openenv.rollout.capture.records import CallRecorder

EVENT_LIMIT = 64 * 1024 * 1024
REFUSALS = frozenset({400, 413, 422})
"""What an endpoint answers to a request that it does not like: not a failure of its own."""
_EMPTY = "the stream held nothing"


class Tap:
    """One stream on its way."""

    def __init__(
        self,
        recorder: CallRecorder,
        module: DialectModule,
        forced: frozenset[str],
        translator: StreamTranslator | None = None,
    ) -> None:
        self._recorder = recorder
        self._module = module
        self._forced = forced
        self._translator = translator
        self._splitter = sse.Splitter()
        self.sampled = 0
        """How many tokens came, as far as the engine says."""
        self.reported = 0
        """How many tokens the usage names."""
        self.has_prompt_ids = False
        """Whether the engine named the tokens of the prompt."""
        self.prompt_tokens: int | None = None
        """How many they are, where the engine has to be asked for them."""
        self.finished = False
        """Whether the model came to its proper end."""
        self.failure: str | None = _EMPTY
        """What is wrong with a stream that came to its end; None when nothing is."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return what the agent sees, after the events in it were written down.

        Raises:
            JournalFull: they could not be written, so the agent must not see them.
            ValueError: an event has no end.
        """
        events = self._splitter.feed(data)
        if not events:
            if len(self._splitter) > EVENT_LIMIT:
                raise ValueError(f"an event has more than {EVENT_LIMIT} bytes")
            return b""
        kept: list[bytes] = []
        seen: list[bytes] = []
        for event in events:
            self._take(event, kept, seen)
        self._recorder.events(b"".join(kept))
        return b"".join(seen)

    def rest(self) -> None:
        """Write down what came of an event that never ended."""
        rest = self._splitter.rest()
        if rest:
            self._recorder.events(rest)

    def end(self) -> bytes:
        """Return what ends the stream for the agent."""
        return self._translator.end() if self._translator is not None else b""

    def _take(self, event: bytes, kept: list[bytes], seen: list[bytes]) -> None:
        data = sse.data_of(event)
        if data == sse.DONE:
            self.finished = True
        chunk = load_object(data) if data is not None else None
        try:
            if chunk is not None:
                kept_event, seen_event = self._read(event, chunk)
            else:
                kept_event, seen_event = event, event if self._translator is None else b""
        except Odd:  # not in the dialect: kept as it is, and nobody's business here
            kept_event, seen_event = event, event if self._translator is None else b""
        kept.append(kept_event)
        seen.append(seen_event)

    def _read(self, event: bytes, chunk: Json) -> tuple[bytes, bytes]:
        """Return what is kept of an event, and what the agent sees of it."""
        module = self._module
        self.failure = stream_error(chunk) or (None if self.failure == _EMPTY else self.failure)
        self.sampled += module.sampled_in(chunk)
        self.reported = max(self.reported, module.completion_tokens(chunk))
        self.prompt_tokens = self.prompt_tokens or prompts.tokens_read(chunk)
        self.finished = self.finished or module.is_end(chunk)
        kept, shown = event, chunk
        ids = module.take_prompt_ids(chunk) if b"t_token_ids" in event else None
        if ids:  # long, and nearly the same in each call: only what is new is kept
            self._recorder.prompt(ids)
            self.has_prompt_ids = True
            kept = _rewritten(event, chunk)
            if TOKEN_IDS in self._forced:
                event = kept
            else:
                shown = load_object(sse.data_of(event) or b"") or chunk
        if self._translator is not None:
            return kept, self._translator.feed(chunk)
        visible = module.strip_event(shown, self._forced)
        if visible is None:
            return kept, b""
        return kept, event if visible is shown else _rewritten(event, visible)


def stream_error(chunk: Json) -> str | None:
    """Return the error that an event brings in place of an answer; None where the agent's request is to blame."""
    inner = chunk.get("response")
    error = chunk.get("error") or (inner.get("error") if isinstance(inner, dict) else None)
    if not error:
        return "the endpoint failed" if chunk.get("type") in ("error", "response.failed") else None
    about = error if isinstance(error, dict) else {"message": error}
    return None if about.get("code") in REFUSALS else str(about.get("message") or error)[:2000]


def _rewritten(event: bytes, chunk: Json) -> bytes:
    """Write an event again with other data; its name and id stay."""
    lines = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"".join(line + b"\n" for line in lines) + b"data: " + dumps(chunk) + b"\n\n"
