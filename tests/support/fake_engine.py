"""A model endpoint for tests: raw HTTP, any shape, any misbehaviour; it logs every token that it wrote.

Runs in a thread (`FakeEngine`), or as a process that prints its port: `python fake_engine.py LOG`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def chat_chunk(delta: Body, *, finish: str | None = None, **extra: Any) -> Body:
    """A chunk of a chat completion with one choice; `extra` goes into the choice."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **extra}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def entry(token: int, *, logprob: float | None = None, text: str | None = None) -> Body:
    """A log-probability entry as OpenAI shapes it."""
    text = f"t{token} " if text is None else text
    value = -token / 1000 if logprob is None else logprob
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


@dataclass
class Answer:
    """What an endpoint does: a status, headers, and pieces of a body. A number is a pause, None a hang-up."""

    pieces: list[bytes | float | None]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = True

    @classmethod
    def json(cls, value: Any, status: int = 200, **headers: str) -> Answer:
        """A JSON body in one piece."""
        head = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        return cls([json.dumps(value).encode()], status, head, chunked=False)

    @classmethod
    def events(cls, *pieces: bytes | float | None, **headers: str) -> Answer:
        """A stream of events."""
        head = {"content-type": "text/event-stream", **{k.replace("_", "-"): v for k, v in headers.items()}}
        return cls(list(pieces), 200, head)


@dataclass
class EngineRequest:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Body


Respond = Callable[[EngineRequest], Answer]


def prompt_ids(body: Body) -> list[int]:
    """Ids that grow with the conversation: two for each message, its number and its length."""
    ids: list[int] = []
    for index, message in enumerate(body["messages"]):
        ids += message.get("ids") or [1000 + index, len(json.dumps(message))]
    return ids


def vllm(tokens: list[int], *, delay_s: float = 0.0) -> Respond:
    """Answer chat completions with these tokens in vLLM's shape, as far as the request asks for it."""

    def respond(request: EngineRequest) -> Answer:
        body = request.body
        wants_ids, wants_logprobs = body.get("return_token_ids"), body.get("logprobs")
        usage = {"prompt_tokens": 5, "completion_tokens": len(tokens), "total_tokens": 5 + len(tokens)}
        top = {"prompt_token_ids": prompt_ids(body)} if wants_ids else {}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(f"t{token} " for token in tokens)}
            choice: Body = {"index": 0, "message": message, "finish_reason": "stop"}
            if wants_logprobs:
                choice["logprobs"] = {"content": [entry(token) for token in tokens]}
            if wants_ids:
                choice["token_ids"] = tokens
            whole = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            return Answer.json({**whole, "usage": usage, **top})
        pieces: list[bytes | float | None] = [event({**chat_chunk({"role": "assistant", "content": ""}), **top})]
        for token in tokens:
            extra: Body = {"token_ids": [token]} if wants_ids else {}
            if wants_logprobs:
                extra["logprobs"] = {"content": [entry(token)]}
            pieces.append(event(chat_chunk({"content": f"t{token} "}, **extra)))
            if delay_s:
                pieces.append(delay_s)
        pieces.append(event(chat_chunk({}, finish="stop")))
        if (body.get("stream_options") or {}).get("include_usage"):
            pieces.append(event({**chat_chunk({}), "choices": [], "usage": usage}))
        return Answer.events(*pieces, DONE)

    return respond


class FakeEngine:
    """The endpoint, in a thread of its own."""

    def __init__(self, respond: Respond | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self.respond: Respond = respond or vllm([11, 12, 13])
        self.requests: list[EngineRequest] = []
        self.written: list[tuple[int, bytes]] = []
        """Every piece that was handed to the kernel, with the number of its request."""
        self.hung_up: list[int] = []
        """Numbers of the requests whose caller went before the answer was whole."""
        self.connections = 0
        self.port = 0
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._started = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls, backlog=512)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            async for request in read_requests(reader):
                self.requests.append(request)
                if not await self._answer(len(self.requests), self.respond(request), writer, reader):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, number: int, answer: Answer, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> bool:
        lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        if answer.chunked:
            lines += "transfer-encoding: chunked\r\n"
        else:
            lines += f"content-length: {sum(len(piece) for piece in answer.pieces if isinstance(piece, bytes))}\r\n"
        if answer.pieces == [None]:
            writer.transport.abort()
            return False
        writer.write(f"HTTP/1.1 {answer.status} X\r\n{lines}\r\n".encode())
        for piece in answer.pieces:
            if piece is None:
                await writer.drain()
                writer.transport.abort()
                return False
            if isinstance(piece, float | int):
                await asyncio.sleep(piece)
                continue
            if reader.at_eof() or writer.transport.is_closing():
                self.hung_up.append(number)
                return False
            self.written.append((number, piece))  # first: the agent may have the piece before `write` returns
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if answer.chunked else piece)
            await writer.drain()
        if answer.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def read_requests(reader: asyncio.StreamReader) -> AsyncIterator[EngineRequest]:
    """The requests of one connection."""
    while True:
        line = await reader.readline()
        if not line:
            return
        method, path, _ = line.decode().split(" ", 2)
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        yield EngineRequest(method, path, headers, json.loads(raw) if raw else {})


def main() -> None:
    """Serve `vllm` streams whose tokens the request names; log every piece once the kernel has it."""
    log = open(sys.argv[1], "ab", buffering=0)  # noqa: SIM115
    counter = iter(range(1, 1 << 60))

    def respond(request: EngineRequest) -> Answer:
        order = json.loads(request.body["messages"][-1]["content"])
        tokens = [next(counter) for _ in range(order["tokens"])]
        log.write(json.dumps({"call": order["call"], "tokens": tokens}).encode() + b"\n")
        return vllm(tokens, delay_s=order.get("delay_s", 0.0))(request)

    with FakeEngine(respond) as engine:
        sys.stdout.write(f"{engine.port}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                signal.pause()


if __name__ == "__main__":
    main()
