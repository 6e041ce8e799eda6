"""Pings for idle connections, with intervals short enough to watch."""

from __future__ import annotations

import asyncio

import pytest

from openenv.server.fast.frame_socket import KeepAlive
from openenv.server.runners import loop_local
from waiting import holds_for_async, wait_until_async

pytestmark = pytest.mark.anyio


class Peer:
    """A connection that answers pings, or does not."""

    def __init__(self, *, answers: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.last_heard = self._loop.time()
        self.answers = answers
        self.pings = 0
        self.aborted = asyncio.Event()

    can_be_heard = True

    def ping(self) -> None:
        self.pings += 1
        if self.answers:
            self._loop.call_soon(self._heard)

    def _heard(self) -> None:
        self.last_heard = self._loop.time()

    def abort(self) -> None:
        self.aborted.set()


async def test_a_peer_that_answers_is_asked_again_and_again() -> None:
    keepalive, peer = KeepAlive(asyncio.get_running_loop(), interval_s=0.02, timeout_s=0.05), Peer(answers=True)
    keepalive.add(peer)
    await wait_until_async(lambda: peer.pings >= 3)
    keepalive.discard(peer)
    assert peer.pings >= 3
    assert not peer.aborted.is_set()


async def test_a_peer_that_is_silent_is_asked_once_and_dropped() -> None:
    keepalive, peer = KeepAlive(asyncio.get_running_loop(), interval_s=0.02, timeout_s=0.05), Peer(answers=False)
    keepalive.add(peer)
    await asyncio.wait_for(peer.aborted.wait(), 10)
    keepalive.discard(peer)
    assert peer.pings == 1


async def test_a_peer_that_talks_is_not_asked() -> None:
    keepalive, peer = KeepAlive(asyncio.get_running_loop(), interval_s=5, timeout_s=5), Peer(answers=False)
    keepalive.add(peer)
    await holds_for_async(0.05, lambda: peer.pings == 0)
    keepalive.discard(peer)


async def test_without_connections_no_timer_runs() -> None:
    keepalive, peer = KeepAlive(asyncio.get_running_loop(), interval_s=5, timeout_s=5), Peer(answers=True)
    keepalive.add(peer)
    assert keepalive._timer is not None
    keepalive.discard(peer)
    assert keepalive._timer is None


async def test_a_loop_has_one_watcher() -> None:
    loop = asyncio.get_running_loop()
    assert loop_local(loop, KeepAlive) is loop_local(loop, KeepAlive)
