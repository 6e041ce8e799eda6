"""Read ATIF, the trajectories of Harbor's agents; compare them with the capture; add captured tokens to them.

The agent counts its tokens, and the capture counts the engine's tokens. If both agree for every call, the
capture is complete.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openenv.rollout.capture.training_trace import FATAL, INFO, WARN
from openenv.rollout.capture.training_trace import CaptureReport as _CaptureReport

Report = _CaptureReport
# Agents call small models for titles and summaries, which trajectories leave out. Below one half, the trajectory is not
# the record of this session.
_LEAST_COVERED = 0.5
"""The share of captured calls that a trajectory must have for the others to count as calls beside the agent's."""


def load_atif(trial_dir: str | Path) -> dict[str, Any] | None:
    """Return the trajectory in a trial's folder, `agent/trajectory.json`; None if it is missing or unreadable."""
    try:
        # A trial may have ended before its agent wrote the file, so a missing or broken one is normal.
        trajectory = json.loads((Path(trial_dir) / "agent" / "trajectory.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return trajectory if isinstance(trajectory, dict) else None


def load_trace(trial_dir: str | Path) -> tuple[dict[str, Any] | None, str]:
    """Return the agent's record of its calls and the record's kind: `atif`, `pi_session`, or an empty string."""
    trajectory = load_atif(trial_dir)
    if trajectory is not None:
        return trajectory, "atif"
    session = _pi_session(Path(trial_dir))
    return (session, "pi_session") if session is not None else (None, "")


def _pi_session(trial_dir: Path) -> dict[str, Any] | None:
    """Return the last session log of the agent pi, which counts the tokens of each answer, in ATIF's form."""
    # File names begin with the time, so the last one is the latest session.
    logs = sorted((trial_dir / "agent" / "pi" / "sessions").glob("*.jsonl"))
    steps = []
    # The agent may have been killed while it wrote a line; other lines still count.
    for line in logs[-1].read_text("utf-8", "replace").splitlines() if logs else []:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        message = entry.get("message") or {}
        if entry.get("type") == "message" and message.get("role") == "assistant":
            count = int((message.get("usage") or {}).get("output") or 0)
            steps.append({"source": "agent", "metrics": {"completion_tokens": count}})
    return {"steps": steps} if steps else None


def agent_steps(atif: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the agent's steps of a trajectory."""
    return [step for step in atif.get("steps") or [] if step.get("source") == "agent"]


def atif_turn_lengths(atif: Mapping[str, Any]) -> list[int]:
    """Return how many tokens the agent counted for each of its steps."""
    return [int((step.get("metrics") or {}).get("completion_tokens") or 0) for step in agent_steps(atif)]


def reconcile(document: Mapping[str, Any], atif: Mapping[str, Any] | None) -> Report:
    """Compare the document of a captured session with the agent's trajectory.

    A difference is FATAL, for one of the two is wrong. Calls that were captured, and that the trajectory does not have,
    are calls beside the agent's (`aux_node_ids`) where all others agree in their order.
    """
    report = Report()
    if atif is None:
        report.add(INFO, "no_atif", "the agent wrote no trajectory to compare with")
        return report
    theirs = atif_turn_lengths(atif)
    # Evaluations capture no tokens, so only the numbers of calls can be compared.
    if document.get("rollout_type", "train") == "eval":
        _compare_counts(report, len(document.get("turns") or []), len(theirs))
        return report
    # Only the agent's conversations: helpers and discarded retries are not in its trajectory.
    rows = [row for row in document.get("sequences") or [] if row["role"] == "agent"]
    # A root is a conversation.
    roots = {row["root_id"] for row in rows}
    turns = [turn for turn in document.get("turns") or [] if turn["root_id"] in roots]
    # Sampled tokens, call by call.
    ours = [int(turn["n_sampled"]) for turn in turns]
    if not document.get("turns"):
        report.add(INFO, "no_turns_upstream", "no calls were captured, so there is nothing to compare")
    elif not rows:
        report.add(
            FATAL, "no_agent_sequence", f"{len(document['turns'])} calls were captured, none of them the agent's"
        )
    # Some agents write steps without metrics. That proves nothing in either direction.
    elif not any(theirs):
        report.add(
            WARN, "atif_no_token_counts", f"the trajectory counts no tokens; {sum(ours)} captured stay unchecked"
        )
    # Equal lengths in the same order: token counts of calls vary so much that chance can be ruled out.
    elif ours == theirs:
        report.add(INFO, "turns_match", f"all {len(ours)} calls agree, {sum(ours)} tokens")
        _compare_prompts(report, rows[0], agent_steps(atif)[0])
        _note_retries(report, atif)
    else:
        _explain(report, turns, ours, theirs)
    return report


def _compare_counts(report: Report, ours: int, theirs: int) -> None:
    """Compare the numbers of calls: the endpoint of an evaluation names no tokens."""
    report.add(INFO, "eval_reconcile_counts_only", f"{ours} calls captured, {theirs} steps in the trajectory")
    if theirs > ours:
        report.add(
            WARN, "atif_calls_missing", f"the trajectory has {theirs} steps, and only {ours} calls were captured"
        )


def _explain(report: Report, turns: Sequence[Mapping[str, Any]], ours: list[int], theirs: list[int]) -> None:
    # Example: captured [20, 7, 31], trajectory [20, 31]: call 7 is a helper's.
    beside = _left_over(theirs, ours)
    if beside is None:
        report.add(FATAL, "turn_mismatch", f"tokens of the calls differ: captured {ours}, in the trajectory {theirs}")
    elif len(theirs) < _LEAST_COVERED * len(ours):
        report.add(FATAL, "atif_coverage_too_low", f"the trajectory has {len(theirs)} of {len(ours)} captured calls")
    else:
        report.aux_node_ids = [str(turns[index]["node_id"]) for index in beside]
        report.add(WARN, "atif_aux_calls", f"{len(beside)} of {len(ours)} captured calls are not in the trajectory")


def _left_over(part: Sequence[int], whole: Sequence[int]) -> list[int] | None:
    """Return the indexes of `whole` left over after matching `part` in order; None if `part` does not match."""
    rest: list[int] = []
    position = 0
    for index, value in enumerate(whole):
        if position < len(part) and value == part[position]:
            position += 1
        else:
            rest.append(index)
    return rest if position == len(part) and rest else None


def _compare_prompts(report: Report, row: Mapping[str, Any], step: Mapping[str, Any]) -> None:
    # 0 means that the agent did not count.
    count = int((step.get("metrics") or {}).get("prompt_tokens") or 0)
    if count and count != row["prompt_len"]:
        report.add(
            WARN, "prompt_len_mismatch", f"first prompt: captured {row['prompt_len']}, in the trajectory {count}"
        )


def _note_retries(report: Report, atif: Mapping[str, Any]) -> None:
    retried = [step for step in agent_steps(atif) if int(step.get("llm_call_count") or 1) > 1]
    # A retried step has one count for several calls, so lengths may differ by it.
    if retried:
        report.add(WARN, "atif_retries", f"{len(retried)} steps took more than one call")
    if atif.get("subagent_trajectories"):
        report.add(INFO, "atif_subagents", f"{len(atif['subagent_trajectories'])} trajectories of other agents")


def merge_into_atif(atif: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trajectory with the captured tokens and log-probabilities in the metrics of its steps.

    Raises:
        ValueError: the two do not agree.
    """
    report = reconcile(document, atif)
    if not report.ok or document.get("rollout_type", "train") == "eval":
        raise ValueError(f"the trajectory cannot be filled: {report.text()}")
    # The caller's trajectory stays unchanged.
    merged = copy.deepcopy(dict(atif))
    beside = set(report.aux_node_ids)
    # The order of calls decides which step gets which tokens; `reconcile` has compared it.
    tokens = _tokens(document)
    nodes = [node for node in tokens if node not in beside]
    for step, node in zip(agent_steps(merged), nodes, strict=False):
        ids, logprobs = tokens[node]
        step["metrics"] = {**(step.get("metrics") or {}), "completion_token_ids": ids, "logprobs": logprobs}
    return merged


def _tokens(document: Mapping[str, Any]) -> dict[str, tuple[list[int], list[float]]]:
    """Return the sampled tokens of the agent, call by call."""
    turns = {turn["node_id"]: turn for turn in document.get("turns") or []}
    tokens: dict[str, tuple[list[int], list[float]]] = {}
    for row in document.get("sequences") or []:
        # Branches share their first calls, which are added once.
        for node in row["node_ids"] if row["role"] == "agent" else ():
            begin = int(turns[node]["n_prompt"])
            end = begin + int(turns[node]["n_sampled"])
            tokens.setdefault(node, (list(row["input_ids"][begin:end]), list(row["logprobs"][begin:end])))
    # Turns are in the order of arrival; sequences are grouped by conversation.
    return {node: tokens[node] for node in turns if node in tokens}
