"""Daytona sandboxes: the real package, which `make test-clouds` has, against a double that runs commands for real."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloud_boxes import cloud_boxes
from openenv.errors import SandboxGone, SandboxUnavailable, SandboxUnsupported
from openenv.providers.inventory import take_inventory
from openenv.sandboxes import DaytonaSandboxes, Limits, Mount, SandboxHandle, SandboxSnapshot, SandboxSpec, backend
from openenv.sandboxes.checks import CHECKS, CheckBench, ContractCheck, NotOffered
from servers import running_server
from waiting import wait_until

SOURCE = Path(__file__).resolve().parents[2] / "src"


def test_without_the_package_the_constructor_says_what_to_install() -> None:
    code = """
import sys
sys.modules["daytona"] = None
from openenv.errors import SandboxUnavailable
from openenv.sandboxes import backend
try:
    backend("daytona", api_key="dtn_x")
except SandboxUnavailable as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "pip install 'daytona>=" in done.stdout, done.stderr


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("daytona")
    import daytona_double

    with cloud_boxes(tmp_path_factory.mktemp("cloud")) as boxes, pytest.MonkeyPatch.context() as patch:
        double = daytona_double.DaytonaDouble(boxes)
        double.as_user = True
        with running_server(double.app, lifespan="off") as server:
            double.url, double.key = server.url, daytona_double.KEY
            patch.setenv("DAYTONA_API_URL", f"{server.url}/api")
            patch.setenv("DAYTONA_API_KEY", daytona_double.KEY)
            yield double


@pytest.fixture(scope="module")
def daytona(double: Any) -> DaytonaSandboxes:
    made = backend("daytona")
    assert isinstance(made, DaytonaSandboxes)
    made.check()
    return made


@pytest.fixture(scope="module")
def bench(daytona: DaytonaSandboxes) -> Iterator[CheckBench]:
    with CheckBench(daytona) as bench:
        yield bench


@pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in CHECKS])
def test_daytona_keeps_the_contract(check: ContractCheck, request: pytest.FixtureRequest) -> None:
    if check.feature is not None and check.feature not in DaytonaSandboxes.features:
        pytest.skip(f"daytona does not offer {check.feature}")
    bench = request.getfixturevalue("bench")
    try:
        check.run(bench)
    except NotOffered as error:
        pytest.skip(str(error))
    finally:
        bench.tidy()


def test_a_sandbox_has_the_shape_that_existing_code_is_written_for(double: Any, daytona: DaytonaSandboxes) -> None:
    before = set(double.listed)
    box = daytona.create(timeout_s=77, envs={"A": "1"}, metadata={"run": "x"})
    try:
        assert isinstance(box, SandboxHandle)
        request = double.listed[box.sandbox_id].request
        assert (request["env"], request["labels"]["run"], request["ttlMinutes"]) == ({"A": "1"}, "x", 2)
        assert not request.get("networkBlockAll")
        result = box.exec("echo out; echo err >&2; exit 3", envs={"B": "2"}, cwd="/tmp", timeout=20)
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        box.write_text("/home/user/a/b.txt", "text")
        assert box.read_text("/home/user/a/b.txt") == "text"
        (item,) = (one for one in take_inventory(("daytona",)).items if one.name == box.sandbox_id)
        assert (item.use, item.is_leftover) == ("sandbox", False)
    finally:
        box.kill()
    assert set(double.listed) == before


def test_nothing_of_a_command_is_left_inside(double: Any, daytona: DaytonaSandboxes) -> None:
    with daytona.open() as box:
        assert double.listed[box.sandbox_id].request["networkBlockAll"] is True
        for _ in range(3):
            box.exec("echo x")
        inside = double.listed[box.sandbox_id].box
        wait_until(lambda: inside.run("ls -d /tmp/.openenv-*").stdout == b"")


def test_a_long_script_and_its_bytes_arrive_as_they_are(daytona: DaytonaSandboxes) -> None:
    with daytona.open() as box:
        long = "x" * 90_000
        assert box.exec(f"printf %s {long} | wc -c", timeout=60).stdout.strip() == "90000"
        data = bytes(range(256)) * 300 + b"\x1e\x01\x01\x01"
        box.write_bytes("/home/user/data", data)
        assert box.read_bytes("/home/user/data") == data


def test_what_daytona_cannot_give_is_refused_before_anything_is_started(
    double: Any, daytona: DaytonaSandboxes, tmp_path: Path
) -> None:
    before = set(double.listed)
    with pytest.raises(SandboxUnsupported, match="image"):
        daytona.open(SandboxSpec(mounts=(Mount(tmp_path, "/x"),)))
    with pytest.raises(SandboxUnsupported, match="resources"):
        daytona.open(SandboxSpec(limits=Limits(memory_mb=1)))
    with pytest.raises(SandboxUnsupported, match="snapshots"):
        daytona.open(SandboxSpec(from_snapshot=SandboxSnapshot("daytona", "/home/user", tmp_path / "none", {})))
    assert set(double.listed) == before


def test_a_start_that_fails_leaves_nothing(double: Any, daytona: DaytonaSandboxes) -> None:
    before = set(double.listed)
    double.fails["execute"] = f"broken {double.key}"
    try:
        with pytest.raises(SandboxUnavailable, match="broken") as caught:
            daytona.open()
    finally:
        double.fails.clear()
    assert double.key not in str(caught.value)
    assert set(double.listed) == before
    with pytest.raises(SandboxUnavailable, match="cannot write to /nowhere"):
        daytona.open(SandboxSpec(home="/nowhere/at/all"))
    assert set(double.listed) == before


def test_a_key_that_is_not_known_is_reported_without_it(double: Any) -> None:
    stranger = DaytonaSandboxes(api_key="dtn_wrong_key_of_someone")
    for call in (stranger.check, stranger.open):
        with pytest.raises(SandboxUnavailable, match="Invalid credentials") as caught:
            call()
        assert "dtn_wrong_key_of_someone" not in str(caught.value)


def test_a_sandbox_that_daytona_ended_is_gone(double: Any, daytona: DaytonaSandboxes) -> None:
    box = daytona.open()
    inside = double.listed.pop(box.sandbox_id).box
    threading.Timer(0.5, inside.close).start()
    with pytest.raises(SandboxGone):
        box.exec("sleep 60")
    with pytest.raises(SandboxGone):
        box.read_text("/etc/passwd")
    box.close()
