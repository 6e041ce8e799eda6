"""`play`: a model plays episodes of a served environment, many at once, and every token of it is captured.

    starts ──> workers, each with a session ──> model calls through a capture proxy ──> samples ──> groups (`stream`)

A failure of the server or the endpoint never becomes a reward: such an episode has none, and counts in no baseline.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from openenv.client.env_client import GenericEnvClient
from openenv.errors import (
    ExecutionError,
    OpenEnvError,
    RequestValidationError,
    SessionCapacityError,
    ToolCallError,
    message_of,
)
from openenv.rollout.agents.dialogue import AnswerRefused, Dialogue, Json
from openenv.rollout.agents.served_episode import RewardRule, served_dialogue
from openenv.rollout.capture import Capture, CaptureServer, export
from openenv.rollout.capture.training_trace import RolloutTurn
from openenv.rollout.run.engine import new_rollout_id
from openenv.rollout.store.outcome import Outcome, Status
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import Model, Task

from .groups import EpisodeSample, SampleGroup
from .stream import GroupStream, OpenGroup, StreamOptions, model_to_train

Start = int | Mapping[str, Any]
"""Where the episodes of a group begin: a seed, or arguments of `reset`."""

_CALL_TIMEOUT_S = 660.0
_PROMPT_REFUSED = frozenset({400, 413, 422})
"""Statuses about the request: the conversation is too long for the model, so the episode ends there."""


class EndpointFailed(OpenEnvError):
    """The model's endpoint did not answer; not the policy's doing."""

    code = "ENDPOINT_FAILED"


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """How episodes are played."""

    max_turns: int
    max_tokens: int | None
    reward: RewardRule


@contextlib.asynccontextmanager
async def play(
    url: str | Sequence[str],
    model: Model,
    starts: Iterable[Start],
    *,
    samples: int = 8,
    concurrency: int = 64,
    system: str = "",
    dialogue: Dialogue | None = None,
    max_turns: int = 20,
    max_tokens: int | None = None,
    reward: RewardRule = "sum",
    retries: int = 2,
    oversample: int = 0,
    max_staleness: int | None = None,
    keep: Callable[[SampleGroup], bool] | None = None,
    on_failed: Callable[[SampleGroup], object] | None = None,
    store: RolloutStore | None = None,
    client_options: Mapping[str, Any] | None = None,
) -> AsyncIterator[EpisodeStream]:
    """Let a model play episodes; yields a stream of groups, each as soon as its last episode has ended.

    Args:
        url: The server, or several over which the sessions are spread.
        model: The endpoint; `sampling` and all else about calls is decided there. One that names no sampling samples
            from its own distribution (`Sampling()`).
        starts: A group for each, taken as they are needed: it may be endless, or a `Curriculum`.
        samples: How many episodes a group has.
        concurrency: How many episodes are played at once; fewer where the server has no room for as many sessions.
        system: What the model is asked to do.
        dialogue: How it talks with the environment; by default tools where the environment has them, else texts.
        max_turns: How many answers an episode has at most; one that is not over then counts with its reward so far.
        max_tokens: How many tokens an answer has at most.
        reward: `sum` of all rewards of an episode, or the `last` one.
        retries: How often an episode is played again that failed for reasons that are not the policy's.
        oversample: How many more episodes a group begins with; when `samples` of them have a reward, the others are
            cancelled. Saves the wait for the slowest, and prefers short episodes.
        max_staleness: By how many versions (`stream.policy_version`, numbers that the endpoint names) the policy that
            sampled a group may be behind; older groups are left out, and counted.
        keep: Says of a group whether it is wanted, such as `lambda group: group.spread > 0`.
        on_failed: Takes the groups without any reward, which the stream leaves out.
        store: Where outcomes and records are kept; by default nothing is.
        client_options: Further arguments of the clients, such as `token`.

    Raises:
        ValueError: an argument is out of range.
        RolloutError: there is no such environment; while playing, as many episodes failed in a row as are played at
            once (at least 4, of 3 groups), with all their retries, or all failed: the last reason is named.
    """
    options = StreamOptions(samples, concurrency, oversample, retries, max_staleness, keep, on_failed)
    if max_turns < 1:
        raise ValueError("max_turns must be at least 1")
    if reward not in ("sum", "last"):
        raise ValueError(f"reward must be 'sum' or 'last', not {reward!r}")
    urls = [url] if isinstance(url, str) else list(url)
    clients = dict(client_options or {})
    with contextlib.ExitStack() as stack:
        root = store.captures if store is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy = await asyncio.to_thread(CaptureServer(root).start)
        try:
            chosen = dialogue
            if chosen is None:
                chosen = await asyncio.to_thread(served_dialogue, urls[0], system, clients)
            limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
            http = httpx2.AsyncClient(base_url=proxy.url, trust_env=False, timeout=_CALL_TIMEOUT_S, limits=limits)
            async with http:
                stream = EpisodeStream(
                    starts,
                    options,
                    urls=urls,
                    model=model_to_train(model),
                    dialogue=chosen,
                    episodes=EpisodeOptions(max_turns, max_tokens, reward),
                    proxy=proxy,
                    http=http,
                    store=store,
                    client_options=clients,
                )
                async with stream:
                    yield stream
        finally:
            await asyncio.to_thread(proxy.stop)


class EpisodeStream(GroupStream[Start]):
    """Groups of episodes, as they end: `async for group in stream`. Made by `play`."""

    def __init__(
        self,
        starts: Iterable[Start],
        options: StreamOptions,
        *,
        urls: Sequence[str],
        model: Model,
        dialogue: Dialogue,
        episodes: EpisodeOptions,
        proxy: CaptureServer,
        http: httpx2.AsyncClient,
        store: RolloutStore | None,
        client_options: Mapping[str, Any],
    ) -> None:
        super().__init__(starts, options, proxy)
        self._urls = urls
        self._model = model
        self._dialogue = dialogue
        self._episodes = episodes
        self._open_capture = proxy.open
        self._http = http
        self._store = store
        self._client_options = client_options
        self._clients: dict[int, GenericEnvClient] = {}

    def name_of(self, item: Start, number: int) -> str:
        if isinstance(item, int):
            return f"seed-{item}"
        return str(item.get("episode_id") or f"start-{number}")

    def whole(self, group: OpenGroup[Start]) -> SampleGroup:
        return SampleGroup(group.name, _arguments(group.item), group.chosen(), group.failed)

    async def release(self, worker: int) -> None:
        await super().release(worker)
        client = self._clients.pop(worker, None)
        if client is not None:
            with contextlib.suppress(OpenEnvError, OSError):
                await client.close()

    def _client(self, worker: int) -> GenericEnvClient:
        """Return the worker's session, which `reset` opens."""
        if worker not in self._clients:
            self._clients[worker] = GenericEnvClient(self._urls[worker % len(self._urls)], **self._client_options)
        return self._clients[worker]

    async def sample(self, worker: int, group: OpenGroup[Start], index: int, attempt: int) -> EpisodeSample:
        labels = {**group.labels(index, attempt), "start": _arguments(group.item)}
        episode = _Episode(new_rollout_id(), group.name, labels, self._episodes.reward)
        client = self._client(worker)
        try:
            with episode.waits_for_environment():
                first = await client.reset(**_arguments(group.item))
        except SessionCapacityError:
            await self.release(worker)
            raise
        except (OpenEnvError, OSError) as exc:
            episode.fail(exc)
            return await self._stored(episode)
        self.settled.add(worker)
        messages = self._dialogue.opening(first.observation)
        episode.instruction = "\n\n".join(str(message["content"]) for message in messages)
        if self._store is not None:  # an episode of a process that dies is listed as interrupted
            about = {"agent": "play", "model": self._model.name, "group": group.label}
            await asyncio.to_thread(self._store.begin, episode.rollout_id, episode.task(), about=about)
        capture = self._open_capture(episode.rollout_id, self._model, metadata=labels)
        try:
            await self._run(client, messages, episode, capture)
        except (OpenEnvError, OSError) as exc:
            episode.fail(exc)
        except asyncio.CancelledError:
            episode.finish("cancelled", "the episode was no longer needed")
            await asyncio.to_thread(capture.close)
            await self._stored(episode, capture)
            raise
        await asyncio.to_thread(capture.close)
        return await self._stored(episode, capture)

    async def _stored(self, episode: _Episode, capture: Capture | None = None) -> EpisodeSample:
        """Store an episode that has ended, and return it as a sample."""
        self.counts.environment_s += episode.environment_s
        self.counts.model_s += episode.model_s
        recording = None if capture is None else capture.recording()
        outcome = episode.outcome(self._model.name, [] if recording is None else export.turns(recording))
        sequences = [] if recording is None else export.sequences(recording)
        if self._store is None:
            outcome.keep_sequences(sequences)
        else:
            await asyncio.to_thread(self._store.add, outcome, episode.task())
        return EpisodeSample(outcome, sequences)

    async def _run(self, client: GenericEnvClient, messages: list[Json], episode: _Episode, capture: Capture) -> None:
        """Play until the episode is over, the model stops, or the turns are used up."""
        for _ in range(self._episodes.max_turns):
            answer = await self._ask(messages, episode, capture)
            if answer is None:
                return
            messages.append(answer)
            try:
                actions = self._dialogue.actions(answer)
            except AnswerRefused as exc:
                messages += self._dialogue.reply(answer, [str(exc)])
                continue
            if not actions:
                episode.finish("ok")
                return
            results = [await self._step(client, action, episode) for action in actions if not episode.is_over]
            if episode.is_over:
                return
            messages += self._dialogue.reply(answer, results)
        episode.finish("truncated", f"the episode was not over after {self._episodes.max_turns} answers")

    async def _step(self, client: GenericEnvClient, action: Json, episode: _Episode) -> str:
        """Take one action, and return what the model sees of it."""
        try:
            with episode.waits_for_environment():
                result = await client.step(action)
        except (RequestValidationError, ToolCallError) as exc:  # the model's action is what is wrong
            return f"Error: {message_of(exc)}"
        except ExecutionError as exc:
            # The environment's code raised. It may be at fault or the action: no reward can be made of that.
            episode.finish("env_failed", message_of(exc))
            return ""
        episode.add_reward(result.reward)
        if result.done:
            episode.finish("ok")
        return self._dialogue.shown(result.observation)

    async def _ask(self, messages: Sequence[Json], episode: _Episode, capture: Capture) -> Json | None:
        """Return the model's answer as a message; None where the conversation has become too long for it.

        Raises:
            EndpointFailed: it does not answer.
        """
        await self.is_free.wait()
        body: Json = {"model": self._model.name, "messages": messages}
        if self._episodes.max_tokens is not None:
            body["max_tokens"] = self._episodes.max_tokens
        if self._dialogue.tools:
            body["tools"] = self._dialogue.tools
        began = time.perf_counter()
        try:
            reply = await self._http.post(
                "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {capture.key}"}
            )
        except httpx2.HTTPError as exc:
            raise EndpointFailed(f"the model endpoint failed: {message_of(exc)}") from exc
        finally:
            episode.model_s += time.perf_counter() - began
        if reply.status_code in _PROMPT_REFUSED:
            episode.finish("truncated", f"the endpoint refused the conversation: {reply.text[:300]}")
            return None
        if reply.status_code != 200:
            raise EndpointFailed(f"the model endpoint answered {reply.status_code}: {reply.text[:300]}")
        try:
            message: Json = reply.json()["choices"][0]["message"]
        except (ValueError, LookupError, TypeError) as exc:
            raise EndpointFailed(f"the model endpoint gave no message: {reply.text[:300]}") from exc
        kept = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
        return {"role": "assistant", "content": "", **kept}


class _Episode:
    """The state of an episode: its reward so far, and how it ended."""

    def __init__(self, rollout_id: str, name: str, labels: Json, rule: RewardRule) -> None:
        self.rollout_id = rollout_id
        self._name = name
        self._labels = labels
        self._rule = rule
        self._reward = 0.0
        self._began = time.time()
        self.status: Status = "ok"
        self.reason: str | None = None
        self.is_over = False
        self.instruction = ""
        self.environment_s = 0.0
        self.model_s = 0.0

    @property
    def reward(self) -> float | None:
        """The reward; None where something failed that is not the policy, or the episode was given up."""
        return None if self.status in ("env_failed", "cancelled") else self._reward

    def add_reward(self, reward: float | None) -> None:
        """Count the reward of a step; None is no reward."""
        if reward is not None:
            self._reward = float(reward) + (self._reward if self._rule == "sum" else 0.0)

    def finish(self, status: Status, reason: str | None = None) -> None:
        """End the episode."""
        self.status, self.reason, self.is_over = status, reason, True

    def fail(self, exc: BaseException) -> None:
        """End it because something failed that is not the policy."""
        self.finish("env_failed", f"{type(exc).__name__}: {message_of(exc)}")

    def task(self) -> Task:
        """Return what the store keeps as its task."""
        return Task(task_id=self._name, instruction=self.instruction or self._name)

    def outcome(self, model: str, turns: Sequence[RolloutTurn] = ()) -> Outcome:
        """Return how it ended."""
        return Outcome(
            rollout_id=self.rollout_id,
            task_id=self._name,
            status=self.status,
            reason=self.reason,
            reward=self.reward,
            agent="play",
            model=model,
            turns=list(turns),
            started_at=self._began,
            wall_s=time.time() - self._began,
            phase_s={"environment": self.environment_s, "model": self.model_s},
            metadata=self._labels,
        )

    @contextlib.contextmanager
    def waits_for_environment(self) -> Iterator[None]:
        """Count the time of a block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.environment_s += time.perf_counter() - began


def _arguments(start: Start) -> Json:
    """Return the arguments of `reset`."""
    return {"seed": start} if isinstance(start, int) else dict(start)
