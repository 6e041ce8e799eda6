"""`openenv serve --reload`: the banner after each start, and clients that learn at once that the sources are broken."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

import http_calls
from openenv import GenericEnvClient
from openenv.errors import ConnectFailed

ENV = """
import os
from openenv import Action, Environment, Observation, State

class Go(Action):
    where: str = "north"

class Seen(Observation):
    place: str = ""

class Walk(Environment[Go, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, **kwargs):
        return Seen(place="GREETING")
    def step(self, action, **kwargs):
        os._exit(3)
    @property
    def state(self):
        return State()
"""
BROKEN = ENV + "\nimport a_module_that_does_not_exist\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "walk.py"
    path.write_text(ENV)
    return path


def answer(url: str) -> httpx2.Response | None:
    try:
        return http_calls.post(f"{url}/reset", json={}, trust_env=False)
    except httpx2.TransportError:
        return None


def greeting(url: str) -> str | None:
    reply = answer(url)
    return None if reply is None or reply.status_code != 200 else str(reply.json()["observation"]["place"])


def refusal(url: str) -> dict[str, Any] | None:
    reply = answer(url)
    return None if reply is None or reply.status_code != 503 else dict(reply.json())


def save(path: Path, text: str) -> None:
    """Replace a file in one go, so that a half-written one is never loaded."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.slow_but_for("in the working folder")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the working folder", "elsewhere"])
def test_the_new_code_is_served_and_introduced_when_a_file_changes(
    command: Callable[..., Any],
    source: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_port: Callable[[], int],
    elsewhere: bool,
) -> None:
    if elsewhere:
        source = tmp_path_factory.mktemp("elsewhere") / "walk.py"
        source.write_text(ENV)
    url = f"http://127.0.0.1:{(port := free_port())}"
    served = command("serve", str(source), "--reload", "--port", str(port), "--max-sessions", "3")
    served.says("Walk is served")
    assert "up to 3, thread runner" in served.output
    assert "are watched" in served.output
    served.wait_for(lambda: greeting(url) == "GREETING")
    save(source, ENV.replace("GREETING", "something longer"))
    served.wait_for(lambda: greeting(url) == "something longer")
    served.says("Walk is served", times=2)
    assert served.stop(signal.SIGTERM) == 0, served.output
    assert "Traceback" not in served.output


def test_while_the_source_is_broken_requests_fail_at_once_with_the_reason(
    command: Callable[..., Any], source: Path, free_port: Callable[[], int]
) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    served = command("serve", "walk.py", "--reload", "--port", str(port))
    served.says("Walk is served")
    save(source, BROKEN)
    answer = served.wait_for(lambda: refusal(url))
    assert answer["code"] == "NOT_LOADED"
    assert "No module named 'a_module_that_does_not_exist'" in answer["detail"]
    with pytest.raises(ConnectFailed, match="a_module_that_does_not_exist") as failed:
        GenericEnvClient(url, connect_timeout_s=600).sync().reset()  # does not wait for another answer
    assert '{"detail"' not in str(failed.value)
    served.says("the next change of a source file starts it again")
    assert f'{source.name}", line {len(BROKEN.splitlines())}, in <module>' in served.output
    assert "walk.py cannot be loaded: ModuleNotFoundError" in served.output
    assert "loading.py" not in served.output
    save(source, ENV)
    served.wait_for(lambda: greeting(url) == "GREETING")
    served.says("Walk is served", times=2)
    assert served.stop(signal.SIGINT) == 130


@pytest.mark.slow
def test_a_long_traceback_is_shown_by_its_last_lines(
    command: Callable[..., Any], source: Path, free_port: Callable[[], int]
) -> None:
    deep = "\n".join(f"def f{number}():\n    return f{number + 1}()" for number in range(30))
    served = command("serve", "walk.py", "--reload", "--port", str(free_port()))
    served.says("Walk is served")
    save(source, f"{deep}\ndef f30():\n    raise ValueError('the deepest')\nf0()\n")
    served.says("the next change of a source file")
    report = served.output.partition("ERROR:")[2]
    assert "in f29" in report
    assert "in f3\n" not in report
    assert "ValueError: the deepest" in report


@pytest.mark.slow
def test_a_server_with_tokens_keeps_to_itself_what_is_wrong_with_its_source(
    command: Callable[..., Any], source: Path, free_port: Callable[[], int]
) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    served = command("serve", "walk.py", "--reload", "--port", str(port), "--token", "open-sesame")
    served.says("Walk is served")
    save(source, BROKEN)
    answer = served.wait_for(lambda: refusal(url))
    assert "does_not_exist" not in answer["detail"]
    assert "log" in answer["detail"]


@pytest.mark.slow
def test_a_server_that_dies_is_reported_and_requests_do_not_wait_for_it(
    command: Callable[..., Any], source: Path, free_port: Callable[[], int]
) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    served = command("serve", "walk.py", "--reload", "--port", str(port))
    served.says("Walk is served")
    with pytest.raises(httpx2.TransportError):
        http_calls.post(f"{url}/step", json={"action": {}}, trust_env=False)
    served.says("has ended with exit code 3")
    assert "exit code 3" in served.wait_for(lambda: refusal(url))["detail"]
    save(source, ENV.replace("GREETING", "again"))
    served.wait_for(lambda: greeting(url) == "again")
    assert served.stop(signal.SIGTERM) == 0


def test_a_mistake_that_is_there_from_the_start_is_reported_and_ends_it(
    command: Callable[..., Any], source: Path
) -> None:
    source.write_text(BROKEN)
    served = command("serve", "walk.py", "--reload", "--port", "0")
    assert served.process.wait(60) == 1
    served.says("Error: walk.py cannot be loaded: ModuleNotFoundError")
