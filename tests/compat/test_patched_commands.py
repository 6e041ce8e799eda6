"""Existing tests patch the Hub's names in `openenv.cli.commands.push` and `fork`; our commands use them from there."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from typer.testing import CliRunner

from openenv.cli.__main__ import app
from openenv.cli.commands import push as published
from openenv.cli.init import Names, write_package
from openenv.packaging.hub.spaces import Spaces

errors = pytest.importorskip("huggingface_hub.errors")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    write_package(Names.of("maze_env"), tmp_path / "maze_env")
    return tmp_path / "maze_env"


@pytest.fixture(params=["push", "fork"])
def command(request: pytest.FixtureRequest, package: Path) -> list[str]:
    return ["push", str(package)] if request.param == "push" else ["fork", "owner/maze_env"]


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """The names that suites patch, in the module of the command under test."""
    module = "fork" if "command" in request.fixturenames and "fork" in request.node.name else "push"
    with (
        patch(f"openenv.cli.commands.{module}.whoami") as whoami,
        patch(f"openenv.cli.commands.{module}.login") as login,
        patch(f"openenv.cli.commands.{module}.HfApi") as api_class,
    ):
        whoami.return_value = {"name": "testuser"}
        login.return_value = None
        yield SimpleNamespace(whoami=whoami, login=login, api_class=api_class, api=api_class.return_value)


def test_a_push_asks_the_patched_hub(package: Path, hub: SimpleNamespace) -> None:
    files: list[str] = []
    hub.api.upload_folder.side_effect = lambda **named: files.extend(os.listdir(named["folder_path"]))
    options = ["--private", "-e", "SIZE=9", "--secret", "KEY=hidden"]
    result = CliRunner().invoke(app, ["push", str(package), *options])
    assert result.exit_code == 0, result.output
    assert hub.whoami.called
    assert "token" not in hub.api_class.call_args.kwargs
    created = hub.api.create_repo.call_args.kwargs
    assert (created["repo_id"], created["private"], created["exist_ok"]) == ("testuser/maze_env", True, True)
    assert "space_hardware" not in created
    hub.api.add_space_variable.assert_called_once_with(repo_id="testuser/maze_env", key="SIZE", value="9")
    hub.api.add_space_secret.assert_called_once_with(repo_id="testuser/maze_env", key="KEY", value="hidden")
    assert "hidden" not in result.output
    assert {"Dockerfile", "README.md", "openenv.yaml"} <= set(files)
    assert hub.api.upload_folder.call_args.kwargs["repo_id"] == "testuser/maze_env"


def test_a_fork_asks_the_patched_hub() -> None:
    with (
        patch("openenv.cli.commands.fork.whoami", return_value=SimpleNamespace(username="testuser")),
        patch("openenv.cli.commands.fork.HfApi") as api_class,
    ):
        result = CliRunner().invoke(app, ["fork", "owner/maze_env", "--private", "--set-env", "SIZE=9"])
        assert result.exit_code == 0, result.output
    copied: dict[str, Any] = api_class.return_value.duplicate_space.call_args.kwargs
    assert (copied["from_id"], copied["to_id"], copied["private"]) == ("owner/maze_env", "testuser/maze_env", True)
    assert (copied["hardware"], copied["variables"]) == ("cpu-basic", [{"key": "SIZE", "value": "9"}])


def test_any_error_of_the_patched_hub_is_a_message(command: list[str], hub: SimpleNamespace) -> None:
    hub.whoami.side_effect = Exception("no network")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "Authentication failed: no network" in result.output
    hub.whoami.side_effect, hub.whoami.return_value = None, {}
    assert "username" in CliRunner().invoke(app, command).output
    assert not hub.login.called, "standard input is no terminal"


def test_a_terminal_without_a_token_logs_in(hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.whoami.side_effect = [errors.LocalTokenNotFoundError("no token"), {"name": "testuser"}]
    other_end, terminal = pty.openpty()
    with os.fdopen(other_end), os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert Spaces(published).username == "testuser"
    hub.login.assert_called_once_with()


def test_patched_names_are_those_of_the_hub_again() -> None:
    import huggingface_hub

    with patch("openenv.cli.commands.push.HfApi", MagicMock()):
        pass
    assert published.HfApi is huggingface_hub.HfApi


def test_a_module_of_a_command_does_not_load_the_hub() -> None:
    line = "import sys, openenv.cli.push, openenv.cli.commands.fork; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
