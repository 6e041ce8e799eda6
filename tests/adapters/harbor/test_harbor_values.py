"""Harbor's datasets, results and trajectories: values only, no servers and no containers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harbor_folders import write_task
from openenv.adapters.harbor import atif, harbor_package, seams
from openenv.adapters.harbor.contract import export_training_contract, to_trace_entries, to_training_trace
from openenv.adapters.harbor.harbor_package import build_models_json, build_trial_config, enable_shared_templates
from openenv.adapters.harbor.models import (
    HarborRolloutResult,
    HarborState,
    HarborTurn,
    conversations_from_document,
    turns_from_document,
)
from openenv.adapters.harbor.options import HarborPermissions
from openenv.adapters.harbor.qualification import (
    evaluate_eval_capture,
    harness_maturity_rows,
    qualification_details,
    qualification_rows,
)
from openenv.adapters.harbor.tasks import (
    HarborTaskProvider,
    has_symlinks,
    own_file,
    prefetch,
    read_instruction,
    resolve_task_dirs,
    task_root,
)
from openenv.adapters.harbor.ui import connect_endpoint, count_actions, js_prelude, validate_endpoint
from openenv.testing import Script, ScriptedModel, Turn


def node(name: str, prompt: int, sampled: int, **more: Any) -> dict[str, Any]:
    return {
        "node_id": name,
        "root_id": "r",
        "n_prompt": prompt,
        "n_sampled": sampled,
        "n_tools": 1,
        "finish_reason": "stop",
        "discarded": False,
        "sampling_params": {"temperature": 1.0},
        "requested_sampling_params": {},
        "request_messages": [{"role": "user", "content": "do it"}],
        "request_tools": None,
        "response_message": {"role": "assistant", "content": f"text of {name}"},
        **more,
    }


def document() -> dict[str, Any]:
    """Two turns: a prompt of 2 tokens, 3 sampled, 1 more read, 2 sampled."""
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [call]}
    row = {
        "role": "agent",
        "root_id": "r",
        "node_ids": ["a", "b"],
        "n_turns": 2,
        "prompt_len": 2,
        "turn_lengths": [3, 2],
        "input_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "loss_mask": [0, 0, 1, 1, 1, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.1, -0.2, -0.3, 0.0, -0.4, -0.5],
        "trainable": True,
        "validation": [],
    }
    aside = {**row, "role": "auxiliary", "node_ids": ["x"], "root_id": "q", "n_turns": 1}
    return {
        "turns": [node("a", 2, 3, response_message=answer), node("b", 6, 2), node("x", 1, 1, root_id="q")],
        "sequences": [row, aside],
        "stats": {"n_discarded": 0},
    }


def result(**more: Any) -> HarborRolloutResult:
    return HarborRolloutResult(task_id="t", turns=turns_from_document(document()), reward=1.0, **more)


def test_turns_have_the_tokens_of_their_own_call() -> None:
    first, second = turns_from_document(document())
    assert (first.prompt_token_ids, first.completion_token_ids) == ([1, 2], [3, 4, 5])
    assert (second.prompt_token_ids, second.completion_token_ids) == ([1, 2, 3, 4, 5, 6], [7, 8])
    assert second.per_token_logps == [-0.4, -0.5]
    assert first.loss_mask == [0, 0, 1, 1, 1]
    assert first.text == "I look."
    assert first.tool_calls == [{"name": "bash", "arguments": "{}"}]


def test_a_turn_of_two_branches_comes_once_and_must_agree() -> None:
    forked = document()
    forked["sequences"].append({**forked["sequences"][0], "node_ids": ["a"]})
    assert len(turns_from_document(forked)) == 2
    forked["sequences"][-1]["loss_mask"] = [0] * 8
    with pytest.raises(ValueError, match="inconsistent completion masks"):
        turns_from_document(forked)
    short = document()
    short["sequences"][0]["input_ids"] = [1, 2, 3]
    with pytest.raises(ValueError, match="incomplete token or mask span"):
        turns_from_document(short)


def test_a_conversation_is_its_longest_path() -> None:
    conversations = conversations_from_document(document())
    assert [(each.root_id, each.role, each.n_turns) for each in conversations] == [
        ("r", "agent", 2),
        ("q", "auxiliary", 1),
    ]
    assert conversations[0].messages[-1] == {"role": "assistant", "content": "text of b"}


def test_results_become_what_trainers_take() -> None:
    entries = to_trace_entries(result())
    assert [entry["metadata"]["turn"] for entry in entries] == [0, 1]
    call = entries[0]["response"]["choices"][0]["message"]["tool_calls"][0]
    assert call == {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    trace = to_training_trace(result())
    assert [turn.loss_mask for turn in trace.turns] == [entry["loss_mask"] for entry in entries]
    contract = export_training_contract(result())
    assert contract["n_trainable_tokens"] == 5
    assert contract["schema_version"] == 1
    assert [turn["trainable"] for turn in contract["turns"]] == [True, True]


def test_what_may_not_be_trained_on_is_refused() -> None:
    with pytest.raises(ValueError, match="eval-only rollout"):
        to_trace_entries(result(rollout_type="eval"))
    with pytest.raises(ValueError, match="fatal validation findings"):
        to_training_trace(result(findings=["[FATAL] x: y"]))
    masked = result()
    masked.turns[1] = masked.turns[1].model_copy(update={"trainable": False, "loss_mask": [0] * 8})
    assert len(to_trace_entries(masked)) == 1
    masked.turns[1] = masked.turns[1].model_copy(update={"loss_mask": None})
    with pytest.raises(ValueError, match="explicit loss_mask"):
        to_training_trace(masked)
    twice = result()
    twice.turns.append(HarborTurn(turn=0))
    with pytest.raises(ValueError, match="duplicate turn identities"):
        export_training_contract(twice)


def test_results_travel_as_json() -> None:
    again = HarborRolloutResult.model_validate_json(result().model_dump_json())
    assert again == result()
    assert again.solved
    assert not HarborRolloutResult().solved
    assert HarborState().rollouts_completed == 0


def test_a_dataset_is_a_split(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / "tasks" / name, instruction=f"do {name}")
    provider = HarborTaskProvider([str(tmp_path), "no/such@thing@x"])
    first, broken = provider.list_splits()
    assert (first["name"], first["num_tasks"]) == (str(tmp_path), 2)
    assert broken["num_tasks"] == 0
    assert broken["error"]
    assert provider.num_tasks("") == 2
    assert provider.get_task("", 1)["instruction"] == "do b"
    assert [task["task_name"] for task in provider.list_tasks(str(tmp_path))] == ["a", "b"]
    assert provider.task_dir("", 0) == tmp_path / "tasks" / "a"
    with pytest.raises(IndexError, match="out of range"):
        provider.get_task("", 2)
    with pytest.raises(ValueError, match="unknown split"):
        provider.num_tasks("other")
    with pytest.raises(ValueError, match="no datasets"):
        HarborTaskProvider().num_tasks("")


def test_datasets_that_cannot_be_had_say_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Harbor tasks found"):
        resolve_task_dirs(str(tmp_path))
    with pytest.raises(ValueError, match="unknown dataset"):
        resolve_task_dirs("nowhere")
    with pytest.raises(ImportError, match=r"Python 3\.12"):
        resolve_task_dirs("terminal-bench@1.0")
    report = prefetch([str(write_task(tmp_path / "t").parent), "nowhere"])
    assert report[str(tmp_path)] == {"num_tasks": 1}
    assert "unknown dataset" in report["nowhere"]["error"]


def test_no_file_outside_of_a_dataset_is_shown(tmp_path: Path) -> None:
    (tmp_path / "secret.md").write_text("secret")
    folder = write_task(tmp_path / "data" / "t", instruction="x" * 5000)
    assert read_instruction(folder, limit=10) == "x" * 10 + "\n…"
    (folder / "instruction.md").unlink()
    (folder / "instruction.md").symlink_to(tmp_path / "secret.md")
    assert read_instruction(folder, spec=str(tmp_path / "data")) == ""
    assert has_symlinks(folder) == [folder / "instruction.md"]
    with pytest.raises(OSError, match="points outside"):
        own_file(task_root(str(tmp_path / "data"), folder), "instruction.md")
    (tmp_path / "data" / "out").symlink_to(tmp_path)
    assert task_root(str(tmp_path / "data"), tmp_path / "data" / "out") is None


def test_a_trajectory_that_agrees_is_filled_with_tokens(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [
        {"source": "user", "message": "do it"},
        {"source": "agent", "metrics": {"completion_tokens": 3, "prompt_tokens": 2}},
        {"source": "agent", "metrics": {"completion_tokens": 2}},
    ]
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "trajectory.json").write_text(json.dumps({"schema_version": "ATIF-v1.7", "steps": steps}))
    trace, source = atif.load_trace(tmp_path)
    assert trace is not None
    assert source == "atif"
    assert atif.atif_turn_lengths(trace) == [3, 2]
    assert atif.reconcile(document(), trace).ok
    filled = atif.agent_steps(atif.merge_into_atif(trace, document()))
    assert [step["metrics"]["completion_token_ids"] for step in filled] == [[3, 4, 5], [7, 8]]
    assert filled[1]["metrics"]["logprobs"] == [-0.4, -0.5]


def test_a_trajectory_that_disagrees_forbids_training(tmp_path: Path) -> None:
    def compare(*counts: int, **more: Any) -> atif.Report:
        steps = [{"source": "agent", "metrics": {"completion_tokens": count}} for count in counts]
        return atif.reconcile({**document(), **more}, {"steps": steps})

    assert [finding.code for finding in compare(3, 9).fatal] == ["turn_mismatch"]
    assert compare(3).aux_node_ids == ["b"]
    assert compare(3).ok
    assert [finding.code for finding in compare(0, 0).findings] == ["atif_no_token_counts"]
    assert not compare(3, 2, sequences=[]).ok
    assert "atif_calls_missing" in compare(1, 1, 1, 1, rollout_type="eval").text()
    assert atif.reconcile(document(), None).ok
    assert atif.load_trace(tmp_path) == (None, "")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "trajectory.json").write_text("[" * 50_000)
    assert atif.load_trace(tmp_path) == (None, "")
    with pytest.raises(ValueError, match="cannot be filled"):
        atif.merge_into_atif({"steps": [{"source": "agent", "metrics": {"completion_tokens": 9}}]}, document())


def test_the_log_of_pi_is_a_trace(tmp_path: Path) -> None:
    folder = tmp_path / "agent" / "pi" / "sessions"
    folder.mkdir(parents=True)
    entry = {"type": "message", "message": {"role": "assistant", "usage": {"output": 7}}}
    (folder / "1.jsonl").write_text(f"no json\n{json.dumps(entry)}\n")
    trace, source = atif.load_trace(tmp_path)
    assert trace is not None
    assert (atif.atif_turn_lengths(trace), source) == ([7], "pi_session")


def test_agents_get_a_name_of_the_model_that_they_can_read() -> None:
    assert seams.agent_facing_model("Qwen/Qwen3-4B") == "Qwen3-4B"
    assert len(seams.agent_facing_model("x" * 100)) < 64
    with pytest.raises(ValueError, match="empty"):
        seams.agent_facing_model(" ")
    name, arguments, envs, own = seams.get("opencode").resolve(
        base_url="http://h", session="s", model="a/b", training=True
    )
    assert name == "intercepted/b"
    config = arguments["opencode_config"]
    assert config["provider"]["intercepted"]["options"] == {"baseURL": "http://h/v1", "apiKey": "s"}
    assert config["tools"]["webfetch"] is False
    assert (envs, own) == ({}, {})
    limited = seams.get("mini-swe-agent").resolve(base_url="http://h", session="s", model="m", step_limit=5)
    assert limited[1] == {"config": {"agent": {"step_limit": 5}}}
    assert limited[2]["OPENAI_API_KEY"] == "s"
    assert seams.get("noop").name == "nop"
    assert seams.get("mine:Agent").import_path == "mine:Agent"
    with pytest.raises(ValueError, match="no harness 'nothing'"):
        seams.get("nothing")
    with pytest.raises(ValueError, match="no profile"):
        seams.get("opencode", profile="x")


def test_trials_of_the_package_harbor_say_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="pip install harbor"):
        build_trial_config(
            task_dir=tmp_path,
            harness="opencode",
            sandbox="docker",
            intercept_url="http://h",
            session_id="s",
            model="m",
            trial_name="t",
            trials_dir=tmp_path,
        )


def test_evidence_is_checked_and_shown() -> None:
    cell = {"harness": "opencode", "provider": "vllm", "status": "eval_pass", "evidence": ["run.json"]}
    assert qualification_rows(["opencode"], {"cells": [cell]}) == [
        ["opencode", "not_run", "not_run", "not_run", "eval_pass"]
    ]
    assert harness_maturity_rows(["opencode"], {"cells": [cell]})[0][1] == "experimental"
    assert qualification_details({"cells": [cell]})[0][:3] == ["opencode", "vllm", "eval_pass"]
    for wrong, words in (
        ({**cell, "evidence": []}, "requires evidence"),
        ({**cell, "status": "fine"}, "unknown qualification status"),
        ({**cell, "provider": "me"}, "unknown qualification provider"),
        ({**cell, "status": "optimizer_pass"}, "optimizer evidence"),
    ):
        with pytest.raises(ValueError, match=words):
            qualification_rows([], {"cells": [wrong]})
    with pytest.raises(ValueError, match="duplicate"):
        qualification_rows([], {"cells": [cell, cell]})
    graded = HarborRolloutResult(rollout_type="eval", reward=1.0, n_turns=1)
    assert all(evaluate_eval_capture(graded).values())


def test_names_of_the_package_harbor_say_what_to_install() -> None:
    assert json.loads(build_models_json("http://h", "k", "m"))["providers"]["intercept"]["baseUrl"] == "http://h/v1"
    for name in harbor_package.INSTALL_FIXES:
        if name not in ("PROVIDER", "build_models_json"):
            with pytest.raises(ImportError, match="pip install harbor"):
                getattr(harbor_package, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        harbor_package.Nothing  # noqa: B018


def test_an_overlay_of_variables_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_TEST_C", "before")
    assert (harbor_package.enabled(), harbor_package.install()) == (False, False)
    with harbor_package.overlay({"HARBOR_TEST_C": "within", "HARBOR_TEST_D": "new"}):
        assert os.environ["HARBOR_TEST_C"] == "within"
        assert os.environ["HARBOR_TEST_D"] == "new"
    assert os.environ["HARBOR_TEST_C"] == "before"
    assert "HARBOR_TEST_D" not in os.environ
    assert enable_shared_templates()


def test_tool_calls_are_counted() -> None:
    assert count_actions(result()) == 1
    assert js_prelude() == ""


def test_an_endpoint_that_a_form_names_is_asked_or_refused() -> None:
    assert connect_endpoint({"source": "hf"})["reason"] == "Pick a model."
    assert "token" in connect_endpoint({"source": "hf", "model": "m"})["reason"]
    assert "own endpoint" in connect_endpoint({}, settings=HarborPermissions(takes_endpoints=False))["reason"]
    assert "private" in validate_endpoint("http://127.0.0.1:1", "m", "", private_urls=False)["reason"]
    assert "URL" in validate_endpoint("", "m", "")["reason"]
    with ScriptedModel(Script(name="m", turns=(Turn(text="hi"),) * 20)) as server:
        engine = connect_endpoint({"source": "url", "url": server.model()["base_url"], "api_key": "k"})
        assert (engine["ok"], engine["model"]) == (True, "scripted/m"), engine
        assert "opencode" in engine["harnesses"]
        assert engine["custom"] == {"source": "url", "url": server.model()["base_url"]}
