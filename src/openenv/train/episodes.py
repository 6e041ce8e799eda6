"""`play`: a model plays episodes of a served environment, many at once, and a proxy captures every token.

    starts ──> workers, each with a session ──> model calls through a capture proxy ──> samples ──> groups (`stream`)

A failure of the server or the endpoint is never scored: the episode has no reward and counts in no baseline.
"""

# One episode (`EpisodeStream._run`), and the status with which it ends:
#
#   reset ──> ask the model ──> actions ──> step, one per action ──> ask the model ──> ...     (branches: `branches`)
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
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from openenv.client.env_client import GenericEnvClient
from openenv.client.rewards import RewardHistory
from openenv.errors import (
    CaptureError,
    ExecutionError,
    OpenEnvError,
    RolloutError,
    SessionCapacityError,
    StoreError,
    message_of,
)
from openenv.protocol.json_values import encode, finite_reward, reply_reward
from openenv.protocol.redaction import redacted
from openenv.rollout.agents.dialogue import AnswerRefused, Dialogue, Json, Prompt
from openenv.rollout.agents.served_episode import RewardRule, environment_name, served_dialogue, served_prompt
from openenv.rollout.capture import Capture, CaptureOptions, CaptureServer, export
from openenv.rollout.capture.encoding import dumps, load_object, loads
from openenv.rollout.capture.token_in import THOUGHTS
from openenv.rollout.capture.training_trace import RolloutTurn
from openenv.rollout.run.engine import new_rollout_id
from openenv.rollout.run.stored_rollout import PLAYED, StoredRollout
from openenv.rollout.store.outcome import Outcome, Status
from openenv.rollout.store.store import STEPS_FILE, RolloutStore, check_is_no_folder
from openenv.rollout.tasks.task import BranchPoint, Model, Task
from openenv.types import StepResult

from .branches import REFUSED_ACTION, EpisodeBranch, ReplayDiverged, error_row, step_row
from .groups import EpisodeSample, SampleGroup
from .stream import GroupStream, OpenGroup, StreamArguments, StreamOptions, model_to_train

Start = int | Mapping[str, Any]
"""The start of a group's episodes: a seed, or arguments of `reset`."""
PlayStart = Start | BranchPoint
"""The same, or a call of a stored episode: the episodes of the group continue after its answer."""

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
    url: str | Sequence[str], model: Model, starts: Iterable[PlayStart], **options: Unpack[PlayArguments]
) -> AsyncIterator[EpisodeStream]:
    """Let a model play episodes; yield a stream of groups, each as soon as its last episode ends.

    The players run on this event loop: train in a thread (`asyncio.to_thread`), or they wait for each update.

    Args:
        url: The server, or several servers that share the sessions.
        model: The endpoint, with `sampling` and everything else about the calls. A model without `sampling` samples
            from its own distribution (`Sampling()`).
        starts: One group per start, read when it is needed: an endless iterator, or a `Curriculum`, is fine. A
            `BranchPoint` continues an episode of `store`.
        options: The fields of `PlayOptions`, such as `samples`, `concurrency` and `max_turns`.

    Raises:
        ValueError: an option is out of range.
        RolloutError: the server has no environment. While the stream runs: every episode failed with all its retries,
            or as many in a row as run at once (at least 4, of 3 groups). The text names the last reason.
        StoreError: while the stream runs: an episode cannot be branched at that call.
    """
    chosen = PlayOptions(**options)
    urls = [url] if isinstance(url, str) else list(url)
    store = chosen.store
    async with player_proxy(None if store is None else store.captures) as proxy:
        dialogue = chosen.dialogue
        if dialogue is None:
            dialogue = await asyncio.to_thread(_dialogue, urls[0], chosen)
        trained = model_to_train(model)
        stream = EpisodeStream(starts, chosen, urls=urls, dialogue=dialogue, model=trained, proxy=proxy)
        stream.played = _described(chosen, urls[0])
        if store is not None:  # only a list of stored episodes shows the name
            stream.environment = await asyncio.to_thread(environment_name, urls[0], chosen.client_options)
        async with stream:
            yield stream


async def branch(
    store: RolloutStore,
    rollout_id: str,
    /,
    *,
    call: int,
    url: str | None = None,
    model: Model | None = None,
    **options: Unpack[PlayArguments],
) -> SampleGroup:
    """Play several continuations of a stored episode from the state after the answer of a call, as one group.

    Args:
        store: The store of the episode.
        rollout_id: The episode; a unique prefix of its ID is enough.
        call: The number of the last shared call, 0 for none. Another answer must follow it.
        url: The server; by default that of the episode.
        model: The endpoint; by default that of the episode, with the key in `OPENENV_MODEL_KEY`.
        options: Options of `play` that replace those of the episode, and `samples`, the number of continuations.

    Raises:
        StoreError: The episode cannot be branched at that call, or an option is missing.
        ReplayDiverged: The environment does not repeat the episode.
        RolloutError: The server or the endpoint failed.
    """
    stored = StoredRollout(store, rollout_id)
    played = dict(stored.answered()[0].metadata.get(PLAYED) or {})
    if played.pop("has_dialogue", False) and "dialogue" not in options:
        raise StoreError(f"The episode '{stored.rollout_id}' was played with a `dialogue` of its own: pass dialogue=")
    recorded_url = played.pop("url", None)
    server, endpoint = url or recorded_url, model or stored.options().get("model")
    if server is None or endpoint is None:
        raise StoreError(f"The journal of '{stored.rollout_id}' names no server or no model: pass url= and model=")
    if "dialogue" in options:
        played = {name: value for name, value in played.items() if name not in ("template", "text_only")}
    # The parent's environment gave its rewards; in a short branch, there may be none.
    chosen: dict[str, Any] = {"gives_rewards": True, **played, **options, "store": store}
    async with play(server, endpoint, [BranchPoint(stored.rollout_id, call)], **chosen) as stream:
        async for group in stream:
            return group
    raise RolloutError(f"The branches of '{stored.rollout_id}' gave no group: `keep` refused it")


# What `branch` needs to continue the conversation like the first episode. Secrets are in none of them.
_DESCRIBED = ("system", "template", "text_only", "max_turns", "max_tokens", "keep_reasoning", "reward")


def _described(options: PlayOptions, url: str) -> Json:
    described: Json = {name: getattr(options, name) for name in _DESCRIBED}
    if redacted(url) == url:
        described["url"] = url
    if options.dialogue is not None:
        described["has_dialogue"] = True
    return described


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


class EpisodeStream(GroupStream[PlayStart]):
    """Groups of episodes in the order in which they end: `async for group in stream`. `play` creates it."""

    options: PlayOptions

    def __init__(
        self,
        starts: Iterable[PlayStart],
        options: PlayOptions,
        *,
        urls: Sequence[str],
        dialogue: Dialogue,
        model: Model,
        proxy: CaptureServer,
    ) -> None:
        super().__init__(starts, options, proxy, options.store, model)
        self.rewards = RewardHistory(is_declared=options.gives_rewards, limit=max(64, 2 * options.concurrency))
        self.environment = ""
        """The name of the environment, for the store."""
        self.played: Json = {}
        """The server and the options, for later branches of the episodes."""
        self._branches: dict[int, EpisodeBranch] = {}  # by the number of their group
        self._divergences: list[ReplayDiverged] = []
        self._urls = urls
        self._endpoint = model
        self._dialogue = dialogue
        self._open_capture, self._reopen_capture = proxy.open, proxy.reopen
        self._client_options = dict(options.client_options or {})
        self._clients: dict[int, GenericEnvClient] = {}
        self._draws = True  # until a server refuses to

    def checked(self, item: PlayStart, number: int) -> PlayStart:
        if isinstance(item, BranchPoint):
            if self._store is None:
                raise RolloutError("a branch needs the store of its episode: pass store=")
            self._branches[number] = EpisodeBranch(self._store, item)
        return item

    def name_of(self, item: PlayStart, number: int) -> str:
        if isinstance(item, BranchPoint):
            return f"{item.rollout_id[:8]}@{item.call}"
        if isinstance(item, int):
            return f"seed-{item}"
        return str(item.get("episode_id") or f"start-{number}")

    def whole(self, group: OpenGroup[PlayStart]) -> SampleGroup:
        start = self.arguments_of(group)
        self._branches.pop(group.number, None)
        return SampleGroup(group.name, start, group.chosen(), group.failed)

    def arguments_of(self, group: OpenGroup[PlayStart]) -> Json:
        """Return the arguments of `reset` in the episodes of a group."""
        item = group.item
        if isinstance(item, BranchPoint):
            return self._branches[group.number].arguments
        return {"seed": item} if isinstance(item, int) else dict(item)

    def hopeless(self, text: str) -> RolloutError:
        diverged = next((each for each in self._divergences if str(each) in text), None)
        return super().hopeless(text) if diverged is None else diverged

    async def finish_group(self, group: OpenGroup[PlayStart]) -> None:
        if group.number in self._branches:
            await self._branches[group.number].close()

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

    async def sample(self, worker: int, group: OpenGroup[PlayStart], index: int, attempt: int) -> EpisodeSample:
        branch = self._branches.get(group.number)
        labels = {**group.labels(index, attempt), "start": self.arguments_of(group)}
        if self.environment:
            labels["environment"] = self.environment
        episode = PlayedEpisode(new_rollout_id(), group.name, labels, self.options.reward)
        if self._store is not None:
            episode.steps = StepLog()
        try:
            messages = await self._opening(worker, branch, episode, labels)
        except SessionCapacityError:
            await self.release(worker)
            raise
        except (OpenEnvError, OSError) as exc:
            if isinstance(exc, ReplayDiverged):
                self._divergences.append(exc)
            episode.fail(exc)
            return await self._stored(episode)
        self.settled.add(worker)
        if self._store is not None:  # so that the store lists it as interrupted if this process dies
            begun = {"agent": "play", "model": self._endpoint.name, "group": group.label}
            await asyncio.to_thread(self._store.begin, episode.rollout_id, episode.task(), about=begun)
        about = {**labels, PLAYED: self.played}
        if branch is None:
            capture = self._open_capture(episode.rollout_id, self._endpoint, metadata=about)
        else:
            opening = partial(self._reopen_capture, start=branch.point, metadata=about)
            capture = await asyncio.to_thread(opening, episode.rollout_id, self._endpoint)
        try:
            if branch is not None:
                await _repeat_calls(branch, capture)
            await self._run(self._client(worker), messages, episode, capture)
        except (OpenEnvError, OSError) as exc:
            episode.fail(exc)
        except asyncio.CancelledError:
            episode.finish("cancelled", "the episode was no longer needed")
            await capture.aclose()
            await self._stored(episode, capture)
            raise
        await capture.aclose()
        return await self._stored(episode, capture)

    async def _opening(
        self, worker: int, branch: EpisodeBranch | None, episode: PlayedEpisode, labels: Json
    ) -> list[Json]:
        """Start an episode, or bring it to the state of its branch; return its first messages."""
        client = self._client(worker)
        if branch is not None:
            url, planned = self._urls[worker % len(self._urls)], self.options.samples + self.options.oversample
            with episode.waits_for_environment():
                labels["reached_by"] = await branch.enter(client, url, is_shared=planned > 1)
            episode.continue_from(branch)
            return list(branch.messages)
        with episode.waits_for_environment():
            first = await client.reset(**labels["start"])
        reply_reward(first.reward, first.metadata)
        await self._note({"kind": "reset", "arguments": labels["start"]}, first, client, episode)
        messages = _own(self._dialogue.opening(first.observation))
        episode.instruction = "\n\n".join(str(message["content"]) for message in messages)
        return messages

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
        while len(episode.turn_rewards) < self.options.max_turns:
            answer = await self._ask(messages, episode, capture)
            if answer is None:
                return
            messages.append(answer)
            episode.turn_rewards.append(0.0)
            try:
                actions = self._dialogue.actions(answer)
            except AnswerRefused as exc:
                episode.refusal = episode.refusal or str(exc)
                messages += _own(self._dialogue.reply(answer, [str(exc)]))
                continue
            if not actions:
                episode.finish("ok")
                return
            results = [await self._step(client, action, episode) for action in actions if not episode.is_over]
            if episode.is_over:
                return
            messages += _own(self._dialogue.reply(answer, results))
        refused = f"; no action was accepted: {episode.refusal}" if episode.refusal and not episode.has_acted else ""
        episode.finish("truncated", f"the episode was not over after {self.options.max_turns} answers{refused}")

    async def _step(self, client: GenericEnvClient, action: Json, episode: PlayedEpisode) -> str:
        """Take one action, and return the model's view of the result."""
        row = {"kind": "step", "action": action, "answer": len(episode.turn_rewards)}
        try:
            with episode.waits_for_environment():
                result = await client.step(action)
            episode.has_acted = True
            await self._note(row, result, client, episode)
            episode.add_reward(reply_reward(result.reward, result.metadata))
        except REFUSED_ACTION as exc:
            episode.refusal = episode.refusal or message_of(exc)
            if episode.steps is not None:
                episode.steps.add(row, error_row(exc))
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
        episode.steps.add(row, step_row(result))
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
        body: Json = {"model": self._endpoint.name, "messages": list(messages)}
        if self.options.max_tokens is not None:
            body["max_tokens"] = self.options.max_tokens
        if self._dialogue.tools:
            body["tools"] = _own(self._dialogue.tools)
        began = time.perf_counter()
        try:
            reply = await capture.post("/v1/chat/completions", body, timeout_s=_CALL_TIMEOUT_S)
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


async def _repeat_calls(branch: EpisodeBranch, capture: Capture) -> None:
    """Make the shared calls of a branch again; each gets its recorded answer.

    Raises:
        CaptureError: One does not.
    """
    for call in branch.calls:
        await capture.post(call.path, dumps(call.request))
    if capture.stats().replayed != len(branch.calls):
        raise CaptureError(f"The calls of '{branch.point.rollout_id}' cannot be repeated")


class StepLog:
    """The reset and the steps of an episode, in the rows of recorded episodes (`server/web/episode_files.py`)."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size = 0
        self._steps = 0

    def add(self, row: Json, result: Json) -> None:
        """Add a row with the result of its call; beyond 8 MB, the rest of the episode is left out."""
        self._steps += row["kind"] == "step"
        self._put({**row, "n": self._steps, **result, "at": time.time()})

    def take_over(self, rows: Iterable[Json]) -> None:
        """Begin with the rows of another episode."""
        for row in rows:
            self._steps += row["kind"] == "step"
            self._put(row)

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
        end = [encode({"kind": "end", "reason": "too many bytes", "is_whole": False})] if self.is_full else []
        try:
            path.write_bytes(b"".join(line + b"\n" for line in [*self._lines, *end]))
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
        self.start: BranchPoint | None = None
        """The call of another episode at which it started."""

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

    def continue_from(self, branch: EpisodeBranch) -> None:
        """Take over the steps and rewards of the parent up to its answer."""
        self.start, self.instruction = branch.point, branch.instruction
        if self.steps is not None:
            self.steps.take_over(branch.rows)
        for row in branch.rows:
            if row["kind"] == "step":
                self.turn_rewards += [0.0] * (row["answer"] - len(self.turn_rewards))
                if "error" not in row:
                    self.has_acted = True
                    self.add_reward(row["reward"])
        self.turn_rewards += [0.0] * (len(branch.calls) - len(self.turn_rewards))

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
            start=self.start,
        )

    @contextlib.contextmanager
    def waits_for_environment(self) -> Iterator[None]:
        """Add the duration of the block to `environment_s`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.environment_s += time.perf_counter() - began


# The proxy keeps the messages of a call, and gets them as values: to write and parse a whole conversation for each call
# took a tenth of its time.
def _own(messages: Sequence[Json]) -> list[Json]:
    """Return a dialogue's messages as JSON values that nothing else refers to."""
    own: list[Json] = loads(dumps(messages))
    return own
