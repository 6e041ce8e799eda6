"""Datasets of episodes: a teacher plays sessions, and each episode becomes a line of `results.jsonl`.

`CollectRunner` plays, `RolloutSerializer` owns the folder, `push_to_hf_hub` uploads it. Must not know environments or
servers: a session factory provides them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from openenv.client.llm_client import LLMClient, LLMError, LLMResponse, ToolCall
from openenv.errors import AccessDenied, RolloutCancelled, install_command, message_of
from openenv.protocol.backoff import Backoff
from openenv.protocol.json_values import finite_reward
from openenv.protocol.schema import make_example
from openenv.protocol.tool_messages import Tool

from .agent_sessions import (
    HarnessAdapter,
    HarnessRolloutResult,
    HarnessRunLimits,
    Message,
    ModelStep,
    ModelStepResult,
    VerifyResult,
    agreed_reward,
    rollout_final_state,
)

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

RESULTS_FILENAME = "results.jsonl"
METADATA_FILENAME = "metadata.json"
README_FILENAME = "README.md"

REWARD_SUM = "reward_sum"
"""The metric of a verdict with the sum of the episode's rewards."""
_SAMPLING_KEYS = frozenset({"temperature", "max_tokens", "top_p"})
_PAUSES = Backoff(first_pause_s=0.5, longest_pause_s=10.0)
_REFUSALS = frozenset({400, 401, 403, 404, 413, 422})
_BLOCK = 1 << 16


# ---- one episode ----


@dataclass
class EpisodeRecord:
    """An episode of the dataset: the conversation, the tool calls, and the environment's reward."""

    episode_id: str
    messages: list[Message]
    reward: float | None
    """None only if the environment gives no rewards and the run keeps such episodes."""
    done: bool
    tool_trace: list[dict[str, Any]]
    metrics: dict[str, Any]
    verify_metrics: dict[str, Any]
    artifacts: dict[str, Any]
    task: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_rollout(
        cls,
        episode_id: str,
        rollout: HarnessRolloutResult,
        verify: VerifyResult,
        task: Any = None,
        extra: dict[str, Any] | None = None,
        *,
        requires_reward: bool = True,
    ) -> EpisodeRecord:
        """Create the record of a rollout and its verdict.

        Its reward is the sum of the episode's rewards if the verdict's metrics have one (`reward_sum`), as those of
        served environments do; else the reward of the last tool call.

        Raises:
            ValueError: The rollout needs a reward and has none, or the verdict's reward differs from the environment's.
            NonFiniteReward: The reward is not a finite number.
        """
        reward = agreed_reward(rollout, verify, is_required=requires_reward)
        total = verify.metrics.get(REWARD_SUM)
        if total is not None:
            reward = float(finite_reward(total))
        state = rollout_final_state(rollout)
        return cls(
            episode_id=episode_id,
            messages=[dict(message) for message in rollout.messages],
            reward=reward,
            done=bool(rollout.done or verify.done),
            tool_trace=state["tool_trace"],
            metrics=dict(rollout.metrics),
            verify_metrics=dict(verify.metrics),
            artifacts=dict(verify.artifacts),
            task=task,
            extra=dict(extra or {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values. NaN and infinite numbers become None, other objects their text."""
        values: dict[str, Any] = to_jsonable_python(self, fallback=str, inf_nan_mode="null")
        return values


# ---- the folder ----


class RolloutSerializer:
    """Writes episodes to a folder: lines of `results.jsonl`, and `metadata.json`.

    Each line is written completely or not at all. A killed process can leave an incomplete last line; the next write
    removes it.

    Args:
        output_dir: The folder; the first write creates it.
    """

    def __init__(self, output_dir: Path | str) -> None:
        self._output_dir = Path(output_dir)

    @property
    def output_dir(self) -> Path:
        """The folder."""
        return self._output_dir

    @property
    def results_path(self) -> Path:
        """The file of episodes."""
        return self._output_dir / RESULTS_FILENAME

    @property
    def metadata_path(self) -> Path:
        """The file that describes how the episodes were collected."""
        return self._output_dir / METADATA_FILENAME

    def write_episode(self, record: EpisodeRecord) -> None:
        """Add an episode.

        Raises:
            ValueError: The last line of the file is not an episode.
            OSError: The file cannot be written; it stays unchanged.
        """
        rest = memoryview(json.dumps(record.to_dict()).encode() + b"\n")
        self._output_dir.mkdir(parents=True, exist_ok=True)
        with self.results_path.open("a+b", buffering=0) as file:
            end = self._end_of_lines(file)
            try:
                while rest:  # an almost full disk accepts a part of a line
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(end)  # half a line would spoil the next one
                raise

    def write_metadata(self, metadata: dict[str, Any]) -> None:
        """Replace the description of how the episodes were collected."""
        self._output_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_jsonable_python(metadata, fallback=str, inf_nan_mode="null"), indent=2)
        draft = self.metadata_path.with_suffix(".json.new")
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(self.metadata_path)

    def read_metadata(self) -> dict[str, Any]:
        """Return the metadata; empty if the file is absent or damaged."""
        try:
            metadata = json.loads(self.metadata_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return metadata if isinstance(metadata, dict) else {}

    def collected_episode_ids(self) -> set[str]:
        """Return the IDs of the episodes in the folder.

        Raises:
            ValueError: A line is not an episode; the message names file and line.
        """
        return set(self._episode_ids())

    def _episode_ids(self) -> Iterator[str]:
        if not self.results_path.exists():
            return
        with self.results_path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                if _is_torn(line):
                    logger.warning("%s:%d is incomplete and is not counted as an episode", self.results_path, number)
                else:
                    yield self._episode_id(line, number)

    def _episode_id(self, line: bytes, number: int | str) -> str:
        place = f"{self.results_path}:{number}"
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as exc:
            raise ValueError(f"{place}: invalid UTF-8: {exc}") from exc
        except json.JSONDecodeError as exc:
            raise ValueError(f"{place}: invalid JSON: {exc.msg}") from exc
        if not isinstance(record, dict):
            raise ValueError(f"{place}: expected an object")
        episode_id = record.get("episode_id")
        if not isinstance(episode_id, str):
            raise ValueError(f"{place}: expected a string episode_id")
        return episode_id

    def _end_of_lines(self, file: FileIO) -> int:
        """Make the file end with a complete line, and return its length."""
        end = file.seek(0, os.SEEK_END)
        start, tail = end, b""
        while start and b"\n" not in tail:
            start = max(0, start - _BLOCK)
            file.seek(start)
            tail = file.read(end - start)
        line = tail.rpartition(b"\n")[2]
        if not line.strip():
            return end
        if _is_torn(line):
            logger.warning("%s: removed its last line, which was incomplete", self.results_path)
            return file.truncate(end - len(line))
        self._episode_id(line, "last line")
        return end + file.write(b"\n")  # another program wrote a complete record without an end of line


def _is_torn(line: bytes) -> bool:
    """Return whether a line is incomplete because its process was killed."""
    if line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


# ---- many episodes ----


@dataclass
class CollectResult:
    """The result of a run: the numbers of collected, skipped, dropped and failed episodes."""

    num_collected: int
    num_skipped: int
    num_dropped: int
    num_failed: int
    episode_ids: list[str]
    """All planned IDs."""
    avg_reward: float
    """The mean reward of the episodes that this run collected."""
    success_rate: float
    """The share of them with a reward above 0."""
    failures: dict[str, str] = field(default_factory=dict)
    """The error of each failed episode."""
    num_rewarded: int = 0
    """The number of collected episodes with a reward."""
    num_left: int = 0
    """The number of episodes that were not played because the run gave up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """How the episodes of a run are played, and when the run gives up.

    Raises:
        ValueError: a value is out of range.
    """

    retries: int = 0
    """How often a failed episode is repeated. A wrong verdict, a missing reward and a refused request are final."""
    concurrency: int = 1
    """The number of episodes at once, each in a thread."""
    give_up_after: int | None = None
    """Stop after this many failed episodes in a row."""
    requires_reward: bool = True
    """Count an episode without any reward as failed. If False, it is written with the reward None."""

    def __post_init__(self) -> None:
        if self.retries < 0 or self.concurrency < 1:
            raise ValueError("retries must be at least 0, concurrency at least 1")


@dataclass(frozen=True, slots=True)
class _Playing:
    """A run that plays episodes."""

    model_step: ModelStep
    options: CollectOptions
    stop: threading.Event


@dataclass(frozen=True, slots=True)
class _PlannedEpisode:
    episode_id: str
    task: Any


class CollectRunner:
    """Plays episodes into a folder, and continues where an earlier run ended.

    If the server, the endpoint or a verdict fails, the episode counts as failed and is never written.

    Args:
        session_factory: Creates a session for each episode.
        harness_adapter: Plays the session.
        serializer: Stores the episodes.
        tasks: One task per episode, in order; episodes after the last task get None.
        limits: The limits of each episode.
    """

    def __init__(
        self,
        *,
        session_factory: Any,
        harness_adapter: HarnessAdapter,
        serializer: RolloutSerializer,
        tasks: Iterable[Any] | None = None,
        limits: HarnessRunLimits | None = None,
    ) -> None:
        self._session_factory = session_factory
        self._harness_adapter = harness_adapter
        self._serializer = serializer
        self._tasks: Iterator[Any] = iter(tasks if tasks is not None else ())
        self._limits = limits

    def run(
        self,
        *,
        model_step: ModelStep,
        num_episodes: int,
        episode_id_prefix: str = "ep",
        resume: bool = True,
        should_keep: Callable[[EpisodeRecord], bool] | None = None,
        options: CollectOptions | None = None,
    ) -> CollectResult:
        """Play episodes until the folder contains the planned number.

        Args:
            model_step: The teacher.
            num_episodes: The planned number, including the episodes that the folder already contains.
            episode_id_prefix: The start of each episode ID; a number of six digits follows.
            resume: Skip the episodes that the folder contains. If False, rename its `results.jsonl` first.
            should_keep: Returns whether an episode is written; the others count as dropped.
            options: Retries, concurrency and limits.

        Raises:
            ValueError: An argument is out of range, or the folder has a line that is not an episode.
            OSError: An episode cannot be written.
        """
        if num_episodes < 0:
            raise ValueError("num_episodes must be at least 0")
        options = options or CollectOptions()
        ids = [f"{episode_id_prefix}-{number:06d}" for number in range(num_episodes)]
        if not resume:
            self._set_results_aside()
        present = self._serializer.collected_episode_ids()
        # Every ID consumes a task, also if it is skipped: an episode has the same task in every run.
        planned = [_PlannedEpisode(episode_id, next(self._tasks, None)) for episode_id in ids]
        remaining = [episode for episode in planned if episode.episode_id not in present]
        result = CollectResult(0, len(planned) - len(remaining), 0, 0, ids, 0.0, 0.0, num_left=len(remaining))
        rewards: list[float] = []
        failed_in_a_row = 0
        stop = threading.Event()
        playing = _Playing(_until(stop, model_step), options, stop)
        episodes = _play_all(remaining, lambda episode: self._play(episode, playing), options.concurrency, stop)
        with _CollectBar(len(planned), result) as show, closing(episodes):
            for episode, record in episodes:
                result.num_left -= 1
                if isinstance(record, Exception):
                    result.num_failed += 1
                    result.failures[episode.episode_id] = f"{type(record).__name__}: {message_of(record)}"
                    failed_in_a_row += 1
                elif should_keep is not None and not should_keep(record):
                    result.num_dropped += 1
                    failed_in_a_row = 0
                else:
                    self._serializer.write_episode(record)
                    result.num_collected += 1
                    if record.reward is not None:
                        rewards.append(record.reward)
                        result.num_rewarded = len(rewards)
                        result.avg_reward = sum(rewards) / len(rewards)
                        result.success_rate = sum(reward > 0 for reward in rewards) / len(rewards)
                    failed_in_a_row = 0
                show(episode.episode_id)
                if failed_in_a_row == options.give_up_after:
                    break
        return result

    def _play(self, episode: _PlannedEpisode, playing: _Playing) -> EpisodeRecord | Exception:
        """Return the record of an episode, or the error of its last attempt."""
        for attempt in range(playing.options.retries + 1):
            try:
                return self._record(episode, playing)
            except Exception as exc:
                logger.info("episode %s failed, attempt %d", episode.episode_id, attempt + 1, exc_info=True)
                is_last = attempt == playing.options.retries or _fails_again(exc)
                if is_last or playing.stop.wait(_PAUSES.pause_s(attempt)):
                    return exc
        raise AssertionError("unreachable")

    def _record(self, episode: _PlannedEpisode, playing: _Playing) -> EpisodeRecord:
        session = self._session_factory.create(task=episode.task, episode_id=episode.episode_id)
        try:
            rollout = self._harness_adapter.run_white_box(playing.model_step, session, self._limits)
            verdict = session.verify(transcript=rollout.messages, final_state=rollout_final_state(rollout))
        finally:
            try:
                session.close()
            except Exception:  # the result of the episode, or its error, is more important
                logger.warning("the session of episode %s could not be closed", episode.episode_id, exc_info=True)
        return EpisodeRecord.from_rollout(
            episode.episode_id, rollout, verdict, episode.task, requires_reward=playing.options.requires_reward
        )

    def _set_results_aside(self) -> None:
        path = self._serializer.results_path
        if not path.exists():
            return
        stamp, number = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ"), 0
        while (aside := path.with_name(f"{path.stem}.{stamp}{f'.{number}' * (number > 0)}.bak{path.suffix}")).exists():
            number += 1
        path.rename(aside)
        warnings.warn(f"resume=False moved existing results file to {aside}", RuntimeWarning, stacklevel=3)


def _fails_again(exc: Exception) -> bool:
    """Return whether a repeated episode would fail in the same way: with a wrong verdict or a refused request."""
    if isinstance(exc, LLMError):
        return exc.status in _REFUSALS
    return isinstance(exc, ValueError | AccessDenied)


def _until(stop: threading.Event, model_step: ModelStep) -> ModelStep:
    """Stop a teacher at the end of the run, so that no thread continues an episode that nobody needs."""

    def step(messages: list[Message], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
        if stop.is_set():
            raise RolloutCancelled("the run has ended")
        return model_step(messages, tools, sampling)

    return step


def _play_all(
    planned: Iterable[_PlannedEpisode],
    play: Callable[[_PlannedEpisode], EpisodeRecord | Exception],
    concurrency: int,
    stop: threading.Event,
) -> Generator[tuple[_PlannedEpisode, EpisodeRecord | Exception], None, None]:
    """Play `concurrency` episodes at once and yield them as they end. Closing the generator cancels the others."""
    if concurrency == 1:
        for episode in planned:
            yield episode, play(episode)
        return
    running: dict[Future[EpisodeRecord | Exception], _PlannedEpisode] = {}
    waiting = iter(planned)
    with ThreadPoolExecutor(concurrency, thread_name_prefix="openenv-collect") as pool:
        try:
            while True:
                for episode in islice(waiting, concurrency - len(running)):
                    running[pool.submit(play, episode)] = episode
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            stop.set()


class _CollectBar:
    """A progress bar in a terminal, and a line on standard error for each failed episode."""

    def __init__(self, total: int, result: CollectResult) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        counts = "collected={task.fields[collected]} failed={task.fields[failed]} reward={task.fields[reward]}"
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn(counts), TimeRemainingColumn())
        self._bar: Progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._result = result
        self._line = self._bar.add_task("", total=total, collected=0, failed=0, reward="-")

    def __enter__(self) -> Callable[[str], None]:
        self._bar.__enter__()
        self._draw()
        return self._show

    def __exit__(self, *exc_info: Any) -> None:
        self._bar.__exit__(*exc_info)

    def _show(self, episode_id: str) -> None:
        if reason := self._result.failures.get(episode_id):
            self._bar.console.print(f"failed {episode_id}: {reason}", markup=False, highlight=False, soft_wrap=True)
        self._draw()

    def _draw(self) -> None:
        result = self._result
        ended = result.num_skipped + result.num_collected + result.num_dropped + result.num_failed
        reward = f"{result.avg_reward:.2f}" if result.num_rewarded else "-"
        self._bar.update(
            self._line, completed=ended, collected=result.num_collected, failed=result.num_failed, reward=reward
        )


# ---- teachers ----


def build_model_step(llm_client: LLMClient, *, system_prompt: str | None = None) -> ModelStep:
    """Return a teacher that asks a language model.

    It uses the keys `temperature`, `max_tokens` and `top_p` of `HarnessRunLimits.sampling`, and drops others with a
    warning.

    Args:
        llm_client: Any client with `complete_with_tools`.
        system_prompt: Sent first if the conversation has no system message. The dataset does not contain it.
    """

    def model_step(messages: list[Message], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
        sent = list(messages)
        if system_prompt and not any(message.get("role") == "system" for message in sent):
            sent.insert(0, {"role": "system", "content": system_prompt})
        if others := sorted(sampling.keys() - _SAMPLING_KEYS):
            warnings.warn(f"Dropping unsupported sampling keys: {', '.join(others)}", RuntimeWarning, stacklevel=2)
        options = {key: value for key, value in sampling.items() if key in _SAMPLING_KEYS}
        listed = [
            {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema} for tool in tools
        ]
        request = llm_client.complete_with_tools(sent, listed, **options)
        answer = asyncio.run_coroutine_threadsafe(request, _model_loop(os.getpid()))
        try:
            return ModelStepResult(response=answer.result())
        except json.JSONDecodeError as exc:
            raise LLMError(f"the model called a tool with arguments that are not JSON: {exc}") from exc
        finally:
            answer.cancel()  # no effect after the answer; after Ctrl-C it ends the request

    return model_step


def scripted_model_step(messages: list[Message], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
    """Play without a model: call one tool after another with the smallest arguments that its schema allows.

    If the last observation lists `legal_actions`, the first of them becomes the argument `action_id`, or the only
    integer of the tool. Use it to try an environment and this pipeline; the episodes teach nothing.
    """
    if not tools:
        return ModelStepResult(LLMResponse("The environment has no tools."))
    turn = sum(message.get("role") == "assistant" for message in messages)
    tool = tools[turn % len(tools)]
    arguments = make_example(tool.input_schema, lambda schema: "a" * max(1, schema.get("minLength", 0)))
    arguments = arguments if isinstance(arguments, dict) else {}
    fields: dict[str, Any] = tool.input_schema.get("properties") or {}
    numbers = [name for name, field in fields.items() if field.get("type") == "integer"]
    legal = _legal_actions(messages)
    if legal and ("action_id" in fields or len(numbers) == 1):
        arguments["action_id" if "action_id" in fields else numbers[0]] = legal[0]
    call = ToolCall(f"scripted-{turn}", tool.name, arguments)
    return ModelStepResult(LLMResponse(f"Calling {tool.name}.", [call]))


def _legal_actions(messages: list[Message]) -> list[Any]:
    for message in reversed(messages):
        content = message.get("content")
        for match in re.finditer(r'legal[_ ]actions"?:\s*(\[[^\]]*\])', str(content or ""), re.IGNORECASE):
            try:
                return list(json.loads(match[1]))
            except ValueError:
                continue
    return []


@functools.cache
def _model_loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the event loop that all teachers of this process share; a daemon thread runs it.

    A provider's SDK binds its connections to the loop of the first request, and fails in any other loop. The process ID
    is part of the key because a forked process does not inherit the thread.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="openenv-teachers", daemon=True).start()
    return loop


# ---- the Hub ----

_CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: "{results}"
tags:
- openenv
---

# OpenEnv rollouts

- **Episodes:** {episodes}

A teacher played them in an environment; `openenv collect` wrote them.
{table}
## Schema

`{results}` has one JSON object per line, one per episode:

| field | content |
|---|---|
| `episode_id` | its name in this dataset |
| `messages` | the conversation, in the form for chat templates and TRL's `SFTTrainer` |
| `reward` | the environment's reward |
| `done` | whether the episode ended; if false, it reached the turn limit |
| `tool_trace` | each tool call: `tool_name`, `arguments` and `result` |
| `metrics`, `verify_metrics`, `artifacts` | counts, and further results of the environment's verdict |
| `task`, `extra` | the task of the episode, and notes of the collecting program |

## Load

```python
from datasets import load_dataset

episodes = load_dataset("NAMESPACE/NAME", split="train")
```
"""


def build_dataset_readme(output_dir: Path | str) -> str:
    """Return the dataset card of a folder.

    Its front matter names `results.jsonl` as the only data file. Otherwise the Hub's viewer would read `metadata.json`
    as episodes.
    """
    folder = RolloutSerializer(output_dir)
    count = _count_episodes(folder)
    rows = [f"| `{_cell(key)}` | `{_cell(value)}` |" for key, value in folder.read_metadata().items()]
    table = "\n".join(["", "| setting | value |", "|---|---|", *rows, ""]) if rows else ""
    return _CARD.format(results=RESULTS_FILENAME, episodes=count, table=table)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'")


def _count_episodes(folder: RolloutSerializer) -> int:
    return sum(1 for _ in folder._episode_ids())


def push_to_hf_hub(
    output_dir: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    commit_message: str | None = None,
    token: str | None = None,
) -> str:
    """Upload episodes, metadata and a card to a dataset of the Hugging Face Hub; return its address.

    Writes the card to `README.md` in the folder. Uploads no other files of the folder.

    Args:
        output_dir: The folder.
        repo_id: The dataset, as `NAMESPACE/NAME`; created if it does not exist.
        private: Create a new dataset as private.
        commit_message: By default the number of episodes.
        token: By default the token that `huggingface_hub` finds.

    Raises:
        FileNotFoundError: The folder has no episodes.
        ImportError: `huggingface_hub` is not installed.
    """
    folder = RolloutSerializer(output_dir)
    if not folder.results_path.exists():
        raise FileNotFoundError(f"{folder.output_dir} has no {RESULTS_FILENAME}: collect episodes first")
    try:
        from huggingface_hub import HfApi, constants
    except ImportError as exc:
        raise ImportError(f"Uploading needs huggingface_hub: {install_command('hub')}") from exc
    (folder.output_dir / README_FILENAME).write_text(build_dataset_readme(folder.output_dir), encoding="utf-8")
    count = _count_episodes(folder)
    api = HfApi(token=token)
    # With None the organization decides; its new datasets may be private by default.
    repo = api.create_repo(repo_id=repo_id, repo_type="dataset", private=private or None, exist_ok=True)
    # A bare NAME becomes NAMESPACE/NAME of whoever is logged in.
    full_id = repo_id if "/" in repo_id else repo.repo_id
    api.upload_folder(
        repo_id=full_id,
        repo_type="dataset",
        folder_path=folder.output_dir,
        allow_patterns=[RESULTS_FILENAME, METADATA_FILENAME, README_FILENAME],
        commit_message=commit_message or f"Add {count} collected episode{'' if count == 1 else 's'}",
    )
    return f"{constants.ENDPOINT}/datasets/{full_id}"
