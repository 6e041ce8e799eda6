"""One model call on its way through the proxy: to the endpoint, into the records, and back to the agent.

Each piece of an answer is on disk before the agent sees it, and each call that began has its end on disk, whatever ends
it:

    agent                     proxy                                records              endpoint
      | POST /v1/messages ---> | remove what is not the agent's,                            |
      |                        | translate, force logprobs and ids -> call                  |
      |                        | ------------------------------------------- POST ------->  |
      |                        | an error before the first byte  ---> try | resent  (again) |
      |                        | <------------------------------------------- 200 --------- |
      |                        |                                 ---> head                  |
      |                        | <------------------------------------------- events ------ |
      |                        | split into events               ---> prompt, up            |
      | <------ events ------- | strip what was forced, translate                           |
      |                        | the last event                  ---> end                   |
      | <------ end ---------- |                                                            |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlencode

from openenv.errors import CaptureError
from openenv.protocol.backoff import Backoff

from ..tasks.model_parameters import allow, steering
from ..tasks.task import Model
from .captured_rollout import EXHAUSTED, CapturedRollout, Redactor
from .dialects import DIALECTS
from .dialects.dialect import (
    LOGPROBS,
    MALFORMED,
    STREAM,
    TOKEN_IDS,
    AgentDialect,
    Bridge,
    CallOptions,
    Completion,
    ModelDialect,
    Translator,
    as_dict,
)
from .encoding import STREAM_DONE, EventSplitter, Json, dumps, event_data, load_object
from .inbound import JSON_TYPE, AgentReply
from .outbound import EndpointError, EndpointResponse, Endpoints
from .parameter_fixes import MAX_FIXES, ParamFix, diagnose
from .records import CallRecorder, JournalFull
from .upstream_errors import error_message

log = logging.getLogger("openenv.rollout.capture")

ATTEMPTS = 3
# An endpoint that asks for a longer pause is not waited for: agents have timeouts of their own, and retry themselves.
RETRY_AFTER_LIMIT_S = 30.0
POLICY_S = 2.0
PROMPT_IDS_S = 5.0
PROBE_S = 30.0
PROBES = 3
PROBE_TOKENS = 16
PROBE_PAUSE_S = 10.0
NEED_TOOLS = frozenset({"tool_choice", "parallel_tool_calls"})
"""Parameters that endpoints refuse in a request without tools."""
LAST_WRITE_S = 2.0
PING_S = 10.0
"""How often an agent that waits for a stream gets a comment, where the endpoint is asked for a whole answer."""
EVENT_LIMIT = PROMPT_IDS_LIMIT = 64 * 1024 * 1024
RESPONSE_LIMIT = 256 * 1024 * 1024
ERROR_LIMIT = 256 * 1024
RETRIED = frozenset({408, 429, 500, 502, 503, 504, 529})
REFUSALS = frozenset({400, 413, 422})
"""An endpoint's answers to a request that it does not accept: not failures of its own."""
SHOWN_HEADERS = frozenset({"retry-after", "retry-after-ms", "x-request-id", "request-id"})
"""The endpoint's headers that the agent may see."""
SENT_HEADERS = frozenset({"accept", "anthropic-version", "anthropic-beta", "openai-beta"})
"""The agent's headers that the endpoint may see."""
SENT_QUERY = frozenset({"beta", "api-version"})
"""What the endpoint may see of the query in the agent's address."""
ANSWER_FIELDS = ("choices", "content", "output")
"""Where a response of each dialect has what the model said."""
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
NO_CACHE = ("cache-control", "no-cache")

# Engines differ in what they accept, and there is no way to ask: the proxy sends what it wants, and leaves out what an
# error names. For example, of vLLM with `--max-logprobs 0`:
#     400 {"message": "Requested sample logprobs of 5, which is greater than max allowed: 0"}
# has the word "logprobs": `top_logprobs` goes first, as `logprobs` alone may be accepted.
NAMED_IN_ERRORS = (
    ("return_token_ids", ("return_token_ids",)),
    ("logprobs", ("top_logprobs", "logprobs")),
    ("stream_options", ("stream_options",)),
    ("chat_template_kwargs", ("chat_template_kwargs",)),
    ("max_completion_tokens", ("max_tokens",)),
)
"""A word in an endpoint's complaint, and the parameters to leave out then, in this order."""
_VERSION = re.compile(r"v\d+\w*")
_EMPTY = "the stream held nothing"


class StreamTap:
    """Reads a stream on its way to the agent: records its events, counts tokens, strips and translates.

    It takes bytes and returns those that the agent is to see. `forced` names what the agent did not ask for:

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
        """How many tokens came, as far as the engine says."""
        self.reported = 0
        """How many tokens the usage names."""
        self.has_prompt_ids = False
        """Whether the engine named the tokens of the prompt."""
        self.prompt_tokens: int | None = None
        """How many they are, where the engine has a route of its own for them."""
        self.finished = False
        """Whether the model came to its proper end."""
        self.failure: str | None = _EMPTY
        """What is wrong with a stream that came to its end; None when nothing is."""

    @property
    def tokens(self) -> int:
        """Return how many tokens were sampled until now."""
        return plausible_tokens(max(self.sampled, self.reported), self._text_bytes, events=self._text_events)

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return what the agent sees, after the events in it are in the records.

        Raises:
            JournalFull: they could not be written, so the agent must not see them.
            EndpointError: an event has no end.
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
                with contextlib.suppress(*MALFORMED):  # not in the dialect: recorded and passed on as it is
                    record, visible = self._read(event, chunk)
            for_records.append(record)
            for_agent.append(visible)
        # One system call for all events that came together, not one for each token.
        self._recorder.events(b"".join(for_records))
        return b"".join(for_agent)

    def flush(self) -> None:
        """Record what came of an event that never ended."""
        rest = self._splitter.rest()
        if rest:
            self._recorder.events(self._redactor.data(rest) if self._redactor is not None else rest)

    def end(self) -> bytes:
        """Return what ends the stream for the agent."""
        return self._translator.end() if self._translator is not None else b""

    def _read(self, event: bytes, chunk: Json) -> tuple[bytes, bytes]:
        """Return what the records keep of an event, and what the agent sees of it."""
        dialect = self._dialect
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
        # The end of `prompt_token_ids` and `input_token_ids`: looked for in the bytes, as few events have them.
        ids = dialect.take_prompt_ids(chunk) if b"t_token_ids" in event else None
        if ids:  # long, and nearly the same in each call: `prompt` entries hold only what is new
            self._recorder.prompt(ids)
            self.has_prompt_ids = True
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
    """Return how many tokens an answer has: what the engine says, or an estimate where that cannot be.

    Engines that say nothing, or too little, must not make an agent's answers free. Most of them send a token an event.
    No tokeniser has 16 bytes a token over a whole answer; most have about four.
    """
    fewest = text_bytes // 16
    for count in (named, events):
        if count and count >= fewest:
            return count
    return max(named, -(-text_bytes // 4))


def stream_error(chunk: Json) -> str | None:
    """Return the error that an event brings in place of an answer; None where the agent's request is to blame."""
    inner = chunk.get("response")
    error = chunk.get("error") or (inner.get("error") if isinstance(inner, dict) else None)
    if not error:
        return "the endpoint failed" if chunk.get("type") in ("error", "response.failed") else None
    about = error if isinstance(error, dict) else {"message": error}
    return None if about.get("code") in REFUSALS else str(about.get("message") or error)[:2000]


def _with_data(event: bytes, chunk: Json) -> bytes:
    """Return an event with other data; its name and id stay."""
    lines = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"".join(line + b"\n" for line in lines) + b"data: " + dumps(chunk) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Services:
    """What all calls share."""

    endpoints: Endpoints
    policy_header: str
    backoff_s: float = 0.5


@dataclass(frozen=True, slots=True)
class CallRequest:
    """An agent's request, its dialect, and the dialect of the endpoint."""

    dialect: AgentDialect
    path: str
    body: Json
    headers: Mapping[str, str]
    endpoint: ModelDialect
    bridge: Bridge | None = None
    query: str = ""

    @property
    def wants_stream(self) -> bool:
        """Say whether the answer is to come as a stream."""
        return self.body.get("stream") is True


class _Failed(Exception):
    """The call cannot go on; the agent gets this error in its dialect.

    `how` is the call's ending in the records, `error` the details there. `shown` is the endpoint's own error body,
    for an agent that speaks the endpoint's dialect.
    """

    def __init__(self, how: str, status: int, message: str, *, error: Json | None = None) -> None:
        super().__init__(message)
        self.how = how
        self.status = status
        self.error: Json = error or {"message": message}
        self.shown: bytes | None = None
        self.headers: list[tuple[str, str]] = []


def is_context_limit(failure: _Failed) -> bool:
    """Say whether an endpoint refused a request because its conversation is too long."""
    error = as_dict(as_dict(failure.error.get("body")).get("error"))
    text = str(failure).lower()
    is_named = error.get("code") == "context_length_exceeded" or ("maximum context length" in text and "tokens" in text)
    return failure.status == 400 and is_named


class ProxiedCall:
    """A call under way. Making one writes its request into the records.

    Raises:
        JournalFull: that could not be written.
    """

    def __init__(self, services: Services, rollout: CapturedRollout, request: CallRequest, reply: AgentReply) -> None:
        self._services = services
        self._rollout = rollout
        self._request = request
        self._reply = reply
        self.over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped: str | None = None  # why `stop` was called; None where the server cancels the task
        self._settled = False
        self._response: EndpointResponse | None = None
        self._base_url = ""  # of the last attempt
        self._tokens = 0
        self._attempts = 0
        self._policy: str | None = None
        self._policy_task: asyncio.Task[str | None] | None = None
        self._new_fixes: list[ParamFix] = []
        model = rollout.model
        self._allowed = allow(request.dialect.name, request.body, engine=model.engine, may_set=model.agent_may_set)
        self._rewrite(rollout.call_options())
        sent = self._rewritten.body
        facts: Json = {"dialect": request.dialect.name, "to": request.endpoint.name, "path": request.path}
        facts |= {"stream": request.wants_stream, "not_trainable": steering(request.endpoint.name, sent)}
        if self._allowed.removed:
            facts["removed"] = self._allowed.removed
        self._recorder: CallRecorder = rollout.recorder.begin(facts, request.body, sent)

    def _rewrite(self, options: CallOptions) -> None:
        request, body = self._request, self._allowed.body
        body = request.bridge.request(body) if request.bridge is not None else body
        self._rewritten, self._options = request.endpoint.rewrite(body, options), options
        for fix in (*(self._rollout.traits.fixes or ()), *self._new_fixes):
            fix.apply(self._rewritten.body)

    @property
    def unspent(self) -> int:
        """Return how many more tokens the call may sample; 0 where it has no limit."""
        return max(0, (self._rewritten.limit or 0) - self._tokens)

    async def run(self) -> None:
        """Carry the call through; return when all is in the records and the agent has its answer."""
        self._task = asyncio.current_task()
        self._reply.on_gone = lambda: self.stop("agent_gone")
        self._rollout.active.add(self)
        helpers: list[asyncio.Task[None] | asyncio.Task[str | None]] = [asyncio.create_task(self._ping())]
        if self._rollout.model.policy_url:
            self._policy_task = asyncio.create_task(self._ask_policy(self._rollout.model.policy_url))
            helpers.append(self._policy_task)
        seconds_left = self._rollout.spending.seconds_left()
        deadline = None
        if seconds_left is not None:
            deadline = asyncio.get_running_loop().call_later(seconds_left, self.stop, "budget")
        #   _carry: _answered -> head -> _relay_stream or _relay_whole -> _complete --> settled "complete"
        #      |        |                      |
        #      +--------+----------------------+--> _Failed, cancelled, JournalFull --> settled, then the agent's error
        #
        # `finally` settles what is left: a call must not be without an end in the records, also where the task is
        # cancelled while it sends an error.
        try:
            failure = await self._carry_guarded()
            if failure is not None and self._rollout.traits.ends_at_context_limit and is_context_limit(failure):
                failure.how = "context"
            if failure is not None:
                with contextlib.suppress(JournalFull):  # the recorder keeps that as `failure`
                    self._settle(failure.how, failure.error)
                    if failure.how in ("budget", "context"):
                        limit = "context" if failure.how == "context" else self._rollout.spending.exhausted()
                        self._rollout.budget_ended(limit or "seconds", self._request.dialect.name)
                if failure.how in ("budget", "context") and not self._reply.started:
                    await send_final_answer(self._reply, self._request.dialect, self._request.body)
                else:
                    await self._send_error(failure)
        finally:
            if deadline is not None:
                deadline.cancel()
            for helper in helpers:
                helper.cancel()
            with contextlib.suppress(JournalFull):
                self._settle("cancelled")
            self._rollout.active.discard(self)
            self._rollout.changed.set()
            self.over.set()

    def stop(self, how: str) -> None:
        """End the call; what was sampled until now stays in the records."""
        if self._stopped is None:
            self._stopped = how
            if self._task is not None:
                self._task.cancel()

    async def _carry_guarded(self) -> _Failed | None:
        """Carry the call; return what ended it early, None for a call that went well."""
        try:
            if self._reply.gone:
                self._stopped = "agent_gone"
            else:
                await self._carry()
                return None
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
        except _Failed as exc:
            await self._look_for_outage(exc)
            return exc
        except JournalFull as exc:
            return _Failed("record_failed", 507, f"this call could not be recorded: {exc}")
        except Exception as exc:  # the boundary of a call
            log.error("a call failed:\n%s", self._redacted(traceback.format_exc()))
            return _Failed("broken", 502, f"the endpoint's answer could not be handed on: {type(exc).__name__}")
        finally:
            if self._response is not None:
                self._response.close()
        if self._stopped == "revoked":
            return _Failed("revoked", 403, "the key of this rollout was revoked")
        if self._stopped == "budget":
            return _Failed("budget", 429, EXHAUSTED)
        return _Failed(self._stopped or "cancelled", 499, "the call was ended")

    async def _look_for_outage(self, failure: _Failed) -> None:
        """Note an endpoint that is gone before the agent can end: it may be back when the rollout is judged.

        A connection that is refused is no answer to a request, so that no agent can have written it.
        """
        if failure.how not in ("unreachable", "broken") or not self._base_url:
            return
        if await self._services.endpoints.is_gone(self._base_url):
            self._rollout.outage = f"nothing listened there when a call failed: {failure}"

    def _settle(self, how: str, error: Json | None = None) -> None:
        """Record how the call ended, before the agent can see that it did; the first time counts."""
        if self._settled:
            return
        self._settled = True
        rollout = self._rollout
        is_whole = self._rewritten.body.get("stream") is not True
        if how in ("agent_gone", "budget", "revoked") and is_whole and self._attempts and not self._tokens:
            rollout.spending.unseen_tokens += self._rewritten.limit or 0
        facts: Json = {"attempts": self._attempts, "tokens": self._tokens}
        if error is not None and how not in ("agent_gone", "cancelled"):
            facts["error"] = error
        if self._policy is not None:
            facts["policy"] = self._policy
        try:
            self._recorder.end(how, facts)
        except JournalFull:
            how = "record_failed"
            raise
        finally:
            rollout.call_ended(how)

    def _count(self, tokens: int) -> None:
        """Set how many tokens were sampled until now, in the account of the rollout as well."""
        self._rollout.spending.completion_tokens += tokens - self._tokens
        self._tokens = tokens

    async def _complete(self, missing_prompt_ids: int | None) -> None:
        """Finish a call that went well; ask llama.cpp for the prompt's ids where so many are missing."""
        if missing_prompt_ids is not None and self._options.return_token_ids and not self._rollout.no_prompt_ids:
            ids = await ask_prompt_ids(
                self._services.endpoints,
                self._rollout.base_url,
                self._rewritten.body,
                self._headers(),
                count=missing_prompt_ids,
            )
            if ids is None:
                self._rollout.no_prompt_ids = True
            else:
                self._recorder.prompt(ids, is_separate=True)
        if self._policy_task is not None:  # asked when the call began: the policy may have changed since
            self._policy = await self._policy_task or self._policy
        self._settle("complete")

    async def _carry(self) -> None:
        response = await self._answered()
        policy = response.headers.get(self._services.policy_header)
        self._policy = None if policy is None else self._redacted(policy)
        self._recorder.head(response.status, {"policy": self._policy} if self._policy else {})
        try:
            if "text/event-stream" in response.headers.get("content-type", ""):
                await self._relay_stream(response)
            else:
                await self._relay_whole(response)
        except EndpointError as exc:
            how, message = "timeout" if exc.kind == "timeout" else "broken", self._redacted(str(exc))
            self._rollout.endpoint_failed(status=response.status, kind=how, message=message)
            raise _Failed(how, 504 if how == "timeout" else 502, message) from None

    # getting an answer

    async def _answered(self) -> EndpointResponse:
        """Return the first answer that is no error; ask again where that may help, never after the first byte.

        Raises:
            _Failed: there is none.
        """
        while True:
            self._attempts += 1
            try:
                response = self._response = await self._send()
            except EndpointError as exc:
                failure = self._unreachable(exc)
                # After a timeout the endpoint may still be sampling: asking again would double its load.
                delay_s = self._delay_s("") if exc.kind == "connect" else None
            else:
                if 200 <= response.status < 300:
                    # What was left out was left out rightly: the rollout's next calls leave it out at once.
                    self._rollout.refused = self._options.refused
                    fixes = self._rollout.traits.fixes
                    if fixes is not None:
                        fixes.extend(fix for fix in self._new_fixes if fix not in fixes)
                    return response
                failure = await self._refused(response)
                if self._leave_out_refused(response.status, failure.error) or self._fix(response.status, failure.error):
                    self._attempts -= (
                        1  # not the endpoint's failure; there is an end: options only shrink, fixes are few
                    )
                    self._recorder.tried(response.status, failure.error)
                    continue
                delay_s = self._delay_s(response.headers.get("retry-after", ""))
                if response.status not in RETRIED:
                    delay_s = None
            if delay_s is None or self._attempts >= ATTEMPTS:
                raise failure
            self._recorder.tried(failure.error.get("status"), failure.error)
            await asyncio.sleep(delay_s)

    def _headers(self) -> dict[str, str]:
        """Return the headers for the endpoint, the real key among them."""
        passed_on = {name: value for name, value in self._request.headers.items() if name in SENT_HEADERS}
        return endpoint_headers(self._rollout.model, passed_on)

    async def _send(self) -> EndpointResponse:
        model, request = self._rollout.model, self._request
        base_url = self._base_url = self._rollout.base_url
        url = endpoint_url(base_url, request.endpoint.path)
        query = [pair for pair in parse_qsl(request.query) if pair[0] in SENT_QUERY and request.bridge is None]
        if query:
            url += f"?{urlencode(query)}"
        body, timeout_s = dumps(self._rewritten.body), model.request_timeout_s
        try:
            return await self._services.endpoints.send("POST", url, body, self._headers(), timeout_s=timeout_s)
        except EndpointError as exc:
            if exc.kind == "connect":
                self._rollout.leave_replica(base_url)
            raise

    def _unreachable(self, exc: EndpointError) -> _Failed:
        how = "timeout" if exc.kind == "timeout" else "unreachable"
        message = self._redacted(str(exc))
        self._rollout.endpoint_failed(status=None, kind=how, message=message)
        error = {"message": message, "kind": exc.kind, "status": None}
        return _Failed(how, 504 if how == "timeout" else 502, message, error=error)

    async def _refused(self, response: EndpointResponse) -> _Failed:
        """Read an error that the endpoint answered with."""
        try:
            body = await response.read(ERROR_LIMIT)
        except EndpointError as exc:
            body = str(exc).encode()
        text = self._redacted(body.decode("utf-8", "replace"))
        parsed = load_object(text)
        parsed = None if parsed is None else self._rollout.redactor.value(parsed)
        message = error_message(parsed) or text[:2000] or f"status {response.status}"
        kind = "refused" if response.status in REFUSALS else "failed"
        self._rollout.endpoint_failed(status=response.status, kind=kind, message=message)
        error: Json = {"message": message, "status": response.status, "kind": "failed"}
        if parsed is not None:
            error["body"] = parsed
        status = response.status if 400 <= response.status < 600 else 502
        if status in (401, 403):  # about the real key, which the agent must not learn anything of
            message = "the endpoint does not accept the key of the capture proxy"
            return _Failed("failed", status, message, error=error)
        failure = _Failed("failed", status, message, error=error)
        failure.headers = self._shown_headers(response)
        if parsed is not None and self._request.bridge is None:
            failure.shown = dumps(parsed)
        return failure

    def _leave_out_refused(self, status: int, error: Json) -> bool:
        """Leave out something forced that the endpoint complains about; False where there is nothing to leave out.

        Only what this proxy put into the request counts: an agent that has its own values complained about must not be
        able to switch the capture off.
        """
        if status not in REFUSALS:
            return False
        complaint = dumps(error).decode().lower()
        sent, request = self._rewritten.body, self._request.body
        if "return_token_ids" in complaint and "stream" in complaint and sent.get("stream") is True:
            return self._leave_out(STREAM)  # this engine has ids for whole answers only
        for word, parameters in NAMED_IN_ERRORS:
            for parameter in parameters if word in complaint else ():
                changed = parameter in sent and (parameter == "max_tokens" or sent[parameter] != request.get(parameter))
                if (changed or parameter in self._rewritten.forced) and self._leave_out(parameter):
                    return True
        return False

    def _fix(self, status: int, error: Json) -> bool:
        """Change the request as the endpoint asks for; False where it asks for nothing, or that may not be."""
        known = self._rollout.traits.fixes
        if known is None or status != 400 or len(known) + len(self._new_fixes) >= MAX_FIXES:
            return False
        fix = diagnose(error.get("body") or error.get("message"))
        if fix is None or fix in known or fix in self._new_fixes or not fix.apply(dict(self._rewritten.body)):
            return False
        self._new_fixes.append(fix)
        self._rewrite(self._options)
        self._recorder.resent(self._request.body, self._rewritten.body)
        return True

    def _leave_out(self, parameter: str) -> bool:
        if not self._options.allows(parameter):
            return False
        self._rewrite(self._options.without(parameter))
        self._recorder.resent(self._request.body, self._rewritten.body)
        return True

    def _delay_s(self, retry_after: str) -> float | None:
        """Return how long to wait before the next attempt; None where the endpoint asks for too long a wait."""
        with contextlib.suppress(ValueError):
            wanted_s = float(retry_after)
            return wanted_s if 0 <= wanted_s <= RETRY_AFTER_LIMIT_S else None
        return Backoff(first_pause_s=self._services.backoff_s).pause_s(self._attempts - 1)

    # handing it on

    async def _relay_stream(self, response: EndpointResponse) -> None:
        request = self._request
        translator = request.bridge.translator(request.body) if request.bridge is not None else None
        redactor = self._rollout.redactor
        tap = StreamTap(self._recorder, request.endpoint, self._rewritten.forced, translator, redactor)
        await self._reply.start(200, [EVENT_STREAM, NO_CACHE, *self._shown_headers(response)])
        try:
            async with contextlib.aclosing(response.pieces()) as pieces:
                async for piece in pieces:
                    visible = tap.feed(piece)
                    self._count(tap.tokens)
                    # The endpoint does not keep to its limit, which was within the budget.
                    if not tap.finished and self._rollout.spending.is_overdrawn():
                        raise _Failed("budget", 429, EXHAUSTED)
                    await self._reply.write(visible)
        finally:
            with contextlib.suppress(JournalFull):
                tap.flush()
        # HTTP alone does not show it: the last chunk of a response may come without the last event of the model.
        if not tap.finished:
            raise EndpointError("the stream ended before the model did", kind="broken")
        if tap.failure is not None:  # the agent has seen it, in the stream itself
            message = self._redacted(tap.failure)
            self._rollout.endpoint_failed(status=response.status, kind="broken", message=message)
            self._settle("broken", {"message": message})
        else:
            await self._complete(None if tap.has_prompt_ids else tap.prompt_tokens)
        # After the end is on disk: an agent that has its answer may end, and its rollout be read, at once.
        await self._reply.write(tap.end())
        await self._reply.end()

    async def _relay_whole(self, response: EndpointResponse) -> None:
        request, endpoint, forced = self._request, self._request.endpoint, self._rewritten.forced
        raw = self._rollout.redactor.data(await response.read(RESPONSE_LIMIT))
        answer = load_object(raw)
        if answer is None:
            self._recorder.body(raw)
            message = "the endpoint answered with something that is not a JSON object"
            self._rollout.endpoint_failed(status=response.status, kind="garbage", message=message)
            text = self._redacted(raw.decode("utf-8", "replace"))[:2000]
            raise _Failed("broken", 502, message, error={"message": message, "status": response.status, "text": text})
        ids = endpoint.take_prompt_ids(answer) if b"token_ids" in raw else None
        if ids:
            self._recorder.prompt(ids)
        self._recorder.body(dumps(answer) if ids else raw)  # the endpoint's own bytes where they stay as they are
        completion = endpoint.completion(answer)
        named = max(len(completion.sampled), endpoint.completion_tokens(answer))
        self._count(plausible_tokens(named, endpoint.text_size(answer)))
        if (problem := missing_answer(completion, answer)) is not None:
            raise EndpointError(self._redacted(problem), kind="garbage")
        if ids and TOKEN_IDS not in forced:  # the agent asked for them
            answer = load_object(raw) or answer
        visible = endpoint.strip_response(answer, forced)
        is_unchanged = visible is answer and not (ids and TOKEN_IDS in forced)
        if request.bridge is not None:
            visible, is_unchanged = request.bridge.translator(request.body).translate(visible), False
        await self._complete(None if ids else tokens_read(answer))
        headers = self._shown_headers(response)
        if request.wants_stream:  # the endpoint was asked for a whole answer, or does not stream
            if not self._reply.started:
                await self._reply.start(200, [EVENT_STREAM, *headers])
            await self._reply.write(b"".join(request.dialect.stream(request.body, visible)))
            await self._reply.end()
        else:
            content_type = ("content-type", response.headers.get("content-type", "application/json"))
            await self._reply.send(200, raw if is_unchanged else dumps(visible), [content_type, *headers])

    async def _ping(self) -> None:
        """Send comments to an agent that waits for a stream which the endpoint gives only whole."""
        while True:
            await asyncio.sleep(PING_S)
            if self._request.wants_stream and self._rewritten.body.get("stream") is not True:
                if not self._reply.started:
                    await self._reply.start(200, [EVENT_STREAM, NO_CACHE])
                await self._reply.write(b": waiting\n\n")

    async def _send_error(self, failure: _Failed) -> None:
        reply, dialect = self._reply, self._request.dialect
        if reply.gone or reply.ended:
            return
        message = self._redacted(str(failure))
        if reply.started:
            reply.abort(dialect.error_event(failure.status, message))
        else:
            body = failure.shown or dumps(dialect.error(failure.status, message))
            sending = reply.send(failure.status, body, [JSON_TYPE, *failure.headers])
            if self._stopped is None:
                await sending
                return
            # The end of a rollout waits for this call, so it must not wait for an agent that does not read.
            try:
                await asyncio.wait_for(sending, LAST_WRITE_S)
            except (asyncio.TimeoutError, TimeoutError):
                reply.abort()

    def _redacted(self, text: str) -> str:
        return self._rollout.redactor.text(text)

    def _shown_headers(self, response: EndpointResponse) -> list[tuple[str, str]]:
        return [(name, self._redacted(value)) for name, value in response.headers.items() if name in SHOWN_HEADERS]

    async def _ask_policy(self, url: str) -> str | None:
        """Ask for the version of the endpoint's policy."""
        try:
            headers = {"accept-encoding": "identity"}
            response = await self._services.endpoints.send("GET", url, b"", headers, timeout_s=POLICY_S)
            body = await response.read(64 * 1024)
        except EndpointError as exc:
            log.warning("the policy's version is not available: %s", self._redacted(str(exc)))
            return None
        if response.status != 200:
            return None
        parsed = load_object(body)
        if parsed is None:
            return body.decode("utf-8", "replace").strip()[:200] or None
        values = (parsed.get(name) for name in ("policy_version", "weight_version", "version"))
        return next((str(value) for value in values if value is not None), None)


async def send_final_answer(reply: AgentReply, dialect: AgentDialect, body: Json) -> None:
    """Answer as a model that ends its turn: agents stop at that, where an error would make them try again."""
    answer = dialect.final_answer(body, EXHAUSTED)
    if body.get("stream") is True:
        await reply.start(200, [EVENT_STREAM])
        await reply.write(b"".join(dialect.stream(body, answer)))
        await reply.end()
    else:
        await reply.send_json(answer)


def endpoint_url(base_url: str, path: str) -> str:
    """Return where a call goes: the base, with `/v1` where it has none, and the dialect's path."""
    base = base_url.rstrip("/")
    return f"{base}{path}" if _VERSION.fullmatch(base.rpartition("/")[2]) else f"{base}/v1{path}"


def endpoint_headers(model: Model, passed_on: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request to a model's endpoint: the real key, and what an agent's request brings along."""
    # `identity`: compressed events would come in blocks, later than they were sampled.
    headers = {"content-type": "application/json", "accept-encoding": "identity", **passed_on}
    key = model.api_key.get_secret_value()
    if model.dialect == "anthropic":
        headers["x-api-key"] = key
        headers.setdefault("anthropic-version", "2023-06-01")
    elif key:  # one that is empty is in `extra_headers`, or there is none
        headers["authorization"] = f"Bearer {key}"
    headers.update({name.lower(): value for name, value in model.extra_headers.items()})
    return headers


def missing_answer(completion: Completion, answer: Json) -> str | None:
    """Return why a response holds nothing that a model said; None where it does."""
    # Some gateways answer 200 with an error in the body.
    if completion.finish_reason is not None or any(answer.get(name) for name in ANSWER_FIELDS):
        return None
    return stream_error(answer) or "the endpoint answered with nothing that a model said"


# llama.cpp names the ids of a prompt on routes of its own only: its template, then its tokeniser. Nothing is tokenised
# here, and ids count only where they are as many as the engine says that it read.


def tokens_read(value: Json) -> int | None:
    """Return how many tokens llama.cpp read, from one of its chunks or responses; None for other engines."""
    usage = value.get("usage")
    if "timings" not in value or not isinstance(usage, dict):
        return None
    count = usage.get("prompt_tokens")
    return count if isinstance(count, int) else None


async def ask_prompt_ids(
    endpoints: Endpoints, base_url: str, body: Json, headers: Mapping[str, str], *, count: int
) -> list[int] | None:
    """Ask llama.cpp for the ids of a request's prompt; None where it does not have them, or has other ones."""
    root = base_url.rstrip("/").removesuffix("/v1")

    async def post(path: str, value: Json) -> Json:
        response = await endpoints.send("POST", f"{root}{path}", dumps(value), headers, timeout_s=PROMPT_IDS_S)
        data = await response.read(PROMPT_IDS_LIMIT)
        return (load_object(data) or {}) if response.status == 200 else {}

    try:
        prompt = (await post("/apply-template", body)).get("prompt")
        ids = (await post("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})).get("tokens")
    except EndpointError:
        return None
    fits = isinstance(ids, list) and len(ids) == count and all(isinstance(token, int) for token in ids)
    return ids if fits else None


# Whether an endpoint is well is asked with a request that no agent wrote: a failure of the agent's own requests proves
# nothing, since a prompt may be made such that the engine fails at it.


async def ask_endpoint(services: Services, model: Model, *, refused: frozenset[str] = frozenset()) -> str | None:
    """Ask an endpoint for a few tokens; return why it does not answer, None where it does. Nothing is recorded.

    Args:
        refused: Parameters that the endpoint is known to turn down.
    """
    options = CallOptions(
        model=model.name,
        top_logprobs=0,
        return_token_ids=False,
        max_tokens=PROBE_TOKENS,
        refused=refused | {LOGPROBS},
        # A parameter of the trainer's that the endpoint refuses fails every call: that is not the agent's doing.
        sampling={name: value for name, value in model.sampling.items() if name not in NEED_TOOLS},
    )
    backoff = Backoff(first_pause_s=services.backoff_s)
    refusal = _ProbeRefusal("")
    for attempt in range(PROBES):
        if attempt:
            await asyncio.sleep(_probe_pause_s(refusal) or backoff.pause_s(attempt - 1))
        try:
            answer = await asyncio.wait_for(_ask_once(services.endpoints, model, options), PROBE_S)
        except (asyncio.TimeoutError, TimeoutError):  # a busy endpoint is not asked again: that would add to its load
            return f"it did not answer within {PROBE_S:g} s"
        if answer is None:
            return None
        refusal = answer
        if refusal.status in REFUSALS:  # an engine that does not take this limit
            allowed = options.allows("max_tokens")
            options = options.without("max_tokens") if allowed else replace(options, max_tokens=None)
    return Redactor(model).text(refusal.message)[:2000]


def check_endpoint(model: Model) -> None:
    """Ask a model's endpoint for a few tokens, before anything is started for it.

    Raises:
        CaptureError: it does not answer; the text says why.
    """

    async def ask() -> str | None:
        endpoints = Endpoints()
        try:
            return await ask_endpoint(Services(endpoints, ""), model)
        finally:
            endpoints.close()

    problem = asyncio.run(ask())
    if problem is not None:
        raise CaptureError(f"The endpoint {model.base_url} does not answer for the model '{model.name}': {problem}")


@dataclass(frozen=True, slots=True)
class _ProbeRefusal:
    """Why an endpoint did not answer the host."""

    message: str
    status: int | None = None
    retry_after: str = ""


def _probe_pause_s(refusal: _ProbeRefusal) -> float | None:
    """Return how long an endpoint whose limit is used up is left alone; None for any other failure.

    An agent can use a limit up, so it is waited for: until then nothing is known about the endpoint.
    """
    if refusal.status != 429:
        return None
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(refusal.retry_after)), RETRY_AFTER_LIMIT_S)
    return PROBE_PAUSE_S


async def _ask_once(endpoints: Endpoints, model: Model, options: CallOptions) -> _ProbeRefusal | None:
    """Ask an endpoint; return why it does not answer, or None."""
    dialect = DIALECTS[model.dialect]
    question: Json = {"messages": [{"role": "user", "content": "Say yes."}]}
    if dialect.name == "openai_responses":
        question = {"input": "Say yes."}
    body = dumps(dialect.rewrite(question, options).body)
    url, headers = endpoint_url(model.base_url, dialect.path), endpoint_headers(model, {})
    try:
        response = await endpoints.send("POST", url, body, headers, timeout_s=PROBE_S)
        raw = await response.read(RESPONSE_LIMIT)
    except EndpointError as exc:
        return _ProbeRefusal(str(exc))
    answer = load_object(raw)
    if not 200 <= response.status < 300:
        message = f"status {response.status}: {error_message(answer) or ''}"
        return _ProbeRefusal(message, response.status, response.headers.get("retry-after", ""))
    if answer is None:
        return _ProbeRefusal("the endpoint answered with something that is not a JSON object")
    problem = missing_answer(dialect.completion(answer), answer)
    return None if problem is None else _ProbeRefusal(problem)
