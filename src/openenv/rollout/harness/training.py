"""`build_harness_rollout_func`: sessions and an adapter as a function that trainers call.

Knows whose word the reward is: the environment's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import isclose
from typing import Any

from .interface import HarnessAdapter, HarnessRolloutResult, HarnessRunLimits, ModelStep, ResourceSession, VerifyResult

_TOLERANCE = 1e-6


def build_harness_rollout_func(
    *,
    session_factory: Any,
    harness_adapter: HarnessAdapter,
    model_step_builder: Callable[[Any, ResourceSession], ModelStep],
    limits: HarnessRunLimits | None = None,
    reward_key: str = "env_reward",
) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    """Build a function that trainers call with prompts and themselves, and that returns tokens and rewards.

    The reward of a rollout is the environment's: a verdict that differs from what the last tool call brought is
    refused, so that no session makes up rewards of its own.

    Args:
        session_factory: Makes a session for each prompt, which is its task.
        harness_adapter: Runs each session.
        model_step_builder: Gets the trainer and a session; returns how the model is asked.
        limits: Of each rollout.
        reward_key: What the rewards are called in the function's result.

    Returns:
        A function whose result has lists under `prompt_ids`, `completion_ids`, `logprobs`, `reward_key` and
        `verify_metrics`, an entry for each prompt. It raises ValueError for a verdict that is not the environment's
        reward, and for a rollout without any.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {
            key: [] for key in ("prompt_ids", "completion_ids", "logprobs", reward_key, "verify_metrics")
        }
        for prompt in prompts:
            session: ResourceSession = session_factory.create(prompt)
            try:
                result = harness_adapter.run_white_box(model_step_builder(trainer, session), session, limits)
                verdict = session.verify(transcript=result.messages, final_state=_final_state(result))
            finally:
                session.close()
            columns["prompt_ids"].append(result.prompt_ids)
            columns["completion_ids"].append(result.completion_ids)
            columns["logprobs"].append(result.logprobs)
            columns[reward_key].append(_agreed_reward(result, verdict))
            columns["verify_metrics"].append(verdict.metrics)
        return columns

    return rollout


def _final_state(result: HarnessRolloutResult) -> dict[str, Any]:
    return {
        "done": result.done,
        "metrics": result.metrics,
        "events": [dataclasses.asdict(event) for event in result.events],
        "tool_trace": [
            {
                "tool_name": entry.tool_name,
                "arguments": entry.arguments,
                "result": {
                    "data": entry.result.data,
                    "done": entry.result.done,
                    "metadata": entry.result.metadata,
                    "error": entry.result.error,
                },
            }
            for entry in result.tool_trace
        ],
    }


def _agreed_reward(result: HarnessRolloutResult, verdict: VerifyResult) -> float:
    found = [entry.result.metadata.get("reward") for entry in result.tool_trace]
    earned = next((float(reward) for reward in reversed(found) if reward is not None), None)
    if verdict.env_reward is None:
        if earned is None:
            raise ValueError("The rollout did not produce an environment reward")
        return earned
    reward = float(verdict.env_reward)
    if earned is not None and not isclose(reward, earned, rel_tol=0.0, abs_tol=_TOLERANCE):
        raise ValueError(
            f"verify.env_reward must forward the environment reward: the last tool call brought {earned}, not {reward}"
        )
    return reward
