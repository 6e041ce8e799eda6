"""A server may publish any schemas: clients raise typed errors in bounded time, and written modules can be imported."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openenv.cli.__main__ import build
from openenv.client import schema_client
from openenv.client.network import ConnectionOptions
from openenv.client.schema_client import learn_types, read_schemas
from openenv.errors import ProtocolError
from openenv.protocol.schema import ARRAY_KEY

Serve = Callable[[bytes], str]
Talk = Callable[[socket.socket], None]


@pytest.fixture
def answer() -> Iterator[Serve]:
    """Serve one body at every path; return the server's address."""
    servers = []

    def start(body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def connections() -> Iterator[Callable[[Talk], str]]:
    """Talk with every client as a test says; return the server's address."""
    listeners = []

    def start(talk: Talk) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        talk(connection)

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def schemas(**fields: Any) -> dict[str, Any]:
    """Return the schemas of an environment whose action has these fields."""
    action = {"title": "Move", "type": "object", "properties": fields, "$defs": fields.pop("$defs", {})}
    plain = {"type": "object", "properties": {}}
    return {"action": action, "observation": plain, "state": plain}


def nested(levels: int) -> Any:
    """Return models inside of models."""
    schema: Any = {"type": "string"}
    for level in range(levels):
        schema = {"title": f"M{level}", "type": "object", "properties": {"a": schema}}
    return schema


BRANCHING = {
    "A": {
        "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/A"}}, {"items": {"$ref": "#/$defs/A"}, "type": "array"}]
    }
}
MANY = {f"a{number}": {"type": "object", "title": "M", "properties": {f"b{number}": {}}} for number in range(600)}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(schemas(a=nested(100))).encode(),
        json.dumps(schemas(a={"$ref": "#/$defs/A"}, **{"$defs": BRANCHING})).encode(),
        json.dumps(schemas(**MANY)).encode(),
        json.dumps(schemas(a={"type": "number", "maximum": 10**400})).encode(),
        json.dumps({"action": {"properties": [1]}, "observation": {}, "state": {}}).encode(),
        json.dumps({"action": {"properties": {"a": {}}, "required": 5}, "observation": {}, "state": {}}).encode(),
        b"[" * 100_000,
        b"[]",
        b"\xff",
    ],
    ids=["deep", "branching", "many", "huge", "properties", "required", "deep json", "list", "bytes"],
)
def test_schemas_beyond_the_limits_are_a_typed_error_in_bounded_time(answer: Serve, body: bytes) -> None:
    url = answer(body)
    began = time.monotonic()
    with pytest.raises(ProtocolError):
        learn_types(read_schemas(url, ConnectionOptions()), url)
    assert time.monotonic() - began < 20


def test_a_reply_larger_than_the_limit_is_refused(answer: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_client, "_MOST_BYTES", 1000)
    with pytest.raises(ProtocolError, match="larger than 1000 bytes"):
        read_schemas(answer(b" " * 2000 + b"{}"), ConnectionOptions())


def test_a_compressed_reply_is_refused_unread(connections: Callable[[Talk], str]) -> None:
    def compressed(connection: socket.socket) -> None:
        assert b"accept-encoding: identity" in connection.recv(65536).lower()
        body = gzip.compress(b"{}" + b" " * 50_000_000)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n" + body)

    with pytest.raises(ProtocolError, match="compressed"):
        read_schemas(connections(compressed), ConnectionOptions())


@pytest.mark.parametrize("part", ["head", "body", "chunks"])
def test_a_reply_that_never_ends_is_given_up(
    connections: Callable[[Talk], str], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(schema_client, "_TOTAL_S", 0.5)
    begin = {
        "head": b"HTTP/1.1 200 OK\r\nx: ",
        "body": b"HTTP/1.1 200 OK\r\n\r\n",
        "chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    }[part]

    def drip(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(begin)
        while True:
            connection.sendall(b"1\r\n \r\n" if part == "chunks" else b" ")
            time.sleep(0.02)

    with pytest.raises(ProtocolError, match="took longer than"):
        read_schemas(connections(drip), ConnectionOptions(connect_timeout_s=0.4))


HOSTILE = {
    'a"""\nraise SystemExit(1)': {"type": "string", "description": '"""\nraise SystemExit(1)\\'},
    "class": {"type": "string", "default": "\u2028\x00'\"\\"},
    "\u202eé": {"const": "\ud800 \u2029"},
    "Inner": {"title": "Inner", "type": "object", "properties": {"Move": {"type": "string"}}},
    "datetime": {"type": "string", "format": "date-time"},
    "nan": {"type": "number", "default": float("nan"), "minimum": float("inf")},
    "length": {"type": "string", "minLength": 1.5, "maxLength": -1, "pattern": "(?<=a)("},
    "multiple": {"type": "integer", "multipleOf": 0},
    "array": {ARRAY_KEY: "os"},
    "model_config": {"type": "integer"},
    "": {"type": ["string", "null"]},
}


def test_a_module_of_hostile_names_and_texts_can_be_imported(answer: Serve, tmp_path: Path) -> None:
    published = {"name": 'x"""; raise SystemExit(1)\n\x1b', **schemas(**HOSTILE)}
    target = tmp_path / "hostile_client.py"
    done = CliRunner().invoke(build(["client"]), ["client", answer(json.dumps(published).encode()), "-o", str(target)])
    assert done.exit_code == 0, done.output
    module: dict[str, Any] = {"__name__": "hostile_client"}
    exec(compile(target.read_text("utf-8"), str(target), "exec"), module)
    assert len(module["Move"].model_fields) >= len(HOSTILE)
