"""`DockerValidationProvider` on a real engine: packages are built, isolated as they declare, checked and removed."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openenv.cli.__main__ import build
from openenv.env.manifest import ExecutionDeclaration, NetworkPolicy, ResourceDeclaration
from openenv.errors import ProviderError
from openenv.packaging.validate.container import DockerValidationProvider
from openenv.packaging.validate.recording import LaunchSpec
from openenv.packaging.validate.rules import CheckStatus, Level
from openenv.packaging.validate.runner import run_validation
from openenv.packaging.validate.served_package import (
    RunningSubject,
    StartupError,
    UnsupportedCapability,
    ValidationProvider,
)
from openenv.sandboxes.container_cli import ContainerCli

pytestmark = pytest.mark.slow
GRIDWORLD = Path(__file__).resolve().parents[2] / "envs" / "gridworld_env"
LeftBehind = Callable[[], list[str]]
RESOURCES = ResourceDeclaration(cpu=1.0, memory_mb=1024, disk_mb=512, episode_timeout_s=60.0)
EXECUTION = "  network: {{mode: {mode}}}\n  execution: {{dockerfile: Dockerfile}}\n"


@pytest.fixture(scope="session")
def helper_image(engine: ContainerCli, environment_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image of the gridworld, in which `python3` is a command."""
    folder = tmp_path_factory.mktemp("helper")
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to("/app/bin/python")
    (folder / "Dockerfile").write_text(f"FROM {environment_image}\nCOPY bin/ /app/bin/\nENV PATH=/app/bin\n")
    engine.output("build", "--quiet", "--tag", "helper:1", str(folder), timeout=300)
    return "helper:1"


@pytest.fixture
def provider(use_engine: str, helper_image: str) -> DockerValidationProvider:
    return DockerValidationProvider(helper_image=helper_image)


@pytest.fixture
def package(tmp_path: Path, helper_image: str) -> Callable[[str], Path]:
    """Make the gridworld's package with a Dockerfile, and a network mode that it declares."""

    def make(mode: str) -> Path:
        folder = tmp_path / "gridworld_env"
        shutil.copytree(GRIDWORLD, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "Dockerfile").write_text(f"FROM {helper_image}\nENV GREETING=1\n")
        with (folder / "openenv.yaml").open("a", encoding="utf-8") as manifest:
            manifest.write(EXECUTION.format(mode=mode))
        (folder / "validation").mkdir(exist_ok=True)
        plan = {"actions": [{"move": "right"}, {"move": "down"}]}
        (folder / "validation" / "runtime.json").write_text(json.dumps(plan))
        return folder

    return make


def spec(image_ref: str, **changes: Any) -> LaunchSpec:
    fields = {"resources": RESOURCES, "network": NetworkPolicy(), "run_id": "test", **changes}
    return LaunchSpec(image_ref=image_ref, **fields)


def image_id(engine: ContainerCli, image: str) -> str:
    return engine.output("image", "inspect", "--format", "{{.Id}}", image)


@pytest.mark.parametrize("mode", ["no-network", "public"])
def test_a_package_in_its_image_passes_and_keeps_its_network_mode(
    mode: str,
    package: Callable[[str], Path],
    provider: DockerValidationProvider,
    left_behind: LeftBehind,
    tmp_path: Path,
) -> None:
    report = run_validation(
        package(mode), max_level=Level.RUNTIME, provider=provider, artifacts_dir=tmp_path / "bundle"
    )
    by_id = {result.check_id: result for result in report.results}
    failed = [one for one in report.results if one.status in (CheckStatus.FAIL, CheckStatus.ERROR)]
    assert [one for one in failed if not one.check_id.startswith("static.")] == []
    assert by_id["runtime.startup"].status is CheckStatus.PASS
    assert by_id["runtime.episode_isolation"].status is CheckStatus.PASS
    assert by_id["runtime.host_containment"].status is CheckStatus.PASS
    network = by_id["runtime.network_policy"]
    assert network.status is CheckStatus.PASS, network
    if mode == "no-network":
        assert {"tcp", "udp"} <= set(network.measured["counted_probes"])
    assert left_behind() == []
    run = json.loads((tmp_path / "bundle" / "run-manifest.json").read_text())
    assert run["provider"]["name"] == "docker-local"
    assert run["provider"]["image_ref"].startswith("sha256:")
    assert json.loads((tmp_path / "bundle" / "cleanup.json").read_text()) == {"started": True, "stopped": True}


def test_a_running_image_answers_runs_commands_and_has_no_network(
    provider: DockerValidationProvider, engine: ContainerCli, helper_image: str, left_behind: LeftBehind
) -> None:
    assert isinstance(provider, ValidationProvider)
    running = provider.start(spec(image_id(engine, helper_image), network=NetworkPolicy(mode="no-network")))
    try:
        assert isinstance(running, RunningSubject)
        seen = running.inspect()
        assert (seen["status"], seen["network_mode"], seen["privileged"]) == ("running", "none", False)
        assert (seen["mounts"], seen["host_namespaces"]) == ([], [])
        done = running.exec(["python3", "-c", "print(6 * 7)"], timeout_s=60)
        assert (done.exit_code, done.stdout.strip()) == (0, "42")
        assert running.exec(["python3", "-c", "import signal; signal.pause()"], timeout_s=1).timed_out
        evidence = running.measure_network()
        assert evidence["namespace"]["interfaces"] == ["lo"]
        assert 8000 in evidence["namespace"]["listening_ports"]
        by_kind = {probe["kind"]: probe for probe in evidence["probes"]}
        assert (by_kind["tcp"]["control"]["result"], by_kind["tcp"]["subject"]["result"]) == ("reachable", "denied")
        host, _, port = running.base_url.removeprefix("http://").partition(":")
    finally:
        running.stop()
    running.stop()  # harmless
    assert left_behind() == []
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 5)


def test_a_server_that_ends_is_an_error_with_its_log_and_nothing_is_left(
    provider: DockerValidationProvider, engine: ContainerCli, helper_image: str, left_behind: LeftBehind, tmp_path: Path
) -> None:
    text = (
        f'FROM {helper_image}\nCMD ["python3", "-c", "import sys; print(3, flush=True); sys.exit(\'no model here\')"]\n'
    )
    (tmp_path / "Dockerfile").write_text(text)
    built = provider.build(tmp_path, ExecutionDeclaration())
    with pytest.raises(StartupError, match="no model here"):
        provider.start(spec(built))
    assert left_behind() == []


def test_what_docker_cannot_give_or_build_is_said_before_anything_runs(
    provider: DockerValidationProvider, engine: ContainerCli, helper_image: str, left_behind: LeftBehind, tmp_path: Path
) -> None:
    image = image_id(engine, helper_image)
    allowlist = NetworkPolicy(mode="allowlist", allowed_hosts=["example.org"])
    with pytest.raises(UnsupportedCapability, match="allowlist"):
        provider.start(spec(image, network=allowlist))
    with pytest.raises(UnsupportedCapability, match="graphics"):
        provider.start(spec(image, resources=RESOURCES.model_copy(update={"gpus": 1})))
    with pytest.raises(ProviderError, match="Dockerfile is missing"):
        provider.build(tmp_path, ExecutionDeclaration())
    (tmp_path / "Dockerfile").write_text(f"FROM {helper_image}\nCOPY nothing /nowhere\n")
    with pytest.raises(ProviderError, match="cannot be built"):
        provider.build(tmp_path, ExecutionDeclaration())
    (tmp_path / "large").write_bytes(os.urandom(5000))
    with pytest.raises(ProviderError, match="4000 may be sent"):
        DockerValidationProvider(max_context_bytes=4000).build(tmp_path, ExecutionDeclaration())


def test_the_command_validates_in_docker(
    package: Callable[[str], Path], use_engine: str, left_behind: LeftBehind
) -> None:
    arguments = ["validate", str(package("public")), "--provider", "docker", "--level", "runtime", "--json"]
    done = CliRunner().invoke(build(["validate"]), arguments)
    report = json.loads(done.stdout)
    results = {result["check_id"]: result for result in report["results"]}
    assert results["runtime.startup"]["status"] == "pass", results
    assert results["runtime.reward_well_formed"]["status"] == "pass"
    assert (report["report_schema_version"], report["manifest"]["manifest_schema_version"]) == ("2", "2")
    assert left_behind() == []
