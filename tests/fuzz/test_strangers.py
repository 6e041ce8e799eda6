"""No sequence of v2 messages with one session's name or token reads or changes another session.

Two clients, each with connections and tokens of its own, say anything to one server in any order: to their own
sessions, to the other's, whose names they know, to sessions that have ended, and with tokens put together from parts
of real ones. Each session is known to its owner by a secret that must never reach the other, and does exactly what
its owner has asked for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from socket import SHUT_RDWR
from typing import Any

import httpx2
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from openenv.env.environment import Environment
from openenv.server.app import HTTPEnvServer, new_application
from openenv.server.sessions.manager import SessionLimits
from openenv.types import Action, Observation, State
from servers import Serve
from slow_steps import take_async

REFUSALS = {"SESSION_NOT_FOUND", "SESSION_LOST", "VALIDATION_ERROR", "STALE_REQUEST"}
CONNECTION_IDS = 1_000_000


class Add(Action):
    amount: int = 1
    pause_s: float = 0.0


class Sum(Observation):
    total: int = 0
    secret: str = ""


class Total(State):
    total: int = 0
    secret: str = ""


class Adder(Environment[Add, Sum, Total]):
    """Adds up, in a coroutine that can be cancelled, and shows its secret in its state."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = Total()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Sum:
        self._state = Total(secret=kwargs.get("secret", ""))
        return Sum(secret=self._state.secret)

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Sum:
        self._state.total += action.amount
        self._state.step_count += 1
        return Sum(total=self._state.total, secret=self._state.secret)

    async def step_async(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Sum:
        await take_async(action.pause_s)
        return self.step(action)

    @property
    def state(self) -> Total:
        return self._state


@dataclass
class Owned:
    """A session as its owner knows it."""

    owner: int
    name: str
    token: str
    secret: str
    total: int = 0
    steps: int = 0
    last_id: int = 0
    is_open: bool = True

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id


@dataclass
class Party:
    """A client, its connection, and what must never reach it."""

    number: int
    dial: Callable[[], ClientConnection]
    connection: ClientConnection = field(init=False)
    forbidden: set[str] = field(default_factory=set)
    stray: list[dict[str, Any]] = field(default_factory=list)
    _ids: Any = field(default_factory=lambda: itertools.count(CONNECTION_IDS))

    def __post_init__(self) -> None:
        self.connection = self.dial()

    def next_id(self) -> int:
        return next(self._ids)  # type: ignore[no-any-return]

    def send(self, **message: Any) -> None:
        self.connection.send(json.dumps(message))

    def take(self) -> dict[str, Any]:
        text = self.connection.recv(timeout=20)
        assert isinstance(text, str)
        assert not any(secret in text for secret in self.forbidden), text
        message: dict[str, Any] = json.loads(text)
        return message

    def answer(self, request_id: int) -> dict[str, Any]:
        while (message := self.take()).get("id") != request_id:
            self.stray.append(message)
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        self.send(**message)
        return self.answer(message["id"])


class Strangers(RuleBasedStateMachine):
    """Two clients of one server, who do not trust each other."""

    server: Any

    @initialize()
    def begin(self) -> None:
        self.parties = [Party(number, self._dial) for number in (0, 1)]
        self.sessions: list[Owned] = []
        self._secrets = itertools.count(1)
        for who in (0, 1):
            self.open(who)

    def _dial(self) -> ClientConnection:
        url = f"ws://127.0.0.1:{self.server.port}/ws"
        return connect(url, subprotocols=["openenv.v2.json"], proxy=None).__enter__()  # type: ignore[list-item]

    def _owned(self, who: int) -> list[Owned]:
        return [session for session in self.sessions if session.owner == who]

    def _pick(self, chosen: int, among: list[Owned]) -> Owned:
        return among[chosen % len(among)]

    # -- what a client does with its own ----------------------------------------------------------------------------

    @precondition(lambda self: len(self.sessions) < 8)
    @rule(who=st.integers(0, 1))
    def open(self, who: int) -> None:
        party = self.parties[who]
        opened = party.ask(type="open", id=party.next_id())
        assert opened["type"] == "opened"
        session = Owned(who, opened["session"], opened["token"], f"secret-{who}-{next(self._secrets)}-{id(self):x}")
        assert session.name not in {other.name for other in self.sessions}
        self.sessions.append(session)
        self.parties[1 - who].forbidden |= {session.secret, session.token, session.token.rpartition(".")[2]}
        self._reset(session)

    @rule(chosen=st.integers(0, 7), amount=st.integers(1, 9))
    def step(self, chosen: int, amount: int) -> None:
        session = self._pick(chosen, self.sessions)
        reply = self._ask_owner(session, type="step", data={"amount": amount})
        if session.is_open:
            session.total += amount
            session.steps += 1
            assert _seen(reply) == (session.total, session.secret)
        else:
            assert reply["data"]["code"] in REFUSALS

    @rule(chosen=st.integers(0, 7))
    def reset(self, chosen: int) -> None:
        session = self._pick(chosen, self.sessions)
        if session.is_open:
            self._reset(session)

    def _reset(self, session: Owned) -> None:
        reply = self._ask_owner(session, type="reset", data={"secret": session.secret})
        session.total = session.steps = 0
        assert _seen(reply) == (0, session.secret)

    @rule(chosen=st.integers(0, 7))
    def repeat(self, chosen: int) -> None:
        session = self._pick(chosen, self.sessions)
        if session.is_open and session.last_id:
            party = self.parties[session.owner]
            reply = party.ask(type="step", id=session.last_id, session=session.name, data={"amount": 100})
            if reply["type"] == "error":  # the last request was no step; either way nothing is run
                assert "is the id of another request" in reply["data"]["message"], reply
            else:
                assert reply["type"] in ("observation", "state")  # what the last request was answered with
                assert session.secret in json.dumps(reply)

    @rule(who=st.integers(0, 1), cut=st.booleans())
    def come_back(self, who: int, cut: bool) -> None:
        party = self.parties[who]
        if cut:
            party.connection.socket.shutdown(SHUT_RDWR)  # a thread may be reading: closing alone would end nothing yet
        else:
            party.connection.close()
        party.connection = party.dial()
        for session in self._owned(who):
            if session.is_open:
                self._resume(session)

    @rule(chosen=st.integers(0, 7))
    def resume(self, chosen: int) -> None:
        session = self._pick(chosen, self.sessions)
        if session.is_open:
            self._resume(session)

    def _resume(self, session: Owned) -> None:
        party = self.parties[session.owner]
        reply = party.ask(type="open", id=party.next_id(), resume=session.token)
        assert (reply["type"], reply["session"], reply["last_id"]) == ("opened", session.name, session.last_id), reply

    @rule(chosen=st.integers(0, 7))
    def close(self, chosen: int) -> None:
        session = self._pick(chosen, self.sessions)
        if session.is_open and sum(other.is_open for other in self._owned(session.owner)) > 1:
            assert self._ask_owner(session, type="close")["type"] == "closed"
            session.is_open = False

    def _ask_owner(self, session: Owned, **message: Any) -> dict[str, Any]:
        return self.parties[session.owner].ask(id=session.next_id(), session=session.name, **message)

    # -- what it tries with the other's -----------------------------------------------------------------------------

    @rule(
        chosen=st.integers(0, 7),
        kind=st.sampled_from(["step", "reset", "state", "close", "mcp"]),
        request_id=st.integers(-1, 60),
    )
    def meddle(self, chosen: int, kind: str, request_id: int) -> None:
        session = self._pick(chosen, self.sessions)
        data = {"step": {"amount": 5}, "reset": {"secret": "stolen"}, "mcp": {"jsonrpc": "2.0", "method": "tools/list"}}
        extra = {"data": data[kind]} if kind in data else {}
        reply = self._stranger(session).ask(type=kind, id=request_id, session=session.name, **extra)
        assert (reply["type"], reply["data"]["code"]) == ("error", "SESSION_NOT_FOUND"), reply

    @rule(chosen=st.integers(0, 7), own=st.integers(0, 7), each=st.booleans(), amount=st.integers(1, 9))
    def meddle_in_a_batch(self, chosen: int, own: int, each: bool, amount: int) -> None:
        foreign = self._pick(chosen, self.sessions)
        stranger = self._stranger(foreign)
        mine = self._pick(own, [session for session in self._owned(stranger.number) if session.is_open])
        wrong = {"type": "step", "id": foreign.last_id + 1, "session": foreign.name, "data": {"amount": 7}}
        right = {"type": "step", "id": mine.next_id(), "session": mine.name, "data": {"amount": amount}}
        end = {"type": "close", "id": foreign.last_id + 1, "session": foreign.name}
        batch_id = stranger.next_id()
        stranger.send(type="batch", id=batch_id, each=each, requests=[wrong, right, end])
        replies: list[dict[str, Any]] = []
        while len(replies) < 3:
            replies += stranger.answer(batch_id if not each else None)["replies"]  # type: ignore[arg-type]
        mine.total += amount
        mine.steps += 1
        seen = [reply for reply in replies if reply["type"] == "observation"]
        assert [(reply["session"], reply["data"]["observation"]["total"]) for reply in seen] == [
            (mine.name, mine.total)
        ]
        assert {reply["data"]["code"] for reply in replies if reply["type"] == "error"} == {"SESSION_NOT_FOUND"}

    @rule(chosen=st.integers(0, 7), offset=st.integers(-1, 1))
    def meddle_with_a_running_request(self, chosen: int, offset: int) -> None:
        session = self._pick(chosen, self.sessions)
        if not session.is_open:
            return
        owner, stranger, request_id = self.parties[session.owner], self._stranger(session), session.next_id()
        owner.send(type="step", id=request_id, session=session.name, data={"amount": 3, "pause_s": 0.01})
        for named in ({"session": session.name}, {}):
            reply_data = stranger.ask(type="cancel", id=stranger.next_id(), request=request_id + offset, **named)
            assert reply_data["type"] == "error" or reply_data["found"] is False, reply_data
        reply = owner.answer(request_id)
        session.total += 3
        session.steps += 1
        assert reply["data"]["observation"]["total"] == session.total

    @rule(chosen=st.integers(0, 7), own=st.integers(0, 7), forgery=st.integers(0, 7))
    def forge_a_token(self, chosen: int, own: int, forgery: int) -> None:
        session = self._pick(chosen, self.sessions)
        stranger = self._stranger(session)
        mine = self._pick(own, self._owned(stranger.number))
        boot, _, secret = mine.token.split(".", 2)
        forged = [
            f"{boot}.{session.name}.{secret}",
            f"{boot}.{session.name}.",
            f"{boot}.{session.name}",
            f".{session.name}.{secret}",
            f"{boot}.{session.name}.{secret}.{mine.name}",
            f"{boot}..{secret}",
            f"{boot}.{session.name}.\u00e9{secret}",
            session.name,
        ][forgery]
        reply = stranger.ask(type="open", id=stranger.next_id(), resume=forged)
        assert reply["type"] == "error", reply
        assert reply["data"]["code"] == "SESSION_LOST"

    @rule(chosen=st.integers(0, 7))
    def ask_over_http(self, chosen: int) -> None:
        session = self._pick(chosen, self.sessions)
        headers = {"X-OpenEnv-Session": session.name}
        with httpx2.Client(base_url=self.server.url, headers=headers, trust_env=False, timeout=20) as client:
            answers = [
                client.post("/step", json={"action": {"amount": 5}}),
                client.post("/reset", json={"secret": "stolen"}),
                client.get("/state"),
                client.delete(f"/sessions/{session.name}"),
            ]
        for answer in answers:
            assert answer.status_code in (404, 410), answer
            assert session.secret not in answer.text

    def _stranger(self, session: Owned) -> Party:
        return self.parties[1 - session.owner]

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def every_reply_answers_a_request(self) -> None:
        for party in getattr(self, "parties", []):
            strange = [note for note in party.stray if note.get("event") != "detached"]
            assert not strange, strange

    def teardown(self) -> None:
        try:
            for session in getattr(self, "sessions", []):
                if session.is_open:
                    reply_data = self._ask_owner(session, type="state")["data"]
                    assert (reply_data["total"], reply_data["secret"]) == (session.total, session.secret)
                    assert reply_data["step_count"] == session.steps
            for party in getattr(self, "parties", []):
                party.ask(type="ping", id=party.next_id())
            self.every_reply_answers_a_request()
        finally:
            for session in getattr(self, "sessions", []):
                if session.is_open:
                    try:
                        self._ask_owner(session, type="close")
                    except (AssertionError, ConnectionClosed, TimeoutError):
                        break
            for party in getattr(self, "parties", []):
                party.connection.close()


def _seen(reply: dict[str, Any]) -> tuple[int, str]:
    reply_data = reply["data"]["observation"]
    return reply_data["total"], reply_data["secret"]


@pytest.mark.slow
def test_clients_cannot_touch_each_others_sessions(serve: Serve) -> None:
    server = HTTPEnvServer(Adder, Add, Sum, state_cls=Total, limits=SessionLimits(sessions=64, grace_s=600))
    app = new_application()
    app.state.openenv_server = server
    server.register_routes(app)
    running = serve(app)
    machine = type("Machine", (Strangers,), {"server": running})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=40, stateful_step_count=40),
    )
    running.wait_for(lambda: not running.manager.sessions())  # an environment is closed after the reply
