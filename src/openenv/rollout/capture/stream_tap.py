"""Answers of endpoints: token counts, completeness, errors; `StreamTap` reads answers that come as a stream.

Knows events and dialects, and writes to the records of one call. Knows nothing of connections, retries or budgets.
"""

from __future__ import annotations

import contextlib

from .captured_rollout import Redactor
from .dialects.dialect import MALFORMED, TOKEN_IDS, Assembler, Completion, ModelDialect, Translator
from .encoding import STREAM_DONE, EventSplitter, Json, dumps, event_data, load_object
from .outbound import EndpointError
from .records import CallRecorder
from .upstream_errors import REFUSALS

EVENT_LIMIT = 64 * 1024 * 1024
ANSWER_FIELDS = ("choices", "content", "output")
"""The fields of a response that hold the model's answer, one per dialect."""
_EMPTY = "the stream was empty"


class StreamTap:
    """Reads a stream on its way to the agent: records its events, counts tokens, removes forced fields, translates.

    `feed` takes the endpoint's bytes and returns the agent's. `forced` lists the fields that the proxy asked for and
    the agent did not:

        endpoint:  data: {"choices":[{"delta":{"content":"4"},"logprobs":{...},"token_ids":[19]}]}
        recorded:  the same bytes
        agent:     data: {"choices":[{"delta":{"content":"4"}}]}
    """

    def __init__(
        self,
        recorder: CallRecorder,
        dialect: ModelDialect,
        forced: frozenset[str],
        translator: Translator | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        self._recorder = recorder
        self._dialect = dialect
        self._forced = forced
        self._translator = translator
        self._redactor = redactor
        self._splitter = EventSplitter()
        self._text_events = self._text_bytes = 0
        self.sampled = 0
        """The number of tokens with an ID or a log-probability."""
        self.reported = 0
        """The number of tokens in the reported usage."""
        self.prompt_ids: list[int] | None = None
        """The prompt's token IDs, if the engine sent them."""
        self.assembler: Assembler | None = None
        """Gets every event, if it is set."""
        self.prompt_tokens: int | None = None
        """The number of prompt tokens, if the engine sends their IDs on another route only."""
        self.finished = False
        """Whether the last event of the model arrived."""
        self.failure: str | None = _EMPTY
        """The failure that a finished stream reports; None for a good answer."""

    @property
    def tokens(self) -> int:
        """Return how many tokens were sampled so far."""
        return plausible_tokens(max(self.sampled, self.reported), self._text_bytes, events=self._text_events)

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the endpoint; record the events in them, then return the bytes for the agent.

        Raises:
            JournalFull: The events could not be recorded, so the agent must not see them.
            EndpointError: An event is too long.
        """
        # Events, not network chunks: an endpoint may cut an event anywhere, and half an event cannot be stripped.
        events = self._splitter.feed(data)
        if not events:
            if len(self._splitter) > EVENT_LIMIT:
                raise EndpointError(f"an event has more than {EVENT_LIMIT} bytes", kind="garbage")
            return b""
        for_records: list[bytes] = []
        for_agent: list[bytes] = []
        for event in events:
            event = self._redactor.data(event) if self._redactor is not None else event
            data_line = event_data(event)
            if data_line == STREAM_DONE:
                self.finished = True
            chunk = load_object(data_line) if data_line is not None else None
            record, visible = event, event if self._translator is None else b""
            if chunk is not None:
                with contextlib.suppress(*MALFORMED):  # not of the dialect: recorded and passed on unchanged
                    record, visible = self._read(event, chunk)
            for_records.append(record)
            for_agent.append(visible)
        # One system call for all events that came together, not one for each token.
        self._recorder.events(b"".join(for_records))
        return b"".join(for_agent)

    def flush(self) -> None:
        """Record the beginning of an event that never ended."""
        rest = self._splitter.rest()
        if rest:
            self._recorder.events(self._redactor.data(rest) if self._redactor is not None else rest)

    # A translated stream ends with events that the endpoint does not send: Anthropic's `message_stop`, for example.
    def end(self) -> bytes:
        """Return the last bytes for the agent."""
        return self._translator.end() if self._translator is not None else b""

    def _read(self, event: bytes, chunk: Json) -> tuple[bytes, bytes]:
        """Return an event as it is recorded, and as the agent sees it."""
        dialect = self._dialect
        if self.assembler is not None:
            with contextlib.suppress(*MALFORMED):
                self.assembler.feed(chunk)
        if self._redactor is not None and ("error" in chunk or chunk.get("type") in ("error", "response.failed")):
            redacted = self._redactor.value(chunk)
            if redacted != chunk:
                chunk, event = redacted, _with_data(event, redacted)
        self.failure = stream_error(chunk) or (None if self.failure == _EMPTY else self.failure)
        self.sampled += dialect.sampled_in(chunk)
        text_bytes = dialect.text_size(chunk)
        self._text_bytes += text_bytes
        self._text_events += text_bytes > 0
        self.reported = max(self.reported, dialect.completion_tokens(chunk))
        self.prompt_tokens = self.prompt_tokens or tokens_read(chunk)
        self.finished = self.finished or dialect.is_end(chunk)
        record, agent_chunk = event, chunk
        # `prompt_token_ids` or `input_token_ids`: only the first event of a stream has them, and a search in the bytes
        # is cheaper than a look into each event.
        ids = dialect.take_prompt_ids(chunk) if b"t_token_ids" in event else None
        if ids:  # long and nearly the same in each call: `prompt` entries hold only the new ones
            self._recorder.prompt(ids)
            self.prompt_ids = ids
            record = _with_data(event, chunk)
            if TOKEN_IDS in self._forced:
                event = record
            else:
                agent_chunk = load_object(event_data(event) or b"") or chunk
        if self._translator is not None:
            return record, self._translator.feed(chunk)
        visible = dialect.strip_event(agent_chunk, self._forced)
        if visible is None:
            return record, b""
        return record, event if visible is agent_chunk else _with_data(event, visible)


def plausible_tokens(named: int, text_bytes: int, *, events: int = 0) -> int:
    """Return the number of an answer's tokens: the reported one if it is plausible, else an estimate.

    Engines that report no tokens, or too few, must not make an agent's answers free.
    """
    # No tokeniser has 16 bytes per token over a whole answer; most have about four. Engines that report nothing usually
    # send an event per token.
    fewest = text_bytes // 16
    for count in (named, events):
        if count and count >= fewest:
            return count
    return max(named, -(-text_bytes // 4))


# Errors in a stream come after status 200, in four forms: `error` as an object or a text, Anthropic's event `error`,
# and `response.failed` of the responses API. A refusal (400, 413, 422) is about the request, not about the endpoint.
def stream_error(chunk: Json) -> str | None:
    """Return the error in an event; None for an answer, or if the endpoint refuses the request."""
    inner = chunk.get("response")
    error = chunk.get("error") or (inner.get("error") if isinstance(inner, dict) else None)
    if not error:
        return "the endpoint failed" if chunk.get("type") in ("error", "response.failed") else None
    about = error if isinstance(error, dict) else {"message": error}
    return None if about.get("code") in REFUSALS else str(about.get("message") or error)[:2000]


def _with_data(event: bytes, chunk: Json) -> bytes:
    """Return an event with new data and its old name and ID."""
    lines = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"".join(line + b"\n" for line in lines) + b"data: " + dumps(chunk) + b"\n\n"


# An answer may be empty on purpose: a model that ends its turn at once has a finish reason and no text.
def missing_answer(completion: Completion, answer: Json) -> str | None:
    """Return the reason for a response without an answer; None if it has one."""
    # Some gateways answer with status 200 and an error in the body.
    if completion.finish_reason is not None or any(answer.get(name) for name in ANSWER_FIELDS):
        return None
    return stream_error(answer) or "the endpoint's response has no answer of the model"


def tokens_read(value: Json) -> int | None:
    """Return the number of prompt tokens that llama.cpp reports; None for other engines."""
    usage = value.get("usage")
    if "timings" not in value or not isinstance(usage, dict):
        return None
    count = usage.get("prompt_tokens")
    return count if isinstance(count, int) else None
