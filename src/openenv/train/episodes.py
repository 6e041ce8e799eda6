"""`play`: a model plays episodes of a served environment, many at once, and every token of it is captured.

    starts ──> workers, each with a session ──> model calls through a capture proxy ──> samples ──> groups, as they end
                     │                                                                      ▲
                     └── the server or the endpoint failed: played again, at most `retries` times ┘

A failure of the server or the endpoint never becomes a reward: such an episode has none, and counts in no baseline.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx2

from openenv.client.env_client import GenericEnvClient
from openenv.errors import ExecutionError, OpenEnvError, RequestValidationError, RolloutError, ToolCallError, message_of
from openenv.rollout.capture import Capture, CaptureServer, export
from openenv.rollout.engine import new_rollout_id
from openenv.rollout.outcome import Outcome, Status
from openenv.rollout.store import RolloutStore
from openenv.rollout.task import Model, Task

from .dialogue import AnswerRefused, Dialogue, Json, TextDialogue, ToolDialogue
from .groups import EpisodeSample, SampleGroup

Start = int | Mapping[str, Any]
"""Where the episodes of a group begin: a seed, or arguments of `reset`."""
RewardRule = Literal["sum", "last"]

_CALL_TIMEOUT_S = 660.0
_HOPELESS = 4
"""How many episodes have to fail in a row, at least, for the whole run to end."""
_PROMPT_REFUSED = frozenset({400, 413, 422})
"""Statuses about the request: the conversation is too long for the model, so the episode ends there."""


class EndpointFailed(OpenEnvError):
    """The model's endpoint did not answer; not the policy's doing."""

    code = "ENDPOINT_FAILED"


@dataclass(slots=True)
class PlayCounts:
    """What a stream has seen until now."""

    episodes: int = 0
    failed: int = 0
    """Episodes that failed for reasons that are not the policy's."""
    stale_groups: int = 0
    """Groups that were sampled by versions older than `max_staleness` allows."""
    filtered_groups: int = 0
    """Groups that `keep` did not want."""
    environment_s: float = 0.0
    """Time in which episodes waited for the environment, added up."""
    model_s: float = 0.0
    """Time in which they waited for the model, added up."""


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """How episodes are played."""

    max_turns: int
    max_tokens: int | None
    reward: RewardRule
    retries: int
    max_staleness: int | None
    keep: Callable[[SampleGroup], bool] | None


@dataclass(slots=True)
class _OpenGroup:
    """A group of which episodes are still played."""

    name: str
    start: Mapping[str, Any]
    size: int
    samples: list[EpisodeSample] = field(default_factory=list)
    failed: list[EpisodeSample] = field(default_factory=list)


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
    max_staleness: int | None = None,
    keep: Callable[[SampleGroup], bool] | None = None,
    store: RolloutStore | None = None,
    client_options: Mapping[str, Any] | None = None,
) -> AsyncIterator[EpisodeStream]:
    """Let a model play episodes; yields a stream of groups, each as soon as its last episode has ended.

    Args:
        url: The server, or several over which the sessions are spread.
        model: The endpoint; `sampling` and all else about calls is decided there.
        starts: A group for each, taken as they are needed: it may be endless.
        samples: How many episodes a group has.
        concurrency: How many episodes are played at once.
        system: What the model is asked to do.
        dialogue: How it talks with the environment; by default tools where the environment has them, else texts.
        max_turns: How many answers an episode has at most; one that is not over then counts with its reward so far.
        max_tokens: How many tokens an answer has at most.
        reward: `sum` of all rewards of an episode, or the `last` one.
        retries: How often an episode is played again that failed for reasons that are not the policy's.
        max_staleness: By how many versions (`stream.policy_version`, numbers that the endpoint names) the policy that
            sampled a group may be behind; older groups are left out, and counted.
        keep: Says of a group whether it is wanted, such as `lambda group: len(set(group.rewards)) > 1`.
        store: Where outcomes and records are kept; by default nothing is.
        client_options: Further arguments of the clients, such as `token`.

    Raises:
        ValueError: an argument is out of range.
        RolloutError: there is no such environment; while playing, as many episodes failed in a row as are played at
            once (at least 4), with all their retries: the last reason is named.
    """
    if min(samples, concurrency, max_turns) < 1 or retries < 0:
        raise ValueError("samples, concurrency and max_turns must be at least 1, retries at least 0")
    if reward not in ("sum", "last"):
        raise ValueError(f"reward must be 'sum' or 'last', not {reward!r}")
    urls = [url] if isinstance(url, str) else list(url)
    options = PlayOptions(max_turns, max_tokens, reward, retries, max_staleness, keep)
    clients = dict(client_options or {})
    with contextlib.ExitStack() as stack:
        root = store.captures if store is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy = await asyncio.to_thread(CaptureServer(root).start)
        try:
            chosen = dialogue or await _suitable_dialogue(urls[0], system, clients)
            limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
            http = httpx2.AsyncClient(base_url=proxy.url, trust_env=False, timeout=_CALL_TIMEOUT_S, limits=limits)
            async with http:
                stream = EpisodeStream(urls, model, chosen, options, proxy, http, store, clients)
                try:
                    stream.begin(starts, samples, concurrency)
                    yield stream
                finally:
                    await stream.end()
        finally:
            await asyncio.to_thread(proxy.stop)


async def _suitable_dialogue(url: str, system: str, client_options: Mapping[str, Any]) -> Dialogue:
    """Ask a server what its actions are."""
    headers = {"authorization": f"Bearer {client_options['token']}"} if client_options.get("token") else {}
    try:
        async with httpx2.AsyncClient(trust_env=False, timeout=30, headers=headers) as http:
            answer = (await http.get(url.rstrip("/") + "/schema")).raise_for_status()
        schema = answer.json()["action"]
    except (httpx2.HTTPError, ValueError, KeyError) as exc:
        raise RolloutError(f"{url} does not say what its actions are ({message_of(exc)}). Is a server there?") from exc
    if "tool_name" not in (schema.get("properties") or {}):
        return TextDialogue(system, schema)
    async with GenericEnvClient(url, **client_options) as client:
        await client.reset()
        listed = await client.step({"type": "list_tools"})
    return ToolDialogue(listed.observation.get("tools") or [], system)


class EpisodeStream:
    """Groups of episodes, as they end: `async for group in stream`. Made by `play`."""

    def __init__(
        self,
        urls: Sequence[str],
        model: Model,
        dialogue: Dialogue,
        options: PlayOptions,
        proxy: CaptureServer,
        http: httpx2.AsyncClient,
        store: RolloutStore | None,
        client_options: Mapping[str, Any],
    ) -> None:
        self._urls = urls
        self._model = model
        self._dialogue = dialogue
        self._options = options
        self._proxy = proxy
        self._http = http
        self._store = store
        self._client_options = client_options
        self._workers: list[asyncio.Task[None]] = []
        self._work: Iterator[tuple[_OpenGroup, int]] = iter(())
        self._done: asyncio.Queue[SampleGroup | BaseException | None] = asyncio.Queue(maxsize=1)
        self._free = asyncio.Event()
        self._free.set()
        self._failures_in_a_row = 0
        self.counts = PlayCounts()
        self.policy_version: int | None = None
        """The version that is trained now; set it after each update where `max_staleness` is used."""

    def begin(self, starts: Iterable[Start], samples: int, concurrency: int) -> None:
        """Start to play."""
        self._work = _work(starts, samples)
        # Groups that were not taken yet: as many as are being played. More would only grow stale.
        self._done = asyncio.Queue(maxsize=max(1, concurrency // samples))
        self._workers = [asyncio.create_task(self._play_on(number)) for number in range(concurrency)]
        self._workers.append(asyncio.create_task(self._watch(self._workers[:])))

    async def end(self) -> None:
        """Stop; episodes under way are given up, their sessions closed."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    def pause(self) -> None:
        """Make no further model call until `resume`: those under way are finished."""
        self._free.clear()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._free.set()

    def __aiter__(self) -> EpisodeStream:
        return self

    async def __anext__(self) -> SampleGroup:
        while True:
            group = await self._done.get()
            if group is None or isinstance(group, BaseException):
                self._done.put_nowait(group)  # for a further reader: nothing else comes any more
                raise StopAsyncIteration if group is None else group
            if self._is_stale(group):
                self.counts.stale_groups += 1
            elif self._options.keep is not None and not self._options.keep(group):
                self.counts.filtered_groups += 1
            else:
                return group

    def _is_stale(self, group: SampleGroup) -> bool:
        if self._options.max_staleness is None or self.policy_version is None:
            return False
        versions = {version for sample in group.samples for version in sample.policy_versions}
        try:
            oldest = min(map(int, versions), default=None)
        except ValueError:
            raise RolloutError(
                f"max_staleness needs versions that are numbers; the endpoint names {versions}"
            ) from None
        return oldest is None or oldest < self.policy_version - self._options.max_staleness

    # Workers

    async def _watch(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """Pass on the first failure of a worker, or that all are done."""
        try:
            await asyncio.gather(*workers)
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            for worker in workers:
                worker.cancel()
            await self._done.put(exc)
            return
        await self._done.put(None)

    async def _play_on(self, number: int) -> None:
        """Play episode after episode with one session."""
        url = self._urls[number % len(self._urls)]
        client: GenericEnvClient | None = None
        try:
            for group, index in self._work:
                for attempt in range(self._options.retries + 1):
                    if client is None:
                        client = GenericEnvClient(url, **self._client_options)
                    sample = await self._episode(client, group, index, attempt)
                    if sample.outcome.status != "env_failed":
                        break
                    await _closed(client)  # what is left of that session cannot be trusted
                    client = None
                    self._failed(sample, is_last=attempt == self._options.retries)
                    if attempt < self._options.retries:
                        group.failed.append(sample)
                await self._add(group, sample)
        finally:
            if client is not None:
                await _closed(client)

    def _failed(self, sample: EpisodeSample, *, is_last: bool) -> None:
        self.counts.failed += 1
        self._failures_in_a_row += is_last
        if self._failures_in_a_row >= max(_HOPELESS, len(self._workers) - 1):
            raise RolloutError(
                f"{self._failures_in_a_row} episodes in a row failed {self._options.retries + 1} times each; the last "
                f"one: {sample.outcome.reason}"
            )

    async def _add(self, group: _OpenGroup, sample: EpisodeSample) -> None:
        self.counts.episodes += 1
        if sample.reward is not None:
            self._failures_in_a_row = 0
        group.samples.append(sample)
        if len(group.samples) == group.size:
            group.samples.sort(key=lambda one: int(one.outcome.metadata["sample"]))
            await self._done.put(SampleGroup(group.name, group.start, group.samples, group.failed))

    # One episode

    async def _episode(self, client: GenericEnvClient, group: _OpenGroup, index: int, attempt: int) -> EpisodeSample:
        began = time.time()
        rollout_id = new_rollout_id()
        metadata = {"group": group.name, "sample": index, "attempt": attempt, "start": dict(group.start)}
        capture = self._proxy.open(rollout_id, self._model, metadata=metadata)
        episode = _Episode(self._options)
        try:
            await self._run(client, group, episode, capture)
        except (OpenEnvError, OSError) as exc:
            episode.finish("env_failed", f"{type(exc).__name__}: {message_of(exc)}")
        finally:
            await asyncio.to_thread(capture.close)
        self.counts.environment_s += episode.environment_s
        self.counts.model_s += episode.model_s
        recording = capture.recording()
        outcome = Outcome(
            rollout_id=rollout_id,
            task_id=group.name,
            status=episode.status,
            reason=episode.reason,
            reward=episode.reward,
            agent="play",
            model=self._model.name,
            turns=export.turns(recording),
            started_at=began,
            wall_s=time.time() - began,
            phase_s={"environment": episode.environment_s, "model": episode.model_s},
            metadata=metadata,
        )
        if self._store is not None:
            task = Task(task_id=group.name, instruction=episode.instruction or group.name)
            await asyncio.to_thread(self._store.add, outcome, task)
        return EpisodeSample(outcome, export.sequences(recording))

    async def _run(self, client: GenericEnvClient, group: _OpenGroup, episode: _Episode, capture: Capture) -> None:
        """Play until the episode is over, the model stops, or the turns are used up."""
        with episode.waits_for_environment():
            first = await client.reset(**group.start)
        messages = self._dialogue.opening(first.observation)
        episode.instruction = "\n\n".join(str(message["content"]) for message in messages)
        for _ in range(self._options.max_turns):
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
        episode.finish("truncated", f"the episode was not over after {self._options.max_turns} answers")

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
        await self._free.wait()
        body: Json = {"model": self._model.name, "messages": messages}
        if self._options.max_tokens is not None:
            body["max_tokens"] = self._options.max_tokens
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

    def __init__(self, options: PlayOptions) -> None:
        self._rule = options.reward
        self._reward = 0.0
        self.status: Status = "ok"
        self.reason: str | None = None
        self.is_over = False
        self.instruction = ""
        self.environment_s = 0.0
        self.model_s = 0.0

    @property
    def reward(self) -> float | None:
        """The reward; None where something failed that is not the policy."""
        return None if self.status == "env_failed" else self._reward

    def add_reward(self, reward: float | None) -> None:
        """Count the reward of a step; None is no reward."""
        if reward is not None:
            self._reward = float(reward) + (self._reward if self._rule == "sum" else 0.0)

    def finish(self, status: Status, reason: str | None = None) -> None:
        """End the episode."""
        self.status, self.reason, self.is_over = status, reason, True

    @contextlib.contextmanager
    def waits_for_environment(self) -> Iterator[None]:
        """Count the time of a block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.environment_s += time.perf_counter() - began


def _work(starts: Iterable[Start], samples: int) -> Iterator[tuple[_OpenGroup, int]]:
    """Yield what is to be played: each sample of each group."""
    for number, start in enumerate(starts):
        arguments = {"seed": start} if isinstance(start, int) else dict(start)
        name = f"seed-{start}" if isinstance(start, int) else str(arguments.get("episode_id") or f"start-{number}")
        group = _OpenGroup(name, arguments, samples)
        for index in range(samples):
            yield group, index


async def _closed(client: GenericEnvClient) -> None:
    with contextlib.suppress(OpenEnvError, OSError):
        await client.close()
