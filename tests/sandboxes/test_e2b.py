"""E2B sandboxes: the real package against a double whose commands run for real; and what works without either."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import SandboxGone, SandboxUnavailable, SandboxUnsupported
from openenv.sandboxes import (
    BgJob,
    E2BSandboxBackend,
    Limits,
    Mount,
    SandboxBackend,
    SandboxHandle,
    SandboxSnapshot,
    SandboxSpec,
)
from openenv.sandboxes.checks import CHECKS, CheckBench, ContractCheck, NotOffered

SOURCE = Path(__file__).resolve().parents[2] / "src"
# Of the double every request starts a process, so that most checks are left to `make test-all`.
EVERY_TIME = {"exec.exit-code", "output.streaming", "job.kill", "tree.round-trip", "end.identity"}


def test_the_module_imports_without_the_package_and_the_constructor_says_what_to_install() -> None:
    code = """
import sys
sys.modules["e2b"] = None
from openenv.sandboxes.e2b import E2BSandboxBackend
try:
    E2BSandboxBackend(api_key="e2b_x")
except ImportError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "pip install e2b" in done.stdout, done.stderr


def test_no_key_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("e2b")
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="E2B_API_KEY"):
        E2BSandboxBackend()
    monkeypatch.setenv("E2B_API_KEY", "e2b_from_the_environment")
    assert isinstance(E2BSandboxBackend(), SandboxBackend)


def test_what_e2b_cannot_give_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    pytest.importorskip("e2b")
    backend = E2BSandboxBackend(api_key="e2b_x", sandbox_kwargs={"api_url": "http://127.0.0.1:9"})
    with pytest.raises(SandboxUnsupported, match="template"):
        backend.open(SandboxSpec(mounts=(Mount(tmp_path, "/x"),)))
    with pytest.raises(SandboxUnsupported, match="template"):
        backend.open(SandboxSpec(limits=Limits(memory_mb=1)))
    with pytest.raises(SandboxUnsupported, match="The backend e2b has no snapshots; local and docker do"):
        backend.open(SandboxSpec(from_snapshot=SandboxSnapshot("e2b", "/home/user", tmp_path / "none", {})))


@pytest.fixture(scope="module")
def double(e2b_double: Any) -> Any:
    return e2b_double


@pytest.fixture(scope="module")
def e2b(double: Any) -> E2BSandboxBackend:
    return E2BSandboxBackend(api_key=double.key, template="coding", sandbox_kwargs=double.kwargs(double.url))


@pytest.fixture(scope="module")
def bench(e2b: E2BSandboxBackend) -> Iterator[CheckBench]:
    with CheckBench(e2b) as bench:
        yield bench


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=check.id, marks=[] if check.id in EVERY_TIME else [pytest.mark.slow]) for check in CHECKS],
)
def test_e2b_keeps_the_contract(check: ContractCheck, request: pytest.FixtureRequest) -> None:
    if check.feature is not None and check.feature not in E2BSandboxBackend.features:
        pytest.skip(f"e2b does not offer {check.feature}")
    bench = request.getfixturevalue("bench")
    try:
        check.run(bench)
    except NotOffered as error:
        pytest.skip(str(error))
    finally:
        bench.tidy()


def test_a_sandbox_has_the_shape_that_existing_code_is_written_for(double: Any, e2b: E2BSandboxBackend) -> None:
    box = e2b.create(timeout_s=77, envs={"A": "1"}, metadata={"run": "x"})
    try:
        assert isinstance(box, SandboxHandle)
        request = double.boxes[box.sandbox_id].request
        assert (request["templateID"], request["timeout"]) == ("coding", 77)
        assert (request["envVars"], request["metadata"]) == ({"A": "1"}, {"run": "x"})
        assert "allow_internet_access" not in request
        result = box.exec("echo out; echo err >&2; exit 3", envs={"B": "2"}, cwd="/tmp", timeout=20)
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        box.write_text("/home/user/a/b.txt", "text")
        assert box.read_text("/home/user/a/b.txt") == "text"
        assert box.exists("/home/user/a")
        assert not box.exists("/home/user/c")
        job = box.start_bg("echo $A; sleep 30")
        assert isinstance(job, BgJob)
        with pytest.raises(TimeoutError):
            job.wait(0.1)
        job.kill()
        assert job.wait(10) == 137
    finally:
        box.kill()
    assert box.sandbox_id not in double.boxes


@pytest.mark.slow
def test_commands_run_without_a_time_limit_of_the_server(double: Any, e2b: E2BSandboxBackend) -> None:
    with e2b.open() as box:
        double.requests.clear()
        box.exec("true", timeout=5)
        box.start_bg("true").wait(20)
    starts = [headers for _, path, headers in double.requests if path == "/process.Process/Start"]
    assert len(starts) == 2
    assert all("connect-timeout-ms" not in headers for headers in starts)


@pytest.mark.slow
def test_a_sandbox_of_ours_has_no_way_out_and_no_way_in_unless_that_is_asked_for(
    double: Any, e2b: E2BSandboxBackend
) -> None:
    with e2b.open() as box:
        request = double.boxes[box.sandbox_id].request
        assert request["allow_internet_access"] is False
        assert request["network"]["allowPublicTraffic"] is False
    own = {**double.kwargs(double.url), "allow_internet_access": True}
    with E2BSandboxBackend(api_key=double.key, sandbox_kwargs=own).open() as box:
        assert double.boxes[box.sandbox_id].request["allow_internet_access"] is True


def test_a_key_that_is_not_known_is_reported(double: Any) -> None:
    stranger = E2BSandboxBackend(api_key="e2b_" + "0" * 40, sandbox_kwargs=double.kwargs(double.url))
    with pytest.raises(SandboxUnavailable, match="API key"):
        stranger.check()
    with pytest.raises(SandboxUnavailable, match="API key"):
        stranger.open()


def test_a_sandbox_that_e2b_ended_is_gone(double: Any, e2b: E2BSandboxBackend) -> None:
    box = e2b.open()
    threading.Timer(0.5, double.boxes[box.sandbox_id].container.close).start()
    with pytest.raises(SandboxGone):
        box.exec("sleep 60")
    with pytest.raises(SandboxGone):
        box.read_text("/etc/passwd")
    box.close()
