"""The catalog of endpoints: what is given comes first, and the operator's keys go to the operator's addresses only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opencode_env.server.catalog import (
    ENDPOINT_KINDS,
    catalog_summary,
    resolve_endpoint,
    resolve_for_caller,
    with_version,
)
from opencode_env.server.settings import ServerSettings

KEYS = {"OPENAI_API_KEY": "sk-operator", "HF_ROUTER_API_KEY": "hf-operator", "VLLM_URL": "http://gpu:8000"}


def test_there_are_three_endpoints_of_the_operator() -> None:
    assert ENDPOINT_KINDS == ("vllm", "openai", "hf_router")


@pytest.mark.parametrize(
    ("kind", "base_url", "key", "model", "is_thinking_off"),
    [
        ("vllm", "http://gpu:8000/v1", "intercepted", "Qwen/Qwen3.5-4B", True),
        ("openai", "https://api.openai.com/v1", "sk-operator", "gpt-4o-mini", False),
        (
            "hf_router",
            "https://router.huggingface.co/v1",
            "hf-operator",
            "Qwen/Qwen3-4B-Instruct-2507:nscale",
            False,
        ),
    ],
)
def test_defaults_fill_what_is_not_given(kind: str, base_url: str, key: str, model: str, is_thinking_off: bool) -> None:
    endpoint = resolve_endpoint(kind, environ=KEYS)
    assert (endpoint.kind, endpoint.base_url, endpoint.api_key, endpoint.model) == (kind, base_url, key, model)
    assert endpoint.disable_thinking_default is is_thinking_off
    assert key == "intercepted" or key not in repr(endpoint)


def test_a_variable_comes_before_the_default_and_an_argument_before_both() -> None:
    environ = {**KEYS, "OPENAI_MODEL": "gpt-x", "OPENAI_BASE_URL": "http://proxy"}
    endpoint = resolve_endpoint("openai", environ=environ)
    assert (endpoint.base_url, endpoint.model) == ("http://proxy/v1", "gpt-x")
    explicit = resolve_endpoint("openai", base_url="http://mine/v1/", api_key="k", model="m", environ=environ)
    assert (explicit.base_url, explicit.api_key, explicit.model) == ("http://mine/v1", "k", "m")


def test_the_variables_of_the_process_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_URL", "http://late")
    assert resolve_endpoint("vllm").base_url == "http://late/v1"


@pytest.mark.parametrize(
    ("kind", "text"),
    [("azure", "unknown endpoint kind"), ("openai", "no api_key"), ("hf_router", "no api_key"), ("vllm", "VLLM_URL")],
)
def test_what_is_missing_is_named(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve_endpoint(kind, environ={})


def test_a_caller_cannot_send_the_operators_key_elsewhere() -> None:
    with pytest.raises(ValueError, match="no api_key for 'openai' at http://evil"):
        resolve_for_caller("openai", base_url="http://evil/v1", environ=KEYS)
    own = resolve_for_caller("openai", base_url="http://evil/v1", api_key="mine", environ=KEYS)
    assert own.api_key == "mine"
    same = resolve_for_caller("openai", base_url="https://api.openai.com", environ=KEYS)
    assert same.api_key == "sk-operator"
    open_to_all = resolve_for_caller("vllm", base_url="http://other", environ=KEYS)
    assert open_to_all.api_key == "intercepted"
    assert resolve_for_caller("openai", environ=KEYS).api_key == "sk-operator"


def test_the_summary_has_no_keys() -> None:
    summary = catalog_summary(KEYS)
    assert [entry["kind"] for entry in summary] == [*ENDPOINT_KINDS, "scripted"]
    assert all(entry["is_ready"] for entry in summary)
    assert "operator" not in str(summary)
    assert [entry["is_ready"] for entry in catalog_summary({})] == [False, False, False, True]


@pytest.mark.parametrize("url", ["http://h", "http://h/", "http://h/v1", "http://h/v1/"])
def test_an_address_ends_in_its_version_once(url: str) -> None:
    assert with_version(url) == "http://h/v1"


# -- settings -------------------------------------------------------------------------------------------------------


def test_settings_come_from_what_is_passed_in() -> None:
    settings = ServerSettings.from_environ(
        {"MAX_CONCURRENT_ENVS": "9", "OPENENV_SANDBOX": "docker", "E2B_API_KEY": "e"}
    )
    assert (settings.max_concurrent_envs, settings.sandbox, settings.e2b_api_key) == (9, "docker", "e")
    assert "'e'" not in repr(settings)
    default = ServerSettings.from_environ({})
    assert (default.max_concurrent_envs, default.sandbox, default.e2b_api_key, default.store) == (
        4,
        "local",
        None,
        None,
    )


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_number_of_sessions_must_be_one(text: str) -> None:
    with pytest.raises(ValueError, match="MAX_CONCURRENT_ENVS"):
        ServerSettings.from_environ({"MAX_CONCURRENT_ENVS": text})


@pytest.mark.parametrize(
    ("environ", "asked", "template", "chosen"),
    [
        ({}, "", "", "local"),
        ({"OPENENV_SANDBOX": "docker"}, "", "", "docker"),
        ({"OPENENV_SANDBOX": "docker"}, "local", "", "local"),
        ({"E2B_API_KEY": "k"}, "", "", "local"),
        ({"E2B_API_KEY": "k"}, "", "opencode-rl", "e2b"),
        ({}, "", "opencode-rl", "local"),
        ({"E2B_API_KEY": "k"}, "local", "opencode-rl", "local"),
        ({"OPENENV_SANDBOX": "process"}, "process", "", "process"),
    ],
)
def test_the_sandbox_is_the_one_asked_for_or_the_operators(
    environ: dict[str, str], asked: str, template: str, chosen: str
) -> None:
    assert ServerSettings.from_environ(environ).choose_sandbox(asked, template) == chosen


def test_a_caller_cannot_choose_to_have_no_isolation() -> None:
    with pytest.raises(ValueError, match="unknown sandbox 'process'"):
        ServerSettings.from_environ({}).choose_sandbox("process", "")


@pytest.mark.slow
def test_importing_the_application_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OPENAI_API_KEY=from-a-file\n", encoding="utf-8")
    code = (
        "import os; before = dict(os.environ)\n"
        "import opencode_env.server.app as served\n"
        "assert dict(os.environ) == before\n"
        "import sys; assert 'gradio' not in sys.modules and 'e2b' not in sys.modules\n"
        "print(len([route for route in served.app.routes if route.path == '/web']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=_environ(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_clients_need_no_server() -> None:
    code = (
        "import sys\n"
        "from opencode_env import OpenCodeConfig, OpenCodeEnv, OpenCodeTask, RolloutResult\n"
        "assert not {'fastapi', 'uvicorn', 'fastmcp', 'gradio', 'e2b'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    import opencode_env

    names = (
        "OpenCodeEnv CallToolAction ListToolsAction CommandResult OpenCodeState RolloutResult RolloutTurn "
        "OpenCodeConfig OpenCodeSession OpenCodeSessionFactory OpenCodeTask Provider E2BSandboxBackend "
        "HFSandboxBackend OpenCodeAdapter SandboxBackend SandboxHandle"
    )
    assert sorted(opencode_env.__all__) == sorted(names.split())
    for name in names.split():
        assert getattr(opencode_env, name) is not None


def _environ() -> dict[str, str]:
    import openenv

    folders = [str(Path(__file__).parents[2]), str(Path(openenv.__file__).parents[1])]
    left_out = {"ENABLE_WEB_INTERFACE", "OPENENV_SANDBOX"}
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    return {**kept, "PYTHONPATH": os.pathsep.join(folders)}
