"""The judge of the storms can fail: servers and clients that lie, forget or leave something behind are found out."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from storm import remains
from storm.episode import client_of, script_of
from storm.faults import DOWN, Fault, Kind, Plan
from storm.keyed import KeyedPlayer
from storm.mcp_http import McpPlayer
from storm.players import player_of
from storm.proxy import Route, bound
from storm.runner import Result, Run, Storm
from storm.verdict import Outcome

from openenv.client.vector.results import SlotEpisode
from openenv.errors import SessionLost
from openenv.server.sessions.ledger import Ledger
from openenv.server.sessions.slots import CapacityQueue
from waiting import wait_until_async

ONLY_STEPS = next(seed for seed in range(1000) if all(ask.kind == "step" for ask in script_of(seed)[1:]))
RESTARTS = 2  # a seed whose vector restarts what is lost
NAMES = {outcome.value: outcome for outcome in Outcome}


def storm(package: str, episodes: int, seed: int = 0) -> Result:
    """Run a few episodes; what servers would still end by themselves is not waited for."""
    return Run(Storm(package, episodes, seed, at_once=8, quiet_s=0.1), lambda _: None).run()


def outcomes(result: Result) -> set[Outcome]:
    """How episodes ended."""
    return {NAMES[name] for name in result.outcomes}


@pytest.fixture
def players(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, int], Any]], None]:
    """Have others play than who would."""

    def use(make: Callable[[str, int], Any]) -> None:
        monkeypatch.setattr("storm.runner.player_of", lambda _use, url, seed: make(url, seed))

    return use


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every episode lost: in its middle the connection is killed, and refused until the grace period is over."""
    monkeypatch.setattr("storm.server.GRACE_S", 0.5)
    monkeypatch.setattr("storm.runner.OUTAGE_S", 2.0)
    fault = Fault(Kind.OUTAGE, DOWN, 5, 0.5, hard=True)
    monkeypatch.setattr("storm.runner.plan_of", lambda seed, **_: Plan(seed, {(fault.direction, fault.point): fault}))


@pytest.mark.parametrize(
    ("package", "episodes"),
    [("ours", 24), pytest.param("keys", 16, marks=pytest.mark.slow), pytest.param("mcp", 16, marks=pytest.mark.slow)],
)
def test_a_server_that_forgets_its_ledger_is_found(
    package: str, episodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "find", lambda self, key: None)
    result = storm(package, episodes)
    assert Outcome.RUN_TWICE in outcomes(result)
    assert not result.is_clean


@pytest.mark.parametrize(
    ("package", "player"),
    [pytest.param("keys", KeyedPlayer, marks=pytest.mark.slow), pytest.param("mcp", McpPlayer, marks=pytest.mark.slow)],
)
def test_a_client_that_repeats_requests_without_their_keys_is_found(
    package: str, player: type[KeyedPlayer], players: Callable[..., None]
) -> None:
    players(lambda url, seed: player(url, seed, keeps_keys=False))
    assert Outcome.RUN_TWICE in outcomes(storm(package, 16))


class Unnoticed:
    """A client that starts a new episode where its own is lost, and does not report it."""

    def __init__(self, url: str) -> None:
        self._client = client_of(url).sync()
        self._begun: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def reset(self, **kwargs: Any) -> Any:
        self._begun = kwargs
        return self._client.reset(**kwargs)

    def step(self, action: Any) -> Any:
        try:
            return self._client.step(action)
        except SessionLost:
            self._client.reset(**self._begun)
            return self._client.step(action)


@pytest.mark.usefixtures("outage")
def test_a_client_that_goes_on_in_another_episode_is_found(players: Callable[..., None]) -> None:
    players(lambda url, _: Unnoticed(url))
    found = outcomes(storm("ours", 1, ONLY_STEPS))
    assert found & {Outcome.SILENT_RESET, Outcome.LEFT_OUT, Outcome.RUN_TWICE, Outcome.WRONG_REPLY}


@pytest.mark.slow
@pytest.mark.usefixtures("outage")
def test_a_client_that_starts_over_and_says_so_is_honest(players: Callable[..., None]) -> None:
    players(lambda url, _: client_of(url, on_session_lost="reset").sync())
    result = storm("ours", 1, ONLY_STEPS)
    assert dict(result.errors) == {"Renewed: expired": 1}
    assert not result.violations


@pytest.mark.slow
@pytest.mark.usefixtures("outage")
def test_a_client_that_starts_over_as_if_it_said_so_is_found(
    players: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.client.env_client.SESSION_LOST_KEY", "nothing")
    players(lambda url, _: client_of(url, on_session_lost="reset").sync())
    assert storm("ours", 1, ONLY_STEPS).violations


@pytest.mark.slow
@pytest.mark.usefixtures("outage")
def test_a_vector_that_restarts_slots_without_a_word_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = storm("first-k", 1, RESTARTS)
    assert not honest.violations
    assert dict(honest.errors) == {"SessionLost: expired": 4}
    take = SlotEpisode.take

    def take_quietly(self: Any, parse: Any) -> Any:
        taken = take(self, parse)
        if taken.restarted:
            taken.error, taken.restarted, taken.started = None, False, False
        return taken

    monkeypatch.setattr(SlotEpisode, "take", take_quietly)
    assert storm("first-k", 1, RESTARTS).violations


def test_a_line_whose_last_are_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapacityQueue, "_first", lambda self: next(reversed(self._tickets), None))
    assert Outcome.OUT_OF_ORDER in outcomes(storm("queue", 40))


class Clinging:
    """A client that does not hang up when it should."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def close(self) -> None:
        pass


@pytest.fixture
def clinging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have clients that stay."""
    kept: list[Clinging] = []

    def make(use: str, url: str, seed: int) -> Clinging:
        kept.append(Clinging(player_of(use, url, seed)))
        return kept[-1]

    monkeypatch.setattr("storm.runner.player_of", make)
    monkeypatch.setattr(remains, "WAIT_S", 0.1)
    yield
    for client in kept:
        client.client.close()


@pytest.mark.slow
@pytest.mark.usefixtures("clinging")
def test_a_session_that_is_never_ended_is_found() -> None:
    result = storm("ours", 1)
    assert result.sessions_left
    assert not result.is_clean


def test_processes_and_sockets_that_are_left_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remains, "WAIT_S", 0.1)
    before = remains.Remains()
    ends = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        _, others = before.found()
    finally:
        child.communicate()
        for end in ends:
            end.close()
    assert others == [f"process {child.pid}", "2 sockets"]


@pytest.mark.anyio
async def test_the_proxy_itself_leaves_no_socket_where_a_route_ends_in_the_middle_of_a_refusal() -> None:
    before = remains.sockets()
    for moments in range(10):
        holder = bound(0)
        route = Route(holder.getsockname()[1], 1, Plan(0, {}), 0.0, holder)
        await route.listen()
        route.run(route.refuse(0.0))
        for _ in range(moments):
            await asyncio.sleep(0)
        await route.close()
    await wait_until_async(lambda: remains.sockets() <= before)
