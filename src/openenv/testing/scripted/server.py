"""`ScriptedModel`: a server that plays scripts. A plain ASGI application."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from pydantic_core import from_json, to_json
from starlette.types import Receive, Scope, Send

from openenv.server.thread_server import ThreadServer

from . import vocabulary
from .player import SampledToken, ScriptedAnswer, ScriptPlayer, prompt_ids
from .script import PREFIX, CutFailure, HangFailure, Script, Scripts, StatusFailure, load_scripts
from .wire_formats import (
    ChatFormat,
    EngineName,
    MessagesFormat,
    ModelRequest,
    ResponsesFormat,
    ScriptedReply,
    UnreadableRequest,
    WireFormat,
)

FORMATS: Mapping[str, WireFormat] = {
    "/chat/completions": ChatFormat(),
    "/messages": MessagesFormat(),
    "/responses": ResponsesFormat(),
}
_PLAYED = 1024
LABEL = (b"x-openenv-model", b"scripted")
"""A header on every reply, which says that a script answers."""


@dataclass(slots=True)
class Played:
    """The tokens that one request really received: the ground truth for a capture.

    `token_ids` and `logprobs` contain only the tokens that were sent, so they may be incomplete.
    """

    response_id: str
    dialect: str
    model: str
    script: str
    turn: int
    stream: bool
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    status: int = 200

    def sent(self, steps: Sequence[SampledToken]) -> None:
        """Record sent tokens."""
        self.token_ids.extend([step.token for step in steps])
        self.logprobs.extend([step.logprob for step in steps])


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A request and its answer in progress."""

    format: WireFormat
    reply: ScriptedReply
    record: Played
    send: Send
    left: asyncio.Future[None]
    """Done when the caller leaves."""


class ModelAddress(TypedDict):
    """The address and name of a model: keywords of `openenv.rollout.Model`."""

    base_url: str
    name: str


class ScriptedModel:
    """A server that plays scripts instead of asking a model. Model names and a header mark its replies.

    Use it as a context manager. It answers OpenAI's chat completions and responses and Anthropic's messages, streamed
    or not. Token IDs and log-probabilities are exact for its artificial tokeniser.

    Args:
        scripts: One script, several, or a file of them.
        host: The address to bind.
        port: The port to bind; 0 binds a free one.
        engine: The place of token IDs in replies: as in `vllm` or `sglang`, or none (`plain`).
        tokens_per_chunk: The number of tokens per chunk of a stream.
        api_key: The required key; None accepts any key.

    Raises:
        ValueError: The scripts cannot be read.
        OSError: The port is taken.
    """

    def __init__(
        self,
        scripts: Scripts,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        engine: EngineName = "vllm",
        tokens_per_chunk: int = 1,
        api_key: str | None = None,
    ) -> None:
        self.scripts: tuple[Script, ...] = load_scripts(scripts)
        self._player = ScriptPlayer(self.scripts)
        self._headers: dict[str, str] = {}
        self._played: deque[Played] = deque(maxlen=_PLAYED)
        self._engine: EngineName = engine
        self._tokens_per_chunk = tokens_per_chunk
        self._api_key = api_key
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None  # ends all waiting
        timeouts = {"timeout_graceful_shutdown": 2, "timeout_keep_alive": 75}
        self._server = ThreadServer(
            self._serve, host=host, port=port, interface="asgi3", lifespan="off", ws="none", **timeouts
        )

    @property
    def url(self) -> str:
        """The address of the API, ending in `/v1`."""
        return f"{self._server.url}/v1"

    @property
    def base_url(self) -> str:
        """The same as `url`."""
        return self.url

    @property
    def root_url(self) -> str:
        """The address without `/v1`, for Anthropic's clients."""
        return self._server.url

    @property
    def port(self) -> int:
        """The port of the server."""
        return self._server.port

    @property
    def name(self) -> str:
        """The name of the first script's model."""
        return self.scripts[0].model_name

    def model(self, name: str | None = None) -> ModelAddress:
        """Return the arguments of `openenv.rollout.Model` for a script, by default the first one.

        Raises:
            KeyError: The name is unknown.
        """
        for script in self.scripts:
            if name is None or script.name == name.removeprefix(PREFIX):
                return {"base_url": self.url, "name": script.model_name}
        raise KeyError(f"no script is called {name!r}")

    def played(self) -> list[Played]:
        """Return the records of the latest requests, oldest first."""
        return list(self._played)

    def set_header(self, name: str, value: str) -> None:
        """Add or change a header of every later reply, such as the version of a policy."""
        self._headers[name] = value

    def start(self) -> ScriptedModel:
        """Start the server, like entering the `with` block."""
        self._server.start()
        return self

    def close(self) -> None:
        """End all running replies and stop the server."""
        if self._loop is not None and self._closing is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
        self._server.close()

    def __enter__(self) -> ScriptedModel:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # the ASGI application

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._closing is None:
            self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        path = str(scope["path"]).rstrip("/").removeprefix("/v1") or "/"
        wire_format = FORMATS.get(path)
        posts = {
            "/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        try:
            if scope["method"] in ("GET", "HEAD"):
                await self._get(path, send)
            elif wire_format is not None:
                await self._generate(wire_format, scope, receive, send)
            elif path in posts:
                await self._reply(send, 200, posts[path](await _body(receive)))
            else:
                await self._reply(send, 404, _nothing_at(scope["path"]))
        except UnreadableRequest as exc:
            refusal = (wire_format or ChatFormat()).error(400, str(exc), "invalid_request_error")
            await self._reply(send, 400, refusal)

    async def _get(self, path: str, send: Send) -> None:
        models = [
            {"id": script.model_name, "object": "model", "created": 0, "owned_by": "scripted", "max_model_len": 1 << 20}
            for script in self.scripts
        ]
        if path == "/models":
            await self._reply(send, 200, {"object": "list", "data": models})
        elif path in ("/health", "/"):
            await self._reply(send, 200, {"status": "healthy", "model": "scripted", "tokenizer": vocabulary.NAME})
        else:
            model = next((model for model in models if path == f"/models/{model['id']}"), None)
            await self._reply(send, 404 if model is None else 200, model or _nothing_at(path))

    async def _generate(self, wire_format: WireFormat, scope: Scope, receive: Receive, send: Send) -> None:
        request = _read(wire_format, await _body(receive))
        if self._api_key is not None and self._api_key not in _keys(scope):
            await self._reply(send, 401, wire_format.error(401, "this key is not known here", "authentication_error"))
            return
        answer = self._player.answer(
            request.model, request.conversation, max_tokens=request.max_tokens, seed=request.seed
        )
        reply = ScriptedReply(request, answer, f"scripted-{uuid.uuid4().hex}", int(time.time()), self._engine)
        record = Played(
            reply.response_id,
            wire_format.name,
            request.model,
            answer.script.name,
            answer.turn,
            request.stream,
            answer.prompt_ids,
        )
        self._played.append(record)
        failure = answer.failure
        if isinstance(failure, StatusFailure):
            record.status = failure.status
            more = {} if failure.retry_after_s is None else {"retry-after": f"{failure.retry_after_s:g}"}
            refusal = wire_format.error(failure.status, failure.message, "scripted_failure")
            await self._reply(send, failure.status, refusal, more)
        else:
            exchange = _Exchange(wire_format, reply, record, send, asyncio.ensure_future(_left(receive)))
            try:
                await (self._stream(exchange) if request.stream else self._whole(exchange))
            finally:
                exchange.left.cancel()

    async def _whole(self, exchange: _Exchange) -> None:
        answer, failure = exchange.reply.answer, exchange.reply.answer.failure
        pause = answer.first_token_delay_s + answer.token_delay_s * len(answer.steps)
        if isinstance(failure, HangFailure):
            pause += _hang_s(failure)
        if pause and not await self._wait(pause, exchange.left):
            return
        if isinstance(failure, CutFailure):
            head = self._head(200, "application/json")
            head["headers"].append((b"content-length", b"1000000"))
            await exchange.send(head)
            return  # the server closes a connection whose reply is not complete
        exchange.record.sent(answer.steps)
        exchange.record.finished = True
        await self._reply(exchange.send, 200, exchange.format.whole(exchange.reply))

    async def _stream(self, exchange: _Exchange) -> None:
        answer, send = exchange.reply.answer, exchange.send
        if answer.first_token_delay_s and not await self._wait(answer.first_token_delay_s, exchange.left):
            return
        await send(self._head(200, "text/event-stream; charset=utf-8"))
        chunks = exchange.format.stream(exchange.reply, tokens_per_chunk=self._tokens_per_chunk)
        for number, chunk in enumerate(chunks):
            if not await self._goes_on(answer, number, exchange.left):
                return
            if answer.token_delay_s and chunk.steps:
                if not await self._wait(answer.token_delay_s * len(chunk.steps), exchange.left):
                    return
            elif exchange.left.done():
                return
            await send({"type": "http.response.body", "body": chunk.data, "more_body": True})
            exchange.record.sent(chunk.steps)
            await asyncio.sleep(0)  # write each chunk separately, and let other streams continue
        exchange.record.finished = True
        await send({"type": "http.response.body", "body": b""})

    async def _goes_on(self, answer: ScriptedAnswer, number: int, left: asyncio.Future[None]) -> bool:
        """Play the script's failure if it applies to this chunk; return whether the stream continues."""
        failure = answer.failure
        if isinstance(failure, CutFailure):
            return number != failure.after_chunks
        if isinstance(failure, HangFailure) and number == failure.after_chunks:
            return await self._wait(_hang_s(failure), left)
        return True

    async def _wait(self, seconds: float, left: asyncio.Future[None]) -> bool:
        """Wait; return False if the caller leaves or the server stops."""
        assert self._closing is not None
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            timeout = None if seconds == float("inf") else seconds
            ends: set[asyncio.Future[Any]] = {left, closing}
            done, _ = await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return not done
        finally:
            closing.cancel()

    def _count_tokens(self, body: Mapping[str, Any]) -> dict[str, Any]:
        conversation = _read(MessagesFormat(), body).conversation
        return {"input_tokens": len(prompt_ids(conversation, self._player.tokenizer))}

    def _tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            ids = prompt_ids(_read(ChatFormat(), body).conversation, self._player.tokenizer)
        else:
            ids = list(vocabulary.encode(str(body.get("prompt", body.get("content", "")))))
        return {"count": len(ids), "max_model_len": 1 << 20, "tokens": ids, "tokenizer": vocabulary.NAME}

    def _detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"prompt": vocabulary.decode(list(body.get("tokens", ())))}
        except (ValueError, TypeError) as exc:
            raise UnreadableRequest(str(exc)) from exc

    def _head(self, status: int, content_type: str) -> dict[str, Any]:
        headers = [(b"content-type", content_type.encode()), LABEL]
        headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self._headers.items()]
        return {"type": "http.response.start", "status": status, "headers": headers}

    async def _reply(self, send: Send, status: int, value: Any, more: Mapping[str, str] | None = None) -> None:
        body = to_json(value)
        head = self._head(status, "application/json")
        head["headers"].append((b"content-length", str(len(body)).encode()))
        head["headers"] += [(name.encode(), text.encode()) for name, text in (more or {}).items()]
        await send(head)
        await send({"type": "http.response.body", "body": body})


def _nothing_at(path: str) -> dict[str, Any]:
    return {"error": {"message": f"nothing is at {path}", "code": 404}}


def _hang_s(failure: HangFailure) -> float:
    return float("inf") if failure.seconds is None else failure.seconds


def _read(wire_format: WireFormat, body: Mapping[str, Any]) -> ModelRequest:
    try:
        return wire_format.read(body)
    except (AttributeError, TypeError, KeyError) as exc:  # a part of the request has a wrong type
        raise UnreadableRequest(f"the request cannot be understood: {exc}") from exc


async def _body(receive: Receive) -> dict[str, Any]:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise UnreadableRequest("the request was broken off")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    try:
        value = from_json(b"".join(parts))
    except ValueError as exc:
        raise UnreadableRequest(f"the body is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise UnreadableRequest("the body must be a JSON object")
    return value


async def _left(receive: Receive) -> None:
    """Return when the caller leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _keys(scope: Scope) -> set[str]:
    keys = set()
    for name, value in scope["headers"]:
        if name == b"authorization":
            keys.add(value.decode("latin-1").removeprefix("Bearer ").strip())
        elif name in (b"x-api-key", b"api-key"):
            keys.add(value.decode("latin-1").strip())
    return keys
