"""mini-swe-agent: how it is started, and that its own model class sends what litellm would send."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from openenv.rollout import AgentRun, Installation, Model, Outcome, Task, run_rollout
from openenv.rollout.agents import MiniSweAgent
from openenv.sandboxes.base import Sandboxes
from openenv.testing import Script, ScriptedCall, ScriptedModel, StatusFailure, Turn
from openenv.testing.scripted import Played

OWN = "model.model_class=endpoint_model.EndpointModel"
TASK = Task(
    instruction="--Write 42 into answer.txt.",
    # A module that the agent would import if it looked into its work folder, and one of its own configurations.
    files={"yaml.py": "raise SystemExit('yaml of the work folder')", "mini.yaml": "model: 3"},
    verify=("grep -qx 42 answer.txt",),
    agent_timeout_s=100,
)


def bash(command: str) -> ScriptedCall:
    return ScriptedCall(name="bash", arguments={"command": command})


# Its packages are its own: a command that finds them works for the agent and not for the verifier.
WRITE = Turn(text="I write it.", calls=(bash("python3 -c 'import litellm' || echo 42 > answer.txt"),))
AGAIN = Turn(text="Now without a command.")
END = Turn(text="Done.", calls=(bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),))


def configuration(local: Sandboxes, options: dict[str, Any]) -> list[str]:
    """Return the `-c` values of a run."""
    installation = Installation(executable="/usr/bin/python3")
    with local.open() as sandbox:
        run = AgentRun(
            TASK, "http://127.0.0.1:7000/v1", "key", "m", sandbox.home, sandbox.workdir, installation, options
        )
        argv = MiniSweAgent().prepare(sandbox, run).argv
    assert argv[:4] == ("/usr/bin/python3", "-I", "-B", "-c")
    return [value for flag, value in itertools.pairwise(argv[5:]) if flag == "-c"]


def test_what_a_run_configures_comes_after_what_the_driver_does(local: Sandboxes) -> None:
    own, default = configuration(local, {})
    assert own == OWN
    assert default.startswith("/")
    assert default.endswith("/minisweagent/config/mini.yaml")
    chosen = ["mini.yaml", "model.model_kwargs.temperature=0"]
    assert configuration(local, {"config": chosen}) == [OWN, *chosen]
    assert configuration(local, {"model_class": "litellm"})[0] == "model.model_class=litellm"


def play(local: Sandboxes, *turns: Turn, **options: object) -> tuple[Outcome, list[Played]]:
    """Run a script through mini-swe-agent."""
    with ScriptedModel(Script(name="vendor", turns=turns)) as server:
        model = Model.model_validate(server.model())
        outcome = run_rollout(TASK, agent="mini-swe-agent", sandbox=local, model=model, options=options)
        return outcome, server.played()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_model_sees_what_litellm_would_have_sent(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    ours, sent = play(local, WRITE, AGAIN, END)
    litellms, expected = play(local, WRITE, AGAIN, END, model_class="litellm")
    for outcome in (ours, litellms):
        assert (outcome.status, outcome.reward, outcome.agent_exit_code) == ("ok", 1.0, 0), outcome.agent_log_tail
    assert [one.prompt_ids for one in sent] == [one.prompt_ids for one in expected]
    assert len(sent) > 2
    leftovers()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_refusal_ends_the_run_and_a_failure_is_tried_again(local: Sandboxes) -> None:
    refusal = Turn(text="no", failures=(StatusFailure(status=400, attempts=None),))
    outcome, played = play(local, WRITE, refusal)
    assert (outcome.status, len(played)) == ("policy_failed", 2)
    assert "EndpointRefusal: status 400" in outcome.agent_log_tail
    outcome, played = play(local, WRITE, Turn(text="x", calls=END.calls, failures=(StatusFailure(status=500),)))
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.agent_log_tail
    assert [one.status for one in played] == [200, 500, 200]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_only_litellm_knows_is_refused(local: Sandboxes) -> None:
    _, default = configuration(local, {})
    outcome, played = play(local, WRITE, config=[default, "model.model_kwargs.num_retries=3"])
    assert (outcome.status, played) == ("env_failed", [])  # it never asked its model
    assert "num_retries" in outcome.agent_log_tail
    assert "model_class='litellm'" in outcome.agent_log_tail
