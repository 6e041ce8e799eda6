"""`openenv serve` has the page unless an option says otherwise; a made token comes with the page's address."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from openenv.server.app import create_app
from program_interpreters import Interpreter
from waiting import wait_until

ENVIRONMENT = """
from openenv import Action, Environment, Observation, State

class Nod(Action):
    times: int = 1

class Still(Environment[Nod, Observation, State]):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()
    def step(self, action, timeout_s=None, **kwargs):
        return Observation()
    @property
    def state(self):
        return State()
"""
APPLICATION = ENVIRONMENT + "\nfrom openenv import create_app\napp = create_app(Still, Nod, Observation)\n"


class Served:
    """A server of `openenv serve` and what it says."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "openenv.cli", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def find(self, pattern: str) -> str | None:
        match = re.search(pattern, "".join(self.said))
        return None if match is None else match.group(1)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def start(tmp_path: Path, ours: Interpreter, wait: Callable[..., None]) -> Iterator[Callable[..., Served]]:
    """Start `openenv serve` on a file or a folder."""
    started: list[Served] = []

    def begin(*arguments: str, setting: str | None = None, target: str = ENVIRONMENT) -> Served:
        (tmp_path / "still.py").write_text(target)
        extra = {} if setting is None else {"ENABLE_WEB_INTERFACE": setting}
        served = Served([str(tmp_path / "still.py"), *arguments], ours.environment(tmp_path, extra))
        started.append(served)
        wait(lambda: served.find(r"(Ctrl-C stops)") is not None or served.process.poll() is not None)
        assert served.process.poll() is None, served.said
        return served

    yield begin
    for served in started:
        served.stop()


@pytest.fixture
def wait() -> Callable[..., None]:
    """Waits for a condition."""
    return lambda condition: wait_until(condition, 60)


def has_page(served: Served) -> bool:
    url = served.find(r"HTTP +(http://\S+)")
    assert url is not None
    status = httpx2.get(f"{url}/web/", trust_env=False, timeout=30).status_code
    assert status in (200, 404)
    assert (served.find(r"Web page +(http\S+/web)") is not None) is (status == 200)
    return status == 200


@pytest.mark.parametrize(
    ("arguments", "setting", "expected"),
    [
        ([], None, True),
        (["--no-web"], None, False),
        ([], "false", False),
        (["--web"], "false", True),
        (["--no-web"], "true", False),
    ],
)
def test_the_page_is_there_unless_it_is_turned_off(
    start: Callable[..., Served], arguments: list[str], setting: str | None, expected: bool
) -> None:
    target = APPLICATION if setting == "true" else ENVIRONMENT
    assert has_page(start(*arguments, setting=setting, target=target)) is expected


def test_a_made_token_comes_with_the_address_of_the_page(
    start: Callable[..., Served], wait: Callable[..., None]
) -> None:
    served = start("--observer-token", "look")
    wait(lambda: served.find(r"(http://\S+/web/#token=\S+)") is not None)
    address = served.find(r"(http://\S+/web/#token=\S+)")
    assert address is not None
    page, token = address.split("#token=")
    with httpx2.Client(base_url=page, trust_env=False, timeout=30) as client:
        assert client.get("page").status_code == 401
        assert client.post("login", json={"token": token}).json() == {"role": "orchestrator"}
        assert client.get("page").json()["role"] == "orchestrator"


def test_the_readme_of_a_folder_is_shown(
    start: Callable[..., Served], tmp_path: Path, wait: Any, ours: Interpreter
) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "openenv.yaml").write_text("name: place\napp: still:app\n")
    (tmp_path / "place" / "README.md").write_text("# A quiet place\n")
    (tmp_path / "place" / "still.py").write_text(APPLICATION)
    served = Served([str(tmp_path / "place")], ours.environment(tmp_path))
    try:
        wait(lambda: served.find(r"(Ctrl-C stops)") is not None)
        url = served.find(r"HTTP +(http://\S+)")
        page = httpx2.get(f"{url}/web/page", trust_env=False, timeout=30).json()
        assert "<h1>A quiet place</h1>" in page["readme_html"]
    finally:
        served.stop()


@pytest.mark.skipif(importlib.util.find_spec("gradio") is not None, reason="Gradio is here")
def test_without_gradio_the_log_says_what_to_install_and_the_standard_page_is_there(
    envs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    app = create_app(envs["Street"], envs["Walk"], envs["View"], gradio_builder=lambda *_: None)
    assert "pip install 'gradio>=" in caplog.text
    assert app.state.openenv_web.arguments.gradio_builder is None


def test_a_gradio_builder_is_not_called_without_a_page(envs: dict[str, Any]) -> None:
    app = create_app(envs["Street"], envs["Walk"], envs["View"], gradio_builder=lambda *_: pytest.fail("called"))
    assert "/web" not in {getattr(route, "path", None) for route in app.routes}
