"""`openenv validate` on packages: each fault is found by its check, and what is right passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openenv.cli.__main__ import build
from openenv.cli.init import Names, write_package
from openenv.packaging.validate.manifest import SignatureError
from openenv.packaging.validate.report import CheckOutcome, source_digest
from openenv.packaging.validate.rules import RULES, Level
from openenv.packaging.validate.runner import run_validation
from portable_package import RULES_WITH_STATE

NOT_DONE = {
    "runtime.host_containment",
    "runtime.oracle_containment",
    "semantic.oracle_max",
    "semantic.canary_floor",
    "semantic.no_solution_leakage",
}
RULES_FILE = "server/maze_env_environment.py"
STEP = "        self._state.step_count += 1\n"
RESET = "        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)\n"
PAYS = "reward=min(1.0, length / 10)"
Change = tuple[str, str, str]


def validate(*arguments: str) -> Any:
    return CliRunner().invoke(build(["validate"]), ["validate", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def package(tmp_path: Path) -> Callable[..., Path]:
    """Make a package from the template, with changes of (file, text, other text)."""

    def make(*changes: Change) -> Path:
        folder = tmp_path / "maze_env"
        write_package(Names.of("maze_env"), folder)
        if any(name == RULES_FILE for name, _, _ in changes):
            (folder / RULES_FILE).write_text(RULES_WITH_STATE, encoding="utf-8")
        for name, old, new in changes:
            text = (folder / name).read_text(encoding="utf-8")
            assert old in text
            (folder / name).write_text(text.replace(old, new), encoding="utf-8")
        return folder

    return make


def check(folder: Path, level: str = "runtime", **options: Any) -> dict[str, CheckOutcome]:
    report = run_validation(folder, max_level=Level[level.upper()], **options)
    return {result.check_id: result for result in report.results}


def failed(results: dict[str, CheckOutcome]) -> set[str]:
    return {check_id for check_id, result in results.items() if result.status in ("fail", "error")}


# -- a package that is right ----------------------------------------------------------------------------------------


def test_a_new_package_passes_every_check_that_can_be_done(package: Callable[..., Path], tmp_path: Path) -> None:
    folder = package()
    done = validate(str(folder), "--json", "--output", str(tmp_path / "out" / "report.json"))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report) == [
        "report_schema_version",
        "target",
        "source_digest",
        "signature",
        "manifest",
        "policy_version",
        "lane",
        "levels_run",
        "results",
        "verdict",
    ]
    assert (report["signature"], report["lane"], report["policy_version"]) == ("openenv.yaml", "local", "v2")
    assert (report["levels_run"], report["verdict"]) == ([1, 2, 3], "pass")
    assert report["manifest"]["reward"]["range"] == [0.0, 1.0]
    by_status: dict[str, set[str]] = {}
    for result in report["results"]:
        assert set(result) == {"check_id", "status", "measured", "evidence", "remediation", "duration_s"}
        by_status.setdefault(result["status"], set()).add(result["check_id"])
    assert by_status["skip"] == NOT_DONE
    assert set(by_status) == {"pass", "skip"}
    undeclared = {"runtime.rubric_introspectable", "runtime.reward_attribution", "runtime.task_declaration_accuracy"}
    assert by_status["pass"] == {rule.id for rule in RULES} - NOT_DONE - undeclared


def test_files_alone_are_checked_without_running_anything(package: Callable[..., Path]) -> None:
    folder = package(("server/app.py", '"""The application', 'raise SystemExit("I was run")\n"""The application'))
    done = validate(str(folder), "--level", "static", "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["verdict"], report["policy_version"]) == (0, "pass", "v1")
    assert report["report_schema_version"] == "1"
    assert [result["check_id"] for result in report["results"]] == [
        "static.manifest",
        "static.layout",
        "static.entry_point",
    ]


def test_skip_build_skips_what_needs_the_package_to_run(package: Callable[..., Path]) -> None:
    results = check(package(("server/app.py", "import argparse", "raise SystemExit")), skip_build=True)
    assert {result.status for name, result in results.items() if name.startswith("runtime.")} == {"skip"}
    assert results["runtime.startup"].evidence[0].startswith("--skip-build")
    assert results["runtime.seed_control"].evidence == ["unmet dependency: runtime.startup"]


def test_checks_that_need_a_failed_one_are_one_line(package: Callable[..., Path]) -> None:
    folder = str(package(("server/app.py", "import argparse", "raise SystemExit")))
    shown = validate(folder, "--skip-build").stdout
    assert " checks were skipped because of it; --verbose lists them\n" in shown
    assert "runtime.seed_control" not in shown
    assert "runtime.seed_control" in validate(folder, "--skip-build", "--verbose").stdout


# -- faults ---------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[tuple[Change, ...], set[str], str]] = {
    "a reward that is no number": (
        ((RULES_FILE, PAYS, 'reward=float("nan")'),),
        {"runtime.reward_well_formed"},
        "nan",
    ),
    "a reward out of range": (
        ((RULES_FILE, PAYS, "reward=5.0"),),
        {"runtime.reward_well_formed"},
        "5.0 is not within 0 and 1",
    ),
    "an observation that does not fit its schema": (
        (
            (
                RULES_FILE,
                "MazeObservation(\n            echoed",
                "MazeObservation.model_construct(\n            echoed",
            ),
            (RULES_FILE, "message_length=length", "message_length=-1, metadata={}"),
        ),
        {"runtime.observation_schema"},
        "message_length: -1 is too small",
    ),
    "steps that are not counted": ((((RULES_FILE, STEP, "")),), {"runtime.state_contract"}, "step_count is 0"),
    "an episode id that is ignored": (
        ((RULES_FILE, "episode_id or str(uuid.uuid4())", "str(uuid.uuid4())"),),
        {"runtime.state_contract"},
        "'validate' was asked for",
    ),
    "chance that ignores the seed": (
        ((RULES_FILE, "MazeObservation(reward=0.0, done=False)", "MazeObservation(echoed_message=str(uuid.uuid4()))"),),
        {"runtime.seed_control", "runtime.episode_determinism"},
        "echoed_message",
    ),
    "chance in a step": (
        ((RULES_FILE, "echoed_message=action.message", "echoed_message=str(uuid.uuid4())"),),
        {"runtime.episode_determinism"},
        "differs in echoed_message",
    ),
    "sessions that share": (
        (
            (RULES_FILE, "    def __init__", "    _seen: list[int] = []\n\n    def __init__"),
            (RULES_FILE, RESET, RESET + "        self._seen.clear()\n"),
            (RULES_FILE, STEP, STEP + "        self._seen.append(1)\n"),
            (RULES_FILE, "message_length=length", "message_length=len(self._seen)"),
        ),
        {"runtime.episode_isolation", "runtime.fork"},
        "played beside another session",
    ),
    "copies that share a file": (
        (
            (RULES_FILE, "import uuid\n", "import os\nimport tempfile\nimport uuid\n"),
            (RULES_FILE, "super().__init__()\n", "super().__init__()\n        self.at = tempfile.mkstemp()[1]\n"),
            (RULES_FILE, RESET, RESET + "        open(self.at, 'w').close()\n"),
            (RULES_FILE, STEP, STEP + "        with open(self.at, 'a') as file:\n            file.write('x')\n"),
            (RULES_FILE, "message_length=length", "message_length=os.path.getsize(self.at)"),
        ),
        {"runtime.fork", "runtime.session_cleanup"},
        "in a copy",
    ),
    "a state that sessions share": (
        (
            (RULES_FILE, "    def __init__", "    shared = State()\n\n    def __init__"),
            (RULES_FILE, RESET, "        MazeEnvironment.shared = State(episode_id=episode_id, step_count=0)\n"),
            (RULES_FILE, STEP, "        self.shared.step_count += 1\n"),
            (RULES_FILE, "return self._state", "return self.shared"),
        ),
        {"runtime.episode_isolation", "runtime.fork"},
        "'neighbour'",
    ),
    "a close() that raises": (
        ((RULES_FILE, "    @property", "    def close(self) -> None:\n        raise OSError\n\n    @property"),),
        {"runtime.session_cleanup"},
        "close() of the environment failed",
    ),
    "files that are left open": (
        (
            (RULES_FILE, "super().__init__()\n", "super().__init__()\n        KEPT.append(open(__file__))\n"),
            (RULES_FILE, "\n\nclass Maze", "\nKEPT = []\n\n\nclass Maze"),
        ),
        {"runtime.session_cleanup"},
        "more files",
    ),
    "a step that raises for an action that fits": (
        ((RULES_FILE, STEP, "        raise RuntimeError('no way')\n"),),
        {"runtime.reward_well_formed"},
        "no way",
    ),
    "an application that cannot be imported": (
        (("server/app.py", "import argparse", "import no_such_module_of_mine"),),
        {"runtime.startup"},
        "no_such_module_of_mine",
    ),
    "tools that are not declared": (
        (("openenv.yaml", "      kind: reward_channel", "      kind: reward_channel\n    declared_tools: [dig]"),),
        {"runtime.tool_declaration_accuracy"},
        "dig",
    ),
    "more memory than is declared": (
        (("openenv.yaml", "memory_mb: 1024", "memory_mb: 8"),),
        {"runtime.resource_bounds"},
        "and 8 are declared",
    ),
}


@pytest.mark.slow_but_for("chance in a step", "a reward that is no number")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_check_and_no_other(name: str, package: Callable[..., Path]) -> None:
    changes, expected, message = FAULTS[name]
    results = check(package(*changes))
    assert failed(results) == expected, results
    evidence = " ".join(line for check_id in expected for line in results[check_id].evidence)
    assert message in evidence
    assert all(results[check_id].remediation for check_id in expected)


@pytest.mark.slow
def test_an_environment_that_hangs_is_given_the_time_that_it_declares(package: Callable[..., Path]) -> None:
    folder = package(
        (RULES_FILE, STEP, "        import threading\n        threading.Event().wait()\n"),
        ("openenv.yaml", "episode_timeout_s: 60.0", "episode_timeout_s: 1.0"),
    )
    results = check(folder)
    assert failed(results) == {"runtime.reward_well_formed"}
    assert "RequestTimeout" in results["runtime.reward_well_formed"].evidence[0]
    assert "an episode" in results["runtime.seed_control"].evidence[0]


@pytest.mark.slow
def test_what_only_another_process_shows_is_found(package: Callable[..., Path]) -> None:
    folder = package(
        (RULES_FILE, "echoed_message=action.message", 'echoed_message=str(hash("x"))'),
        (RULES_FILE, PAYS, 'reward=(hash("x") % 1000) / 2000'),
    )
    results = check(folder, "semantic")
    assert failed(results) == {"semantic.verifier_portability", "semantic.replayability"}
    assert "in another process" in results["semantic.replayability"].evidence[0]


def test_a_reward_for_nothing_leaves_no_gap(package: Callable[..., Path]) -> None:
    results = check(package((RULES_FILE, PAYS, "reward=1.0")), "semantic")
    assert failed(results) == {"semantic.floor_gap"}


@pytest.mark.parametrize(
    ("reward", "evidence"),
    [
        ("0.25 if self.state.step_count == 9 else None", "the first action alone earns 0.25 of 1"),
        pytest.param("None", "no reward in 100 steps; write validation/runtime.json", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_comes_late_is_waited_for(package: Callable[..., Path], reward: str, evidence: str) -> None:
    results = check(package((RULES_FILE, PAYS, f"reward={reward}")), "semantic")
    assert evidence in results["semantic.floor_gap"].evidence[0]


def test_a_server_of_one_session_keeps_its_word(package: Callable[..., Path]) -> None:
    folder = package(
        ("server/app.py", "max_concurrent_envs=64", "max_concurrent_envs=1"),
        (RULES_FILE, "SUPPORTS_CONCURRENT_SESSIONS = True", "SUPPORTS_CONCURRENT_SESSIONS = False"),
    )
    results = check(folder)
    assert failed(results) == set()
    assert results["runtime.episode_isolation"].measured == {"sessions": 1}


# -- actions --------------------------------------------------------------------------------------------------------

ONLY_MAGIC = (
    ("models.py", "from pydantic import Field", "from pydantic import Field, field_validator"),
    (
        "models.py",
        '    message: str = Field(description="The text to send.")\n',
        '    message: str = Field(pattern="^x+y$")\n',
    ),
)


def test_without_an_action_that_fits_nothing_is_said_of_episodes(package: Callable[..., Path]) -> None:
    results = check(package(*ONLY_MAGIC))
    assert failed(results) == set()
    assert results["runtime.episode_determinism"].status == "skip"
    assert "validation/runtime.json" in results["runtime.reward_well_formed"].evidence[0]


def test_the_plan_of_a_package_is_played(package: Callable[..., Path]) -> None:
    folder = package(*ONLY_MAGIC)
    plan = {"plan_schema_version": "1", "reset": {"seed": 3, "episode_id": "e"}, "actions": [{"message": "xxy"}]}
    (folder / "validation").mkdir()
    (folder / "validation" / "runtime.json").write_text(json.dumps(plan))
    results = check(folder)
    assert failed(results) == set()
    assert results["runtime.reward_well_formed"].measured["rewards"] == [pytest.approx(0.3)]
    assert results["runtime.seed_control"].measured["seed"] == 3


BANK = """
from openenv import MCPEnvironment, Observation, tool


class Bank(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None) -> Observation:
        self.coins = 100
        return Observation()

    @tool
    def pay(self, name: str, coins: int) -> int:
        '''Pay coins.'''
        self.coins -= coins
        self.earn(1.0, done=True)
        return self.coins
"""


def test_the_plan_that_is_proposed_for_tools_calls_one_and_passes(tmp_path: Path) -> None:
    (tmp_path / "bank.py").write_text(BANK)
    without = check(tmp_path / "bank.py")["runtime.observation_schema"]
    assert without.status == "skip"
    [text] = without.evidence
    plan = json.loads(text[text.index("{") :])
    assert plan["actions"][0].keys() == {"type", "tool_name", "arguments"}
    assert plan["actions"][0]["arguments"].keys() == {"name", "coins"}
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "runtime.json").write_text(json.dumps(plan))
    assert failed(results := check(tmp_path / "bank.py")) == set()
    assert results["runtime.observation_schema"].status == "pass"


def test_a_plan_that_is_none_is_named(package: Callable[..., Path]) -> None:
    folder = package()
    (folder / "validation").mkdir()
    (folder / "validation" / "runtime.json").write_text('{"plan_schema_version": "1", "actions": []}')
    results = check(folder)
    assert "runtime.json is not a valid plan: actions" in results["runtime.reward_well_formed"].evidence[0]


def test_a_planned_action_that_is_refused_is_a_fault(package: Callable[..., Path]) -> None:
    folder = package()
    plan = {"plan_schema_version": "1", "reset": {"seed": 3, "episode_id": "e"}, "actions": [{"text": "xxy"}]}
    (folder / "validation").mkdir()
    (folder / "validation" / "runtime.json").write_text(json.dumps(plan))
    assert "runtime.reward_well_formed" in failed(check(folder))


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "check_id", "message"),
    [
        ([("openenv.yaml", "validation:", "other:")], "static.manifest", "no validation block"),
        ([("openenv.yaml", "name: maze_env", "title: maze")], "static.manifest", "name: is missing"),
        ([("openenv.yaml", "type: space", "kind: space")], "static.manifest", "kind: unknown key"),
        ([("openenv.yaml", "port: 8000", "port: '8000'")], "static.manifest", "port: "),
        ([("openenv.yaml", "version: 0.1.0", "version: 0.1")], "static.manifest", "write it in quotes: '0.1'"),
        ([("openenv.yaml", "version: 0.1.0", "version: 0.2.0")], "static.manifest", "pyproject.toml says 0.1.0"),
        ([("openenv.yaml", "version: 0.1.0", "version: new")], "static.manifest", "is not a version such as 0.1.0"),
        (
            [("openenv.yaml", "runtime: fastapi", "runtime: node")],
            "static.manifest",
            "'node' is not valid; choose from 'fastapi'",
        ),
        (
            [("openenv.yaml", "spec_version: 1", "spec_version: 3")],
            "static.manifest",
            "spec_version: 3 is not valid; choose from 1",
        ),
        ([("openenv.yaml", "name: maze_env", "name: [")], "static.manifest", "not valid YAML"),
        ([("openenv.yaml", "range: [0.0, 1.0]", "range: [1.0, 0.0]")], "static.manifest", "smaller one first"),
        ([("openenv.yaml", "floor_margin: 0.1", "floor_margin: 0.01")], "static.manifest", "0.1 at least"),
        ([("openenv.yaml", "episode_timeout_s: 60.0", "episode_timeout_s: 9999")], "static.manifest", "3600 at most"),
        ([("openenv.yaml", "cpu: 1.0", "cpus: 1.0")], "static.manifest", "resources.cpu"),
        ([("openenv.yaml", "tags: [demo]", "tags: []")], "static.manifest", "types.tags"),
        ([("openenv.yaml", "kind: reward_channel", "kind: script")], "static.manifest", "entry is for"),
        ([("openenv.yaml", "app: server.app:app", "app: server.apps:app")], "static.layout", "server/apps.py"),
        ([("server/app.py", "def main()", "def run()")], "static.entry_point", "no main()"),
        ([("server/app.py", '__name__ == "__main__"', "True")], "static.entry_point", "does not call main()"),
        ([("server/app.py", "import argparse", "import (")], "static.entry_point", "no Python"),
        ([("pyproject.toml", "server = ", "other = ")], "static.entry_point", "no script"),
    ],
)
def test_a_mistake_in_the_files_is_named(
    changes: list[Change], check_id: str, message: str, package: Callable[..., Path]
) -> None:
    results = check(package(*changes), "static")
    assert results[check_id].status == "fail"
    assert message in " ".join(results[check_id].evidence)
    assert results[check_id].remediation


def test_texts_of_a_package_cannot_steer_the_terminal(package: Callable[..., Path]) -> None:
    folder = package(("openenv.yaml", "runtime: fastapi", 'runtime: "\\e]0;x\\a\\e[2J[bold]\\u202e"'))
    printed = validate(str(folder), "--level", "static").output
    assert not {"\x1b", "\x07", "\u202e"} & set(printed)
    assert "[bold]" in printed


def test_missing_files_and_dependencies_are_named(package: Callable[..., Path]) -> None:
    folder = package(
        ("pyproject.toml", '"openenv>=0.11.0", "uv', '"openenv-maze>=1", "uv'),
        ("pyproject.toml", '"openenv>=0.11.0", ', ""),
    )
    for name in ("server/Dockerfile", "README.md", "server/requirements.txt"):
        (folder / name).unlink()
    results = check(folder, "static")
    assert results["static.layout"].evidence == ["missing: README.md, server/Dockerfile"]
    assert results["static.entry_point"].evidence == ["openenv is not among the dependencies"]


def test_without_promises_the_package_is_played_all_the_same(package: Callable[..., Path]) -> None:
    folder = package(("openenv.yaml", "validation:", "other:"))
    done = validate(str(folder), "--level", "runtime")
    assert done.exit_code == 1
    assert "✗ static.manifest" in done.stdout
    assert "capabilities: {verifier: {kind: reward_channel}}" in done.stdout
    assert "✓ runtime.episode_isolation" in done.stdout
    assert "1 failed" in done.stdout


def test_a_digest_follows_the_sources(package: Callable[..., Path]) -> None:
    folder = package()
    before = source_digest(folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert source_digest(folder) == before
    (folder / "models.py").rename(folder / "model.py")
    assert source_digest(folder) != before


# -- exit codes and options -----------------------------------------------------------------------------------------


def test_a_folder_without_a_manifest_is_no_package(tmp_path: Path) -> None:
    done = validate(str(tmp_path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "has no openenv.yaml" in done.stderr
    assert validate(str(tmp_path / "nowhere")).exit_code == 2
    with pytest.raises(SignatureError):
        check(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ([".", "--url", "http://localhost:1"], 1, "not both"),
        (["http://localhost:1", "--url", "http://localhost:1"], 1, "not two"),
        (["--local", "--url", "http://localhost:1"], 1, "not both"),
        (["--level", "everything"], 3, "static, runtime, semantic"),
        (["--policy", "v9"], 3, "v1, v2"),
        (["--policy", "v1", "--level", "runtime"], 3, "need v2"),
        (["--timeout", "0"], 2, "timeout"),
        (["--provider", "cloud"], 3, "process, docker"),
        (["http://localhost:1", "--provider", "docker"], 1, "already runs"),
    ],
)
def test_options_that_do_not_go_together_are_an_error_of_one_line(arguments: list[str], code: int, error: str) -> None:
    done = validate(*arguments)
    assert done.exit_code == code
    assert error in done.stderr


def test_a_report_that_cannot_be_written_is_an_error_of_the_command(
    package: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = validate(str(package()), "--level", "static", "--output", str(tmp_path / "file" / "report.json"))
    assert done.exit_code == 3
    assert "could not run" in done.stderr


@pytest.mark.slow
def test_a_command_that_is_ended_takes_its_server_and_its_files_with_it(
    package: Callable[..., Path], command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    slow = "        import threading\n        threading.Event().wait()\n"
    running = command("validate", str(package((RULES_FILE, STEP, slow))), TMPDIR=str(tmp_path / "tmp"))
    running.says("runtime.startup")
    assert list((tmp_path / "tmp").iterdir()) != []
    running.process.terminate()
    assert running.process.wait(60) == 143, running.output
    assert list((tmp_path / "tmp").iterdir()) == []
