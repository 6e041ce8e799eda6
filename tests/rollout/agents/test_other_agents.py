"""The other agents: the real programs in the local sandbox, each in its own dialect, against a scripted model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from openenv.rollout import Model, Sampling, Task, run_rollout
from openenv.sandboxes.base import Sandboxes
from openenv.testing import Script, ScriptedCall, ScriptedModel, Turn

WRITE = Task(
    instruction="Write 42 into answer.txt.", verify=("grep -qx 42 answer.txt",), agent_timeout_s=100, task_id="write"
)
FIRST = {
    "mini-swe-agent": ScriptedCall(name="bash", arguments={"command": "echo 42 > answer.txt"}),
    "claude-code": ScriptedCall(name="Write", arguments={"file_path": "${cwd}/answer.txt", "content": "42\n"}),
    "codex": ScriptedCall(name="exec_command", arguments={"cmd": "echo 42 > answer.txt"}),
}
LAST = {
    "mini-swe-agent": (ScriptedCall(name="bash", arguments={"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", sorted(FIRST))
def test_the_agent_does_a_task_in_its_sandbox(name: str, local: Sandboxes, leftovers: Callable[[], None]) -> None:
    turns = (Turn(text="I write it.", calls=(FIRST[name],)), Turn(text="Done.", calls=LAST.get(name, ())))
    with ScriptedModel(Script(name="script", turns=turns), api_key="the-real-key") as server:
        model = Model.model_validate({**server.model(), "api_key": "the-real-key", "sampling": Sampling()})
        outcome = run_rollout(WRITE, agent=name, sandbox=local, model=model)
    assert (outcome.status, outcome.reward, outcome.agent_exit_code) == ("ok", 1.0, 0), outcome.agent_log_tail
    assert len(outcome.turns) == 2
    for turn in outcome.turns:
        assert len(turn.completion_token_ids) == len(turn.per_token_logps) > 0
        assert turn.not_trainable == []
    assert "the-real-key" not in outcome.model_dump_json()
    leftovers()
