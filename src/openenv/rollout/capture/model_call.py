"""One model call on its way through the proxy: to the endpoint, written down, and back to the agent.

Knows the order of things. Each answer is on disk before the agent sees it; a call that began is written down to its
end, whatever ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .captured_rollout import CapturedRollout
from .dialects.dialect import (
    MALFORMED,
    STREAM,
    TOKEN_IDS,
    Bridge,
    CallOptions,
    DialectModule,
    RewrittenRequest,
    StreamTranslator,
)
from .encoding import STREAM_DONE, EventSplitter, Json, dumps, event_data, load_object
from .inbound import AgentReply
from .outbound import EndpointError, EndpointExchange, Endpoints, ResponseHead
from .records import CallRecorder, JournalFull

# tap: what happens to the bytes of a stream on their way from the endpoint to the agent.
#
# Knows events and dialects. Must not know sockets: it takes bytes, and returns those that the agent is to see.


EVENT_LIMIT = 64 * 1024 * 1024
REFUSALS = frozenset({400, 413, 422})
"""What an endpoint answers to a request that it does not like: not a failure of its own."""
_EMPTY = "the stream held nothing"


class StreamTap:
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
        self._splitter = EventSplitter()
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
        data = event_data(event)
        if data == STREAM_DONE:
            self.finished = True
        chunk = load_object(data) if data is not None else None
        try:
            if chunk is not None:
                kept_event, seen_event = self._read(event, chunk)
            else:
                kept_event, seen_event = event, event if self._translator is None else b""
        except MALFORMED:  # not in the dialect: kept as it is, and nobody's business here
            kept_event, seen_event = event, event if self._translator is None else b""
        kept.append(kept_event)
        seen.append(seen_event)

    def _read(self, event: bytes, chunk: Json) -> tuple[bytes, bytes]:
        """Return what is kept of an event, and what the agent sees of it."""
        module = self._module
        self.failure = stream_error(chunk) or (None if self.failure == _EMPTY else self.failure)
        self.sampled += module.sampled_in(chunk)
        self.reported = max(self.reported, module.completion_tokens(chunk))
        self.prompt_tokens = self.prompt_tokens or tokens_read(chunk)
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
                shown = load_object(event_data(event) or b"") or chunk
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


log = logging.getLogger("openenv.rollout.capture")

ATTEMPTS = 3
POLICY_S = 2.0
RETRY_AFTER_LIMIT_S = 30.0
PING_S = 10.0
"""How often an agent that waits for a stream is told that it still comes, where the endpoint sends none."""
RESPONSE_LIMIT = 256 * 1024 * 1024
ERROR_LIMIT = 256 * 1024
RETRIED = frozenset({408, 429, 500, 502, 503, 504, 529})
SHOWN_HEADERS = frozenset({"content-type", "retry-after", "retry-after-ms", "x-request-id", "request-id"})
"""The endpoint's headers that the agent may see."""
SENT_HEADERS = frozenset({"accept", "anthropic-version", "anthropic-beta", "openai-beta"})
"""The agent's headers that the endpoint may see."""
ANSWERS = ("choices", "content", "output")
"""Where a response of each dialect has what the model said."""
JSON = ("content-type", "application/json")
EVENTS = ("content-type", "text/event-stream; charset=utf-8")

_VERSION = re.compile(r"v\d+\w*")
NAMED_IN_ERRORS = (
    ("return_token_ids", ("return_token_ids",)),
    ("logprobs", ("top_logprobs", "logprobs")),
    ("stream_options", ("stream_options",)),
    ("chat_template_kwargs", ("chat_template_kwargs",)),
    ("max_completion_tokens", ("max_tokens",)),
)
"""A word in an endpoint's complaint, and what to leave out then, in this order."""


@dataclass(frozen=True, slots=True)
class Services:
    """What all calls share."""

    endpoints: Endpoints
    policy_header: str
    backoff_s: float = 0.5


@dataclass(frozen=True, slots=True)
class CallRequest:
    """What an agent asked: its dialect, its request, and how the endpoint is spoken to."""

    dialect: DialectModule
    path: str
    body: Json
    headers: Mapping[str, str]
    endpoint: DialectModule
    bridge: Bridge | None = None
    query: str = ""

    @property
    def wants_stream(self) -> bool:
        """Say whether the answer is to come as a stream."""
        return self.body.get("stream") is True


class _Failed(Exception):
    """The call cannot go on; the agent gets this error in its dialect."""

    def __init__(self, how: str, status: int, message: str, *, error: Json | None = None) -> None:
        super().__init__(message)
        self.how = how
        self.status = status
        self.error: Json = error or {"message": message}
        self.shown: bytes | None = None
        self.headers: list[tuple[str, str]] = []


class ProxiedCall:
    """A call under way."""

    def __init__(self, services: Services, rollout: CapturedRollout, ask: CallRequest, reply: AgentReply) -> None:
        self._services = services
        self._rollout = rollout
        self._ask = ask
        self._reply = reply
        self._task: asyncio.Task[None] | None = None
        self._stopped: str | None = None
        self._settled = False
        self.over = asyncio.Event()
        self._exchange: EndpointExchange | None = None
        self._broken: Exception | None = None
        self._tokens = 0
        self._attempts = 0
        self._policy: str | None = None
        self._policy_task: asyncio.Task[str | None] | None = None
        self._rewritten, self._wishes = self._rewrite(rollout.wishes())
        facts = {"dialect": ask.dialect.NAME, "to": ask.endpoint.NAME, "path": ask.path, "stream": ask.wants_stream}
        self._recorder: CallRecorder = rollout.recorder.begin(facts, ask.body, self._rewritten.body)

    def _rewrite(self, wishes: CallOptions) -> tuple[RewrittenRequest, CallOptions]:
        ask = self._ask
        body = ask.bridge.request(ask.body) if ask.bridge is not None else ask.body
        return ask.endpoint.rewrite(body, wishes), wishes

    async def run(self) -> None:
        """Carry the call through; return when all is written down and the agent has its answer."""
        self._reply.on_gone = lambda: self.stop("agent_gone")
        self._reply.on_pause = self._pause
        self._task = asyncio.get_running_loop().create_task(self._guarded())
        self._rollout.active.add(self)
        try:
            await asyncio.wait([self._task])
            self._task.result()
        finally:
            self._rollout.active.discard(self)
            self.over.set()

    def stop(self, how: str) -> None:
        """End the call; what was sampled until now stays written down."""
        if self._stopped is None and not self._settled:
            self._stopped = how
            if self._task is not None and not self._task.done():
                self._task.cancel()

    def _pause(self, is_paused: bool) -> None:
        if self._exchange is not None:
            self._exchange.pause(is_paused)

    async def _guarded(self) -> None:
        if self._rollout.policy_url:
            self._policy_task = asyncio.get_running_loop().create_task(self._ask_policy(self._rollout.policy_url))
        self._pings = asyncio.get_running_loop().call_later(PING_S, self._ping)
        failure: _Failed | None = None
        try:
            if self._reply.gone:
                self._stopped = self._stopped or "agent_gone"
            if self._stopped is None:
                await self._carry()
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
        except _Failed as exc:
            failure = exc
        except JournalFull as exc:
            failure = _Failed("record_failed", 507, f"this call could not be recorded: {exc}")
        except Exception as exc:  # the boundary of a call: nobody else would write down how it ended
            log.exception("a call failed")
            failure = _Failed("broken", 502, f"the endpoint's answer could not be handed on: {type(exc).__name__}")
        finally:
            self._finish(failure)

    def _finish(self, failure: _Failed | None) -> None:
        """Let go of everything, write down how the call ended, and tell the agent where it failed."""
        self._pings.cancel()
        if self._policy_task is not None:
            self._policy_task.cancel()
        if self._exchange is not None and not self._settled:
            self._exchange.cancel()
        if self._stopped == "revoked":
            failure = _Failed("revoked", 403, "the key of this rollout was revoked")
        how = self._stopped or (failure.how if failure is not None else "cancelled")
        with contextlib.suppress(JournalFull):  # the recorder has taken note of it
            self._settle(how, failure.error if failure is not None else None)
        if failure is not None:
            self._answer_error(failure)

    def _ping(self) -> None:
        if self._ask.wants_stream and self._rewritten.body.get("stream") is not True:
            if not self._reply.started:
                self._reply.start(200, [EVENTS, ("cache-control", "no-cache")])
            self._reply.write(b": waiting\n\n")
        self._pings = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def _settle(self, how: str, error: Json | None = None) -> None:
        """Write down how the call ended, before the agent can see that it did; the first time counts."""
        if self._settled:
            return
        self._settled = True
        rollout = self._rollout
        rollout.spending.completion_tokens += self._tokens
        facts: Json = {"attempts": self._attempts, "tokens": self._tokens}
        if error is not None:
            facts["error"] = error
        if self._policy is not None:
            facts["policy"] = self._policy
        try:
            self._recorder.end(how, **facts)
        except JournalFull:
            how = "record_failed"
            raise
        finally:
            rollout.call_ended(how)

    async def _complete(self, missing_prompt_ids: int | None) -> None:
        """Finish a call that went well; ask for the prompt's ids where so many are missing."""
        wanted = self._wishes.return_token_ids and not self._rollout.no_prompt_ids
        if missing_prompt_ids is not None and wanted:
            base_url, headers = self._rollout.model.base_url, self._headers()
            ids = await ask_prompt_ids(
                self._services.endpoints, base_url, self._rewritten.body, headers, count=missing_prompt_ids
            )
            if ids is None:
                self._rollout.no_prompt_ids = True
            else:
                self._recorder.prompt(ids, asked=True)
        if self._policy_task is not None:
            self._policy = await self._policy_task or self._policy
        self._settle("complete")

    async def _carry(self) -> None:
        exchange, head = await self._answered()
        rollout = self._rollout
        self._policy = head.headers.get(self._services.policy_header)
        facts = {"policy": self._policy} if self._policy else {}
        self._recorder.head(head.status, **facts)
        try:
            if "text/event-stream" in head.headers.get("content-type", ""):
                await self._relay(exchange, head)
            else:
                await self._whole(exchange, head)
        except EndpointError as exc:
            if isinstance(self._broken, JournalFull):
                raise self._broken from None
            how = "timeout" if exc.kind == "timeout" else "broken"
            rollout.endpoint_failed(status=head.status, kind=how, message=str(exc))
            raise _Failed(how, 504 if how == "timeout" else 502, str(exc)) from None

    # getting an answer

    async def _answered(self) -> tuple[EndpointExchange, ResponseHead]:
        """Return the first answer that is no error; ask again where that may help.

        Raises:
            _Failed: there is none.
        """
        while True:
            self._attempts += 1
            try:
                exchange, head = await self._ask_once()
            except EndpointError as exc:
                failure = self._unreachable(exc)
                delay = self._delay(None) if exc.kind == "connect" else None
            else:
                if 200 <= head.status < 300:
                    self._rollout.refused = self._wishes.refused  # what was left out, was left out rightly
                    return exchange, head
                failure = await self._refused(exchange, head)
                if self._leave_out(head.status, failure.error):
                    self._attempts -= 1
                    self._recorder.tried(head.status, failure.error)
                    continue
                delay = self._delay(head) if head.status in RETRIED else None
            if delay is None or self._attempts >= ATTEMPTS:
                raise failure
            self._recorder.tried(failure.error.get("status"), failure.error)
            await asyncio.sleep(delay)

    def _headers(self) -> dict[str, str]:
        """Return the headers for the endpoint, the real key among them."""
        model, ask = self._rollout.model, self._ask
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        headers.update({name: value for name, value in ask.headers.items() if name in SENT_HEADERS})
        key = model.api_key.get_secret_value()
        if ask.endpoint.NAME == "anthropic":
            headers["x-api-key"] = key
            headers.setdefault("anthropic-version", "2023-06-01")
        else:
            headers["authorization"] = f"Bearer {key}"
        headers.update({name.lower(): value for name, value in model.extra_headers.items()})
        return headers

    async def _ask_once(self) -> tuple[EndpointExchange, ResponseHead]:
        model, ask = self._rollout.model, self._ask
        url = endpoint_url(model.base_url, ask.endpoint.PATH)
        if ask.query and ask.bridge is None:
            url += f"?{ask.query}"
        body, timeout_s = dumps(self._rewritten.body), model.request_timeout_s
        self._exchange, head = await self._services.endpoints.send(
            "POST", url, body, self._headers(), timeout_s=timeout_s
        )
        return self._exchange, head

    def _unreachable(self, exc: EndpointError) -> _Failed:
        how = "timeout" if exc.kind == "timeout" else "unreachable"
        message = self._redacted(str(exc))
        self._rollout.endpoint_failed(status=None, kind=how, message=message)
        error = {"message": message, "kind": exc.kind, "status": None}
        return _Failed(how, 504 if how == "timeout" else 502, message, error=error)

    async def _refused(self, exchange: EndpointExchange, head: ResponseHead) -> _Failed:
        """Read an error that the endpoint answered with."""
        try:
            body = await exchange.read(ERROR_LIMIT)
        except EndpointError as exc:
            body = str(exc).encode()
        text = self._redacted(body.decode("utf-8", "replace"))
        parsed = load_object(text)
        message = error_message(parsed) or text[:2000] or f"status {head.status}"
        kind = "refused" if head.status in REFUSALS else "failed"
        self._rollout.endpoint_failed(status=head.status, kind=kind, message=message)
        error: Json = {"message": message, "status": head.status, "kind": "failed"}
        if parsed is not None:
            error["body"] = parsed
        status = head.status if head.status >= 400 else 502
        if status in (401, 403):  # about the key that the agent does not have
            message = "the endpoint does not accept the key of the capture proxy"
            return _Failed("failed", status, message, error=error)
        failure = _Failed("failed", status, message, error=error)
        failure.headers = list(shown(head))
        if parsed is not None and self._ask.bridge is None:
            failure.shown = text.encode()
        return failure

    def _leave_out(self, status: int, error: Json) -> bool:
        """Say whether to ask again without something that was forced into the request and that the endpoint refused."""
        if status not in REFUSALS:
            return False
        complaint = dumps(error).decode().lower()
        sent, asked = self._rewritten.body, self._ask.body
        if "return_token_ids" in complaint and "stream" in complaint and sent.get("stream") is True:
            return self._without(STREAM)  # this engine has ids for whole answers only
        for word, parameters in NAMED_IN_ERRORS:
            for parameter in parameters if word in complaint else ():
                changed = parameter in sent and (parameter == "max_tokens" or sent[parameter] != asked.get(parameter))
                forced = changed or parameter in self._rewritten.forced
                if forced and self._wishes.asks(parameter):
                    return self._without(parameter)
        return False

    def _without(self, parameter: str) -> bool:
        if not self._wishes.asks(parameter):
            return False
        self._rewritten, self._wishes = self._rewrite(self._wishes.without(parameter))
        self._recorder.resent(self._ask.body, self._rewritten.body)
        return True

    def _delay(self, head: ResponseHead | None) -> float | None:
        """Return how long to wait before the next attempt; None for none, as the endpoint asks for too long a wait."""
        given = head.headers.get("retry-after", "") if head is not None else ""
        with contextlib.suppress(ValueError):
            asked = float(given)
            return asked if 0 <= asked <= RETRY_AFTER_LIMIT_S else None
        base = self._services.backoff_s * float(2 ** (self._attempts - 1))
        return base * (0.5 + random.random())

    # handing it on

    async def _relay(self, exchange: EndpointExchange, head: ResponseHead) -> None:
        ask = self._ask
        translator = ask.bridge.translator(ask.body) if ask.bridge is not None else None
        tap = StreamTap(self._recorder, ask.endpoint, self._rewritten.forced, translator)
        extra = [(name, value) for name, value in shown(head) if name != "content-type"]
        self._reply.start(200, [EVENTS, ("cache-control", "no-cache"), *extra])

        def take(data: bytes) -> None:
            try:
                self._reply.write(tap.feed(data))
            except JournalFull as exc:
                self._broken = exc
                exchange.fail(EndpointError(str(exc), kind="record"))
            except Exception as exc:  # the boundary of a callback; what came is written down
                log.exception("a stream could not be handed on")
                self._broken = exc
                exchange.fail(EndpointError(f"the stream could not be handed on: {exc}", kind="garbage"))
            self._tokens = max(tap.sampled, tap.reported)

        try:
            await exchange.relay(take)
        finally:
            with contextlib.suppress(JournalFull):
                tap.rest()
        if not tap.finished:
            raise EndpointError("the stream ended before the model did", kind="broken")
        if tap.failure is not None:  # the agent has been told, in the stream itself
            message = self._redacted(tap.failure)
            self._rollout.endpoint_failed(status=head.status, kind="broken", message=message)
            self._settle("broken", {"message": message})
        else:
            await self._complete(None if tap.has_prompt_ids else tap.prompt_tokens)
        self._reply.write(tap.end())
        self._reply.end()

    async def _whole(self, exchange: EndpointExchange, head: ResponseHead) -> None:
        ask = self._ask
        raw = await exchange.read(RESPONSE_LIMIT)
        response = load_object(raw)
        if response is None:
            self._recorder.body(raw)
            message = "the endpoint answered with something that is not a JSON object"
            self._rollout.endpoint_failed(status=head.status, kind="garbage", message=message)
            text = self._redacted(raw[:2000].decode("utf-8", "replace"))
            raise _Failed("broken", 502, message, error={"message": message, "status": head.status, "text": text})
        ids = ask.endpoint.take_prompt_ids(response) if b"token_ids" in raw else None
        if ids:
            self._recorder.prompt(ids)
        self._recorder.body(dumps(response) if ids else raw)
        completion = ask.endpoint.completion(response)
        tokens = len(completion.sampled)
        self._tokens = max(tokens, ask.endpoint.completion_tokens(response))
        if completion.finish_reason is None and not any(response.get(name) for name in ANSWERS):
            message = stream_error(response) or "the endpoint answered with nothing that a model said"
            raise EndpointError(self._redacted(message), kind="garbage")
        if ids and TOKEN_IDS not in self._rewritten.forced:
            response = load_object(raw) or response
        visible = ask.endpoint.strip_response(response, self._rewritten.forced)
        if ask.bridge is not None:
            visible = ask.bridge.response(ask.body, visible)
        await self._complete(None if ids else tokens_read(response))
        if ask.wants_stream:
            extra = [(name, value) for name, value in shown(head) if name != "content-type"]
            if not self._reply.started:
                self._reply.start(200, [EVENTS, *extra])
            self._reply.write(b"".join(ask.dialect.stream(ask.body, visible)))
            self._reply.end()
        else:
            unchanged = visible is response and not (ids and TOKEN_IDS in self._rewritten.forced)
            self._reply.send(200, raw if unchanged else dumps(visible), [*shown(head)] or [JSON])

    # errors

    def _answer_error(self, failure: _Failed) -> None:
        reply, dialect = self._reply, self._ask.dialect
        if reply.gone or reply.ended:
            return
        body = failure.shown or dumps(dialect.error(failure.status, self._redacted(str(failure))))
        if reply.started:
            reply.write(dialect.error_event(failure.status, self._redacted(str(failure))))
            reply.end(abort=True)
        else:
            headers = [(name, value) for name, value in failure.headers if name != "content-type"]
            reply.send(failure.status, body, [JSON, *headers])

    def _redacted(self, text: str) -> str:
        secret = self._rollout.model.api_key.get_secret_value()
        return text.replace(secret, "***") if len(secret) >= 4 and secret != "intercepted" else text

    # the policy's version

    async def _ask_policy(self, url: str) -> str | None:
        try:
            endpoints = self._services.endpoints
            headers = {"accept-encoding": "identity"}
            exchange, head = await endpoints.send("GET", url, b"", headers, timeout_s=POLICY_S)
            body = await exchange.read(64 * 1024)
        except EndpointError as exc:
            log.warning("the policy's version could not be asked for: %s", exc)
            return None
        if head.status != 200:
            return None
        parsed = load_object(body)
        if parsed is None:
            return body.decode("utf-8", "replace").strip()[:200] or None
        known = (parsed.get(name) for name in ("policy_version", "weight_version", "version"))
        return next((str(value) for value in known if value is not None), None)


def endpoint_url(base_url: str, path: str) -> str:
    """Return where a call goes: the base, with `/v1` where it has none, and the dialect's path."""
    base = base_url.rstrip("/")
    return f"{base}{path}" if _VERSION.fullmatch(base.rpartition("/")[2]) else f"{base}/v1{path}"


def shown(head: ResponseHead) -> Iterable[tuple[str, str]]:
    """Return the headers that the agent may see."""
    return [(name, value) for name, value in head.headers.items() if name in SHOWN_HEADERS]


def error_message(parsed: Json | None) -> str | None:
    """Return the text of an error in any of the shapes that endpoints use."""
    error = (parsed or {}).get("error", parsed)
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail")
        return str(message) if message else None
    return str(error) if error else None


# Prompt ids of llama.cpp, by its own template and its own tokeniser.
#
# Nothing is tokenised here, and ids count only where they are as many as the engine says
# that it read.


PROMPT_IDS_S = 5.0
PROMPT_IDS_LIMIT = 64 * 1024 * 1024


def tokens_read(value: Json) -> int | None:
    """Return how many tokens llama.cpp read, from a chunk or a response of its; None for other engines."""
    usage = value.get("usage")
    if "timings" not in value or not isinstance(usage, dict):
        return None
    count = usage.get("prompt_tokens")
    return count if isinstance(count, int) else None


async def ask_prompt_ids(
    endpoints: Endpoints, base_url: str, body: Json, headers: Mapping[str, str], *, count: int
) -> list[int] | None:
    """CallRequest the engine for the ids of a request's prompt; None where it does not say, or says something else."""
    root = base_url.rstrip("/").removesuffix("/v1")
    try:
        rendered = await _post_json(endpoints, f"{root}/apply-template", body, headers)
        asked = {"content": rendered.get("prompt"), "add_special": True, "parse_special": True}
        ids = (await _post_json(endpoints, f"{root}/tokenize", asked, headers)).get("tokens")
    except EndpointError:
        return None
    return ids if _fits(ids, count) else None


def _fits(ids: Any, count: int) -> bool:
    return isinstance(ids, list) and len(ids) == count and all(isinstance(token, int) for token in ids)


async def _post_json(endpoints: Endpoints, url: str, body: Json, headers: Mapping[str, str]) -> Json:
    exchange, head = await endpoints.send("POST", url, dumps(body), headers, timeout_s=PROMPT_IDS_S)
    try:
        data = await exchange.read(PROMPT_IDS_LIMIT)
    finally:
        exchange.cancel()  # does nothing where the answer came whole
    return (load_object(data) or {}) if head.status == 200 else {}
