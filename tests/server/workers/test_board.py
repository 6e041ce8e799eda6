"""The memory that workers share: rows, the lock, the least loaded worker, opening keys, tickets, texts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from openenv.errors import SessionElsewhere, SessionLost
from openenv.server.sessions.peers import NO_SLOTS, SlotCounts, new_boot
from openenv.server.workers import board as boards
from openenv.server.workers.board import (
    DOWN,
    LEAVING,
    QUIET,
    SERVING,
    STARTING,
    Board,
    SharedPeers,
    WorkerPlace,
    place_of,
)
from openenv.server.workers.channel import PeerMessageKind

BOOT = new_boot()


@pytest.fixture
def board() -> Iterator[Board]:
    """A board of three workers that serve."""
    shared = Board(3)
    for index in range(3):
        shared.begin(index)
        shared.set_state(index, SERVING)
    yield shared
    shared.close()


class Outbox:
    """Keeps messages instead of sending them."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, PeerMessageKind, bytes]] = []

    def send(self, index: int, kind: PeerMessageKind, payload: bytes = b"") -> None:
        """Keep one."""
        self.sent.append((index, kind, payload))


def peers_of(board: Board, index: int) -> tuple[SharedPeers, Outbox]:
    outbox: Any = Outbox()
    return SharedPeers(board, outbox, WorkerPlace(index, board.generation(index)), BOOT), outbox


def test_a_name_says_which_process_has_made_it() -> None:
    assert place_of("2f0c-w12-3") == WorkerPlace(12, 3)
    for name in ("2f0c", "", "w1-2", "x-w1", "x-w-1-2", "x-w1-2-", "x-w1234-1", f"x-w1-{'9' * 10}"):
        assert place_of(name) is None, name


def test_a_worker_that_is_replaced_is_another_one(board: Board) -> None:
    place = WorkerPlace(1, board.generation(1))
    assert board.is_there(place)
    board.publish(1, SlotCounts(live=4, agents=1))
    assert board.end(1) == SlotCounts(live=4, agents=1)
    assert (board.state(1), board.counts_of(1)) == (DOWN, NO_SLOTS)
    assert board.others(0) == [2]
    assert board.begin(1) == place.generation + 1
    assert board.state(1) == STARTING
    board.set_state(1, SERVING)
    assert not board.is_there(place)
    assert not board.is_there(WorkerPlace(3, 1))


def test_counts_beside_a_worker_are_those_of_the_others(board: Board) -> None:
    for index in range(3):
        board.publish(index, SlotCounts(*(10**index * field for field in range(1, 9))))
    assert board.counts_beside(1) == SlotCounts(*(101 * field for field in range(1, 9)))


def test_what_is_on_its_way_counts_until_it_has_settled(board: Board) -> None:
    assert [board.place(0)[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [board.load(index) for index in range(3)] == [2, 2, 2]
    assert board.place(2) == (2, 1)  # of several, the one that has the connection
    board.settle(1, 2)
    board.publish(1, SlotCounts(live=1))
    assert board.load(1) == 1
    assert board.place(0, sessions=5) == (1, 5)
    board.send(0, 1, -5)  # it could not be handed over
    assert board.load(1) == 1
    board.settle(1, 100)
    assert board.load(1) == 1
    assert board.place(0)[0] == 1


def test_nothing_is_on_its_way_to_a_new_process(board: Board) -> None:
    for _ in range(9):
        board.place(2)
    board.end(1)
    assert board.load(1) == 0
    board.begin(1)
    board.set_state(1, SERVING)
    assert board.load(1) == 0
    assert board.place(0)[0] == 1
    assert board.load(1) == 1


def test_workers_that_leave_get_no_new_sessions(board: Board) -> None:
    board.publish(0, SlotCounts(live=100))
    board.set_state(1, LEAVING)
    board.set_state(2, QUIET)
    assert board.place(0)[0] == board.place(1)[0] == 0
    assert board.is_there(WorkerPlace(1, board.generation(1)))  # but their own
    board.set_state(0, LEAVING)
    assert board.place(1)[0] == 1  # none serves: this one can say so
    assert board.shared(2) == 2


def test_a_repeated_key_goes_where_the_first_has_gone(board: Board) -> None:
    chosen, placed = board.place(0, b"key")
    assert placed == 1
    for here in range(3):
        assert board.place(here, b"key") == (chosen, 0)
    board.end(chosen)
    board.begin(chosen)
    board.set_state(chosen, SERVING)
    assert board.place(2, b"key").sessions == 1  # that process is gone, and its sessions with it


def test_of_too_many_keys_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "_BUCKETS", 8)
    board = Board(2)
    for index in range(2):
        board.begin(index)
        board.set_state(index, SERVING)
    for number in range(200):
        board.place(0, b"%d" % number)
    assert board.place(0, b"199").sessions == 0
    assert board.place(0, b"0").sessions == 1
    board.close()


def test_tickets_have_one_order_over_all_workers(board: Board) -> None:
    assert board.first_waiting() is None
    numbers = [board.next_ticket() for _ in range(6)]
    assert numbers == sorted(set(numbers))
    board.publish_waiting(0, numbers[1::2], numbers[1])
    board.publish_waiting(2, numbers[::2], numbers[0])
    assert board.first_waiting() == (numbers[0], 2)
    assert [board.waiting_before(0, number) for number in numbers[1::2]] == [1, 2, 3]
    assert board.waiting_before(1, numbers[5]) == 5
    board.publish_waiting(2, numbers[::2], 0)  # all of them stand aside
    assert board.first_waiting() == (numbers[1], 0)
    board.publish_waiting(0, [], 0)
    assert board.first_waiting() is None


def test_texts_are_kept_whole_lines(board: Board) -> None:
    assert board.kept_text(3) == b""
    board.keep_text(3, b"a 1\nb 2\n")
    assert board.kept_text(3) == b"a 1\nb 2\n"
    long = b"series_%d 1\n"
    board.keep_text(0, b"".join(long % number for number in range(100_000)))
    kept = board.kept_text(0)
    assert kept.endswith(b" 1\n")
    assert 200_000 < len(kept) <= 256 * 1024
    assert board.kept_text(3) == b"a 1\nb 2\n"


def test_the_lock_of_a_killed_process_is_free(board: Board) -> None:
    context = multiprocessing.get_context("fork")
    is_held = context.Event()

    def hold() -> None:
        with board:
            is_held.set()
            signal.pause()

    holder = context.Process(target=hold)
    holder.start()
    assert holder.pid is not None
    assert is_held.wait(30)
    threading.Timer(0.2, os.kill, (holder.pid, signal.SIGKILL)).start()
    with board:  # waits until then
        holder.join(20)
        assert holder.exitcode == -signal.SIGKILL


def test_sessions_learn_of_other_workers_what_they_have_to(board: Board) -> None:
    peers, outbox = peers_of(board, 0)
    board.publish(1, SlotCounts(live=2, soft=1, waiting_once=1))
    board.publish(2, SlotCounts(live=3, soft=2, waiting_briefly=1))
    assert peers.counts() == SlotCounts(live=5, soft=3, waiting_once=1, waiting_briefly=1)
    assert peers.evict_soft(for_soft=True)
    peers.slot_freed(briefly=True, once=False)
    peers.slot_freed(briefly=False, once=True)
    wake = PeerMessageKind.WAKE
    assert outbox.sent == [(2, PeerMessageKind.EVICT, b"\x01"), (2, wake, b""), (1, wake, b"")]
    for index in (1, 2):
        board.publish(index, NO_SLOTS)
    assert not peers.evict_soft(for_soft=False)
    assert not peers.has_next
    board.publish_waiting(2, [7], 7)
    assert peers.has_next
    assert (peers.is_first(6), peers.is_first(8)) == (True, False)
    board.publish_waiting(0, [5], 5)
    assert peers_of(board, 2)[0].has_next
    peers.leave()
    assert board.state(0) == LEAVING
    board.set_state(0, QUIET)
    peers.leave()
    assert board.state(0) == QUIET


def test_a_session_that_is_not_here_is_elsewhere_lost_or_unknown(board: Board) -> None:
    here, there = peers_of(board, 0)[0], peers_of(board, 1)[0]
    name = there.new_id()
    assert isinstance(here.absence(name), SessionElsewhere)
    assert there.absence(name) is None
    board.end(1)
    lost = here.absence(name)
    assert isinstance(lost, SessionLost)
    assert lost.reason == "worker crashed"
    for unknown in ("x", "x-w9-1", "x-w1-99", f"{new_boot()}{name[len(BOOT) :]}"):
        assert here.absence(unknown) is None


def test_arrivals_are_load_until_they_are_sessions_or_their_time_is_over(board: Board) -> None:
    peers, _ = peers_of(board, 1)
    board.publish(0, SlotCounts(live=50))
    board.publish(2, SlotCounts(live=50))
    for until in (1.0, 2.0):
        assert board.place(0, sessions=3) == (1, 3)
        peers.arrived(3, until)
    assert board.load(1) == 6
    peers.publish(SlotCounts(live=2))
    assert board.load(1) == 6
    assert peers.expire_arrivals(1.5) == 2.0
    assert board.load(1) == 5
    peers.refused()
    assert board.load(1) == 4
    assert peers.expire_arrivals(3.0) is None
    assert board.load(1) == 2


def test_a_worker_keeps_a_session_for_which_it_has_hardly_more_than_others(board: Board) -> None:
    board.publish(0, NO_SLOTS._replace(live=81))
    board.publish(1, NO_SLOTS._replace(live=72))
    board.publish(2, NO_SLOTS._replace(live=100))
    assert board.place(0).place == 0
    assert board.place(2).place == 1
    board.publish(0, NO_SLOTS._replace(live=83))
    assert board.place(0).place == 1


def test_few_sessions_go_to_the_least_loaded_worker_exactly(board: Board) -> None:
    board.publish(0, NO_SLOTS._replace(live=1))
    board.publish(2, NO_SLOTS._replace(live=1))
    assert board.place(0).place == 1
