"""The warm pool: never the same sandbox twice, dead ones replaced, everything freed."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from openenv.errors import SandboxError, SandboxGone
from openenv.sandboxes import LocalSandboxes, ProcessSandboxes, Sandbox, SandboxPool, SandboxSpec
from slow_steps import take
from waiting import wait_until


class Counting(ProcessSandboxes):
    """A backend that remembers what it opened, and that fails on request."""

    def __init__(self) -> None:
        super().__init__(i_know_there_is_no_isolation=True)
        self.opened: list[Sandbox] = []
        self.specs: list[SandboxSpec] = []
        self.failure: Exception | None = None

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        if self.failure is not None:
            raise self.failure
        box = super().open(spec)
        self.opened.append(box)
        self.specs.append(spec or SandboxSpec())
        return box


def is_gone(box: Sandbox) -> bool:
    try:
        box.exists("/")
    except SandboxGone:
        return True
    return False


def test_sandboxes_are_ready_before_they_are_needed() -> None:
    backend = Counting()
    with SandboxPool(backend, size=3) as pool:
        pool.wait_ready()
        assert len(backend.opened) == 3
        with pool.lease() as box:
            assert box is backend.opened[0]
            assert box.exec("echo hi").stdout == "hi\n"
        pool.wait_ready()


def test_a_used_sandbox_is_closed_and_never_given_out_again() -> None:
    backend = Counting()
    with SandboxPool(backend, size=1) as pool:
        seen = []
        for _ in range(4):
            with pool.lease() as box:
                seen.append(box)
            assert is_gone(box)
        assert len({id(box) for box in seen}) == 4


def test_an_exception_in_a_lease_closes_its_sandbox() -> None:
    with SandboxPool(Counting(), size=1) as pool:
        with pytest.raises(ZeroDivisionError), pool.lease() as box:
            raise ZeroDivisionError
        assert is_gone(box)


def test_many_threads_get_sandboxes_of_their_own() -> None:
    backend = Counting()
    seen: list[Sandbox] = []

    def use(number: int) -> None:
        with pool.lease() as box:
            seen.append(box)
            box.write_text("who", str(number))
            take(0.01)
            assert box.read_text("who") == str(number)

    with SandboxPool(backend, size=4) as pool, concurrent.futures.ThreadPoolExecutor(16) as threads:
        for done in [threads.submit(use, number) for number in range(60)]:
            done.result(60)
    assert len({box.sandbox_id for box in seen}) == 60
    assert all(is_gone(box) for box in backend.opened)


def test_a_sandbox_that_died_while_it_was_ready_is_replaced() -> None:
    backend = Counting()
    with SandboxPool(backend, size=2) as pool:
        pool.wait_ready()
        for box in backend.opened[:2]:
            box.kill()
        with pool.lease() as box:
            assert not is_gone(box)


def test_a_sandbox_that_was_ready_for_too_long_is_replaced() -> None:
    now = [1000.0]
    backend = Counting()
    with SandboxPool(backend, size=1, max_idle_s=60, clock=lambda: now[0]) as pool:
        pool.wait_ready()
        now[0] += 61
        with pool.lease() as box:
            assert box is not backend.opened[0]
        wait_until(lambda: is_gone(backend.opened[0]))


def test_time_spent_waiting_is_not_taken_from_the_lease() -> None:
    backend = Counting()
    with SandboxPool(backend, SandboxSpec(timeout_s=100), size=1, max_idle_s=60) as pool:
        pool.wait_ready()
        assert backend.specs[0].timeout_s == 160


def test_leases_can_be_limited() -> None:
    with SandboxPool(Counting(), size=1, max_leases=1) as pool:
        with pool.lease():
            with pytest.raises(TimeoutError), pool.lease(timeout=0.05):
                pass
        with pool.lease(timeout=30):
            pass


def test_a_backend_that_fails_is_reported_and_tried_again() -> None:
    backend = Counting()
    backend.failure = SandboxError("no room")
    with SandboxPool(backend, size=1) as pool:
        with pytest.raises(TimeoutError, match="no room"):
            pool.wait_ready(timeout=0.3)
        with pytest.raises(SandboxError, match="no room"), pool.lease():
            pass
        backend.failure = None
        pool.wait_ready(timeout=30)
        assert pool.problem is None


def test_closing_frees_what_waits_and_what_is_in_use() -> None:
    backend = Counting()
    before = set(threading.enumerate())
    pool = SandboxPool(backend, size=2)
    pool.wait_ready()
    with pool.lease() as box:
        pool.close()
        assert is_gone(box)
    assert all(is_gone(box) for box in backend.opened)
    with pytest.raises(SandboxError, match="closed"), pool.lease():
        pass
    pool.close()
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_a_pool_keeps_at_least_one() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SandboxPool(Counting(), size=0)


@pytest.mark.usefixtures("local")
def test_local_sandboxes_are_pooled_and_leave_nothing() -> None:
    backend = LocalSandboxes()
    with SandboxPool(backend, size=2) as pool:
        pool.wait_ready()
        for _ in range(3):
            with pool.lease() as box:
                assert box.exec("echo hi").stdout == "hi\n"
    assert backend.leftovers() == []
