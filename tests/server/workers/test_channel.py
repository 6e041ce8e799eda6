"""Messages between workers: whole, in order, with descriptors, and never lost in a full socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openenv.server.workers import channel as channels
from openenv.server.workers.channel import PeerChannel, PeerMessage, PeerMessageKind, message_pair, receive
from waiting import wait_until_async

CONNECTION = PeerMessageKind.CONNECTION
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """The sockets of two workers."""
    made = [message_pair() for _ in range(2)]
    yield made
    for pair in made:
        for end in pair:
            end.close()


class Worker:
    """One end, which keeps what it gets."""

    def __init__(self, index: int, pairs: Any, answer: Callable[[str], bytes] = lambda question: b"") -> None:
        self.messages: list[PeerMessage] = []
        self.channel = PeerChannel(index, pairs[index][0], [writer for _, writer in pairs], answer)
        self.channel.handlers = {CONNECTION: self.messages.append, PeerMessageKind.WAKE: self._fail}

    @staticmethod
    def _fail(message: PeerMessage) -> None:
        raise ValueError("no")

    async def wait(self, count: int) -> list[PeerMessage]:
        """Wait for so many messages."""
        await wait_until_async(lambda: len(self.messages) >= count)
        return self.messages


async def test_messages_arrive_whole_in_order_and_with_their_descriptors(pairs: Any) -> None:
    one, other = Worker(0, pairs), Worker(1, pairs)
    other.channel.begin()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one.channel.send(1, CONNECTION, b"small", [theirs.fileno()])
        one.channel.send(1, CONNECTION, b"large" * 100_000, [theirs.fileno()])
        one.channel.send(1, CONNECTION)
        small, large, empty = await other.wait(3)
        assert (small.payload, large.payload, empty.payload) == (b"small", b"large" * 100_000, b"")
        assert [len(message.descriptors) for message in (small, large, empty)] == [1, 1, 0]
        assert {message.sender for message in other.messages} == {0}
        for message in (small, large):
            with socket.socket(fileno=message.descriptors.pop()) as copy:
                copy.send(b"hello")
                assert ours.recv(5) == b"hello"
    other.channel.end()


async def test_a_full_socket_delays_messages_and_loses_none(pairs: Any) -> None:
    one, other = Worker(0, pairs), Worker(1, pairs)
    one.channel.begin()
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket() as sent:
        for number in range(2000):
            one.channel.send(1, CONNECTION, b"%d" % number + b"x" * 8000, [sent.fileno()])
        assert len(os.listdir("/proc/self/fd")) > before  # some wait, with descriptors of their own
        other.channel.begin()
        messages = await other.wait(2000)
    assert [int(message.payload.rstrip(b"x")) for message in messages] == list(range(2000))
    for message in messages:
        os.close(message.descriptors.pop())
    assert len(os.listdir("/proc/self/fd")) == before
    one.channel.end()
    other.channel.end()


async def test_a_question_is_answered_by_those_that_can(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Worker(0, pairs), Worker(1, pairs, lambda question: f"{question}!".encode())
    one.channel.begin()
    other.channel.begin()
    assert await one.channel.ask([1], "well") == [b"well!"]
    assert await one.channel.ask([], "well") == []
    assert await asyncio.gather(*(one.channel.ask([1], str(number)) for number in range(50))) == [
        [b"%d!" % number] for number in range(50)
    ]
    other.channel.end()
    monkeypatch.setattr(channels, "_ASK_S", 0.05)
    assert await one.channel.ask([1], "well") == []  # it is busy, or dead
    one.channel.end()


async def test_a_message_that_cannot_be_handled_or_read_ends_nothing(
    pairs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = Worker(0, pairs), Worker(1, pairs)
    other.channel.begin()
    one.channel.send(1, PeerMessageKind.WAKE)  # raises
    pairs[1][1].send(b"x")
    pairs[1][1].send(bytes([99, 0, 0, 0, 0, 0, 0, 0]))  # no such kind
    pairs[1][1].send(bytes([CONNECTION, 1, 0, 0, 0, 0, 0, 0]))  # its file is missing
    one.channel.send(1, CONNECTION, b"after")
    assert [message.payload for message in await other.wait(1)] == [b"after"]
    assert caplog.text.count("could not be read") == 3
    assert caplog.text.count("could not be handled") == 1
    other.channel.end()


async def test_what_was_not_read_is_there_for_the_next_process(pairs: Any) -> None:
    Worker(0, pairs).channel.send(1, CONNECTION, b"first")
    message = receive(pairs[1][0])
    assert message is not None
    assert (message.kind, message.payload) == (CONNECTION, b"first")
    with pytest.raises(BlockingIOError):
        receive(pairs[1][0])
