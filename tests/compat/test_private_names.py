"""Private names, texts and requirements that public code relies on: both packages give the same answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from program_interpreters import Interpreter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

PROGRAM = """
import asyncio, json, sys, tempfile
from pathlib import Path
from openenv.core import GenericEnvClient
from openenv.core.harness import ResourceSession, SessionMCPBridge, ToolResult, VerifyResult
from openenv.core.harness.collect import RolloutSerializer, build_dataset_readme
from openenv.core.env_server.mcp_types import Tool

facts = {}

async def client():
    env = GenericEnvClient(base_url=sys.argv[1], connect_timeout_s=7.0)
    facts["before"] = [env._ws is None, env._connect_timeout]
    env._connect_timeout = 60.0
    await env.connect()
    facts["connected"] = env._ws is not None
    reset = await env._send_and_receive({"type": "reset", "data": {"seed": 1, "episode_id": "mine"}})
    state = await env._send_and_receive({"type": "state"})
    facts["messages"] = [reset["type"], sorted(reset["data"]), state["type"], state["data"]["episode_id"]]
    await env.close()
    facts["after"] = env._ws is None

asyncio.run(client())
doc = GenericEnvClient.__init__.__doc__.lower()
facts["doc"] = [word in doc for word in ("mode", "simulation", "production")]

class Session(ResourceSession):
    def initial_messages(self): return []
    def list_tools(self): return [Tool(name="add", description="Add.", input_schema={"type": "object"})]
    def call_tool(self, name, arguments):
        if name == "add": return ToolResult(data=3, done=True)
        raise {"gone": KeyError("Unknown tool: gone"), "bad": ValueError("bad a")}.get(name, RuntimeError("broke"))
    def verify(self, transcript, final_state=None): return VerifyResult(env_reward=1.0)
    def close(self): pass

bridge = SessionMCPBridge(Session())
facts["session"] = type(bridge.session).__name__
requests = [{"method": "tools/list"}, {"method": "nothing"}, {"method": "tools/call", "params": {}}]
requests += [{"method": "tools/call", "params": {"name": name}} for name in ("add", "reset", "gone", "bad", "worse")]
answers = [bridge.handle_request({"jsonrpc": "2.0", "id": 1, **each}) for each in requests]
answers.append(bridge.handle_request({"id": 1, "method": "tools/list"}))
facts["bridge"] = [
    [a["error"]["code"], a["error"]["message"]] if a.get("error") else sorted(a["result"]) for a in answers
]

folder = Path(tempfile.mkdtemp())
(folder / "results.jsonl").write_text(json.dumps({"episode_id": "e", "messages": [], "reward": 1.0}) + "\\n")
RolloutSerializer(folder).write_metadata({"model": "m"})
card = build_dataset_readme(folder)
facts["card"] = [text in card for text in ("OpenEnv rollouts", "Episodes:** 1", "Schema", "`model`", "split: train")]
print(json.dumps(facts))
"""


def facts(interpreter: Interpreter, url: str, folder: Path) -> dict[str, Any]:
    command = [interpreter.python, "-c", PROGRAM, url]
    done = subprocess.run(
        command, env=interpreter.environment(folder), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (interpreter.name, done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_private_names_and_texts_are_those_of_the_published_package(
    ours: Interpreter, published: Interpreter, server: Callable[..., Any], tmp_path: Path
) -> None:
    url = server(ours, MAX_CONCURRENT_ENVS="64").url
    expected = facts(published, url, tmp_path)
    assert expected["doc"] == [True, True, True]
    assert expected["card"] == [True] * 5
    assert expected["before"] == [True, 7.0]
    assert facts(ours, url, tmp_path) == expected


PUSH = """
import inspect, json, sys
from pathlib import Path
from unittest.mock import MagicMock
import httpx
import huggingface_hub
from huggingface_hub.errors import RepositoryNotFoundError
from typer.testing import CliRunner

calls = {"create_repo": [], "upload_folder": []}
signatures = {name: inspect.signature(getattr(huggingface_hub.HfApi, name)) for name in calls}
missing = RepositoryNotFoundError("no", response=httpx.Response(404, request=httpx.Request("GET", "http://hub")))
api = MagicMock()
api.space_info.side_effect = api.repo_info.side_effect = missing
api.repo_exists.return_value = False
api.whoami.return_value = {"name": "me"}

def record(name):
    def called(*positional, **named):
        calls[name].append(dict(signatures[name].bind(api, *positional, **named).arguments))
        return MagicMock(repo_id="me/room_env")
    return called

for name in calls:
    setattr(api, name, record(name))
huggingface_hub.HfApi = MagicMock(return_value=api)
huggingface_hub.whoami = lambda *_, **__: {"name": "me"}
huggingface_hub.login = lambda *_, **__: None

from openenv.cli.__main__ import app
from openenv.core.harness.collect import RolloutSerializer, push_to_hf_hub

facts = [CliRunner().invoke(app, ["push", sys.argv[1], "--repo-id", "me/room_env"]).exit_code]
RolloutSerializer(sys.argv[2]).results_path.write_text(json.dumps({"episode_id": "e"}) + "\\n")
facts.append(push_to_hf_hub(sys.argv[2], "me/episodes"))
created = [{key: call[key] for key in ("repo_id", "repo_type", "exist_ok")} for call in calls["create_repo"]]
facts += [created, [bool(call.get("private")) for call in calls["create_repo"]]]
facts.append([[call["repo_id"], call["repo_type"]] for call in calls["upload_folder"]])
print(json.dumps(facts))
"""
ROOM = {
    "openenv.yaml": "spec_version: 1\nname: room_env\ntype: space\nruntime: fastapi\napp: server.app:app\nport: 8000\n",
    "pyproject.toml": '[project]\nname = "room_env"\nversion = "0.1.0"\ndependencies = ["openenv[core]>=0.2.0"]\n',
    "README.md": "---\ntitle: Room\nsdk: docker\napp_port: 8000\n---\n# Room\n",
    "server/app.py": "app = None\n",
    "server/Dockerfile": "FROM openenv-base:latest\n",
    **dict.fromkeys(("__init__.py", "client.py", "models.py", "server/__init__.py"), ""),
}


@pytest.mark.parametrize("package", ["ours", pytest.param("published", marks=pytest.mark.slow)])
def test_both_packages_create_the_same_repositories_when_they_push(
    package: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    which: Interpreter = request.getfixturevalue(package)
    folder, episodes = tmp_path / "room_env", tmp_path / "episodes"
    episodes.mkdir()
    for name, text in ROOM.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    command = [which.python, "-c", PUSH, str(folder), str(episodes)]
    env = which.environment(tmp_path, {"HF_TOKEN": "hf_test"})
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    space, dataset = ("me/room_env", "space"), ("me/episodes", "dataset")
    assert json.loads(done.stdout.splitlines()[-1]) == [
        0,
        "https://huggingface.co/datasets/me/episodes",
        [{"repo_id": name, "repo_type": kind, "exist_ok": True} for name, kind in (space, dataset)],
        [False, False],
        [[*space], [*dataset]],
    ]


def test_the_core_extra_and_the_old_name_install_the_packages_that_environments_import(
    published: Interpreter,
) -> None:
    program = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('openenv')))"
    done = subprocess.run([published.python, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    theirs = {canonicalize_name(each.name): each for each in map(Requirement, json.loads(done.stdout))}
    theirs = {name: each for name, each in theirs.items() if each.marker is None}
    project = read_project(ROOT / "pyproject.toml")
    plain, core = (
        {canonicalize_name(Requirement(each).name) for each in lines}
        for lines in (project["dependencies"], project["optional-dependencies"]["core"])
    )
    heavy = {"requests", "httpx", "openai", "huggingface-hub", "gradio"}
    assert heavy <= theirs.keys()
    assert heavy <= core
    assert not heavy & plain
    # Only the published command line itself needs these two.
    assert theirs.keys() - plain - core <= {"tomli", "tomli-w"}
    old = read_project(ROOT / "packages" / "openenv-core" / "pyproject.toml")
    for lines in (old["dependencies"], old["optional-dependencies"]["core"]):
        assert [(Requirement(each).name, Requirement(each).extras) for each in lines] == [("openenv", {"core"})]


def read_project(path: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return project
