"""`inspect eval` and `inspect view` themselves, on Gridworld and on a coding task; `make test-inspect` sets them up."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from waiting import wait_until

pytest.importorskip("inspect_ai", reason="it has an environment of its own: make test-inspect")

from gridworld_env.server.app import app as gridworld_app
from openenv.adapters.inspect import write_inspect_logs
from openenv.rollout import RolloutStore
from openenv.testing import serve
from stored_rollouts import add_square

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SNIPPETS = Path(__file__).parents[3] / "docs_src"
INSPECT = str(Path(sys.executable).parent / "inspect")
TASK = """
instruction: Write hello into greeting.txt.
solution: echo hello > greeting.txt
verify: grep -qx hello greeting.txt
"""


def environment() -> dict[str, str]:
    """Return the variables of a child process.

    Inspect's mock model counts tokens with a table that it downloads; the package litellm has a copy.
    """
    package = importlib.util.find_spec("litellm")
    tables = {}
    if package is not None and package.origin is not None:
        folder = Path(package.origin).parent / "litellm_core_utils" / "tokenizers"
        tables = {"TIKTOKEN_CACHE_DIR": str(folder)}
    return {**os.environ, **tables}


def inspect_eval(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [INSPECT, "eval", *words, "--model", "mockllm/model", "--log-dir", str(folder), "--display", "plain"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@contextmanager
def inspect_view(folder: Path) -> Iterator[httpx2.Client]:
    """Run `inspect view` until the block ends; yields a client of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [INSPECT, "view", "start", "--log-dir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    headers = {"X-Inspect-View-Request": "true"}
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30, trust_env=False) as client:

            def answers() -> bool:
                assert process.poll() is None, "inspect view ended"
                with contextlib.suppress(httpx2.HTTPError):
                    return client.get("/").status_code > 0
                return False

            wait_until(answers, 60, "inspect view does not answer", every_s=0.2)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def viewed(client: httpx2.Client) -> list[dict[str, Any]]:
    """Return all logs as the viewer's page fetches them."""
    assert "<html" in client.get("/").text
    files = client.get("/api/log-files").raise_for_status().json()["files"]
    return [
        json.loads(client.get(f"/api/logs/{quote(file['name'], safe='')}").raise_for_status().text) for file in files
    ]


def test_inspect_evaluates_gridworld_and_shows_it(tmp_path: Path) -> None:
    with serve(gridworld_app) as served:
        words = ("-T", f"url={served.url}", "-T", "seeds=2", "-T", "max_turns=2", "-T", "system=Find the goal.")
        done = inspect_eval("openenv/served_env", *words, folder=tmp_path)
    assert "env_reward" in done.stdout
    with inspect_view(tmp_path) as client:
        [log] = viewed(client)
    assert log["status"] == "success"
    assert log["eval"]["task"] == "openenv/served_env"
    assert [sample["id"] for sample in log["samples"]] == ["seed-0", "seed-1"]
    for sample in log["samples"]:
        assert sample["messages"][0]["content"] == "Find the goal."
        assert "Default output from mockllm" in json.dumps(sample["messages"])
        assert sample["scores"]["env_reward"]["metadata"]["status"] == "truncated"


def test_inspect_evaluates_a_coding_task_and_shows_it(tmp_path: Path) -> None:
    task = tmp_path / "hello.yaml"
    task.write_text(TASK)
    inspect_eval("openenv/rollout", "-T", f"tasks={task}", "-T", "agent=oracle", folder=tmp_path / "logs")
    with inspect_view(tmp_path / "logs") as client:
        [log] = viewed(client)
    assert log["status"] == "success"
    [sample] = log["samples"]
    assert sample["scores"]["env_reward"]["value"] == 1.0
    assert sample["store"]["openenv"]["outcome"]["verify_results"][0]["exit_code"] == 0


def test_the_example_of_the_guide_prints_what_it_should(tmp_path: Path) -> None:
    with serve(gridworld_app) as served:
        command = [sys.executable, str(SNIPPETS / "use_inspect.py"), served.url, str(tmp_path)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.endswith("{'mean': 0.0, 'stderr': 0.0}\n"), done.stdout + done.stderr


def test_inspect_lists_what_the_package_registers() -> None:
    script = (
        "from inspect_ai._util.registry import registry_lookup\n"
        "for kind, name in (('task', 'served_env'), ('task', 'rollout'), ('solver', 'play_env'),\n"
        "                   ('solver', 'run_agent'), ('scorer', 'env_reward')):\n"
        "    assert registry_lookup(kind, f'openenv/{name}') is not None, name\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_stored_rollouts_open_in_the_viewer(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "store") as store:
        add_square(store, "r1", folder=tmp_path)
        write_inspect_logs(store, tmp_path / "logs" / "rollouts.eval")
    with inspect_view(tmp_path / "logs") as client:
        [log] = viewed(client)
    assert log["samples"][0]["id"] == "square"
    assert log["results"]["scores"][0]["metrics"]["mean"]["value"] == pytest.approx(2 / 3)
