"""`openenv validate URL`: a running server, of this package or of the published one."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from environments import Idle
from openenv import Action, Observation, State
from openenv.cli.__main__ import build
from openenv.server.app import create_app
from portable_package import write_portable_package
from program_interpreters import Interpreter
from servers import Serve

ENDPOINTS = [
    "openapi_version_available",
    "health_endpoint",
    "metadata_endpoint",
    "schema_endpoint",
    "mcp_endpoint",
    "mode_endpoint_consistency",
]
SESSIONS = [
    "runtime.reward_well_formed",
    "runtime.observation_schema",
    "runtime.state_contract",
    "runtime.seed_control",
    "runtime.episode_determinism",
    "runtime.episode_isolation",
    "runtime.fork",
    "runtime.step_before_reset",
    "runtime.invalid_action",
    "runtime.session_cleanup",
]


class Push(Action):
    far: int


class Cart(Idle):
    """Pays for pushes, less and less."""

    pays = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._state = State(episode_id=episode_id)
        return Observation()

    def step(self, action: Push, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self._state.step_count += 1
        return Observation(reward=self.pays / self._state.step_count, done=self._state.step_count == 3)

    @property
    def state(self) -> State:
        return self._state


def validate(*arguments: str) -> Any:
    return CliRunner().invoke(build(["validate"]), ["validate", *arguments], env={"COLUMNS": "200"})


def app(env: type = Cart, **options: Any) -> Any:
    return create_app(env, Push, Observation, env_name="cart", max_concurrent_envs=8, **options)


def test_a_server_of_ours_passes_and_its_sessions_too(serve: Serve, tmp_path: Path) -> None:
    url = serve(app()).url
    done = validate(url + "/", "--json", "--timeout", "30", "--output", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert [one["id"] for one in report["criteria"]] == ENDPOINTS + SESSIONS
    assert all(one["passed"] for one in report["criteria"]), report
    assert [one["id"] for one in report["criteria"] if one["required"]] == ENDPOINTS
    assert report["summary"] == {
        "passed_count": 16,
        "total_count": 16,
        "failed_criteria": [],
        "required_passed_count": 6,
        "required_total_count": 6,
    }
    assert (report["mode"], report["standard_profile"], report["passed"]) == ("simulation", "openenv-http/1.x", True)
    assert (report["target"], report["validation_type"]) == (url, "running_environment")


def test_without_sessions_only_the_endpoints_are_asked(serve: Serve) -> None:
    done = validate("--url", serve(app()).url, "--level", "static", "--json", "--timeout", "30")
    assert [one["id"] for one in json.loads(done.stdout)["criteria"]] == ENDPOINTS


def test_what_sessions_show_is_reported_and_decides_nothing(serve: Serve) -> None:
    class Forgetful(Cart):
        def step(self, action: Push, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            return Observation(reward=1.0)

    done = validate(serve(app(Forgetful)).url, "--timeout", "30")
    assert done.exit_code == 0
    assert "! runtime.state_contract" in done.stdout
    assert "step_count is 0" in done.stdout
    assert "fix:" in done.stdout
    assert "Verdict: warn" in done.stdout


def test_a_server_in_production_has_no_episodes_to_check(serve: Serve) -> None:
    done = validate(serve(app(mode="production")).url, "--json", "--timeout", "30")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["mode"]) == (0, "production")
    assert [one["id"] for one in report["criteria"]] == ENDPOINTS


def test_a_server_that_asks_for_a_token_gets_one(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", "secret")
    secured = app()
    monkeypatch.delenv("OPENENV_TOKEN")
    url = serve(secured).url
    refused = validate(url, "--timeout", "30")
    assert refused.exit_code == 1
    assert "asks for a token" in refused.stdout
    accepted = validate(url, "--token", "secret", "--timeout", "30")
    assert accepted.exit_code == 0, accepted.stdout
    assert "16 passed" in accepted.stdout


def test_without_a_server_all_six_criteria_fail(free_port: Callable[[], int]) -> None:
    done = validate(f"http://127.0.0.1:{free_port()}", "--json", "--timeout", "5")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert report["summary"]["failed_criteria"] == ENDPOINTS
    assert (report["mode"], report["standard_version"]) == ("unknown", "unknown")
    assert report["standard_profile"] == "openenv-http/unknown"


def test_a_server_of_something_else_fails_with_its_answers() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"info": {"version": 7}, "paths": {"/reset": {}}, "status": "ill"}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        done = validate(f"http://127.0.0.1:{server.server_address[1]}", "--json", "--timeout", "30")
        server.shutdown()
        thread.join(30)
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert report["summary"]["failed_criteria"] == ENDPOINTS
    by_id = {one["id"]: one for one in report["criteria"]}
    assert by_id["health_endpoint"]["actual"] == {"status_code": 200, "status": "ill"}
    assert "no JSON" in by_id["mcp_endpoint"]["details"]
    assert by_id["mode_endpoint_consistency"]["actual"]["/step"] is False


# -- beside the published package -----------------------------------------------------------------------------------


def shape(value: Any) -> Any:
    """What a program that reads a report relies on: keys, ids, statuses; not the words."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items() if key not in ("description", "duration_s", "evidence")}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return value


@pytest.mark.slow
@pytest.mark.published
def test_both_judge_a_published_server_alike(
    tmp_path: Path, published: Interpreter, free_port: Callable[[], int], serve_package: Callable[..., Any]
) -> None:
    write_portable_package(tmp_path / "maze_env")
    theirs = [str(Path(published.python).with_name("openenv")), "validate"]
    with serve_package(published, tmp_path, free_port()) as url:
        mine = validate(url, "--json", "--timeout", "60")
        reference = subprocess.run(
            [*theirs, url, "--json", "--timeout", "60"],
            env=published.environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert (mine.exit_code, reference.returncode) == (0, 0), mine.stdout
    ours, other = json.loads(mine.stdout), json.loads(reference.stdout)
    assert all(one["passed"] for one in ours["criteria"]), ours
    assert [one["id"] for one in ours["criteria"]][6:] == SESSIONS
    for report in (ours, other):
        report.pop("summary")
        del report["criteria"][6:]
        for one in report["criteria"]:
            one.pop("expected")
            one.pop("actual")
    assert shape(ours) == shape(other)
    reference = subprocess.run(
        [*theirs, str(tmp_path / "maze_env"), "--json", "--skip-build"],
        env=published.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    other = json.loads(reference.stdout)
    mine = validate(str(tmp_path / "maze_env"), "--json", "--skip-build")
    ours = json.loads(mine.stdout)
    assert (mine.exit_code, ours["verdict"]) == (reference.returncode, other["verdict"])
    assert list(ours) == list(other)
    assert ours["manifest"] == other["manifest"]
    assert ours["results"][0]["measured"] == other["results"][0]["measured"]
    ids = [{one["check_id"]: one["status"] for one in report["results"]} for report in (ours, other)]
    assert ids[1].items() <= ids[0].items()
    assert re.fullmatch(r"[0-9a-f]{64}", ours["source_digest"])
