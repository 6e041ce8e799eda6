"""The contract of sandboxes, check by check, on the backends that need no service; and the runner of the checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from openenv.errors import SandboxUnavailable
from openenv.sandboxes import LocalSandboxes, ProcessSandboxes, Sandbox, Sandboxes, SandboxSpec, self_check
from openenv.sandboxes.base import FEATURES
from openenv.sandboxes.checks import CHECKS, CheckBench, CheckResult, ContractCheck, NotOffered


@pytest.fixture(scope="module")
def local_bench(local: LocalSandboxes) -> Iterator[CheckBench]:
    with CheckBench(local) as bench:
        yield bench


@pytest.fixture(scope="module")
def process_bench(process: ProcessSandboxes) -> Iterator[CheckBench]:
    with CheckBench(process) as bench:
        yield bench


def run(check: ContractCheck, bench: CheckBench) -> None:
    try:
        check.run(bench)
    except NotOffered as error:
        pytest.skip(str(error))
    finally:
        bench.tidy()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_local_keeps_the_contract(check: ContractCheck, local_bench: CheckBench) -> None:
    run(check, local_bench)


@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if check.feature in (None, *ProcessSandboxes.features)],
    ids=lambda check: check.id,
)
def test_process_keeps_the_contract(check: ContractCheck, process_bench: CheckBench) -> None:
    run(check, process_bench)


def test_there_are_enough_checks_and_each_says_what_it_is_about() -> None:
    assert len(CHECKS) >= 40
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    assert all(check.says.endswith(".") and check.run.__doc__ for check in CHECKS)
    assert {check.feature for check in CHECKS} - {None} <= FEATURES


def test_results_are_reported_one_by_one_and_what_is_not_offered_does_not_pass(process: ProcessSandboxes) -> None:
    seen: list[CheckResult] = []
    results = self_check(process, report=seen.append, only=["exec.exit-code", "isolation.tcp"])
    assert results == seen
    assert [(result.id, result.status) for result in results] == [
        ("exec.exit-code", "passed"),
        ("isolation.tcp", "not offered"),
    ]
    assert "isolation" in results[1].detail


class Forgetful(ProcessSandboxes):
    """A backend whose sandboxes lose their exit codes, and which cannot open a second one."""

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        box = super().open(spec)
        run_command = box.exec
        box.exec = lambda *args, **kwargs: _without_code(run_command(*args, **kwargs))  # type: ignore[method-assign]
        return box


def _without_code(result: object) -> object:
    object.__setattr__(result, "exit_code", 0)
    return result


def test_a_backend_that_breaks_the_contract_is_found_out() -> None:
    backend: Sandboxes = Forgetful(i_know_there_is_no_isolation=True)
    results = self_check(backend, only=["exec.exit-code", "exec.shell", "exec.home"])
    assert [result.status for result in results] == ["failed", "failed", "passed"]
    assert "exit code" in results[0].detail


class Missing(ProcessSandboxes):
    """A backend that cannot run."""

    def check(self) -> None:
        raise SandboxUnavailable("install it")


def test_a_backend_that_cannot_run_is_not_checked() -> None:
    with pytest.raises(SandboxUnavailable, match="install it"):
        self_check(Missing(i_know_there_is_no_isolation=True))
