"""The warm pool: never the same sandbox twice, dead ones replaced, everything freed."""

from __future__ import annotations

import concurrent.futures
import threading
from dataclasses import replace

import pytest

from openenv.errors import SandboxError, SandboxGone
from openenv.sandboxes import LocalSandboxes, ProcessSandboxes, Sandbox, SandboxPool, SandboxSpec, WarmSandboxes
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


def test_a_sandbox_that_nobody_takes_is_replaced_as_well() -> None:
    backend = Counting()
    with SandboxPool(backend, size=1, max_idle_s=0.2):
        wait_until(lambda: len(backend.opened) > 1 and is_gone(backend.opened[0]))


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


# -- several kinds


def warmed(warm: WarmSandboxes, backend: Counting, spec: SandboxSpec | None = None) -> Sandbox:
    """Open two sandboxes of a kind, and return the one that is kept ready afterwards."""
    ours = [warm.open(spec), warm.open(spec)]
    wait_until(lambda: len(backend.opened) >= 3)
    (waiting,) = (box for box in backend.opened if box not in ours)
    return waiting


def test_a_kind_of_sandbox_is_kept_ready_from_its_second_start_on() -> None:
    backend = Counting()
    with WarmSandboxes(backend, ready=1) as warm:
        assert warm.open() is backend.opened[0]
        assert len(backend.opened) == 1
        ours = warm.open()
        wait_until(lambda: len(backend.opened) == 3)
        (waiting,) = (box for box in backend.opened[1:] if box is not ours)
        wait_until(lambda: warm.open() is waiting)
    assert not is_gone(waiting), "the caller closes what it opened"


def test_every_kind_has_sandboxes_of_its_own_and_metadata_makes_no_kind() -> None:
    backend = Counting()
    kinds = [SandboxSpec(envs={"A": "1"}), SandboxSpec(envs={"A": "2"}), SandboxSpec(timeout_s=5)]
    with WarmSandboxes(backend) as warm:
        for number in range(2):
            for kind in kinds:
                warm.open(replace(kind, metadata={"rollout_id": str(number)}))
        wait_until(lambda: len(backend.opened) == 9)
        taken = [backend.specs[backend.opened.index(warm.open(kind))] for kind in kinds]
    assert not any(spec.metadata for spec in taken), "they come from pools"
    assert [spec.envs for spec in taken] == [kind.envs for kind in kinds]
    assert {(spec.timeout_s, *spec.envs.items()) for spec in backend.specs if not spec.metadata} == {
        (spec.timeout_s, *spec.envs.items()) for spec in taken
    }


def test_the_kind_that_was_not_used_for_longest_is_given_up() -> None:
    backend = Counting()
    old, new = SandboxSpec(timeout_s=5), SandboxSpec(timeout_s=6)
    with WarmSandboxes(backend, most_kinds=1) as warm:
        waiting = warmed(warm, backend, old)
        warm.open(new)
        wait_until(lambda: is_gone(waiting))


def test_a_failing_start_is_the_callers_failure() -> None:
    backend = Counting()
    with WarmSandboxes(backend) as warm:
        warmed(warm, backend).kill()
        backend.failure = SandboxError("no room")
        with pytest.raises(SandboxError, match="no room"):
            warm.open()


def test_warm_sandboxes_can_be_opened_after_the_end() -> None:
    backend = Counting()
    with WarmSandboxes(backend) as warm:
        warm.open(), warm.open()
    assert warm.open() is backend.opened[-1]


@pytest.mark.usefixtures("local")
def test_warm_sandboxes_start_from_snapshots_and_leave_nothing() -> None:
    backend = LocalSandboxes()
    with WarmSandboxes(backend) as warm:
        assert warm.features == backend.features
        with warm.open() as box:
            box.write_text("file", "kept")
            snapshot = box.snapshot()
        with snapshot:
            for _ in range(3):
                with warm.open(SandboxSpec(from_snapshot=snapshot)) as box:
                    assert box.read_text("file") == "kept"
    assert warm.leftovers() == []
