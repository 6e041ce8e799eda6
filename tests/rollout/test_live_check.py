"""The splice between the two sandboxes of a live check: bytes go through, and neither side can hold it up."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openenv.rollout.verify import live_check
from openenv.rollout.verify.live_check import Splice


@pytest.fixture
def splice(tmp_path: Path) -> Iterator[Callable[..., Splice]]:
    """Make splices; after they are closed no thread and no socket of theirs may be left."""
    before = set(os.listdir("/proc/self/fd"))
    made: list[Splice] = []

    def make(*, start_s: float = 20.0, is_over: Callable[[], bool] = lambda: False, folder: Path = tmp_path) -> Splice:
        made.append(Splice(folder, start_s=start_s, is_over=is_over).__enter__())
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert [thread for thread in threading.enumerate() if thread.name == "openenv-splice"] == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def connect(path: Path) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH)
    try:
        end.connect(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    end.settimeout(20)
    return end


def joined(splice: Splice) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection, as judge and as connector."""
    run, judge = connect(splice.run), connect(splice.judge)
    assert run.recv(1) == b"\1"
    run.sendall(b"\1")
    return judge, run


def test_bytes_go_both_ways_and_each_direction_ends_by_itself(splice: Callable[..., Splice], tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 40)  # a path that is too long for a unix socket
    deep.mkdir()
    judge, run = joined(splice(folder=deep))
    with judge, run:
        judge.sendall(b"question")
        judge.shutdown(socket.SHUT_WR)
        assert run.makefile("rb").read() == b"question"
        run.sendall(b"answer" * 5_000)
        run.shutdown(socket.SHUT_WR)
        assert judge.makefile("rb").read() == b"answer" * 5_000


def test_connections_do_not_mix(splice: Callable[..., Splice]) -> None:
    both = splice()
    pairs = [joined(both) for _ in range(20)]
    for number, (judge, run) in enumerate(pairs):
        run.sendall(b"%d" % number)
        judge.sendall(b"x%d" % number)
    for number, (judge, run) in enumerate(pairs):
        assert judge.recv(10) == b"%d" % number
        assert run.recv(10) == b"x%d" % number
        judge.close()
        run.close()


def test_a_judge_does_not_wait_for_a_run_that_has_ended(
    splice: Callable[..., Splice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_check, "_GRACE_S", 0.2)
    with connect(splice(start_s=600, is_over=lambda: True).judge) as judge:
        assert judge.recv(1) == b""


def test_a_connector_that_answers_wrongly_or_not_at_all_ends_the_judges_connection(
    splice: Callable[..., Splice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_check, "_GRACE_S", 0.2)
    both = splice(start_s=0.3)
    for answer in (b"x", b""):
        with connect(both.run) as run, connect(both.judge) as judge:
            assert run.recv(1) == b"\1"
            run.sendall(answer)
            assert judge.recv(1) == b""


def test_more_connections_than_are_needed_are_closed(splice: Callable[..., Splice]) -> None:
    both = splice()
    ends = [connect(both.run) for _ in range(live_check._SPARE + 40)]
    closed = [end for end in ends[live_check._SPARE + 16 :] if _is_closed(end)]
    for end in ends:
        end.close()
    assert len(closed) == 24


def _is_closed(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except OSError:
        return True


def test_closing_ends_connections_under_way(splice: Callable[..., Splice]) -> None:
    both = splice()
    judge, run = joined(both)
    waiting = connect(both.judge)
    sender = threading.Thread(target=_send_without_end, args=(judge,))
    sender.start()
    both.close()
    sender.join(20)
    assert not sender.is_alive()
    with judge, run, waiting:
        assert waiting.recv(1) == b""


def _send_without_end(end: socket.socket) -> None:
    try:
        while True:
            end.sendall(b"x" * 65536)
    except OSError:
        pass
