"""`openenv serve` and tokens: made and shown once beyond loopback, taken from options and settings, refused openly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import http_calls
import openenv
from openenv import GenericEnvClient
from openenv.errors import AccessDenied
from openenv.server.access import AccessPolicy, Role
from openenv.server.loading import TargetError
from openenv.server.run import AccessOptions, ServeOptions, environment_server, prepare

ENV = """
from openenv import Action, Environment, Observation, State

class Walk(Environment[Action, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, **kwargs):
        return Observation()
    def step(self, action, **kwargs):
        return Observation()
    @property
    def state(self):
        return State()
"""
APP = """
from walk import Walk
from openenv import Action, Observation, create_app
from openenv.server.access import AccessPolicy
app = create_app(Walk, Action, Observation, access=AccessPolicy(orchestrator="built-in"))
"""
BEYOND = "127.1"  # taken for an address that others reach, since it is not written as one of loopback, which it is


def status(served: Any, token: str | None = None, path: str = "/schema") -> int:
    """What a server answers to a request with that token."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return http_calls.get(f"{served.url}{path}", headers=headers, trust_env=False).status_code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "walk.py").write_text(ENV)
    (tmp_path / "guarded.py").write_text(APP)
    return tmp_path


@pytest.fixture
def started(folder: Path, command: Callable[..., Any]) -> Callable[..., Any]:
    """Start `openenv serve` on a free port."""

    def start(*arguments: str, **variables: str) -> Any:
        given = {"COLUMNS": "160", **variables}
        return command("serve", *arguments, "--port", "0", patience_s=30.0, **given)

    return start


def test_beyond_loopback_a_token_is_made_and_shown_once_with_a_line_that_works(started: Callable[..., Any]) -> None:
    served = started("walk.py", "--host", BEYOND)
    line = served.finds(r"(with GenericEnvClient\(.*)")
    token = served.finds(r'token="([\w-]+)"')
    assert len(token) == 32
    assert served.output.count(token) == 3  # in the frame, in the address of the page and in the line
    assert "without authentication" not in served.output
    assert (status(served), status(served, token), status(served, path="/health")) == (401, 200, 200)
    run = [sys.executable, "-c", f"from openenv import GenericEnvClient\n{line}"]
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment = {**kept, "PYTHONPATH": str(Path(openenv.__file__).parents[1])}
    assert "StepResult" in subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    with pytest.raises(AccessDenied):
        GenericEnvClient(served.url).sync().connect()


def test_a_quiet_server_beyond_loopback_says_its_token(started: Callable[..., Any]) -> None:
    served = started("walk.py", "--host", BEYOND, "--log-level", "warning")
    token = served.finds(r"token: ([\w-]+)\n")
    assert (status(served), status(served, token)) == (401, 200)
    assert len(served.output.splitlines()) == 2


def test_a_token_of_the_settings_is_used_and_not_shown(started: Callable[..., Any]) -> None:
    served = started("walk.py", "--host", BEYOND, OPENENV_TOKEN="from-outside")
    served.finds(r"(Try it)")
    assert (status(served), status(served, "from-outside")) == (401, 200)
    served.finds(r'(token="\.\.\.")')
    assert "from-outside" not in served.output
    assert "as configured" in served.output


def test_no_token_serves_openly_with_a_warning(started: Callable[..., Any]) -> None:
    served = started("walk.py", "--host", BEYOND, "--no-token")
    served.finds(r"(open to others, without authentication)")
    assert status(served) == 200


def test_no_token_makes_none_but_keeps_what_is_configured(started: Callable[..., Any]) -> None:
    served = started("walk.py", "--host", BEYOND, "--no-token", OPENENV_TOKEN="kept")
    assert (status(served), status(served, "kept")) == (401, 200)


def test_options_give_tokens_to_roles(started: Callable[..., Any]) -> None:
    served = started("walk.py", "--token", "boss,deputy", "--agent-token", "robot", "--observer-token", "eyes")
    assert [status(served, token) for token in (None, "boss", "deputy", "eyes", "robot")] == [401, 200, 200, 200, 403]
    assert "boss" not in served.output


def test_with_reload_the_token_is_printed_and_valid(started: Callable[..., Any]) -> None:
    served = started("walk.py", "--host", BEYOND, "--reload")
    token = served.finds(r"Token +([\w-]{20,})")
    assert (status(served), status(served, token)) == (401, 200)


def test_no_token_and_a_token_do_not_go_together(started: Callable[..., Any]) -> None:
    served = started("walk.py", "--no-token", "--token", "x")
    assert served.process.wait(30) == 2
    served.finds(r"(contradicts the other token)")


# -- which tokens count ---------------------------------------------------------------------------------------------


def policy_of(target: str, **access: Any) -> AccessPolicy:
    server = environment_server(prepare(target, ServeOptions(access=AccessOptions(**access))))
    assert server is not None
    return server.access


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("walk", "guarded"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("OPENENV_TOKEN", "OPENENV_AGENT_TOKEN", "OPENENV_OBSERVER_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("here")
def test_an_option_comes_before_the_application_and_that_before_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", "setting")
    assert policy_of("walk.py").role("setting") is Role.ORCHESTRATOR
    own = policy_of("guarded.py", spare_token="spare")
    assert [own.role(token) for token in ("built-in", "setting", "spare")] == [Role.ORCHESTRATOR, None, None]
    given = policy_of("guarded.py", token="option")
    assert [given.role(token) for token in ("option", "built-in")] == [Role.ORCHESTRATOR, None]
    mixed = policy_of("walk.py", agent_token="robot", spare_token="spare")
    assert [mixed.role(token) for token in ("robot", "setting", "spare")] == [Role.AGENT, Role.ORCHESTRATOR, None]


@pytest.mark.usefixtures("here")
def test_a_spare_token_is_for_a_server_without_an_orchestrator() -> None:
    assert policy_of("walk.py").is_open
    assert policy_of("walk.py", spare_token="spare").role("spare") is Role.ORCHESTRATOR
    assert policy_of("walk.py", agent_token="robot", spare_token="spare").role("spare") is Role.ORCHESTRATOR
    with pytest.raises(TargetError, match="cannot be both"):
        policy_of("walk.py", token="x", agent_token="x")


def test_the_largest_message_is_an_option(started: Callable[..., Any]) -> None:
    served = started("walk.py", "--max-message-mb", "0.001")
    for size, status in [(500, 200), (2000, 413)]:
        answer = http_calls.post(f"{served.url}/reset", json={"text": "x" * size}, trust_env=False)
        assert answer.status_code == status
