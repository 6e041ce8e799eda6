"""A proxy that stands between an agent and its model inside one sandbox, and records every call.

No package but the standard library: this file is uploaded into sandboxes that cannot reach a proxy of their host, and
in it `openenv.rollout.tasks.model_parameters`, the rules of what an agent decides (`SOURCE`). There the agent shares a
machine with it; where the host can be reached, `openenv.rollout.capture` is the safer one. Knows OpenAI's chat
completions; must not know the rest of this package.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

try:
    from openenv.rollout.tasks import model_parameters as parameters
except ImportError:  # in a sandbox: `SOURCE` has put the module there
    import parameters  # type: ignore[import-not-found,no-redef]

KEY_VARIABLES = ("OPENCODE_UPSTREAM_API_KEY", "UPSTREAM_API_KEY")
RENAMED_LIMIT = ("gpt-5", "o1", "o3", "o4")
"""Models that take `max_completion_tokens` instead of `max_tokens`."""
_OWN_PARAMETERS = ("return_token_ids", "top_logprobs", "logprobs", "chat_template_kwargs")
_MAX_BODY = 64 * 1024 * 1024
_PR_SET_DUMPABLE = 4


@dataclass(frozen=True)
class ProxyConfig:
    """Where the model is, what it is asked for, and where the records go."""

    upstream_url: str
    upstream_api_key: str = field(default="intercepted", repr=False)
    trace: str | Path = "proxy_trace.jsonl"
    host: str = "127.0.0.1"
    port: int = 7000
    top_logprobs: int = 5
    request_timeout_s: float = 600.0
    max_tokens_cap: int | None = None
    disable_thinking: bool = False
    model_override: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """How answers are sampled: parameters for every call, by the endpoint's names. The agent's own do not count."""

    def __post_init__(self) -> None:
        parameters.check_trainer_parameters(None, self.sampling, ())

    @property
    def completions_url(self) -> str:
        """The address of the model's chat completions."""
        base = self.upstream_url.rstrip("/")
        return f"{base if base.endswith('/v1') else base + '/v1'}/chat/completions"


class ProxySource:
    """This module and the rules that it goes by as one file, for sandboxes that have neither; read like a `Path`."""

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the file's text."""
        own = Path(__file__).read_text(encoding)
        rules = Path(parameters.__file__).read_text(encoding)
        first = "from __future__ import annotations\n"
        before, after = own.split(first, 1)
        loaded = (
            "import sys, types\n"
            'rules = sys.modules["parameters"] = types.ModuleType("parameters")\n'
            f"exec(compile({rules!r}, 'parameters.py', 'exec'), rules.__dict__)\n"
        )
        return f"{before}{first}{loaded}{after}"


SOURCE = ProxySource()


# -- requests -----------------------------------------------------------------------------------------------------


def rewrite_request(body: dict[str, Any], config: ProxyConfig) -> dict[str, Any]:
    """Return what the model is asked: what is the agent's to decide, what a record needs, and the limits that hold."""
    made = {**parameters.allow("openai_chat", body).body, **config.sampling}
    if config.model_override:
        made["model"] = config.model_override
    made["logprobs"] = True
    made.setdefault("top_logprobs", config.top_logprobs)
    made["return_token_ids"] = True
    limits = [limit for limit in (parameters.asked_limit(made), config.max_tokens_cap) if limit is not None]
    is_renamed = str(made.get("model", "")).startswith(RENAMED_LIMIT) or "max_completion_tokens" in made
    for name in parameters.OUTPUT_LIMITS:
        made.pop(name, None)
    if limits:
        made["max_completion_tokens" if is_renamed else "max_tokens"] = min(limits)
    if config.disable_thinking:
        kwargs = made.get("chat_template_kwargs")
        made["chat_template_kwargs"] = {**(kwargs if isinstance(kwargs, dict) else {}), "enable_thinking": False}
    return made


def without_refused(body: dict[str, Any], refusal: str) -> dict[str, Any] | None:
    """Return a request without the first parameter that the model's refusal names, or None.

    It must be our own, or a sampling parameter without effect.
    """
    neutral = (name for name in parameters.NEUTRAL_SAMPLING if name in body and parameters.is_neutral(name, body[name]))
    for name in (*_OWN_PARAMETERS, *neutral):
        if name in body and name in refusal:
            made = dict(body)
            del made[name]
            if name == "logprobs":
                made.pop("top_logprobs", None)
            return made
    return None


def stripped(message: dict[str, Any]) -> dict[str, Any]:
    """Return a reply, or a piece of one, as the agent would have got it: without tokens and log-probabilities."""
    made = {key: value for key, value in message.items() if key not in ("prompt_token_ids", "prompt_logprobs")}
    if isinstance(made.get("choices"), list):
        made["choices"] = [
            {key: value for key, value in choice.items() if key not in ("logprobs", "token_ids", "prompt_token_ids")}
            if isinstance(choice, dict)
            else choice
            for choice in made["choices"]
        ]
    return made


# -- records ------------------------------------------------------------------------------------------------------


class Recording:
    """What came back of one call, put together piece by piece.

    Args:
        request: The body that went to the model.
        turn: The number of the call.
    """

    def __init__(self, request: dict[str, Any], turn: int) -> None:
        self.request = request
        self.turn = turn
        self.status: int | None = None
        self.error: dict[str, Any] | None = None
        self.is_written = False
        self.began = time.time()
        self._clock = time.monotonic()
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._prompt_ids: list[int] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the model came to an end in every choice."""
        return bool(self._choices) and all(choice["finish_reason"] for choice in self._choices.values())

    def fail(self, kind: str, message: str) -> None:
        """Note that the call did not come to its end."""
        self.error = {"type": kind, "message": message}

    def take_reply(self, reply: dict[str, Any]) -> None:
        """Take a whole reply."""
        self._note_head(reply)
        for number, choice in enumerate(reply.get("choices") or ()):
            kept = self._choice(choice.get("index", number))
            kept["message"] = choice.get("message") or {}
            self._note_choice(kept, choice)

    def take_piece(self, piece: dict[str, Any]) -> None:
        """Take a piece of a streamed reply."""
        self._note_head(piece)
        for number, choice in enumerate(piece.get("choices") or ()):
            kept = self._choice(choice.get("index", number))
            _add_delta(kept["message"], choice.get("delta") or {})
            self._note_choice(kept, choice)

    def _choice(self, index: int) -> dict[str, Any]:
        empty = {"index": index, "message": {"role": "assistant"}, "finish_reason": None, "logprobs": [], "ids": []}
        return self._choices.setdefault(index, empty)

    def _note_head(self, message: dict[str, Any]) -> None:
        self._head.update({key: value for key, value in message.items() if key != "choices" and value is not None})
        if isinstance(message.get("prompt_token_ids"), list):
            self._prompt_ids = message["prompt_token_ids"]

    def _note_choice(self, kept: dict[str, Any], choice: dict[str, Any]) -> None:
        kept["finish_reason"] = choice.get("finish_reason") or kept["finish_reason"]
        entries = (choice.get("logprobs") or {}).get("content")
        kept["logprobs"].extend(entries if isinstance(entries, list) else ())
        ids = choice.get("token_ids")
        kept["ids"].extend(ids if isinstance(ids, list) else ())
        if isinstance(choice.get("prompt_token_ids"), list):
            self._prompt_ids = choice["prompt_token_ids"]

    def record(self) -> dict[str, Any]:
        """Return the call as a record; tokens, ids and log-probabilities have the same length, or are not there."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        first = choices[0] if choices else {"logprobs": [], "ids": [], "finish_reason": None}
        entries = first["logprobs"]
        values = [entry.get("logprob") for entry in entries]
        ids = first["ids"] or _ids_of(entries)
        response: dict[str, Any] = {**self._head, "usage": self._head.get("usage")}
        response.pop("prompt_token_ids", None)
        response["choices"] = [
            {key: choice[key] for key in ("index", "message", "finish_reason")} for choice in choices
        ]
        if self.error is not None:
            response |= {"upstream_status": self.status, "upstream_error": self.error}
        reasons = parameters.steering("openai_chat", self.request)
        return {
            **({"not_trainable": list(reasons)} if reasons else {}),
            "turn": self.turn,
            "request": self.request,
            "response": response,
            "logprobs": entries,
            "completion_tokens": [str(entry.get("token", "")) for entry in entries],
            "completion_token_ids": ids if len(ids) == len(entries) else [],
            "per_token_logps": [] if None in values else values,
            "prompt_token_ids": self._prompt_ids,
            "finish_reason": first["finish_reason"],
            "latency_s": time.monotonic() - self._clock,
            "timestamp": self.began,
            "upstream_status": self.status,
            "upstream_error": self.error,
        }


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            _add_calls(message.setdefault("tool_calls", []), value or [])
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        elif value is not None:
            message[key] = value


def _add_calls(calls: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    for piece in pieces:
        index = piece.get("index", 0)
        while len(calls) <= index:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[index], piece.get("function") or {}
        call["id"] = piece.get("id") or call.get("id")
        for key in ("name", "arguments"):
            call["function"][key] += function.get(key) or ""


def _ids_of(entries: list[dict[str, Any]]) -> list[int]:
    """Return ids that the entries carry themselves, in either of two ways; none unless all do."""
    ids: list[int] = []
    for entry in entries:
        token_id = entry.get("token_id")
        token = str(entry.get("token", ""))
        if not isinstance(token_id, int) and token.startswith("token_id:") and token[9:].isdigit():
            token_id = int(token[9:])
        if not isinstance(token_id, int):
            return []
        ids.append(token_id)
    return ids


class Trace:
    """The file of records; each is written whole, in the order in which calls end."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        self._lock = threading.Lock()
        self._turns = 0

    def begin(self, request: dict[str, Any]) -> Recording:
        """Begin the record of a call."""
        with self._lock:
            self._turns += 1
            return Recording(request, self._turns)

    def end(self, recording: Recording) -> None:
        """Write a record, once: before the agent sees the end of the reply, so that none it has seen is missing."""
        if recording.is_written:
            return
        recording.is_written = True
        line = json.dumps(recording.record(), ensure_ascii=False) + "\n"
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a trace, in the order in which the calls began; a torn last line is left out."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return parse_trace(lines)


def parse_trace(lines: list[str]) -> list[dict[str, Any]]:
    """Return the records in these lines."""
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return sorted(records, key=lambda record: record.get("turn", 0))


# -- serving ------------------------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        self.trace = Trace(config.trace)
        super().__init__((config.host, config.port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say that a connection broke, in one line."""
        sys.stderr.write(f"{client_address}: {sys.exc_info()[1]!r}\n")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests to standard error, which is the proxy's log file."""
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {format % args}\n")

    def do_GET(self) -> None:
        """Answer the health check."""
        if self.path == "/healthz":
            self._send(200, {"status": "ok"})
        else:
            self._refuse(404, f"no such route: {self.path}")

    def do_POST(self) -> None:
        """Pass a completion on."""
        body = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), _MAX_BODY))
        if self.path != "/v1/chat/completions":
            self._refuse(404, f"no such route: {self.path}")
            return
        try:
            request = json.loads(body)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            self._refuse(400, "the body is no JSON object")
            return
        recording = self.server.trace.begin(rewrite_request(request, self.server.config))
        try:
            self._pass_on(recording)
        except (OSError, http.client.HTTPException) as exc:
            recording.fail(type(exc).__name__, str(exc))
            if recording.status is None:
                self._refuse(502, f"the model cannot be reached: {exc}")
            else:
                self.close_connection = True  # in the middle of a reply: only breaking off says so
        finally:
            self.server.trace.end(recording)

    def _pass_on(self, recording: Recording) -> None:
        with self._asked(recording) as reply:
            recording.status = reply.status
            is_stream = "text/event-stream" in (reply.getheader("Content-Type") or "")
            if isinstance(reply, http.client.HTTPResponse) and reply.status < 400 and is_stream:
                self._stream(recording, reply)
                return
            content = reply.read()
            try:
                message = json.loads(content)
            except ValueError:
                recording.fail("InvalidReply", content[:500].decode("utf-8", "replace"))
                self._refuse(502, "the model's reply is no JSON")
                return
            if reply.status >= 400:
                recording.error = message if isinstance(message, dict) else {"message": str(message)}
                shown = message
            else:
                recording.take_reply(message)
                shown = stripped(message)
            self.server.trace.end(recording)
            self._send(reply.status, shown)

    @contextlib.contextmanager
    def _asked(self, recording: Recording) -> Iterator[http.client.HTTPResponse | _Read]:
        """Ask the model; what it refuses of our own additions is left out, once each."""
        config = self.server.config
        url = urlsplit(config.completions_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        headers = {
            "Authorization": f"Bearer {config.upstream_api_key}",
            "Content-Type": "application/json",
            "Accept": self.headers.get("Accept", "*/*"),
        }
        while True:
            with contextlib.closing(kind(url.netloc, timeout=config.request_timeout_s)) as connection:
                path = url.path + (f"?{url.query}" if url.query else "")
                connection.request("POST", path, json.dumps(recording.request).encode(), headers)
                reply = connection.getresponse()
                if reply.status not in (400, 422):
                    yield reply
                    return
                refusal = reply.read()
                again = without_refused(recording.request, refusal.decode("utf-8", "replace"))
                if again is None:
                    yield _Read(reply, refusal)
                    return
                recording.request = again

    def _stream(self, recording: Recording, reply: http.client.HTTPResponse) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_heard, is_done = True, False
        for line in iter(reply.readline, b""):
            shown = _seen_line(recording, line)
            if line.strip() == b"data: [DONE]":
                is_done = True
                self.server.trace.end(recording)
            if not is_heard:
                continue
            try:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(shown), shown))
                self.wfile.flush()
            except OSError as exc:  # the agent hung up: what the model still says is recorded all the same
                recording.fail("ClientDisconnect", str(exc))
                is_heard = False
                self.close_connection = True
        if not is_done and not recording.has_ended:  # to http.client a broken stream looks like its end
            recording.fail("BrokenStream", "the stream ended before the model did")
            self.close_connection = True
        elif is_heard:
            self.server.trace.end(recording)
            self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, message: Any) -> None:
        content = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, message: str) -> None:
        self._send(status, {"error": {"message": message, "type": "proxy_error", "code": status}})


@dataclass(frozen=True)
class _Read:
    """A reply whose body has been read already."""

    reply: http.client.HTTPResponse
    content: bytes

    @property
    def status(self) -> int:
        return self.reply.status

    def getheader(self, name: str) -> str | None:
        """Return a header."""
        return self.reply.getheader(name)

    def read(self) -> bytes:
        """Return the body."""
        return self.content


def _seen_line(recording: Recording, line: bytes) -> bytes:
    """Record a line of a stream, and return it as the agent sees it."""
    if not line.startswith(b"data:"):
        return line
    try:
        piece = json.loads(line[5:])
    except ValueError:  # [DONE]
        return line
    if not isinstance(piece, dict):
        return line
    recording.take_piece(piece)
    if isinstance(piece.get("error"), dict):
        recording.error = piece["error"]
    shown = stripped(piece)
    return line if shown == piece else b"data: " + json.dumps(shown, ensure_ascii=False).encode() + b"\n"


class InterceptionProxy:
    """The proxy in a thread of this process, for as long as a `with` block lasts; port 0 takes any."""

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address for the agent, ending in `/v1`."""
        assert self._server is not None, "the proxy is not running"
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/v1"

    def __enter__(self) -> InterceptionProxy:
        self._server = _Server(self.config)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(10)


def serve(config: ProxyConfig) -> None:
    """Serve until the process ends."""
    _hide_memory()
    with _Server(config) as server:
        server.serve_forever()


def _hide_memory() -> None:
    """Keep other processes of the same user from reading the key out of this one's memory and environment."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def main() -> None:
    """Serve with the options of the command line; the key comes from the environment."""
    parser = argparse.ArgumentParser(description="Stand between an agent and its model, and record every call.")
    parser.add_argument("--upstream-url", required=True)
    parser.add_argument("--upstream-api-key", help=f"by default {' or '.join(KEY_VARIABLES)}, which others cannot see")
    parser.add_argument("--trace", default="proxy_trace.jsonl")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=7000)
    parser.add_argument("--top-logprobs", type=int, default=5)
    parser.add_argument("--request-timeout", type=float, default=600.0)
    parser.add_argument("--max-tokens-cap", type=int)
    parser.add_argument("--disable-thinking", action="store_true")
    parser.add_argument("--model-override")
    parser.add_argument("--sampling", type=json.loads, default={}, help="parameters for every call, as a JSON object")
    options = parser.parse_args()
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "intercepted")
    serve(
        ProxyConfig(
            upstream_url=options.upstream_url,
            upstream_api_key=options.upstream_api_key or key,
            trace=options.trace,
            host=options.host,
            port=options.port,
            top_logprobs=options.top_logprobs,
            request_timeout_s=options.request_timeout,
            max_tokens_cap=options.max_tokens_cap,
            disable_thinking=options.disable_thinking,
            model_override=options.model_override,
            sampling=options.sampling,
        )
    )


if __name__ == "__main__":
    main()
