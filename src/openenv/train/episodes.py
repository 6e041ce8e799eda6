"""`play`: a model plays episodes of a served environment, many at once, and a proxy captures every token.

    starts ──> workers, each with a session ──> model calls through a capture proxy ──> samples ──> groups (`stream`)

A failure of the server or the endpoint is never scored: the episode has no reward and counts in no baseline.
"""

# One episode (`EpisodeStream._run`), and the status with which it ends:
#
#   reset ──> ask the model ──> actions ──> step, one per action ──> ask the model ──> ...
#     │          │                │            │
#     │          │                │            ├─ the environment is done      ok
#     │          │                │            ├─ the environment raised       env_failed
#     │          │                │            └─ the action was refused       the model reads the error and continues
#     │          │                ├─ none: the model ends the episode          ok
#     │          │                └─ not readable                              the model reads the reason and continues
#     │          ├─ the endpoint refuses the policy's answers: too long        truncated
#     │          ├─ `max_turns` is reached                                     truncated
#     │          └─ the endpoint failed, or refuses every request              env_failed
#     └─ the server failed                                                     env_failed

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from openenv.client.env_client import GenericEnvClient
from openenv.client.rewards import RewardHistory
from openenv.errors import (
    CaptureError,
    ExecutionError,
    OpenEnvError,
    RequestValidationError,
    SessionCapacityError,
    ToolCallError,
    message_of,
)
from openenv.protocol.json_values import encode, finite_reward, reply_reward
from openenv.rollout.agents.dialogue import AnswerRefused, Dialogue, Json, Prompt
from openenv.rollout.agents.served_episode import RewardRule, environment_name, served_dialogue, served_prompt
from openenv.rollout.capture import Capture, CaptureOptions, CaptureServer, export
from openenv.rollout.capture.encoding import dumps, load_object
from openenv.rollout.capture.token_in import THOUGHTS
from openenv.rollout.capture.training_trace import RolloutTurn
from openenv.rollout.run.engine import new_rollout_id
from openenv.rollout.store.outcome import Outcome, Status
from openenv.rollout.store.store import STEPS_FILE, RolloutStore, check_is_no_folder
from openenv.rollout.tasks.task import Model, Task
from openenv.types import StepResult

from .groups import EpisodeSample, SampleGroup
from .stream import GroupStream, OpenGroup, StreamArguments, StreamOptions, model_to_train

Start = int | Mapping[str, Any]
"""The start of a group's episodes: a seed, or arguments of `reset`."""

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 660.0
_MOST_STEP_BYTES = 8 * 1024 * 1024
_REFUSED = frozenset({400, 413, 422})
"""Statuses that refuse a request: because of the policy's answers, or because the endpoint refuses every request."""


class EndpointFailed(OpenEnvError):
    """The model's endpoint did not answer: an infrastructure failure."""

    code = "ENDPOINT_FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions(StreamOptions):
    """How episodes are played. `play` takes these fields as keyword arguments.

    Raises:
        ValueError: a value is out of range.
    """

    system: str = ""
    """The task of the model, as its system message."""
    dialogue: Dialogue | None = None
    """How the model talks with the environment; by default with tool calls if the environment has tools, else text."""
    template: str = ""
    """The first message of an episode, with `{description}`, `{actions}` and `{observation}`; empty for the
    environment's `PROMPT_TEMPLATE`, or else all three, separated by blank lines."""
    text_only: bool = False
    """Whether the model reads only the observation's text: no description, no form of actions, no other fields."""
    max_turns: int = 20
    """The largest number of replies in an episode. An unfinished episode then counts with its reward so far."""
    max_tokens: int | None = None
    """The largest number of tokens in a reply."""
    keep_reasoning: bool = True
    """Whether the model's thoughts are sent back with its replies, in the endpoint's field for them. Templates decide
    which of them the model sees. Set False if the endpoint refuses the field."""
    reward: RewardRule = "sum"
    """`sum` adds all rewards of an episode, `last` takes the last one."""
    gives_rewards: bool = False
    """Whether the environment is known to give rewards, perhaps rarely. Otherwise complete groups wait for the first
    reward of any episode, and the stream stops if none comes. A missing reward counts as 0."""
    store: RolloutStore | None = None
    """Keeps outcomes and captured calls; None discards them."""
    client_options: Mapping[str, Any] | None = None
    """More arguments of the clients, such as `token`."""

    def __post_init__(self) -> None:
        # Not `super()`: the decorator builds a new class for `slots`, which the method's own `super()` does not know.
        StreamOptions.__post_init__(self)
        check_is_no_folder(self.store)
        if self.max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        if self.reward not in ("sum", "last"):
            raise ValueError(f"reward must be 'sum' or 'last', not {self.reward!r}")
        if self.dialogue is not None and (self.template or self.text_only):
            raise ValueError("a `dialogue` has its own form: pass no `template` and no `text_only` beside it")
        Prompt(template=self.template)


class PlayArguments(StreamArguments, total=False):
    """The fields of `PlayOptions` as keyword arguments; mypy compares both lists."""

    system: str
    dialogue: Dialogue | None
    template: str
    text_only: bool
    max_turns: int
    max_tokens: int | None
    keep_reasoning: bool
    reward: RewardRule
    gives_rewards: bool
    store: RolloutStore | None
    client_options: Mapping[str, Any] | None


@contextlib.asynccontextmanager
async def play(
    url: str | Sequence[str], model: Model, starts: Iterable[Start], **options: Unpack[PlayArguments]
) -> AsyncIterator[EpisodeStream]:
    """Let a model play episodes; yield a stream of groups, each as soon as its last episode ends.

    The players run on this event loop: train in a thread (`asyncio.to_thread`), or they wait for each update.

    Args:
        url: The server, or several servers that share the sessions.
        model: The endpoint, with `sampling` and everything else about the calls. A model without `sampling` samples
            from its own distribution (`Sampling()`).
        starts: One group per start, read when it is needed: an endless iterator, or a `Curriculum`, is fine.
        options: The fields of `PlayOptions`, such as `samples`, `concurrency` and `max_turns`.

    Raises:
        ValueError: an option is out of range.
        RolloutError: the server has no environment. While the stream runs: every episode failed with all its retries,
            or as many in a row as run at once (at least 4, of 3 groups). The text names the last reason.
    """
    chosen = PlayOptions(**options)
    urls = [url] if isinstance(url, str) else list(url)
    store = chosen.store
    async with player_proxy(None if store is None else store.captures) as proxy:
        dialogue = chosen.dialogue
        if dialogue is None:
            dialogue = await asyncio.to_thread(_dialogue, urls[0], chosen)
        endpoint = CapturedModel(model_to_train(model), proxy)
        stream = EpisodeStream(starts, chosen, urls=urls, dialogue=dialogue, endpoint=endpoint)
        if store is not None:  # only a list of stored episodes shows the name
            stream.environment = await asyncio.to_thread(environment_name, urls[0], chosen.client_options)
        async with stream:
            yield stream


@contextlib.asynccontextmanager
async def player_proxy(root: Path | None) -> AsyncIterator[CaptureServer]:
    """Run a capture proxy for players on this loop; None keeps the records in a temporary folder."""
    with contextlib.ExitStack() as stack:
        folder = root or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Nobody lists closed episodes here, and there may be a hundred in a second.
        async with CaptureServer(folder, CaptureOptions(holds_calls=True, closed_ttl_s=0.0)).on_this_loop() as proxy:
            yield proxy


def _dialogue(url: str, options: PlayOptions) -> Dialogue:
    """Return the dialogue for a server, if the caller brings none."""
    client = options.client_options
    form = served_prompt(url, client, template=options.template, text_only=options.text_only)
    return served_dialogue(url, options.system, client, prompt=form)


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A model's endpoint behind the capture proxy."""

    model: Model
    proxy: CaptureServer


class EpisodeStream(GroupStream[Start]):
    """Groups of episodes in the order in which they end: `async for group in stream`. `play` creates it."""

    options: PlayOptions

    def __init__(
        self,
        starts: Iterable[Start],
        options: PlayOptions,
        *,
        urls: Sequence[str],
        dialogue: Dialogue,
        endpoint: CapturedModel,
    ) -> None:
        super().__init__(starts, options, endpoint.proxy, options.store, endpoint.model)
        self.rewards = RewardHistory(is_declared=options.gives_rewards, limit=max(64, 2 * options.concurrency))
        self.environment = ""
        """The name of the environment, for the store."""
        self._urls = urls
        self._endpoint = endpoint.model
        self._dialogue = dialogue
        self._open_capture = endpoint.proxy.open
        self._client_options = dict(options.client_options or {})
        self._clients: dict[int, GenericEnvClient] = {}
        self._draws = True  # until a server refuses to

    def name_of(self, item: Start, number: int) -> str:
        if isinstance(item, int):
            return f"seed-{item}"
        return str(item.get("episode_id") or f"start-{number}")

    def whole(self, group: OpenGroup[Start]) -> SampleGroup:
        return SampleGroup(group.name, reset_arguments(group.item), group.chosen(), group.failed)

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
        labels = {**group.labels(index, attempt), "start": reset_arguments(group.item)}
        if self.environment:
            labels["environment"] = self.environment
        episode = PlayedEpisode(new_rollout_id(), group.name, labels, self.options.reward)
        if self._store is not None:
            episode.steps = StepLog()
        client = self._client(worker)
        try:
            with episode.waits_for_environment():
                first = await client.reset(**reset_arguments(group.item))
            reply_reward(first.reward, first.metadata)
        except SessionCapacityError:
            await self.release(worker)
            raise
        except (OpenEnvError, OSError) as exc:
            episode.fail(exc)
            return await self._stored(episode)
        await self._note({"kind": "reset", "arguments": reset_arguments(group.item)}, first, client, episode)
        self.settled.add(worker)
        messages = self._dialogue.opening(first.observation)
        episode.instruction = "\n\n".join(str(message["content"]) for message in messages)
        if self._store is not None:  # so that the store lists it as interrupted if this process dies
            about = {"agent": "play", "model": self._endpoint.name, "group": group.label}
            await asyncio.to_thread(self._store.begin, episode.rollout_id, episode.task(), about=about)
        capture = self._open_capture(episode.rollout_id, self._endpoint, metadata=labels)
        try:
            await self._run(client, messages, episode, capture)
        except (OpenEnvError, OSError) as exc:
            episode.fail(exc)
        except asyncio.CancelledError:
            episode.finish("cancelled", "the episode was no longer needed")
            await capture.aclose()
            await self._stored(episode, capture)
            raise
        await capture.aclose()
        return await self._stored(episode, capture)

    async def _stored(self, episode: PlayedEpisode, capture: Capture | None = None) -> EpisodeSample:
        """Store a finished episode, and return it as a sample."""
        self.counts.environment_s += episode.environment_s
        self.counts.model_s += episode.model_s
        recording = None if capture is None else capture.trace()
        outcome = episode.outcome(self._endpoint.name, [] if recording is None else export.turns(recording))
        sequences = [] if recording is None else export.sequences(recording)
        calls = [] if recording is None else [call.number for call in recording.calls if call.sampled]
        rewards = dict(zip(calls, episode.turn_rewards, strict=False))  # a call without an answer earned nothing
        outcome.metadata["turn_rewards"] = {str(number): reward for number, reward in rewards.items()}
        outcome.metadata["is_rewarded"] = episode.is_rewarded
        if self._store is None:
            outcome.keep_sequences(sequences)
        else:
            await asyncio.to_thread(self._keep, self._store, outcome, episode)
        return EpisodeSample(outcome, sequences, is_rewarded=episode.is_rewarded, turn_rewards=rewards)

    def _keep(self, store: RolloutStore, outcome: Outcome, episode: PlayedEpisode) -> None:
        """Store an episode: its steps, as all files, before its record."""
        path = store.live_file(episode.rollout_id, STEPS_FILE)
        if episode.steps is not None and path.parent.is_dir():  # an episode whose reset failed has no folder yet
            episode.steps.write(path)
        store.add(outcome, episode.task())

    async def _run(
        self, client: GenericEnvClient, messages: list[Json], episode: PlayedEpisode, capture: Capture
    ) -> None:
        """Play until the episode ends, the model stops, or `max_turns` is reached."""
        for _ in range(self.options.max_turns):
            answer = await self._ask(messages, episode, capture)
            if answer is None:
                return
            messages.append(answer)
            episode.turn_rewards.append(0.0)
            try:
                actions = self._dialogue.actions(answer)
            except AnswerRefused as exc:
                episode.refusal = episode.refusal or str(exc)
                messages += self._dialogue.reply(answer, [str(exc)])
                continue
            if not actions:
                episode.finish("ok")
                return
            results = [await self._step(client, action, episode) for action in actions if not episode.is_over]
            if episode.is_over:
                return
            messages += self._dialogue.reply(answer, results)
        refused = f"; no action was accepted: {episode.refusal}" if episode.refusal and not episode.has_acted else ""
        episode.finish("truncated", f"the episode was not over after {self.options.max_turns} answers{refused}")

    async def _step(self, client: GenericEnvClient, action: Json, episode: PlayedEpisode) -> str:
        """Take one action, and return the model's view of the result."""
        try:
            with episode.waits_for_environment():
                result = await client.step(action)
            episode.has_acted = True
            await self._note({"kind": "step", "action": action}, result, client, episode)
            episode.add_reward(reply_reward(result.reward, result.metadata))
        except (RequestValidationError, ToolCallError) as exc:  # the model's action is wrong
            episode.refusal = episode.refusal or message_of(exc)
            return f"Error: {message_of(exc)}"
        except ExecutionError as exc:
            # The environment's code raised, or the reward is not a finite number. So the episode has no reward.
            episode.finish("env_failed", message_of(exc))
            return ""
        if result.done:
            episode.finish("ok")
        return self._dialogue.shown(result.observation)

    async def _note(self, row: Json, result: StepResult[Any], client: GenericEnvClient, episode: PlayedEpisode) -> None:
        """Log a call of the environment for the store, with the environment's picture of its result."""
        if episode.steps is None:
            return
        episode.steps.add(row, result)
        if not self._draws or episode.steps.is_full:
            return
        try:
            with episode.waits_for_environment():
                html = await client.render_web(result)
        except (OpenEnvError, OSError) as exc:  # above all: no `render_web`, or a server that speaks only v1
            logger.debug("no pictures of %s: %s", self.environment, message_of(exc))
            self._draws = False
        else:
            if html is not None:
                episode.steps.add_picture(html)

    async def _ask(self, messages: Sequence[Json], episode: PlayedEpisode, capture: Capture) -> Json | None:
        """Return the model's reply as a message; None if the endpoint refuses what the policy said.

        Raises:
            EndpointFailed: the endpoint does not answer, or refuses requests without the policy's answers.
        """
        await self.is_free.wait()
        body: Json = {"model": self._endpoint.name, "messages": messages}
        if self.options.max_tokens is not None:
            body["max_tokens"] = self.options.max_tokens
        if self._dialogue.tools:
            body["tools"] = self._dialogue.tools
        began = time.perf_counter()
        try:
            reply = await capture.post("/v1/chat/completions", dumps(body), timeout_s=_CALL_TIMEOUT_S)
        except CaptureError as exc:
            raise EndpointFailed(f"the model endpoint failed: {message_of(exc)}") from exc
        finally:
            episode.model_s += time.perf_counter() - began
        text = reply.body[:1000].decode("utf-8", "replace")[:300]
        if reply.status in _REFUSED:
            await self._blame(text, episode, capture)
            return None
        if reply.status != 200:
            raise EndpointFailed(f"the model endpoint answered {reply.status}: {text}")
        try:
            message: Json = (load_object(reply.body) or {})["choices"][0]["message"]
        except (ValueError, LookupError, TypeError) as exc:
            raise EndpointFailed(f"the model endpoint gave no message: {text}") from exc
        names = ("role", "content", "tool_calls", *(THOUGHTS if self.options.keep_reasoning else ()))
        kept = {name: message[name] for name in names if message.get(name)}
        return {"role": "assistant", "content": "", **kept}

    async def _blame(self, refusal: str, episode: PlayedEpisode, capture: Capture) -> None:
        """End an episode whose request was refused, if its answers are the reason.

        The conversation may be too long, or a tool call unparsable. But a refusal is an infrastructure failure if the
        policy wrote no part of the request, or if the endpoint refuses a fixed request with the same tools.

        Raises:
            EndpointFailed: the endpoint is the reason.
        """
        if not episode.turn_rewards:
            raise EndpointFailed(f"the endpoint refused the first request of an episode: {refusal}")
        failure = await asyncio.wrap_future(capture.ask_endpoint(self._dialogue.tools))
        if failure is not None:
            raise EndpointFailed(f"the endpoint refused a request ({refusal}) and a fixed one, too: {failure}")
        episode.finish("truncated", f"the endpoint refused the conversation: {refusal}")


class StepLog:
    """The reset and the steps of an episode, in the rows of recorded episodes (`server/web/episode_files.py`)."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size = 0
        self._steps = 0

    def add(self, row: Json, result: StepResult[Any]) -> None:
        """Add a row with the result of its call; beyond 8 MB, the rest of the episode is left out."""
        self._steps += row["kind"] == "step"
        seen = result.observation
        if result.metadata and isinstance(seen, dict):  # pictures of Gymnasium are there
            seen = {**seen, "metadata": result.metadata}
        whole = {**row, "n": self._steps, "observation": seen, "reward": result.reward}
        self._put({**whole, "done": result.done, "at": time.time()})

    def add_picture(self, html: str) -> None:
        """Add the environment's picture of the last row."""
        self._put({"kind": "picture", "n": self._steps, "html": html})

    @property
    def is_full(self) -> bool:
        """Whether the rest of the episode is left out."""
        return self._size > _MOST_STEP_BYTES

    def _put(self, row: Json) -> None:
        line = encode(row)
        self._size += len(line)
        if not self.is_full:
            self._lines.append(line)

    def write(self, path: Path) -> None:
        """Write all rows. They are for readers only, so a full disk does not fail the episode."""
        try:
            path.write_bytes(b"".join(line + b"\n" for line in self._lines))
        except OSError as exc:
            logger.warning("the steps of an episode are not stored: %s", exc)


class PlayedEpisode:
    """The state of an episode: its reward so far, and how it ended."""

    def __init__(self, rollout_id: str, name: str, labels: Json, rule: RewardRule) -> None:
        self.rollout_id = rollout_id
        self._name = name
        self._labels = labels
        self._rule = rule
        self._reward = 0.0
        self.turn_rewards: list[float] = []
        """The reward of each answer of the model; their sum is the episode's reward."""
        self.is_rewarded = False
        self._began = time.time()
        self.status: Status = "ok"
        self.reason: str | None = None
        self.is_over = False
        self.instruction = ""
        self.has_acted = False  # whether the environment accepted an action
        self.refusal = ""  # why the first refused action was
        self.environment_s = 0.0
        self.model_s = 0.0
        self.steps: StepLog | None = None
        """The steps for the store, or None without one."""

    @property
    def reward(self) -> float | None:
        """The reward; None after an infrastructure failure or a cancellation."""
        return None if self.status in ("env_failed", "cancelled") else self._reward

    def add_reward(self, reward: float | None) -> None:
        """Count the reward of a step, which may be None.

        Raises:
            NonFiniteReward: The sum is infinite.
        """
        if reward is not None:
            self.is_rewarded = True
            self._reward = finite_reward(float(reward) + (self._reward if self._rule == "sum" else 0.0))
            if self._rule == "last":  # only the last reward counts, so it is the only one of the turns, too
                self.turn_rewards = [0.0] * len(self.turn_rewards)
            self.turn_rewards[-1] += float(reward)

    def finish(self, status: Status, reason: str | None = None) -> None:
        """End the episode."""
        self.status, self.reason, self.is_over = status, reason, True

    def fail(self, exc: BaseException) -> None:
        """End the episode because of an infrastructure failure."""
        self.finish("env_failed", f"{type(exc).__name__}: {message_of(exc)}")

    def task(self) -> Task:
        """Return the task for the store."""
        return Task(task_id=self._name, instruction=self.instruction or self._name)

    def outcome(self, model: str, turns: Sequence[RolloutTurn] = ()) -> Outcome:
        """Return the outcome for the store."""
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
        """Add the duration of the block to `environment_s`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.environment_s += time.perf_counter() - began


def reset_arguments(start: Start) -> Json:
    """Return the arguments of `reset`."""
    return {"seed": start} if isinstance(start, int) else dict(start)
