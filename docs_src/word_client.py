from __future__ import annotations

from typing import Any

from word_env import WordAction, WordObservation, WordState

from openenv import EnvClient, StepResult


class WordEnv(EnvClient[WordAction, WordObservation, WordState]):
    def _step_payload(self, action: WordAction) -> dict[str, Any]:
        return {"guess": action.guess}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[WordObservation]:
        reward, done = payload.get("reward"), bool(payload.get("done"))
        observation = WordObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation, reward, done, payload.get("metadata"))

    def _parse_state(self, payload: dict[str, Any]) -> WordState:
        return WordState(**payload)
