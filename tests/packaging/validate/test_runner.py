"""`run_validation`: what a run records, keeps on disk and lets graders of other packages see."""

from __future__ import annotations

import hashlib
import json
import runpy
import socket
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from environments import Heard, Parrot, Say
from openenv import create_app
from openenv.cli.init import Names, write_package
from openenv.env.manifest import ExecutionDeclaration
from openenv.packaging.validate.graders import Grader, Subject
from openenv.packaging.validate.manifest import OpenEnvYamlParser
from openenv.packaging.validate.policy import PolicyError, load_policy
from openenv.packaging.validate.recording import (
    LaunchSpec,
    RuntimePlan,
    RuntimeReset,
    collect_runtime_evidence,
    http_deadline,
)
from openenv.packaging.validate.report import CheckResult, ValidationReport, ValidationReportV2, write_report
from openenv.packaging.validate.rules import CheckStatus, Level, ProviderCapability
from openenv.packaging.validate.runner import run_validation
from openenv.packaging.validate.served_package import RunningSubject, StartupError, UnsupportedCapability
from openenv.testing import serve

PLAN = RuntimePlan(
    plan_schema_version="1",
    reset=RuntimeReset(episode_id="a", seed=1),
    actions=[{"message": "hello"}, {"message": "b"}],
)
SNIPPETS = Path(__file__).parents[3] / "docs_src"
EXECUTION = "  execution: {dockerfile: server/Dockerfile}\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(create_app(Parrot, Say, Heard, max_concurrent_envs=4)) as served:
        yield served.url


@pytest.fixture
def package(tmp_path: Path) -> Path:
    write_package(Names.of("maze_env"), tmp_path / "maze_env")
    return tmp_path / "maze_env"


def test_an_episode_is_recorded_message_by_message(url: str) -> None:
    evidence = collect_runtime_evidence(url, PLAN, episode_timeout_s=30)
    assert evidence.failure_reason is None
    assert [one.operation for one in evidence.exchanges] == ["reset", "state", "step", "state", "step", "state"]
    assert json.loads(evidence.exchanges[0].request_json)["data"] == {"seed": 1, "episode_id": "a"}
    assert json.loads(evidence.exchanges[3].response_json)["data"]["step_count"] == 1
    assert "properties" in json.loads(evidence.observation_schema_json or "")


def test_a_refused_action_ends_the_record_with_its_phase(url: str) -> None:
    plan = PLAN.model_copy(update={"actions": [{"message": 5}]})
    evidence = collect_runtime_evidence(url, plan, episode_timeout_s=30)
    assert (evidence.failure_phase, evidence.failure_reason) == ("step", "step was refused (VALIDATION_ERROR)")
    assert len(evidence.exchanges) == 3


def test_a_server_that_is_not_there_or_never_ends_is_a_failure_in_time() -> None:
    gone = collect_runtime_evidence("http://127.0.0.1:1", PLAN, episode_timeout_s=5)
    assert gone.failure_phase == "schema"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
                while True:
                    try:
                        client.sendall(b" ")
                    except OSError:
                        return
                    if over.wait(0.05):
                        return

        over = threading.Event()
        thread = threading.Thread(target=drip)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        dripped = collect_runtime_evidence(address, PLAN, episode_timeout_s=0.5)
        over.set()
        thread.join()
    assert dripped.failure_phase == "schema"
    assert (dripped.failure_reason or "").startswith("no complete reply within")


def test_a_deadline_that_is_not_reached_changes_nothing() -> None:
    with pytest.raises(KeyError), http_deadline(30):
        raise KeyError


def test_a_bundle_keeps_everything_with_its_checksums(package: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    report = run_validation(package, max_level=Level.RUNTIME, artifacts_dir=bundle)
    assert isinstance(report, ValidationReportV2)
    assert json.loads((bundle / "report.json").read_text()) == json.loads(write_report(report))
    sums = dict(reversed(line.split("  ")) for line in (bundle / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {path.name for path in bundle.iterdir()} - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((bundle / name).read_bytes()).hexdigest() == digest
    trace = json.loads((bundle / "collector-trace.json").read_text())
    assert trace[0]["request_json"]["type"] == "reset"
    assert json.loads((bundle / "collector-evidence.json").read_text())["complete"]
    coverage = json.loads((bundle / "coverage.json").read_text())
    assert "runtime.startup" in coverage["executed"]
    assert "runtime.host_containment" in coverage["incomplete"]


def test_the_snippets_of_the_page(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(package.parent)
    runpy.run_path(str(SNIPPETS / "validate_package.py"))
    assert capsys.readouterr().out == "pass\n"
    manifest = OpenEnvYamlParser().parse(package)
    grader = runpy.run_path(str(SNIPPETS / "own_grader.py"))["SbomGrader"]()
    subject = Subject(package, manifest, None, None, package)
    assert isinstance(grader, Grader)
    assert grader.run(subject).status is CheckStatus.FAIL
    (package / "sbom.json").touch()
    assert grader.run(subject).status is CheckStatus.PASS


def test_files_alone_make_a_report_of_the_first_version(package: Path, tmp_path: Path) -> None:
    report = run_validation(package, max_level=Level.STATIC)
    assert (type(report), report.report_schema_version, report.policy_version) == (ValidationReport, "1", "v1")
    text = write_report(report, tmp_path / "new" / "report.json")
    assert (tmp_path / "new" / "report.json").read_text() == text
    assert ValidationReport.model_validate_json(text) == report
    with (package / "openenv.yaml").open("a") as manifest:
        manifest.write(EXECUTION)
    assert run_validation(package, max_level=Level.STATIC).report_schema_version == "2"


def test_the_first_policy_is_for_files_only(package: Path) -> None:
    with pytest.raises(PolicyError, match="need v2"):
        run_validation(package, policy=load_policy("v1"))


class ContainmentGrader:
    """A grader of another package, of a check that we skip."""

    check_id = "runtime.host_containment"
    level = Level.RUNTIME
    requires_capabilities: frozenset[str] = frozenset()
    requires_provider: frozenset[ProviderCapability] = frozenset()
    depends_on = ("runtime.startup",)

    def applies_to(self, manifest: Any) -> bool:
        return True

    def run(self, subject: Subject) -> CheckResult:
        assert subject.runtime_evidence is not None
        assert isinstance(subject.running, RunningSubject)
        again = collect_runtime_evidence(subject.running.base_url, PLAN, episode_timeout_s=30)
        count = len(subject.runtime_evidence.exchanges)
        status = CheckStatus.PASS if again.failure_reason is None else CheckStatus.FAIL
        return CheckResult(check_id=self.check_id, status=status, measured={"seen": count}, duration_s=0.0)


class SbomGrader(ContainmentGrader):
    """One of a check that we do not make at all."""

    check_id = "static.sbom"
    level = Level.STATIC
    depends_on = ()

    def run(self, subject: Subject) -> CheckResult:
        return CheckResult(check_id=self.check_id, status=CheckStatus.PASS, duration_s=0.0)


def test_graders_of_other_packages_replace_and_add_checks(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, f"{__name__}:{name}", "") for name in ("ContainmentGrader", "SbomGrader")]
    monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.name])
    monkeypatch.setattr("openenv.packaging.validate.graders.entry_points", lambda group: points)
    report = run_validation(package, max_level=Level.RUNTIME)
    by_id = {result.check_id: result for result in report.results}
    assert len(by_id) == len(report.results)
    assert by_id["static.sbom"].status is CheckStatus.PASS
    assert by_id["runtime.host_containment"].measured["seen"] > 3


class Provider:
    """A provider whose image is the served parrot."""

    name = "test"
    capabilities = frozenset({ProviderCapability.EXEC})
    supported_network_modes = frozenset({"public"})

    def __init__(self, url: str, error: Exception | None = None) -> None:
        self.base_url, self.error, self.stopped = url, error, 0
        self.specs: list[LaunchSpec] = []

    def build(self, root: Path, execution: ExecutionDeclaration) -> str:
        assert (root / execution.dockerfile).is_file()
        return "sha256:" + "0" * 64

    def start(self, spec: LaunchSpec) -> Provider:
        self.specs.append(spec)
        if self.error is not None:
            raise self.error
        return self

    def inspect(self) -> dict[str, Any]:
        return {}

    def logs(self, max_bytes: int = 65536) -> str:
        return ""

    def exec(self, argv: list[str], timeout_s: float) -> Any:
        raise UnsupportedCapability("no commands")

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, CheckStatus.PASS),
        (StartupError("no port"), CheckStatus.FAIL),
        (UnsupportedCapability("x"), CheckStatus.SKIP),
    ],
)
def test_a_provider_runs_the_package(
    error: Exception | None, status: CheckStatus, package: Path, url: str, tmp_path: Path
) -> None:
    provider = Provider(url, error)
    report = run_validation(package, max_level=Level.RUNTIME, provider=provider, artifacts_dir=tmp_path / "b")
    by_id = {result.check_id: result for result in report.results}
    assert by_id["runtime.startup"].status is status
    assert provider.stopped == (1 if error is None else 0)
    assert provider.specs[0].resources.memory_mb == 1024
    assert len(provider.specs[0].env_vars["OPENENV_TOKEN"]) > 20
    expected = CheckStatus.PASS if error is None else CheckStatus.SKIP
    assert by_id["runtime.reward_well_formed"].status is expected
    run = json.loads((tmp_path / "b" / "run-manifest.json").read_text())
    assert run["provider"] == {"name": "test", "image_ref": "sha256:" + "0" * 64}


def test_a_provider_needs_a_valid_manifest(package: Path, url: str) -> None:
    (package / "openenv.yaml").write_text("name: maze_env\n")
    provider = Provider(url)
    report = run_validation(package, max_level=Level.RUNTIME, provider=provider)
    assert [one.status for one in report.results if one.check_id == "runtime.startup"] == [CheckStatus.SKIP]
    assert provider.specs == []
