"""No sequence of requests by a client with one session reads or changes another: over HTTP, JSON-RPC, MCP and both
protocols on `/ws`.

Each example gives an intruder a session of its own on a server where others are at work, and lets it try what it likes
with the names and tokens it has, with pieces of them, and with forged ones.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from environments import Shelf
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.app import create_app
from openenv.types import State
from servers import Serve

SESSION = "X-OpenEnv-Session"
PUT = {"name": "put", "arguments": {"item": "intruder"}}
STEP = {"tool_name": "put", "arguments": {"item": "intruder"}}


class Memory(State):
    items: list[str] = Field(default_factory=list)


class Drawer(Shelf):
    """Shows all that was put into it."""

    TOOLS = ("put",)

    def put(self, item: str) -> list[str]:  # type: ignore[override]
        self.items.append(item)
        return self.items

    @property
    def state(self) -> Memory:
        return Memory(items=self.items)


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


@dataclass
class Peer:
    """A client with a connection of either protocol."""

    ws: ClientConnection
    last_id: int = 0

    def ask(self, message: dict[str, Any]) -> Any:
        self.last_id += 1
        self.ws.send(json.dumps({"id": self.last_id, **message} if self.ws.subprotocol else message))
        return json.loads(self.ws.recv(timeout=10))


@dataclass
class Others:
    """The sessions that no other client may touch, one for each way to have one."""

    http: httpx2.Client
    v1: Peer
    v2: Peer
    secrets: list[str]
    names: dict[str, str]
    v2_token: str
    seen: dict[str, Any] = field(default_factory=dict)

    def look(self) -> dict[str, Any]:
        """What each of them holds now."""
        by_name = {
            kind: self.http.get("/state", headers={SESSION: self.names[kind]}).json()["items"]
            for kind in ("http", "rpc", "mcp")
        }
        return {
            **by_name,
            "v1": self.v1.ask({"type": "state"})["data"]["items"],
            "v2": self.v2.ask({"type": "state"})["data"]["items"],
        }


def address(url: str, query: str = "") -> str:
    return f"ws{url.removeprefix('http')}/ws{query}"


@pytest.fixture(scope="module")
def url(serve_once: Serve) -> str:
    app = create_app(Drawer, CallToolAction, CallToolObservation, max_concurrent_envs=64)
    return str(serve_once(app).url)


@pytest.fixture(scope="module")
def others(url: str) -> Iterator[Others]:
    secrets = [uuid.uuid4().hex for _ in range(5)]
    puts = [{"name": "put", "arguments": {"item": secret}} for secret in secrets]
    handshake = rpc(
        "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={"name": "x", "version": "1"}
    )
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(base_url=url, trust_env=False, verify=False, timeout=20))
        v1 = Peer(stack.enter_context(connect(address(url), proxy=None)))
        v2 = Peer(stack.enter_context(connect(address(url), proxy=None, subprotocols=["openenv.v2.json"])))  # type: ignore[list-item]
        by_http = client.post("/reset", json={}, headers={SESSION: "new"}).headers[SESSION]
        step = {"action": {"tool_name": "put", "arguments": puts[0]["arguments"]}}
        assert client.post("/step", json=step, headers={SESSION: by_http}).status_code == 200
        by_rpc = client.post("/mcp", json=rpc("openenv/session/create")).json()["result"]["session_id"]
        client.post("/mcp", json=rpc("tools/call", **puts[1], session_id=by_rpc))
        mcp = {"Accept": "application/json, text/event-stream"}
        by_mcp = client.post("/mcp", json=handshake, headers=mcp).headers["Mcp-Session-Id"]
        client.post("/mcp", json=rpc("tools/call", **puts[2]), headers={**mcp, "Mcp-Session-Id": by_mcp})
        v1.ask({"type": "mcp", "data": rpc("tools/call", **puts[3])})
        opened = v2.ask({"type": "open"})
        v2.ask({"type": "mcp", "data": rpc("tools/call", **puts[4])})
        client.cookies.clear()
        names = {"http": by_http, "rpc": by_rpc, "mcp": by_mcp, "v2": opened["session"]}
        there = Others(client, v1, v2, secrets, names, opened["token"])
        there.seen = there.look()
        assert sorted(item for items in there.seen.values() for item in items) == sorted(secrets)
        yield there


# -- what an intruder does ------------------------------------------------------------------------------------------

# How it names a session: its own, none, something that looks like one, pieces and spellings of its own, and the name of
# a session of protocol v2, which is not enough to have it.
NAMES = st.sampled_from(
    [
        "own",
        "new",
        "",
        "*",
        "%",
        "null",
        "0",
        "../",
        "own upper",
        "own cut",
        "own longer",
        "random",
        "zeros",
        "list",
        "own token",
        "known",
    ]
)
HTTP = st.sampled_from(
    ["reset", "step", "state", "describe", "close", "plain reset", "plain step", "plain state", "open"]
)
RPC = st.sampled_from(["tools/call", "tools/list", "openenv/session/create", "openenv/session/close"])
MCP = st.sampled_from(["header", "address", "meta", "cookie", "mcp header", "delete"])
V1 = st.sampled_from(["reset", "step", "state", "mcp", "close by rpc"])
V2 = st.sampled_from(["reset", "step", "state", "mcp", "close", "cancel", "batch", "resume", "forged", "known name"])
MOVES = st.one_of(
    st.tuples(st.just("http"), HTTP, NAMES),
    st.tuples(st.just("rpc"), RPC, NAMES),
    st.tuples(st.just("mcp"), MCP, NAMES),
    st.tuples(st.just("attach"), st.just(""), NAMES),
    st.tuples(st.just("v1"), V1, NAMES),
    st.tuples(st.just("v2"), V2, NAMES),
)


class Intruder:
    """Has one session of each kind and everything a client can send. Keeps all that it hears."""

    def __init__(self, url: str, others: Others, stack: contextlib.ExitStack) -> None:
        self._url = url
        self._stack = stack
        self._known_name = others.names["v2"]
        self._known_token = others.v2_token
        self.heard: list[str] = []
        self._http = stack.enter_context(httpx2.Client(base_url=url, trust_env=False, verify=False, timeout=20))
        self._own = self._http.post("/reset", json={}, headers={SESSION: "new"}).headers[SESSION]
        self._v1 = self._connect()
        self._v2 = self._connect(v2=True)
        self._v2_session, self._token = "", ""
        self._open_v2()

    def leave(self) -> None:
        """End what is its own."""
        self._http.delete(f"/sessions/{self._own}")
        with contextlib.suppress(ConnectionClosed):
            self._v2.ask({"type": "close", "session": self._v2_session})

    def do(self, kind: str, what: str, name: str) -> None:
        """Make one move."""
        spelled = self._spelled(name)
        try:
            getattr(self, f"_do_{kind}")(what, spelled)
        except ConnectionClosed:  # its own connections may end by what it does
            self._v1 = self._connect()
            self._v2 = self._connect(v2=True)
            self._open_v2()

    def _spelled(self, name: str) -> str:
        forms = {
            "own": self._own,
            "own upper": self._own.upper(),
            "own cut": self._own[:-1],
            "own longer": f"{self._own}0",
            "random": str(uuid.uuid4()),
            "zeros": str(uuid.UUID(int=0)),
            "list": f"{self._own},{self._own}",
            "own token": self._token,
            "known": self._known_name,
        }
        return forms.get(name, name)

    def _connect(self, query: str = "", *, v2: bool = False) -> Peer:
        offered: Any = ["openenv.v2.json"] if v2 else None
        return Peer(self._stack.enter_context(connect(address(self._url, query), proxy=None, subprotocols=offered)))

    def _open_v2(self) -> None:
        opened = self._v2.ask({"type": "open"})
        self._v2_session, self._token = opened["session"], opened["token"]

    def _hear(self, answer: httpx2.Response) -> None:
        self.heard += [answer.text, str(answer.headers)]

    def _do_http(self, what: str, name: str) -> None:
        headers = {} if what.startswith("plain") else {SESSION: name}
        match what.removeprefix("plain "):
            case "reset":
                answer = self._http.post("/reset", json={}, headers=headers)
            case "step":
                answer = self._http.post("/step", json={"action": STEP}, headers=headers)
            case "state":
                answer = self._http.get("/state", headers=headers)
            case "open":
                answer = self._http.post("/sessions", json={}, headers=headers)
            case "describe":
                answer = self._http.get(f"/sessions/{name}")
            case _:
                answer = self._http.delete(f"/sessions/{name}" if name != self._own else "/sessions/other")
        self._hear(answer)
        opened = answer.headers.get(SESSION)
        if opened is not None and opened not in (self._own, name):
            self._http.delete(f"/sessions/{opened}")

    def _do_rpc(self, what: str, name: str) -> None:
        call = PUT if what == "tools/call" else {}
        if what == "openenv/session/close" and name == self._own:
            name = "other"
        answer = self._http.post("/mcp", json=rpc(what, **call, session_id=name))
        self._hear(answer)
        if what == "openenv/session/create" and "result" in answer.json():
            self._http.delete(f"/sessions/{answer.json()['result']['session_id']}")

    def _do_mcp(self, what: str, name: str) -> None:
        version = "2026-07-28"
        meta = {
            "io.modelcontextprotocol/protocolVersion": version,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        headers = {
            "Accept": "application/json, text/event-stream",
            "Mcp-Protocol-Version": version,
            "Mcp-Method": "tools/call",
            "Mcp-Name": "put",
        }
        params: dict[str, Any] = {}
        match what:
            case "header":
                headers[SESSION] = name
            case "address":
                params["session_id"] = name
            case "meta":
                meta["openenv/session"] = name
            case "cookie":
                headers["Cookie"] = f"openenv_mcp={name}; openenv_session={name}"
            case _:
                headers = {"Accept": headers["Accept"], "Mcp-Session-Id": name}
        call = rpc("tools/call", **PUT, _meta=meta)
        if what == "delete":
            answer = self._http.delete("/mcp", headers=headers)
        else:
            answer = self._http.post("/mcp", params=params, json=call, headers=headers)
        self._hear(answer)
        opened = answer.cookies.get("openenv_mcp")
        if opened:
            self._http.delete(f"/sessions/{opened}")
        self._http.cookies.clear()

    def _do_attach(self, what: str, name: str) -> None:
        peer = self._connect(f"?session_id={name}" if "/" not in name else "?session_id=")
        with contextlib.suppress(ConnectionClosed):
            self.heard += [json.dumps(peer.ask({"type": kind})) for kind in ("state", "reset", "state")]
        peer.ws.close()

    def _do_v1(self, what: str, name: str) -> None:
        frames: dict[str, dict[str, Any]] = {
            "step": {"type": "step", "data": STEP},
            "mcp": {"type": "mcp", "data": rpc("tools/call", **PUT, session_id=name)},
            "close by rpc": {"type": "mcp", "data": rpc("openenv/session/close", session_id=name)},
        }
        if what == "close by rpc" and name == self._own:
            return
        self.heard.append(json.dumps(self._v1.ask(frames.get(what, {"type": what}))))

    def _do_v2(self, what: str, name: str) -> None:
        known, own_secret = self._known_name, self._token.rpartition(".")[2]
        forged = [
            self._token.replace(self._v2_session, known),
            self._token.replace(own_secret, name),
            self._known_token.replace(self._known_token.rpartition(".")[2], own_secret),
            self._known_token[:-1],
            f"{self._known_token}0",
            known,
        ]
        messages: dict[str, list[dict[str, Any]]] = {
            "reset": [{"type": "reset", "session": name, "data": {}}],
            "step": [{"type": "step", "session": name, "data": STEP}],
            "mcp": [{"type": "mcp", "session": name, "data": rpc("tools/call", **PUT, session_id=name)}],
            "cancel": [{"type": "cancel", "session": name, "request": 1}],
            "resume": [{"type": "open", "resume": name if name != self._token else "x"}],
            "forged": [{"type": "open", "resume": token} for token in forged],
            "batch": [{"type": "batch", "requests": [{"type": "state", "id": 1, "session": known}]}],
            "known name": [
                {"type": kind, "session": known, **({"data": data} if data is not None else {})}
                for kind, data in [
                    ("state", None),
                    ("reset", {}),
                    ("step", STEP),
                    ("mcp", rpc("tools/call", **PUT, session_id=known)),
                    ("close", None),
                ]
            ],
        }
        for message in messages.get(what, [{"type": what, "session": name}]):
            answer = self._v2.ask(message)
            assert answer["type"] in ("error", "cancelled", "batch") or answer.get("session") != known
            self.heard.append(json.dumps(answer))


@settings(max_examples=120)
@given(moves=st.lists(MOVES, min_size=1, max_size=12))
@pytest.mark.slow
def test_a_client_of_one_session_neither_reads_nor_changes_another(
    url: str, others: Others, moves: list[tuple[str, str, str]]
) -> None:
    with contextlib.ExitStack() as stack:
        intruder = Intruder(url, others, stack)
        for kind, what, name in moves:
            intruder.do(kind, what, name)
        intruder.leave()
    heard = "\n".join(intruder.heard)
    assert not any(secret in heard for secret in others.secrets)
    assert others.look() == others.seen


def test_the_name_of_an_http_session_or_the_token_of_another_gives_access_to_it(url: str) -> None:
    """The control: the same moves do reach a session once its name or token is known."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(base_url=url, trust_env=False, verify=False, timeout=20))
        name = client.post("/reset", json={}, headers={SESSION: "new"}).headers[SESSION]
        peer = Peer(stack.enter_context(connect(address(url), proxy=None, subprotocols=["openenv.v2.json"])))  # type: ignore[list-item]
        opened = peer.ask({"type": "open"})
        there = Others(client, peer, peer, [], {"v2": opened["session"]}, opened["token"])
        intruder = Intruder(url, there, stack)
        intruder._do_http("step", name)
        intruder._do_rpc("tools/call", name)
        intruder._do_mcp("meta", name)
        intruder._do_attach("", name)
        assert "intruder" in intruder.heard[0]
        assert intruder._v2.ask({"type": "open", "resume": opened["token"]})["resumed"]
        assert client.get("/state", headers={SESSION: name}).json()["items"] == []  # its socket has sent a reset
        client.delete(f"/sessions/{name}")
        intruder.leave()
