"""Which worker a request is for, from its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from openenv.protocol.codec import JSON, MSGPACK
from openenv.server.request_head import announced_sessions, is_request, read_head
from openenv.server.sessions.peers import SlotCounts
from openenv.server.workers.board import LEAVING, SERVING, Board
from openenv.server.workers.routing import Destination, Router

HERE, HELD, EMPTY = 0, 1, 2  # this worker; the one that has the sessions; the least loaded one
STAYS, TO_HELD, TO_EMPTY = Destination(HERE), Destination(HELD), Destination(EMPTY, 1)
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
    return Router(board, HERE)


def head_of(line: str, *fields: str, body: bytes = b"") -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: x", *fields, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode()


def request(router: Router, line: str, *fields: str, body: bytes = b"", is_first: bool = True) -> Destination:
    head = read_head(head_of(line, *fields, body=body))
    assert head is not None
    return router.of_request(head, body if router.needs_body(head) else b"", is_first=is_first)


@pytest.mark.parametrize(
    ("line", "fields", "expected"),
    [
        ("POST /step", [f"X-OpenEnv-Session: {NAME}"], TO_HELD),
        ("POST /step", [f"x-openenv-session:{NAME} "], TO_HELD),
        ("GET /state", [f"X-OpenEnv-Session: {NAME}"], TO_HELD),
        ("GET /state", [f"X-OpenEnv-Session: {GONE}"], STAYS),
        ("POST /step", ["X-OpenEnv-Session: made-up"], STAYS),
        ("POST /reset", ["X-OpenEnv-Session: new"], TO_EMPTY),
        ("POST /step", ["X-OpenEnv-Session: new"], STAYS),
        ("POST /sessions", [], TO_EMPTY),
        ("GET /sessions", [], STAYS),
        (f"GET /sessions/{NAME}", [], TO_HELD),
        (f"DELETE /sessions/{NAME}", [], TO_HELD),
        (f"POST /sessions/{NAME}/fork", [], TO_HELD),
        (f"POST /sessions/{NAME}/restore", [], TO_HELD),
        (f"POST /sessions/{GONE}/fork", [], STAYS),
        (f"DELETE /web/sessions/{NAME}", [], TO_HELD),
        ("GET /sessions/", [], STAYS),
        (f"GET /sessions/{NAME.replace('-', '%2D')}", [], TO_HELD),
        ("POST /step", [f"Cookie: a=b; openenv_session={NAME}"], TO_HELD),
        ("POST /step", [], TO_EMPTY),
        ("POST /mcp", [f"Mcp-Session-Id: {NAME}"], TO_HELD),
        ("GET /mcp", [f"mcp-session-id: {NAME}"], TO_HELD),
        (f"GET /mcp?session_id={NAME}", [], TO_HELD),
        ("GET /web/", [f"Cookie: openenv_visitor={NAME}"], TO_HELD),
        ("GET /web/", [], TO_EMPTY),
        ("GET /web/static/app.js", [f"Cookie: openenv_visitor={NAME}"], STAYS),
        ("POST /web/step", [], STAYS),
        ("GET /health", [], STAYS),
        ("GET /metrics", [f"Cookie: openenv_session={NAME}"], STAYS),
    ],
)
def test_requests_go_where_their_session_is(
    router: Router, line: str, fields: list[str], expected: Destination
) -> None:
    assert request(router, line, *fields) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"method": "tools/call", "params": {"session_id": NAME}}, TO_HELD),
        ({"method": "tools/call", "params": {"session_id": "made-up"}}, TO_EMPTY),
        ({"method": "tools/call", "params": {"session_id": GONE}}, STAYS),
        ({"method": "tools/call", "params": {"arguments": {"session_id": NAME}}}, STAYS),
        ({"method": "openenv/session/create", "params": {}}, TO_EMPTY),
        ({"method": "initialize", "params": {}}, TO_EMPTY),
    ],
)
def test_json_rpc_names_its_session_in_the_body(
    router: Router, message: dict[str, object], expected: Destination
) -> None:
    assert request(router, "POST /mcp", body=json.dumps({"jsonrpc": "2.0", "id": 1, **message}).encode()) == expected


def test_only_the_first_request_of_a_connection_moves_it_for_the_balance(router: Router) -> None:
    assert request(router, "POST /step", is_first=False) == STAYS
    assert request(router, "POST /reset", "X-OpenEnv-Session: new", is_first=False) == TO_EMPTY


def test_a_repeated_key_finds_the_worker_of_the_first(board: Board, router: Router) -> None:
    fields = ("X-OpenEnv-Session: new", "Idempotency-Key: kkkk")
    assert request(router, "POST /reset", *fields) == TO_EMPTY
    board.publish(EMPTY, SlotCounts(live=500))
    assert request(router, "POST /reset", *fields) == Destination(EMPTY)  # nothing more is opened
    assert request(router, "POST /sessions", "idempotency-key: kkkk") == Destination(EMPTY)
    assert request(router, "POST /sessions", "idempotency-key: other") == Destination(HERE, 1)


def test_a_worker_that_leaves_still_gets_the_requests_of_its_sessions(board: Board, router: Router) -> None:
    board.set_state(HELD, LEAVING)
    assert request(router, f"GET /sessions/{NAME}") == TO_HELD
    board.end(HELD)
    assert request(router, f"GET /sessions/{NAME}") == STAYS


def upgrade(router: Router, target: str, *fields: str) -> Destination:
    head = read_head(head_of(f"GET {target}", *fields))
    assert head is not None
    return router.of_upgrade(head)


def test_websockets_are_placed_by_their_handshake_or_with_v2_by_their_first_message(router: Router) -> None:
    assert upgrade(router, "/ws") == TO_EMPTY
    assert upgrade(router, f"/ws?session_id={NAME}") == TO_HELD
    assert upgrade(router, "/ws", "Sec-WebSocket-Protocol: openenv.v2.msgpack, openenv.v2.json") == STAYS
    assert upgrade(router, "/mcp") == TO_EMPTY
    assert upgrade(router, "/harness") == TO_EMPTY
    assert upgrade(router, "/ws/ui", f"Cookie: openenv_visitor={NAME}") == TO_HELD
    assert upgrade(router, "/elsewhere") == STAYS


def first_message(router: Router, message: object) -> Destination:
    payload = json.dumps(message).encode()
    return router.of_first_message(payload, JSON, binary=False, role="orchestrator", limit=1 << 20, sessions=1)


def test_the_first_message_of_v2_resumes_or_opens(board: Board, router: Router) -> None:
    assert first_message(router, {"type": "open", "id": 1, "resume": f"boot.{NAME}.secret"}) == TO_HELD
    assert first_message(router, {"type": "open", "id": 1, "nonce": "n" * 16}) == TO_EMPTY
    board.publish(EMPTY, SlotCounts(live=500))
    assert first_message(router, {"type": "open", "id": 1, "nonce": "n" * 16}) == Destination(EMPTY)
    assert first_message(router, {"type": "open", "id": 1, "nonce": "m" * 16}) == Destination(HERE, 1)
    for message in ({"type": "ping", "id": 1}, ["open"], "open"):
        assert first_message(router, message) == STAYS
    packed = MSGPACK.encode({"type": "open", "id": 1, "resume": f"boot.{NAME}.secret"})
    assert router.of_first_message(packed, MSGPACK, binary=True, role="agent", limit=1 << 20, sessions=1) == TO_HELD
    for payload in (b"{", b"x" * 300_000, b""):
        assert router.of_first_message(payload, JSON, binary=False, role="agent", limit=100, sessions=1) == STAYS


def test_a_connection_that_opens_many_sessions_says_so(board: Board, router: Router) -> None:
    head = head_of("GET /ws", "X-OpenEnv-Sessions: 40", "Sec-WebSocket-Protocol: openenv.v2.json")
    assert announced_sessions(head) == 40
    assert announced_sessions(head_of("GET /ws")) == 1
    assert announced_sessions(head_of("GET /ws", "X-OpenEnv-Sessions: 999999")) == 10_000
    payload = b'{"type":"open","id":1}'
    choice = router.of_first_message(
        payload, JSON, binary=False, role="orchestrator", limit=1000, sessions=announced_sessions(head)
    )
    assert choice == Destination(EMPTY, 40)
    assert board.load(EMPTY) == 40


def test_heads_that_only_a_parser_understands_are_left_to_it() -> None:
    for raw in (b"GET  / HTTP/1.1\r\n\r\n", b"GET http://x/ HTTP/1.1\r\n\r\n", b"GET /\r\n\r\n"):
        assert read_head(raw) is None
    # Where the parser may see another length, only it can tell where the next request begins.
    for fields in (
        b"Content-Length: 1\r\nHost: x\r\nContent-Length: 2",
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length : 1",
        b"Content-Length:\r\n 1",
        b"Host: x\nContent-Length: 1",
        b"Content-Length: +1",
        b"Content-Length: 1, 1",
        b"Content-Length: " + b"9" * 16,
    ):
        assert read_head(b"POST / HTTP/1.1\r\n" + fields + b"\r\n\r\n") is None, fields
    plain = read_head(b"POST / HTTP/1.1\r\ncontent-LENGTH:12 \r\n\r\n")
    assert plain is not None
    assert plain.body_bytes == 12
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
