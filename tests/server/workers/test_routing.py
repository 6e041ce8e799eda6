"""Which worker a request is for, from its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from openenv.protocol.codec import JSON, MSGPACK
from openenv.server.workers.board import LEAVING, SERVING, Board, WorkerPlace
from openenv.server.workers.routing import Router, is_request, read_head, sessions_of
from openenv.sessions.peers import SlotCounts

HERE, HELD, EMPTY = 0, 1, 2  # this worker; the one that has the sessions; the least loaded one
NAME = "5f3c-w1-1"
GONE = "5f3c-w1-7"


@pytest.fixture
def board() -> Iterator[Board]:
    """A board of three workers, the last of which is the least loaded."""
    shared = Board(3)
    for index in range(3):
        shared.begin(index)
        shared.set_state(index, SERVING)
    shared.publish(HERE, SlotCounts(live=50))
    shared.publish(HELD, SlotCounts(live=50))
    yield shared
    shared.close()


@pytest.fixture
def router(board: Board) -> Router:
    """That of the first worker."""
    return Router(board, WorkerPlace(HERE, 1))


def head_of(line: str, *fields: str, body: bytes = b"") -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: x", *fields, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode()


def request(router: Router, line: str, *fields: str, body: bytes = b"", is_first: bool = True) -> int:
    head = read_head(head_of(line, *fields, body=body))
    assert head is not None
    return router.of_request(head, body if router.needs_body(head) else b"", is_first=is_first)


@pytest.mark.parametrize(
    ("line", "fields", "expected"),
    [
        ("POST /step", [f"X-OpenEnv-Session: {NAME}"], HELD),
        ("POST /step", [f"x-openenv-session:{NAME} "], HELD),
        ("GET /state", [f"X-OpenEnv-Session: {NAME}"], HELD),
        ("GET /state", [f"X-OpenEnv-Session: {GONE}"], HERE),
        ("POST /step", ["X-OpenEnv-Session: made-up"], HERE),
        ("POST /reset", ["X-OpenEnv-Session: new"], EMPTY),
        ("POST /step", ["X-OpenEnv-Session: new"], HERE),
        ("POST /sessions", [], EMPTY),
        ("GET /sessions", [], HERE),
        (f"GET /sessions/{NAME}", [], HELD),
        (f"DELETE /sessions/{NAME}", [], HELD),
        (f"POST /sessions/{NAME}/fork", [], HELD),
        (f"POST /sessions/{NAME}/restore", [], HELD),
        (f"POST /sessions/{GONE}/fork", [], HERE),
        (f"DELETE /web/sessions/{NAME}", [], HELD),
        ("GET /sessions/", [], HERE),
        (f"GET /sessions/{NAME.replace('-', '%2D')}", [], HELD),
        ("POST /step", [f"Cookie: a=b; openenv_session={NAME}"], HELD),
        ("POST /step", [], EMPTY),
        ("POST /mcp", [f"Mcp-Session-Id: {NAME}"], HELD),
        ("GET /mcp", [f"mcp-session-id: {NAME}"], HELD),
        (f"GET /mcp?session_id={NAME}", [], HELD),
        ("GET /web/", [f"Cookie: openenv_visitor={NAME}"], HELD),
        ("GET /web/", [], EMPTY),
        ("GET /web/static/app.js", [f"Cookie: openenv_visitor={NAME}"], HERE),
        ("POST /web/step", [], HERE),
        ("GET /health", [], HERE),
        ("GET /metrics", [f"Cookie: openenv_session={NAME}"], HERE),
    ],
)
def test_requests_go_where_their_session_is(router: Router, line: str, fields: list[str], expected: int) -> None:
    assert request(router, line, *fields) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"method": "tools/call", "params": {"session_id": NAME}}, HELD),
        ({"method": "tools/call", "params": {"session_id": "made-up"}}, EMPTY),
        ({"method": "tools/call", "params": {"session_id": GONE}}, HERE),
        ({"method": "tools/call", "params": {"arguments": {"session_id": NAME}}}, HERE),
        ({"method": "openenv/session/create", "params": {}}, EMPTY),
        ({"method": "initialize", "params": {}}, EMPTY),
    ],
)
def test_json_rpc_names_its_session_in_the_body(router: Router, message: dict[str, object], expected: int) -> None:
    assert request(router, "POST /mcp", body=json.dumps({"jsonrpc": "2.0", "id": 1, **message}).encode()) == expected


def test_only_the_first_request_of_a_connection_moves_it_for_the_balance(router: Router) -> None:
    assert request(router, "POST /step", is_first=False) == HERE
    assert router.placed == 0
    assert request(router, "POST /reset", "X-OpenEnv-Session: new", is_first=False) == EMPTY
    assert router.placed == 1


def test_a_repeated_key_finds_the_worker_of_the_first(board: Board, router: Router) -> None:
    fields = ("X-OpenEnv-Session: new", "Idempotency-Key: kkkk")
    assert request(router, "POST /reset", *fields) == EMPTY
    board.publish(EMPTY, SlotCounts(live=500))
    assert request(router, "POST /reset", *fields) == EMPTY
    assert router.placed == 0
    assert request(router, "POST /sessions", "idempotency-key: kkkk") == EMPTY
    assert request(router, "POST /sessions", "idempotency-key: other") == HERE


def test_a_worker_that_leaves_still_gets_the_requests_of_its_sessions(board: Board, router: Router) -> None:
    board.set_state(HELD, LEAVING)
    assert request(router, f"GET /sessions/{NAME}") == HELD
    board.end(HELD)
    assert request(router, f"GET /sessions/{NAME}") == HERE


def upgrade(router: Router, target: str, *fields: str) -> int:
    head = read_head(head_of(f"GET {target}", *fields))
    assert head is not None
    return router.of_upgrade(head)


def test_websockets_are_placed_by_their_handshake_or_with_v2_by_their_first_message(router: Router) -> None:
    assert upgrade(router, "/ws") == EMPTY
    assert upgrade(router, f"/ws?session_id={NAME}") == HELD
    assert upgrade(router, "/ws", "Sec-WebSocket-Protocol: openenv.v2.msgpack, openenv.v2.json") == HERE
    assert router.placed == 0
    assert upgrade(router, "/mcp") == EMPTY
    assert upgrade(router, "/ws/ui", f"Cookie: openenv_visitor={NAME}") == HELD
    assert upgrade(router, "/elsewhere") == HERE


def first_message(router: Router, message: object) -> int:
    payload = json.dumps(message).encode()
    return router.of_first_message(payload, JSON, binary=False, role="orchestrator", limit=1 << 20, sessions=1)


def test_the_first_message_of_v2_resumes_or_opens(board: Board, router: Router) -> None:
    assert first_message(router, {"type": "open", "id": 1, "resume": f"boot.{NAME}.secret"}) == HELD
    assert first_message(router, {"type": "open", "id": 1, "nonce": "n" * 16}) == EMPTY
    board.publish(EMPTY, SlotCounts(live=500))
    assert first_message(router, {"type": "open", "id": 1, "nonce": "n" * 16}) == EMPTY
    assert first_message(router, {"type": "open", "id": 1, "nonce": "m" * 16}) == HERE
    for message in ({"type": "ping", "id": 1}, ["open"], "open"):
        assert first_message(router, message) == HERE
    packed = MSGPACK.encode({"type": "open", "id": 1, "resume": f"boot.{NAME}.secret"})
    assert router.of_first_message(packed, MSGPACK, binary=True, role="agent", limit=1 << 20, sessions=1) == HELD
    for payload in (b"{", b"x" * 300_000, b""):
        assert router.of_first_message(payload, JSON, binary=False, role="agent", limit=100, sessions=1) == HERE


def test_a_connection_that_opens_many_sessions_says_so(board: Board, router: Router) -> None:
    head = head_of("GET /ws", "X-OpenEnv-Sessions: 40", "Sec-WebSocket-Protocol: openenv.v2.json")
    assert sessions_of(head) == 40
    assert sessions_of(head_of("GET /ws")) == 1
    payload = b'{"type":"open","id":1}'
    router.of_first_message(payload, JSON, binary=False, role="orchestrator", limit=1000, sessions=sessions_of(head))
    assert (router.placed, board.load(EMPTY)) == (40, 40)


def test_heads_that_only_a_parser_understands_are_left_to_it() -> None:
    for raw in (b"GET  / HTTP/1.1\r\n\r\n", b"GET http://x/ HTTP/1.1\r\n\r\n", b"GET /\r\n\r\n"):
        assert read_head(raw) is None
    twice = b"POST / HTTP/1.1\r\nContent-Length: 1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
    assert read_head(twice) is None
    chunked = read_head(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert chunked is not None
    assert chunked.body_bytes is None
    assert [is_request(data) for data in (b"GET /", b"GE", b"\x16\x03", b"hello ", b"")] == [
        True,
        True,
        False,
        False,
        False,
    ]
