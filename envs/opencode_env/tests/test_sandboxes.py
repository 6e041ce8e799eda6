"""Sandboxes of other kinds: E2B's names with and without its package, its template, and one that mounts nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from opencode_env.sandbox import E2BSandboxBackend, SandboxBackend
from opencode_env.server.carried_agent import CarriedOpenCode
from openenv.errors import SandboxUnsupported
from openenv.rollout import Model, Outcome, Task, run_rollout_async
from openenv.sandboxes.base import SandboxSpec
from openenv.sandboxes.local import LocalSandboxes
from openenv.sandboxes.local.sandbox import LocalSandbox
from openenv.testing import Script, ScriptedModel, Turn
from openenv.testing.scripted.agent_scripts import write_file

ENVS = Path(__file__).parents[2]


def test_the_names_of_e2b_are_there_without_its_package() -> None:
    code = (
        "import sys; sys.modules['e2b'] = None\n"
        "from opencode_env.sandbox import E2BBgJob, E2BSandboxBackend, E2BSandboxHandle\n"
        "try:\n"
        "    E2BSandboxBackend(api_key='k')\n"
        "except ImportError as exc:\n"
        "    print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ENVS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout


def test_e2b_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("e2b")
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="E2B_API_KEY"):
        E2BSandboxBackend()
    assert isinstance(E2BSandboxBackend(api_key="k", template="opencode-rl"), SandboxBackend)


def test_a_template_has_all_that_a_rollout_needs() -> None:
    e2b = pytest.importorskip("e2b")
    from opencode_env.sandbox.build_template import CPUS, MEMORY_MB, NAME, describe

    made = e2b.Template.to_dockerfile(describe())
    assert "FROM python:3.12" in made
    for part in ("opencode.ai/install", "interception.py", "/home/user/workdir", "fastapi"):
        assert part in made
    assert (NAME, CPUS, MEMORY_MB) == ("opencode-rl", 2, 2048)


class NoMounts(LocalSandboxes):
    """A backend that cannot show folders of this machine."""

    features = LocalSandboxes.features - {"mounts"}

    def open(self, spec: SandboxSpec | None = None) -> LocalSandbox:
        if spec is not None and spec.mounts:
            raise SandboxUnsupported("no mounts here")
        return super().open(spec)


BAKED = """\
mkdir -p ~/.opencode/bin && cat > ~/.opencode/bin/opencode <<'EOF'
#!/usr/bin/env python3
import json, os, sys, urllib.request
if sys.argv[1] == "run":
    body = {"model": "m", "messages": [{"role": "user", "content": sys.stdin.read()}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
    open("hello.txt", "w").write("hello\\n")
EOF
chmod +x ~/.opencode/bin/opencode
"""


def roll(script: Script, *setup: str) -> Outcome:
    """Run a rollout where nothing can be mounted."""

    async def run(model: ScriptedModel) -> Outcome:
        return await run_rollout_async(
            Task(instruction="write hello.txt", setup=setup, verify=("grep -qx hello hello.txt",)),
            agent=CarriedOpenCode(),
            sandbox=NoMounts(),
            model=Model(**model.model()),
        )

    with ScriptedModel(script) as model:
        return asyncio.run(run(model))


@pytest.mark.usefixtures("local_sandboxes")
def test_where_nothing_can_be_mounted_the_templates_agent_is_used() -> None:
    outcome = roll(Script(turns=(Turn(text="Fine."),)), BAKED)
    assert (outcome.status, outcome.reward, len(outcome.turns)) == ("ok", 1.0, 1), outcome.reason


@pytest.mark.slow  # the whole program is copied
@pytest.mark.usefixtures("local_sandboxes")
def test_where_there_is_none_the_agent_is_carried_inside() -> None:
    outcome = roll(write_file("opencode", "hello.txt", "hello\n"))
    assert (outcome.status, outcome.reward, len(outcome.turns)) == ("ok", 1.0, 2), outcome.reason
