"""veRL: an agent loop that plays a served environment. Needs verl (0.9.1 or newer).

Add it to the file of agent loops that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names:

    - name: openenv
      _target_: openenv.train.trainers.verl.ServedAgentLoop
      url: http://localhost:8000

and set the column `agent_name` of the dataset to `openenv`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from uuid import uuid4

from openenv.adapters import importing
from openenv.client.env_client import GenericEnvClient
from openenv.client.rewards import reward_history
from openenv.errors import OpenEnvError
from openenv.rollout.agents.dialogue import AnswerRefused, Dialogue, Json, conversation_of
from openenv.rollout.agents.served_episode import EPISODE_OVER, EpisodeFailed, EpisodeRules, RewardRule, served_dialogue

with importing("verl>=0.9.1", needed_by="openenv.train.trainers.verl"):
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
    from verl.experimental.agent_loop.tool_parser import ToolParser


@dataclass
class _Conversation:
    """A conversation: messages, their tokens, and a mask of the sampled tokens."""

    messages: list[Json]
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    generate_s: float = 0.0
    environment_s: float = 0.0
    preempted: int = -1


@register("openenv")
class ServedAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Plays one episode per prompt, each in its session; the score is the environment's reward.

    The key `reset` of a row's `extra_info` has the arguments for `reset` of the environment. The first observation
    follows the prompt. A failure of the server or the environment raises `EpisodeFailed`, which ends veRL's run.

    Args:
        url: The server; `url` in a row's `extra_info` takes precedence.
        system: The system message; one in a row's prompt takes precedence.
        max_turns: The largest number of replies in an episode.
        reward: `sum` adds all rewards of an episode, `last` takes the last one.
        client: Arguments of the client, such as `token`.
    """

    def __init__(
        self,
        *args: Any,
        url: str = "",
        system: str = "",
        max_turns: int = 10,
        reward: RewardRule = "sum",
        client: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("tools", None)  # tools for veRL's loops; the environment has its tools
        kwargs.pop("name", None)  # the name of the entry in the file
        super().__init__(*args, **kwargs)
        self._url, self._system, self._max_turns = url, system, max_turns
        self._reward: RewardRule = reward
        self._client_options = dict(client or {})
        self._parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)
        self._response_length = self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play an episode.

        Raises:
            ValueError: `url` is missing, or the row's prompt has several system messages.
            EpisodeFailed: The server or the environment failed.
            NoRewards: The environment has never given a reward.
        """
        row = dict(kwargs.get("extra_info") or {})
        url = str(row.get("url") or self._url)
        if not url:
            raise ValueError("the agent loop needs a `url`, in its configuration or in a row's extra_info")
        options = tuple(sorted(self._client_options.items()))
        dialogue = await asyncio.to_thread(_dialogue, url, self._system, options)
        rules = EpisodeRules(dialogue, self._reward, history=reward_history(url))
        talk = _Conversation(list(kwargs["raw_prompt"]))
        async with GenericEnvClient(url, **self._client_options) as client:
            await self._play(client, rules, talk, dict(row.get("reset") or {}), sampling_params)
        split = len(talk.tokens) - len(talk.mask)
        length = self._response_length
        return AgentLoopOutput(
            prompt_ids=talk.tokens[:split],
            response_ids=talk.tokens[split:][:length],
            response_mask=talk.mask[:length],
            response_logprobs=talk.logprobs[:length] if talk.logprobs else None,
            reward_score=rules.final_reward(),
            num_turns=2 * talk.turns,
            metrics=AgentLoopMetrics(
                generate_sequences=talk.generate_s, tool_calls=talk.environment_s, num_preempted=talk.preempted
            ),
            extra_fields=talk.extra,
        )

    async def _play(
        self, client: GenericEnvClient, rules: EpisodeRules, talk: _Conversation, start: Json, sampling: Json
    ) -> None:
        """Play until the episode ends, the model stops, or the limit of turns or tokens is reached."""
        dialogue, request_id = rules.dialogue, uuid4().hex
        try:
            first = await client.reset(**start)
        except (OpenEnvError, OSError) as exc:
            raise rules.fail(exc) from exc
        rules.begin(first)
        talk.messages = conversation_of(talk.messages, dialogue.opening(first.observation))
        talk.tokens = await self.ct_build_initial_tokens(talk.messages, tools=list(dialogue.tools) or None)
        while not rules.is_over and talk.turns < self._max_turns:
            answer = await self._ask(talk, request_id, sampling, dialogue)
            if len(talk.mask) >= self._response_length:
                return
            try:
                actions = dialogue.actions(answer)
                results = [await self._act(client, rules, action, talk) for action in actions]
            except AnswerRefused as exc:
                results = [str(exc)]
            if rules.is_over or not results or not await self._tell(talk, dialogue.reply(answer, results), dialogue):
                return

    async def _ask(self, talk: _Conversation, request_id: str, sampling: Json, dialogue: Dialogue) -> Json:
        """Ask the model; return its reply as a message."""
        if self._parser.stop_token_ids:
            stops = {*(sampling.get("stop_token_ids") or []), *self._parser.stop_token_ids}
            sampling = {**sampling, "stop_token_ids": list(stops)}
        began = time.perf_counter()
        output = await self.server_manager.generate(
            request_id=request_id, prompt_ids=talk.tokens, sampling_params=sampling
        )
        talk.generate_s += time.perf_counter() - began
        if output.num_preempted is not None:
            talk.preempted = max(talk.preempted, 0) + output.num_preempted
        talk.extra.update(output.extra_fields)
        talk.turns += 1
        merged, talk.mask, logprobs = await self.ct_merge_assistant_token(
            talk.tokens,
            output.token_ids,
            talk.mask,
            talk.logprobs or ([] if output.log_probs else None),
            assistant_logprobs=output.log_probs or None,
        )
        talk.tokens, talk.logprobs = merged.token_ids, logprobs
        answer: Json = {"role": "assistant"}
        if dialogue.tools:
            answer["content"], calls = await self._parser.extract_tool_calls(output.token_ids, [])
            if calls:
                answer["tool_calls"] = [
                    {
                        "id": call.tool_call_id or f"call-{talk.turns}-{number}",
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for number, call in enumerate(calls)
                ]
        else:
            answer["content"] = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        talk.messages.append(answer)
        return answer

    async def _act(self, client: GenericEnvClient, rules: EpisodeRules, action: Json, talk: _Conversation) -> str:
        """Take an action; return the model's view of the result."""
        if rules.is_over:
            return EPISODE_OVER
        began = time.perf_counter()
        try:
            return rules.take(await client.step(action))
        except EpisodeFailed:
            raise
        except (OpenEnvError, OSError) as exc:
            return rules.refuse(exc)
        finally:
            talk.environment_s += time.perf_counter() - began

    async def _tell(self, talk: _Conversation, messages: list[Json], dialogue: Dialogue) -> bool:
        """Add the environment's messages; return False if they exceed the token limit."""
        before, after = list(talk.messages), [*talk.messages, *messages]
        merged, mask, logprobs = await self.ct_merge_context_msg(
            before, after, talk.tokens, talk.mask, talk.logprobs, tools=list(dialogue.tools) or None
        )
        if len(mask) >= self._response_length:
            return False
        talk.messages, talk.tokens, talk.mask, talk.logprobs = after, merged.token_ids, mask, logprobs
        return True


@lru_cache(maxsize=64)
def _dialogue(url: str, system: str, client_options: tuple[tuple[str, Any], ...]) -> Dialogue:
    """Ask a server for its action schema, only once: veRL creates a loop per row."""
    return served_dialogue(url, system, dict(client_options))
