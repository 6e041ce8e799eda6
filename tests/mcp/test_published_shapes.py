"""OpenEnv's JSON-RPC beside the published package: both serve the same FastMCP tools, both get the same requests, and
the answers have the same keys, types, codes and, where it is the server that words them, the same values."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect

from program_interpreters import Interpreter
from waiting import wait_until_healthy

pytestmark = [pytest.mark.slow, pytest.mark.published, pytest.mark.timeout(900)]

SAMPLES = Path(__file__).parents[1] / "compat"

REQUESTS: list[tuple[str, Any]] = [
    ("list", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}),
    ("list with params", {"jsonrpc": "2.0", "id": "a", "method": "tools/list", "params": {}}),
    ("list without id", {"jsonrpc": "2.0", "method": "tools/list"}),
    ("number", {"name": "put", "arguments": {"item": "a"}}),
    ("untyped text", {"name": "bare"}),
    ("object", {"name": "table", "arguments": {}}),
    ("nothing", {"name": "nothing", "arguments": {}}),
    ("text", {"name": "greet", "arguments": {"name": "Ada"}}),
    ("with context", {"name": "count_to", "arguments": {"number": 2}}),
    ("raises", {"name": "fail", "arguments": {"words": "no"}}),
    ("wrong arguments", {"name": "put", "arguments": {"thing": 1}}),
    ("unknown tool", {"name": "absent", "arguments": {}}),
    ("no name", {"arguments": {}}),
    ("unknown method", {"jsonrpc": "2.0", "id": 1, "method": "tools/other", "params": {}}),
    ("resources", {"jsonrpc": "2.0", "id": 1, "method": "resources/list", "params": {}}),
    ("no version", {"id": 1, "method": "tools/list"}),
    ("other version", {"jsonrpc": "1.0", "id": 1, "method": "tools/list"}),
    ("no method", {"jsonrpc": "2.0", "id": 1}),
    ("extra key", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "more": 1}),
    ("params are a list", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": []}),
    ("close without session", {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": {}}),
]
NAMES = [name for name, _ in REQUESTS]

# The part that finds the mistake words it; only that there is a text is promised.
WORDS = {"raises", "wrong arguments", "no version", "other version", "no method", "extra key", "params are a list"}
WORDS |= {"close without session"}
# Ours says more: which kind of error it was.
DATA = {"raises", "wrong arguments", "unknown tool"}


def body_of(given: dict[str, Any]) -> dict[str, Any]:
    """Complete the parameters of a call to a request."""
    if given.keys() & {"jsonrpc", "id", "method"}:
        return given
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": given}


@pytest.fixture(scope="module")
def urls(
    ours: Interpreter, published: Interpreter, tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[tuple[str, str]]:
    """The tools, served by this package and by the published one."""
    folder = tmp_path_factory.mktemp("servers")
    with (
        served(ours, folder / "ours.log", free_port()) as our_url,
        served(published, folder / "published.log", free_port()) as their_url,
    ):
        yield our_url, their_url


@contextlib.contextmanager
def served(interpreter: Any, log: Path, port: int) -> Iterator[str]:
    """Serve the tools in a process of an interpreter."""
    command = [interpreter.python, "-m", "uvicorn", "sample_tools:app", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=interpreter.environment(SAMPLES), stdout=output, stderr=output)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(15)


def post(url: str) -> dict[str, Any]:
    """Every answer over HTTP, without a session."""
    with httpx2.Client(base_url=url, trust_env=False, timeout=30) as client:
        return {name: client.post("/mcp", json=body_of(given)).json() for name, given in REQUESTS}


def post_in_session(url: str) -> dict[str, Any]:
    """Every answer over HTTP, in a session that is created first and closed last."""
    with httpx2.Client(base_url=url, trust_env=False, timeout=30) as client:
        create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
        answers = {"create": client.post("/mcp", json=create).json()}
        session = {"session_id": answers["create"]["result"]["session_id"]}
        for name, given in REQUESTS:
            body = body_of(given)
            if isinstance(body.get("params"), dict) and body["method"] != "openenv/session/close":
                body = {**body, "params": {**body["params"], **session}}
            answers[name] = client.post("/mcp", json=body).json()
        close = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": session}
        answers["close"] = client.post("/mcp", json=close).json()
        answers["close again"] = client.post("/mcp", json=close).json()
        return answers


def socket_of(path: str) -> Callable[[str], dict[str, Any]]:
    """Every answer over a WebSocket."""

    def ask(url: str) -> dict[str, Any]:
        answers = {}
        with connect(url.replace("http", "ws", 1) + path, proxy=None) as connection:
            for name, given in REQUESTS:
                body = body_of(given)
                connection.send(json.dumps({"type": "mcp", "data": body} if path == "/ws" else body))
                answers[name] = json.loads(connection.recv(30))
        return answers

    return ask


TRANSPORTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "POST": post,
    "POST in a session": post_in_session,
    "WS /mcp": socket_of("/mcp"),
    "mcp frames of /ws": socket_of("/ws"),
}


@pytest.fixture(scope="module", params=TRANSPORTS)
def answers(request: pytest.FixtureRequest, urls: tuple[str, str]) -> tuple[Any, Any]:
    """What we answer over a transport, and what the published server does."""
    ask = TRANSPORTS[request.param]
    return ask(urls[0]), ask(urls[1])


def shape(value: Any) -> Any:
    """Keys and types, however deep; the items of a list are all shown."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__


def without(answer: Any, *, words: bool, data: bool) -> Any:
    """Leave out what a server words itself, and what ours adds."""
    shown = json.loads(json.dumps(answer))
    error = shown.get("data", shown).get("error") if isinstance(shown.get("data", shown), dict) else None
    if error is not None:
        if words:
            error["message"] = "..."
        if data:
            error["data"] = None
    return shown


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_has_the_published_shape(answers: tuple[Any, Any], name: str) -> None:
    mine, theirs = (without(one[name], words=False, data=name in DATA) for one in answers)
    assert shape(untitled(mine)) == shape(untitled(theirs))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("list")])
def test_an_answer_has_the_published_values(answers: tuple[Any, Any], name: str) -> None:
    mine, theirs = (without(one[name], words=name in WORDS, data=name in DATA) for one in answers)
    assert mine == theirs


def untitled(answer: Any) -> Any:
    """Leave out the title of each tool: it is FastMCP that gives one, since its fourth major release."""
    result = answer.get("data", answer).get("result")
    for tool in result["tools"] if isinstance(result, dict) and "tools" in result else ():
        assert tool["title"] is None or isinstance(tool["title"], str)
        tool["title"] = None
    return answer


def test_the_same_tools_are_listed_in_the_same_order(answers: tuple[Any, Any]) -> None:
    mine, theirs = (one["list"].get("data", one["list"])["result"]["tools"] for one in answers)
    assert [tool["name"] for tool in mine] == [tool["name"] for tool in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys()
        assert {key: one[key] for key in ("description", "inputSchema")} == {
            key: other[key] for key in ("description", "inputSchema")
        }


def test_a_session_is_created_and_closed_in_the_published_shape(urls: tuple[str, str]) -> None:
    mine, theirs = (post_in_session(url) for url in urls)
    for name in ("create", "close", "close again"):
        assert shape(mine[name]) == shape(theirs[name])
    assert mine["close"]["result"]["closed"] is theirs["close"]["result"]["closed"] is True
    assert mine["close again"]["error"]["code"] == theirs["close again"]["error"]["code"]
