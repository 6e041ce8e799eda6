"""Protocol v2 against a model: random batches, repetitions, cancellations and lost connections, over both encodings.

Whatever a client does, each request is run at most once, all answers to it are the same, every message on a connection
that holds is answered, and the replies of a session are those of an environment that took its requests in their order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from socket import SHUT_RDWR
from typing import Any, ClassVar

import pytest
from websockets.sync.client import ClientConnection, connect

from openenv.env.environment import Environment
from openenv.protocol.codec import JSON, MSGPACK, Codec
from openenv.server.app import create_fastapi_app
from openenv.server.telemetry.watched_calls import CallWatch
from openenv.types import Action, Observation, State
from servers import Serve
from slow_steps import take

SOON = 60.0
AHEAD = 10  # unanswered requests of a session at most: fewer than replies are kept
ROUNDS = int(os.environ.get("OPENENV_MODEL_ROUNDS", "6"))
SEED = os.environ.get("OPENENV_MODEL_SEED", "")
KINDS = ["one thread", "threads", "inline", "coroutines", "watched"]


class Odd(BaseException):
    """What no environment should raise."""


class Tally(Action):
    token: str
    amount: int = 1
    pause_s: float = 0.0
    raises: str = ""
    pad: int = 0
    note: str = ""


class Total(Observation):
    total: int = 0
    token: str = ""
    pad: str = ""


class Tallying(Environment[Tally, Total, State]):
    """Adds up, and notes each step that it takes."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    seen: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self._total = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Total:
        with self.lock:
            self.seen[str(episode_id)] += 1
        self._total = 0
        return Total(total=0, token=str(episode_id))

    def step(self, action: Tally, timeout_s: float | None = None, **kwargs: Any) -> Total:
        with self.lock:
            self.seen[action.token] += 1
        if action.pause_s:
            take(action.pause_s)
        match action.raises:
            case "error":
                raise ValueError(action.token)
            case "exit":
                raise SystemExit(action.token)
            case "interrupt":
                raise KeyboardInterrupt(action.token)
            case "odd":
                raise Odd(action.token)
        self._total += action.amount
        return Total(total=self._total, token=action.token, pad="x" * action.pad, reward=0.5)

    @property
    def state(self) -> State:
        return State(step_count=abs(self._total))


class TallyingOnOneThread(Tallying):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True


class TallyingInLoop(Tallying):
    async def step_async(self, action: Tally, timeout_s: float | None = None, **kwargs: Any) -> Total:
        return self.step(action)


class Player:
    """A client of several sessions, and what the answers to it must be."""

    def __init__(self, server: Any, rng: random.Random) -> None:
        self.server = server
        self.rng = rng
        name = uuid.uuid4().hex
        self.tokens = (f"{name} {number}" for number in itertools.count())
        self.resume: dict[str, str] = {}
        self.sent: dict[str, dict[int, dict[str, Any]]] = {}
        self.next_id: dict[str, int] = {}
        self.answers: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.cancelled: set[tuple[str, int]] = set()
        self.connection: ClientConnection | None = None
        self.dial()
        for _ in range(rng.randint(1, 4)):
            self.open()

    # -- the wire -------------------------------------------------------------------------------------------------

    def dial(self) -> None:
        """Connect, in one of the encodings, and come back for all sessions."""
        self.codec: Codec = self.rng.choice([JSON, MSGPACK])
        url = f"ws://127.0.0.1:{self.server.port}/ws"
        protocols: Any = [self.codec.name]
        self.connection = connect(url, subprotocols=protocols, proxy=None, compression=None, max_size=None).__enter__()
        self.singles: Counter[tuple[str, int]] = Counter()
        self.batches: dict[int, list[tuple[str, int]]] = {}
        self.others: dict[int, dict[str, Any] | None] = {}
        self.batch_ids = itertools.count(1)
        for token in self.resume.values():
            opened = self.control(type="open", resume=token, **self.compress())
            assert opened["resumed"] is True, opened

    def compress(self) -> dict[str, Any]:
        return {"compress": self.rng.choice([1, 64, 4096])} if self.rng.random() < 0.3 else {}

    def send(self, message: dict[str, Any]) -> None:
        assert self.connection is not None
        data, binary = self.codec.compressed(self.codec.encode(message), 1 if self.rng.random() < 0.1 else None)
        self.connection.send(data if binary else data.decode())

    def control(self, **message: Any) -> dict[str, Any]:
        """Send a request that is no session's, and wait for its answer."""
        number = next(self.batch_ids)
        self.others[number] = None
        self.send({"id": number, **message})
        while (answer := self.others[number]) is None:
            self.take()
        del self.others[number]
        return answer

    def take(self) -> None:
        """Take one message, which has to be expected."""
        assert self.connection is not None
        data = self.connection.recv(timeout=SOON)
        binary = isinstance(data, bytes)
        message = self.codec.decode(data if isinstance(data, bytes) else data.encode(), binary=binary)
        if message["type"] == "batch":
            if "id" in message:
                expected = self.batches.pop(message["id"])
                assert [(one["session"], one["id"]) for one in message["replies"]] == expected
            else:
                self.singles.subtract((one["session"], one["id"]) for one in message["replies"])
            for reply in message["replies"]:
                self.note(reply)
        elif message["type"] in ("opened", "cancelled", "pong"):
            assert self.others[message["id"]] is None
            self.others[message["id"]] = message
        else:
            assert message["type"] != "event", message
            self.singles[(message["session"], message["id"])] -= 1
            self.note(message)
        assert min(self.singles.values(), default=0) >= 0, "a reply without a request"

    def note(self, reply: dict[str, Any]) -> None:
        self.answers.setdefault((reply["session"], reply["id"]), []).append(reply)

    def settle(self) -> None:
        """Take every answer that is due."""
        while any(self.singles.values()) or self.batches:
            self.take()

    # -- moves ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        opened = self.control(type="open", **self.compress())
        self.resume[opened["session"]] = opened["token"]
        self.sent[opened["session"]], self.next_id[opened["session"]] = {}, 1

    def request(self, session: str, *, steps_only: bool = False) -> dict[str, Any]:
        """Make a new request, or repeat one of the last few."""
        known = self.sent[session]
        if known and self.rng.random() < 0.25:
            return known[self.rng.choice(sorted(known)[-6:])]
        unanswered = sum((session, number) not in self.answers for number in known)
        if unanswered >= AHEAD:
            self.settle()
        number = self.next_id[session]
        self.next_id[session] += self.rng.choice([1, 1, 1, 5])
        request: dict[str, Any] = {"type": "step", "id": number, "session": session}
        kind = self.rng.random()
        if kind < 0.1 and not steps_only:
            request |= {"type": "reset", "data": {"episode_id": next(self.tokens)}}
        elif kind < 0.15 and not steps_only:
            request["type"] = "state"
        else:
            raises = self.rng.choice(["error", "exit", "interrupt", "odd"]) if self.rng.random() < 0.15 else ""
            pause_s = self.rng.choice([0.0, 0.0, 0.0, 0.0005, 0.003])
            request["data"] = {
                "token": next(self.tokens),
                "amount": self.rng.randint(-5, 5),
                "raises": raises,
                "pause_s": pause_s,
                "pad": 5000 if self.rng.random() < 0.1 else 0,
                "note": "n" * (5000 if self.rng.random() < 0.1 else 0),  # a batch with it waits for its turn
            }
            if self.rng.random() < 0.1:
                request["timeout_s"] = 30.0
        known[number] = request
        return request

    def step_alone(self) -> None:
        request = self.request(self.rng.choice(list(self.resume)))
        self.singles[(request["session"], request["id"])] += 1
        self.send(request)

    def batch(self) -> None:
        steps_only = self.rng.random() < 0.8
        names = [self.rng.choice(list(self.resume)) for _ in range(self.rng.randint(0, 6))]
        if self.rng.random() < 0.6:
            names = list(self.resume)
        self.send_batch([self.request(name, steps_only=steps_only) for name in names])

    def send_batch(self, requests: list[dict[str, Any]]) -> None:
        number = next(self.batch_ids)
        keys = [(request["session"], request["id"]) for request in requests]
        message: dict[str, Any] = {"type": "batch", "id": number, "requests": requests}
        if requests and self.rng.random() < 0.15:
            message["each"] = True
            self.singles.update(keys)
        else:
            self.batches[number] = keys
        self.send(message)

    def cancel(self) -> None:
        session = self.rng.choice(list(self.resume))
        open_ids = [number for number in self.sent[session] if (session, number) not in self.answers]
        if open_ids:
            number = self.rng.choice(open_ids)
            self.cancelled.add((session, number))
            self.control(type="cancel", session=session, request=number)

    def lose(self) -> None:
        """Lose the connection with whatever is on its way, and ask again for all that was not answered."""
        assert self.connection is not None
        with contextlib.suppress(OSError):
            self.connection.socket.shutdown(SHUT_RDWR)
        self.connection.close()
        self.dial()
        missing = [
            request
            for session, known in self.sent.items()
            for number, request in sorted(known.items())
            if (session, number) not in self.answers
        ]
        if self.rng.random() < 0.5:
            self.send_batch(missing)
        else:
            for request in missing:
                self.singles[(request["session"], request["id"])] += 1
                self.send(request)

    def play(self, moves: int) -> None:
        weighed = [self.batch] * 8 + [self.step_alone] * 4 + [self.settle] * 3 + [self.cancel, self.lose]
        for _ in range(moves):
            self.rng.choice(weighed)()
        self.settle()

    # -- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        for session, known in self.sent.items():
            total = 0
            for number, request in sorted(known.items()):
                replies = self.answers[(session, number)]
                assert all(reply == replies[0] for reply in replies), replies
                total = self.check_one(request, replies[0], total)

    def check_one(self, request: dict[str, Any], reply: dict[str, Any], total: int) -> int:
        data = request.get("data", {})
        token = data.get("token") or data.get("episode_id")
        runs = Tallying.seen[token] if token else 1
        if reply["type"] == "error" and reply["data"]["code"] == "CANCELLED":
            assert (request["session"], request["id"]) in self.cancelled
            assert runs == 0 or token is None, (request, reply)
            return total
        assert runs == 1, (request, reply, runs)
        if data.get("raises"):
            assert reply["type"] == "error", reply
            assert reply["data"]["code"] == "EXECUTION_ERROR", reply
            assert data["token"] in reply["data"]["message"], reply
            return total
        if request["type"] == "state":
            assert (reply["type"], reply["data"]["step_count"]) == ("state", abs(total)), (request, reply)
            return total
        total = 0 if request["type"] == "reset" else total + data["amount"]
        assert reply["type"] == "observation", (request, reply)
        seen = reply["data"]["observation"]
        assert (seen["total"], seen["token"]) == (total, token), (request, reply)
        return total

    def leave(self) -> None:
        assert self.connection is not None
        for session in self.resume:
            self.send({"type": "close", "id": self.next_id[session], "session": session})
        self.connection.close()


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, serve: Serve) -> Any:
    """A server whose steps run in one of the ways there are."""
    kind: str = request.param
    classes = {"one thread": TallyingOnOneThread, "watched": TallyingOnOneThread, "coroutines": TallyingInLoop}
    env_cls = classes.get(kind, Tallying)
    runner = "inline" if kind == "inline" else "thread"
    served = serve(create_fastapi_app(env_cls, Tally, Total, max_concurrent_envs=64, runner=runner))
    served.watch = CallWatch(served.manager) if kind == "watched" else None
    return served


def play(server: Any, seed: int) -> None:
    player = Player(server, random.Random(seed))
    try:
        player.play(60)
        player.check()
    except BaseException as exc:
        raise AssertionError(f"seed {seed}") from exc
    player.leave()


@pytest.mark.slow_but_for("threads")
def test_answers_are_those_of_the_model(server: Any) -> None:
    for number in range(ROUNDS):
        if server.watch is not None and number == 1:
            server.watch.begin()
        seeds = [random.Random(f"{SEED} {number} {player}").getrandbits(32) for player in range(2)]
        with ThreadPoolExecutor(2) as players:
            list(players.map(lambda seed: play(server, seed), seeds))
    server.wait_for(lambda: not server.manager.sessions())
