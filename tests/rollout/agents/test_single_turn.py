"""The agent `single-turn`: its prompt, the file or the script that a reply becomes, and its failures."""

from __future__ import annotations

import pytest

from openenv.rollout import Model, Outcome, Task, run_rollout
from openenv.rollout.agents.single_turn import prompt_of
from openenv.sandboxes.base import Sandboxes
from openenv.testing import Script, ScriptedModel, Turn

ANSWER = Task(instruction="What is 6 * 7?", verify=('[ "$(cat answer.txt)" = 42 ]',), metadata={"answer": "answer.txt"})
SCRIPT = Task(instruction="Make two files.", verify=("test -f a.txt", "test -f b.txt"))


def outcome_of(task: Task, reply: str, sandbox: Sandboxes) -> Outcome:
    with ScriptedModel(Script(turns=(Turn(text=reply),))) as scripted:
        return run_rollout(task, agent="single-turn", model=Model(**scripted.model()), sandbox=sandbox)


@pytest.mark.parametrize("reply", ["42", "  42\n\n", "It is\n```text\n42\n```\nor\n```\n43\n```\n"])
def test_a_reply_or_its_first_code_block_becomes_the_answer(reply: str, local: Sandboxes) -> None:
    outcome = outcome_of(ANSWER, reply, local)
    assert (outcome.status, outcome.reward, len(outcome.turns)) == ("ok", 1.0, 1)


def test_without_an_answer_file_the_reply_runs_as_a_script(local: Sandboxes) -> None:
    outcome = outcome_of(SCRIPT, "```sh\ntouch a.txt\nfalse\ntouch b.txt; exit 3\n```", local)
    assert (outcome.status, outcome.reward) == ("ok", 1.0)


def test_a_script_that_fails_earns_what_its_checks_find(local: Sandboxes) -> None:
    outcome = outcome_of(SCRIPT, "touch a.txt\nexit 1", local)
    assert (outcome.status, outcome.reward) == ("ok", 0.5)


def test_the_prompt_has_small_text_files_and_the_form_of_the_reply() -> None:
    files = {"data.csv": "a,b\n1,2\n", "large.txt": "x" * 5000, "empty.py": "", "picture.png": b"\x89PNG\0"}
    task = ANSWER.model_copy(update={"files": files})
    prompt = prompt_of(task)
    assert prompt.startswith("What is 6 * 7?")
    assert "data.csv:\n```\na,b\n1,2\n```" in prompt
    assert "the content of answer.txt" in prompt
    assert not any(name in prompt for name in ("large.txt", "empty.py", "picture.png"))
    assert "shell script" in prompt_of(SCRIPT)
