"""The harness: sessions with the real OpenCode, in a user's own sandbox of the narrow shape and in the local one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opencode_env import OpenCodeConfig, OpenCodeSession, OpenCodeSessionFactory, OpenCodeTask, SandboxBackend, harness
from opencode_env.harness import proxy_log_path, proxy_trace_path
from opencode_env.opencode_runtime import SandboxPaths, build_opencode_json, build_run_command
from opencode_env.sandbox.base import ExecResult, SandboxHandle
from openenv.core.harness import (
    LoopOwningSession,
    ResourceSession,
    ResourceSessionFactory,
    TrainableSession,
    VerifyResult,
)
from openenv.core.harness.capture.upstream import training_sampling
from openenv.rollout import Sampling
from openenv.sandboxes import LocalSandboxes
from openenv.testing import HangFailure, Script, ScriptedModel, Turn
from openenv.testing.scripted.agent_scripts import run_command, write_file
from waiting import wait_until

Play = Callable[..., ScriptedModel]
KEY = "sk-the-real-one"
_AGENT_S = 240
HELLO = write_file("opencode", "hello.txt", "hello\n", name="hello")


def never(seconds: float) -> None:
    """Wait for nothing."""


@pytest.fixture
def narrow(folder_backend: Any, opencode: Path) -> Any:
    """A user's own backend, whose sandboxes have OpenCode already."""
    place = folder_backend.home / ".opencode" / "bin"
    place.mkdir(parents=True)
    (place / "opencode").symlink_to(opencode)
    return folder_backend


def config_for(model: ScriptedModel, **more: Any) -> OpenCodeConfig:
    return OpenCodeConfig(base_url=model.url, api_key=KEY, model=model.name, agent_timeout_s=_AGENT_S, **more)


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def agents_files(home: Path) -> str:
    """All text that lies in a sandbox's home, but for OpenCode itself and the trace of the proxy."""
    lines = []
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink() and "/.cache/" not in str(path) and path.stat().st_size < 1_000_000:
            lines.append(path.read_bytes().decode("utf-8", "replace"))
    return "\n".join(lines)


def assert_exact(records: list[dict[str, Any]], model: ScriptedModel) -> None:
    """Each record has the tokens that the model sent, neither more nor less."""
    for record, played in zip(records, model.played(), strict=True):
        assert record["completion_token_ids"] == played.token_ids
        assert record["per_token_logps"] == pytest.approx(played.logprobs)
        assert len(record["completion_tokens"]) == len(played.token_ids) > 0
        assert record["prompt_token_ids"] == played.prompt_ids


def trained_on(session: OpenCodeSession) -> list[dict[str, Any]]:
    """What a trainer gets of a session, in the shape of records; every sampled token is trained on."""
    turns = session.fetch_training_trace().turns
    for turn in turns:
        assert turn.loss_mask == [0] * len(turn.prompt_token_ids) + [1] * len(turn.completion_token_ids)
    return [{**turn.model_dump(), "completion_tokens": turn.completion_token_ids} for turn in turns]


# -- OpenCode's configuration ---------------------------------------------------------------------------------------


def test_the_configuration_names_the_model_in_full_and_by_its_alias() -> None:
    made = build_opencode_json(OpenCodeConfig(base_url="http://host/v1", model="Qwen/Qwen3-8B"))
    assert made["model"] == "intercepted/Qwen3-8B"
    assert made["provider"]["intercepted"]["models"]["Qwen3-8B"]["id"] == "Qwen/Qwen3-8B"
    assert made["provider"]["intercepted"]["options"]["baseURL"] == "http://host/v1"
    assert made["tools"] == {"webfetch": False, "question": False}
    default = build_opencode_json(OpenCodeConfig(base_url="http://host/v1"))
    assert (default["model"], list(default["provider"]["intercepted"]["models"])) == ("intercepted/model", ["model"])


def test_what_is_extra_is_laid_over_the_configuration() -> None:
    config = OpenCodeConfig(
        base_url="http://host",
        provider="anthropic",
        enabled_tools=["bash"],
        disabled_tools=["edit"],
        system_prompt="be brief",
        sandbox_home="/root",
        extra_opencode_json={"provider": {"intercepted": {"options": {"timeout": 5}}}, "theme": "dark"},
    )
    made = build_opencode_json(config)
    provider = made["provider"]["intercepted"]
    assert (provider["npm"], provider["options"]["timeout"]) == ("@ai-sdk/anthropic", 5)
    assert provider["options"]["baseURL"] == "http://host"
    assert (made["tools"], made["theme"]) == ({"edit": False, "bash": True}, "dark")
    assert made["instructions"] == ["/root/task/system.md"]


def test_every_path_is_below_the_home_of_the_sandbox() -> None:
    paths = SandboxPaths("/root")
    for name in ("workdir", "instruction", "config", "agent_log", "proxy_log", "proxy_trace", "proxy_source", "reward"):
        assert getattr(paths, name).startswith("/root/")
    assert SandboxPaths("/home/user").reward == "/home/user/logs/verifier/reward.txt"
    assert "/home/user" not in build_run_command(OpenCodeConfig(base_url="x", sandbox_home="/root"), "opencode")


@pytest.mark.parametrize("task", ["do it", {"instruction": "do it"}, OpenCodeTask(instruction="do it")])
def test_a_task_is_made_of_what_there_is(task: Any) -> None:
    assert OpenCodeTask.coerce(task).instruction == "do it"


def test_a_task_is_the_last_message_of_the_user_in_a_prompt() -> None:
    parts = [{"type": "text", "text": "do "}, {"type": "text", "text": "it"}]
    prompt = [{"role": "user", "content": "no"}, {"role": "user", "content": parts}, {"role": "assistant"}]
    assert OpenCodeTask.coerce(prompt).instruction == "do it"


@pytest.mark.parametrize("value", [3, [], [{"role": "system", "content": "x"}], ["do it"]])
def test_a_task_is_not_made_of_anything(value: Any) -> None:
    with pytest.raises(TypeError, match="Cannot coerce"):
        OpenCodeTask.coerce(value)


def test_a_key_is_not_shown() -> None:
    assert KEY not in repr(OpenCodeConfig(base_url="http://host", api_key=KEY))


# -- the order of a session, in a user's own sandbox ----------------------------------------------------------------


def test_a_users_own_class_is_a_backend(folder_backend: Any) -> None:
    assert isinstance(folder_backend, SandboxBackend)
    assert isinstance(folder_backend.create(), SandboxHandle)
    assert issubclass(OpenCodeSessionFactory, ResourceSessionFactory)
    assert issubclass(OpenCodeSession, ResourceSession)


@pytest.mark.slow
def test_the_agent_starts_when_everything_else_is_done(narrow: Any, play: Play) -> None:
    model = play(HELLO)
    config = config_for(model, sandbox_home=str(narrow.home), extra_setup_shell="echo extra", system_prompt="be brief")
    factory = OpenCodeSessionFactory(config=config, sandbox_backend=narrow, sleep=never)
    task = OpenCodeTask(
        instruction="write hello.txt",
        setup_shell="echo ready > setup.txt",
        upload_files={f"{narrow.home}/workdir/given.txt": "given"},
    )
    session = factory.create(task, episode_id="first")
    try:
        assert session.wait_for_completion() == 0
        assert session.wait_for_completion() == 0
        assert (narrow.home / "workdir" / "hello.txt").read_text() == "hello\n"
        assert (narrow.home / "workdir" / "setup.txt").read_text() == "ready\n"
        assert '"type":"tool_use"' in session.fetch_trace().replace(" ", "")
        assert session.fetch_proxy_trace() == []
        assert {played.model for played in model.played()} == {"scripted/hello"}  # the whole id
        assert session.initial_messages() == [{"role": "user", "content": "write hello.txt"}]
        assert session.list_tools() == []
        assert "bash" in (session.call_tool("bash", {}).error or "")
        assert session.verify([]) == VerifyResult(env_reward=None, done=True)
    finally:
        session.close()
    assert narrow.made[0].is_dead
    assert narrow.asked == [{"timeout_s": _AGENT_S + 240 + 300 + 300, "metadata": {"episode_id": "first"}}]
    steps = [line for line in narrow.log if line.startswith(("exec echo", "write", "start"))]
    home = str(narrow.home)
    names = [line.replace(home, "~").split(" && ")[0] for line in steps]
    assert names == [
        "exec echo ok",
        "write ~/task/instruction.md",
        "write ~/task/system.md",
        "write ~/workdir/given.txt",
        "exec echo extra",
        "exec echo ready > setup.txt",
        "write ~/.config/opencode/opencode.json",
        "start cd ~/workdir",
    ]


def test_an_agent_that_fails_has_its_own_exit_code(narrow: Any, play: Play) -> None:
    (narrow.home / ".opencode/bin/opencode").unlink()
    (narrow.home / ".opencode/bin/opencode").write_text('#!/bin/sh\n[ "$1" = --version ] || exit 42\n')
    (narrow.home / ".opencode/bin/opencode").chmod(0o755)
    config = config_for(play(HELLO), sandbox_home=str(narrow.home))
    session = OpenCodeSessionFactory(config=config, sandbox_backend=narrow, sleep=never).create("fail")
    assert session.wait_for_completion() == 42
    session.close()


def test_the_agent_is_ended_and_its_own_reward_gone_before_its_work_is_judged(narrow: Any, play: Play) -> None:
    hanging = Script(turns=(Turn(failures=(HangFailure(attempts=None),)),))
    config = config_for(play(hanging), sandbox_home=str(narrow.home))
    seen: list[Any] = []

    def verifier(sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
        seen.append((task.instruction, narrow.made[0].jobs[-1].wait(0), sandbox.exists(planted)))
        return VerifyResult(env_reward=0.5, done=True)

    factory = OpenCodeSessionFactory(config=config, sandbox_backend=narrow, verifier=verifier, sleep=never)
    session = factory.create("hang")
    with pytest.raises(TimeoutError):
        session.wait_for_completion(0.2)
    planted = SandboxPaths(str(narrow.home)).reward
    session.sandbox.write_text(planted, "1.0")
    assert session.verify([]).env_reward == 0.5
    assert seen == [("hang", -9, False)]
    session.close()


def test_an_agent_may_be_started_later_and_only_once(narrow: Any, play: Play) -> None:
    config = config_for(play(HELLO), sandbox_home=str(narrow.home))
    session = OpenCodeSessionFactory(config=config, sandbox_backend=narrow, starts_agent=False, sleep=never).create("x")
    with pytest.raises(RuntimeError, match="not been started"):
        session.wait_for_completion()
    session.start_agent()
    session.start_agent()
    assert len(narrow.made[0].jobs) == 1
    session.close()


# -- the proxy inside -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sandbox_that_cannot_reach_its_host_gets_the_proxy_inside(narrow: Any, play: Play) -> None:
    model = play(HELLO, api_key=KEY)
    config = config_for(model, sandbox_home=str(narrow.home))
    factory = OpenCodeSessionFactory(
        config=config, sandbox_backend=narrow, mode="transparent_proxy", proxy_port=free_port(), sleep=never
    )
    session = factory.create("write hello.txt")
    try:
        assert session.wait_for_completion() == 0, session.fetch_trace()
        assert (narrow.home / "workdir" / "hello.txt").exists()
        records = session.fetch_proxy_trace()
        assert [record["turn"] for record in records] == [1, 2]
        assert_exact(records, model)
        assert_exact(trained_on(session), model)
        assert all(record["request"]["model"] == model.name for record in records)
        assert all(record["request"].items() >= Sampling().parameters().items() for record in records)
        assert KEY not in agents_files(narrow.home)
        assert not any(KEY in line for line in narrow.log)
        written = json.loads((narrow.home / ".config/opencode/opencode.json").read_text())
        assert written["provider"]["intercepted"]["options"]["apiKey"] == "intercepted"
    finally:
        session.close()
    assert all(job.wait(0) is not None for job in narrow.made[0].jobs)


# -- for trainers ---------------------------------------------------------------------------------------------------

BASH = [{"type": "function", "function": {"name": "bash"}}]


def record(turn: int, prompt: list[int], sampled: list[int], tools: Any = BASH, **more: Any) -> str:
    """A line of a proxy's trace."""
    fields = {
        "turn": turn,
        "request": {"messages": [{"role": "user", "content": "task"}], "tools": tools},
        "response": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}]},
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "per_token_logps": [-0.5] * len(sampled),
        "completion_tokens": ["x"] * len(sampled),
        "finish_reason": "stop",
        **more,
    }
    return json.dumps(fields)


def session_with(folder_backend: Any, *records: str) -> OpenCodeSession:
    """A session whose proxy was started by other means."""
    path = folder_backend.home / "trace.jsonl"
    path.write_text("\n".join(records))
    return OpenCodeSession(
        sandbox=folder_backend.create(),
        task=OpenCodeTask(instruction="task"),
        config=OpenCodeConfig(base_url="http://host"),
        proxy_trace_path=str(path),
    )


def test_a_trainer_gets_the_agents_own_calls_conversation_by_conversation(folder_backend: Any) -> None:
    session = session_with(
        folder_backend,
        record(0, [1], [2, 3]),
        record(1, [50], [51], tools=None),  # a title
        record(2, [60], [61]),  # another conversation of the same agent, while the first goes on
        record(3, [1, 2, 3, 9], [4], not_trainable=["tool_choice: forced tool"]),
        record(4, [60, 61, 8], [62]),
    )
    assert isinstance(session, TrainableSession)
    assert isinstance(session, LoopOwningSession)
    trace = session.fetch_training_trace()
    assert [turn.node_id for turn in trace.turns] == ["0", "3", "2", "4"]
    assert [turn.loss_mask for turn in trace.turns] == [[0, 1, 1], [0] * 5, [0, 1], [0, 0, 0, 1]]
    assert trace.turns[0].request["messages"] == [{"role": "user", "content": "task"}]
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.fetch_training_trace()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_token_ids": None}, "no_prompt_ids"),
        ({"completion_token_ids": []}, "no_token_ids"),
        ({"per_token_logps": []}, "no_logprobs"),
    ],
)
def test_a_trainer_gets_no_call_that_the_engine_did_not_name(
    folder_backend: Any, change: dict[str, Any], reason: str
) -> None:
    session = session_with(folder_backend, record(1, [1], [2]), record(2, [1, 2, 3], [4], **change))
    trace = session.fetch_training_trace()
    assert [turn.node_id for turn in trace.turns] == ["1"], "the other call is complete"
    alone = session_with(folder_backend, record(1, [1], [2], **change))
    with pytest.raises(ValueError, match=reason):
        alone.fetch_training_trace()


def test_a_black_box_says_how_it_can_be_trained_on(folder_backend: Any) -> None:
    task, config = OpenCodeTask(instruction="x"), OpenCodeConfig(base_url="http://host")
    session = OpenCodeSession(sandbox=folder_backend.create(), task=task, config=config)
    with pytest.raises(ValueError, match="mode='transparent_proxy'"):
        session.fetch_training_trace()


def test_an_answer_has_complete_sampling_unless_it_is_left_to_the_endpoint(folder_backend: Any) -> None:
    config = OpenCodeConfig(base_url="http://host")
    assert OpenCodeSessionFactory(config=config, sandbox_backend=folder_backend).sampling == Sampling().parameters()
    assert OpenCodeSessionFactory(config=config, sandbox_backend=folder_backend, sampling={}).sampling == {}


def test_sampling_that_nothing_would_enforce_is_refused(folder_backend: Any) -> None:
    config = OpenCodeConfig(base_url="http://host", sandbox_home=str(folder_backend.home), proxy_sampling={"seed": 1})
    program = folder_backend.home / ".opencode" / "bin" / "opencode"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    factory = OpenCodeSessionFactory(config=config, sandbox_backend=folder_backend, sampling={"temperature": 1.0})
    assert factory.sampling == {**Sampling().parameters(), "seed": 1}
    with pytest.raises(RuntimeError, match="transparent_proxy"):
        factory.create("x")
    with pytest.raises(ValueError, match="'n' cannot be set"):
        OpenCodeSessionFactory(config=config, sandbox_backend=folder_backend, sampling={"n": 4})


CALLS_ONCE = """\
#!/usr/bin/env python3
import json, os, sys, urllib.request
if sys.argv[1] == "run":
    body = {"model": "m", "messages": [{"role": "user", "content": sys.stdin.read()}], "temperature": 0.1}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""


class OwnPort(OpenCodeSessionFactory):
    """Starts the proxy itself, as the factories of TRL's examples do."""

    def _start_proxy(self, sandbox: SandboxHandle) -> tuple[Any, str, str]:
        port, trace = free_port(), proxy_trace_path(self._config)
        folder = str(Path(self._config.sandbox_home) / "proxy")
        self._exec_with_retry(sandbox, "true", timeout=10, attempts=3, backoff_s=0.1, label="nothing to install")
        sandbox.write_text(f"{folder}/interception.py", harness._PROXY_SOURCE_PATH.read_text())
        line = f"cd {folder} && exec python3 -I interception.py --upstream-url {self._config.base_url} --trace {trace}"
        line += f" --port {port} --sampling '{json.dumps(self.sampling)}' --model-override {self._config.model}"
        key = {"OPENCODE_UPSTREAM_API_KEY": self._config.api_key}
        job = sandbox.start_bg(f"{line} > {proxy_log_path(self._config)} 2>&1", envs=key)
        asked = f"curl -sf http://127.0.0.1:{port}/healthz"
        wait_until(
            lambda: sandbox.exec(asked, timeout=5).exit_code == 0,
            message=lambda: sandbox.read_text(proxy_log_path(self._config)),
        )
        return job, f"http://127.0.0.1:{port}/v1", trace


def test_a_factory_of_a_user_may_start_the_proxy_itself(folder_backend: Any, play: Play) -> None:
    program = folder_backend.home / ".opencode" / "bin" / "opencode"
    program.parent.mkdir(parents=True)
    program.write_text(CALLS_ONCE)
    program.chmod(0o755)
    model = play(Script(turns=(Turn(text="Fine."),)), api_key=KEY)
    sampling = training_sampling({"temperature": 0.7})
    factory = OwnPort(
        config=config_for(model, sandbox_home=str(folder_backend.home)),
        sandbox_backend=folder_backend,
        mode="transparent_proxy",
        sampling=sampling,
    )
    session = factory.create([{"role": "system", "content": "be"}, {"role": "user", "content": "go"}])
    try:
        assert session.wait_for_completion() == 0, session.fetch_trace()
        [turn] = session.fetch_training_trace().turns
        [played] = model.played()
        assert (turn.prompt_token_ids, turn.completion_token_ids) == (played.prompt_ids, played.token_ids)
        assert turn.per_token_logps == pytest.approx(played.logprobs)
        assert sum(turn.loss_mask) == len(played.token_ids)
        assert {name: turn.request[name] for name in sampling} == sampling  # not the agent's own
        assert turn.request["messages"] == [{"role": "user", "content": "go"}]
    finally:
        session.close()


# -- what fails -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("part", ["echo ok", "mkdir", "false-setup", "python3 -c"])
def test_whatever_fails_the_sandbox_is_ended(narrow: Any, play: Play, part: str) -> None:
    narrow.fail = lambda cmd: ExecResult(7, "", "no such luck") if cmd.startswith(part) else None
    config = config_for(play(HELLO), sandbox_home=str(narrow.home))
    factory = OpenCodeSessionFactory(
        config=config, sandbox_backend=narrow, mode="transparent_proxy", proxy_port=free_port(), sleep=never
    )
    with pytest.raises(RuntimeError):
        factory.create({"instruction": "x", "setup_shell": "false-setup"})
    assert narrow.made[0].is_dead


def test_a_setup_that_fails_says_what_it_said(narrow: Any, play: Play) -> None:
    config = config_for(play(HELLO), sandbox_home=str(narrow.home))
    factory = OpenCodeSessionFactory(config=config, sandbox_backend=narrow, sleep=never)
    with pytest.raises(RuntimeError, match=r"setup_shell failed \(exit code 3\): dear me"):
        factory.create({"instruction": "x", "setup_shell": "echo dear me >&2; exit 3"})


@pytest.mark.parametrize(
    ("failure", "tries", "pauses"),
    [
        (ExecResult(1, "", ""), 3, [3.0, 6.0]),
        (ConnectionError("gone"), 3, [3.0, 6.0]),
        (ExecResult(1, "", "no space left"), 1, []),
    ],
)
def test_the_installer_is_tried_again_only_where_that_may_help(
    folder_backend: Any, failure: Any, tries: int, pauses: list[float]
) -> None:
    folder_backend.fail = lambda cmd: failure if "curl" in cmd else None
    slept: list[float] = []
    config = OpenCodeConfig(base_url="http://host", sandbox_home=str(folder_backend.home))
    factory = OpenCodeSessionFactory(config=config, sandbox_backend=folder_backend, sleep=slept.append)
    with pytest.raises(RuntimeError, match="OpenCode could not be installed"):
        factory.create("x")
    assert sum("curl" in line for line in folder_backend.log) == tries
    assert slept == pauses


def test_a_sandbox_that_never_answers_is_given_up(folder_backend: Any) -> None:
    folder_backend.fail = lambda cmd: ConnectionError("not yet")
    slept: list[float] = []
    config = OpenCodeConfig(base_url="http://host", sandbox_home=str(folder_backend.home))
    with pytest.raises(RuntimeError, match="did not answer"):
        OpenCodeSessionFactory(config=config, sandbox_backend=folder_backend, sleep=slept.append).create("x")
    assert slept == [1.0] * 15
    assert folder_backend.made[0].is_dead


def test_there_are_two_modes() -> None:
    with pytest.raises(ValueError, match="transparent_proxy"):
        OpenCodeSessionFactory(config=OpenCodeConfig(base_url="x"), sandbox_backend=LocalSandboxes(), mode="glass")


# -- in the local sandbox -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("local_sandboxes")
def test_in_our_sandbox_the_proxy_is_outside_and_the_key_nowhere(play: Play) -> None:
    look = run_command("opencode", "env; cat ~/.config/opencode/opencode.json; cat /proc/*/environ", name="look")
    model = play(look, api_key=KEY)

    def verifier(sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
        lines = sandbox.exec("grep -rs sk-the-real-one / --include=*.json --include=*.log --include=*.txt")
        return VerifyResult(env_reward=float(lines.exit_code != 0), done=True)

    factory = OpenCodeSessionFactory(
        config=config_for(model), sandbox_backend=LocalSandboxes(), mode="transparent_proxy", verifier=verifier
    )
    session = factory.create(OpenCodeTask(instruction="look around", setup_shell="echo ready > setup.txt"))
    try:
        assert session.wait_for_completion() == 0, session.fetch_trace()
        assert KEY not in session.fetch_trace()
        assert "OPENAI_API_KEY=" in session.fetch_trace()
        records = session.fetch_proxy_trace()
        assert [record["turn"] for record in records] == [1, 2]
        assert_exact(records, model)
        assert_exact(trained_on(session), model)
        assert session.sandbox.read_text("/home/user/workdir/setup.txt") == "ready\n"
        assert session.verify([]).env_reward == 1.0
    finally:
        session.close()


@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.slow
def test_a_black_box_in_our_sandbox_reaches_its_model_and_nothing_else(play: Play) -> None:
    model = play(HELLO, api_key=KEY)
    session = OpenCodeSessionFactory(config=config_for(model), sandbox_backend=LocalSandboxes()).create(
        "write hello.txt"
    )
    try:
        assert session.wait_for_completion() == 0, session.fetch_trace()
        assert session.fetch_proxy_trace() == []
        assert session.sandbox.exists("/home/user/workdir/hello.txt")
        assert session.sandbox.exec(f"curl -m 2 -s {model.url}/models").exit_code != 0
    finally:
        session.close()
