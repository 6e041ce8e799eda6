"""`train_policy`: a whole training run, from a model and an environment to checkpoints. `openenv train` calls it.

    served environment ── play ─────┐ groups                            ┌──> checkpoints
                                    ├────────> Learner ──> new weights ─┼──> metrics and samples (trackers)
    tasks ── rollouts, sandboxes ───┘             ▲                     └──> PolicyEndpoint, which both ask
                                                  └── evaluation on starts or tasks that training never sees

Copy this file to write a run of your own: it contains no mechanism, only the choice of parts. Knows no command line.
"""

# The run's folder:
#
#   run.json              the settings; a run that continues must have the same model and the same environment or tasks
#   checkpoints/000020/   model and tokenizer as transformers reads them, optimizer, state of the stream
#   metrics.jsonl         a line per update and per evaluation; samples.jsonl has some of the answers
#   rollouts/             every episode with its tokens: openenv view RUN/rollouts

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openenv.rollout.agents.served_episode import action_schema
from openenv.rollout.agents.shell_chat import ShellChat
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_folders import load_tasks
from openenv.rollout.tasks.task_sets import SET_PREFIX, task_set, task_set_names

from ..episodes import play
from ..evaluation import evaluate
from ..groups import Method, SampleGroup
from ..items import shuffled
from ..stream import GroupStream
from ..tasks import rollouts
from ..trackers import TrackedRun, Tracker, open_tracker, sample_rows
from .endpoint import PolicyEndpoint
from .learner import Learner, LearnerOptions, checkpoints
from .policy import Policy, PolicyOptions
from .sampler import Sampler

_SETTINGS = "run.json"
_SAME = ("model", "env", "tasks", "agent", "seed", "samples", "groups")
"""Settings that a run that continues may not change."""
_HELD_OUT_SEED = 1_000_000_007
"""The seed of a task set's held-out tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The settings of a run.

    Raises:
        ValueError: a value is out of range, or values contradict each other.
    """

    model: str
    """A folder, a `.gguf` file, or a name on the Hugging Face Hub."""
    env: str | None = None
    """The URL of a served environment."""
    tasks: Sequence[str] = ()
    """Task files, folders of them, or names of task sets."""
    out: Path = Path("runs/train")
    """The folder of the run."""
    resume: bool = False
    """Whether to continue the run in `out` from its newest checkpoint."""
    algorithm: Method = "grpo"
    updates: int | None = None
    """The number of updates in all; None for no limit."""
    minutes: float | None = None
    """The time of this process, evaluations included; None for no limit."""
    groups: int = 8
    """The number of starts or tasks per update."""
    samples: int = 8
    """The number of episodes or rollouts from each."""
    concurrency: int = 32
    """The number of episodes or rollouts at once."""
    processes: int | None = None
    """The number of worker processes for rollouts; None chooses by the number of processors."""
    held_out: int = 16
    """The number of starts or tasks for evaluations; 0 for none."""
    evaluate_every: int = 10
    """The number of updates between evaluations."""
    checkpoint_every: int = 10
    learning_rate: float = 1e-5
    system_prompt: str = ""
    """The system message, in a served environment and of the agent `shell-chat`."""
    text_only: bool = False
    """Whether the model reads only the text of a served environment's observations."""
    max_turns: int = 8
    """The largest number of replies, in a served environment and of the agent `shell-chat`."""
    max_tokens: int = 128
    """The largest number of tokens in a reply."""
    context: int = 2048
    """The largest number of tokens in an episode."""
    agent: str | None = None
    """The agent that works on tasks; None for `shell-chat`."""
    token: str | None = None
    """The token of the served environment."""
    seed: int = 0
    device: str = "auto"
    loggers: Sequence[str] = ()
    """Trackers besides JSON lines: `wandb`, `trackio`, `tensorboard`."""

    def __post_init__(self) -> None:
        if (self.env is None) == (not self.tasks):
            raise ValueError("give either the URL of a served environment or tasks")
        if self.updates is None and self.minutes is None:
            raise ValueError("give a number of updates or of minutes: otherwise the run never ends")
        if min(self.held_out, self.evaluate_every, self.checkpoint_every) < 0:
            raise ValueError("held_out, evaluate_every and checkpoint_every must be at least 0")
        if self.env is not None and (self.agent is not None or self.processes is not None):
            raise ValueError("agent and processes are for tasks: the model itself plays a served environment")
        if self.tasks and (self.token is not None or self.text_only):
            raise ValueError("token and text_only are for a served environment")
        if self.agent not in (None, "shell-chat") and self.system_prompt:
            raise ValueError(f"the agent {self.agent} has a system prompt of its own")

    @property
    def tracked(self) -> TrackedRun:
        """The run for trackers; its folder is that of the run."""
        out = self.out.absolute()
        config = {name: value for name, value in asdict(self).items() if name != "token"}
        return TrackedRun(name=out.name, folder=out.parent, config=config, resume=self.resume)


Progress = Callable[[int, dict[str, float]], None]
"""Called with the number of the update and its metrics."""


async def train_policy(run: TrainingRun, on_progress: Progress | None = None) -> Path:
    """Train, and return the folder of the last checkpoint.

    Raises:
        FileExistsError: the folder has an earlier run, and `resume` is not set.
        ValueError: there is nothing to continue, or the settings are others than before.
        OSError: the model cannot be read.
        RolloutError: the environment, the tasks or the sandboxes failed for good.
    """
    tracked = run.tracked
    folder = tracked.files
    last = _last_checkpoint(run, folder)
    source = _Source(run)  # reads the tasks, so that a mistake is found before the model is loaded
    options = PolicyOptions(learning_rate=run.learning_rate, seed=run.seed, device=run.device, epochs=2)
    if run.env is not None:  # also before the model, which takes a minute to load
        await asyncio.to_thread(action_schema, run.env, {"token": run.token})
    with open_tracker(["jsonl", *run.loggers], tracked) as tracker:
        policy = await asyncio.to_thread(Policy.load, str(last) if last else run.model, options)
        if last is not None:
            policy.restore(last)
        (folder / _SETTINGS).write_text(json.dumps(_settings(run)))
        log = _Log(tracker, on_progress)
        with (
            RolloutStore(folder / "rollouts") as store,
            Sampler(policy, slots=min(run.concurrency, 128), context=run.context) as sampler,
            PolicyEndpoint.of(sampler) as endpoint,
        ):
            learner = Learner(
                sampler,
                LearnerOptions(
                    groups=run.groups,
                    updates=run.updates,
                    seconds=None if run.minutes is None else 60 * run.minutes,
                    method=run.algorithm,
                    evaluate_every=run.evaluate_every if source.has_held_out else 0,
                    checkpoint_every=run.checkpoint_every,
                ),
                log=log.metrics,
                folder=folder,
                evaluate=lambda: source.evaluate(endpoint),
                describe=log.samples,
            )
            state = None if last is None else json.loads((last / "stream.json").read_text())
            await learner.run(lambda: source.training(endpoint, store), state)
    return checkpoints(folder)[-1]


class _Source:
    """Where groups come from: a served environment, or tasks."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._held_out: list[Any] = []
        self._training: Callable[[], Iterator[Any]]
        if run.env is not None:
            self._held_out = list(range(run.held_out))
            first = run.held_out + 1_000_000 * run.seed
            self._training = lambda: itertools.count(first)
        else:
            self._held_out, self._training = _split(run)

    @property
    def has_held_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self._held_out)

    def training(self, endpoint: PolicyEndpoint, store: RolloutStore) -> AbstractAsyncContextManager[GroupStream[Any]]:
        """Open the stream to train on."""
        run = self._run
        return self._open(
            self._training(),
            endpoint,
            samples=run.samples,
            groups_per_update=run.groups,
            max_staleness=1,
            store=store,
        )

    async def evaluate(self, endpoint: PolicyEndpoint) -> dict[str, float]:
        """Return metrics of the held-out starts or tasks."""
        async with self._open(self._held_out, endpoint, samples=2) as stream:
            return (await evaluate(stream)).metrics()

    def _open(
        self, items: Any, endpoint: PolicyEndpoint, **options: Any
    ) -> AbstractAsyncContextManager[GroupStream[Any]]:
        run = self._run
        options["concurrency"] = run.concurrency
        model = endpoint.model(max_tokens_cap=run.max_tokens)
        if run.env is not None:
            options |= {"system": run.system_prompt, "text_only": run.text_only}
            options |= {"max_turns": run.max_turns, "max_tokens": run.max_tokens}
            options["client_options"] = {} if run.token is None else {"token": run.token}
            return play(run.env, model, items, **options)
        processes = run.processes or max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
        # Every reply needs room in the context, so an agent by name gets the limits of the model only.
        agent: Any = run.agent
        if agent in (None, "shell-chat"):
            agent = ShellChat(max_turns=run.max_turns, max_tokens=run.max_tokens)
            if run.system_prompt:
                agent.system = run.system_prompt
        return rollouts(items, agent=agent, model=model, processes=processes, **options)


def _split(run: TrainingRun) -> tuple[list[Task], Callable[[], Iterator[Task]]]:
    """Return held-out tasks, and endless training tasks without them."""
    sets = [name for name in run.tasks if _is_set(name)]
    files = [task for name in run.tasks if not _is_set(name) for task in load_tasks(name)]
    # Every fifth task of a folder at most, so that most of them are left for training.
    files = list(itertools.islice(shuffled(files, seed=run.seed, epochs=1), len(files)))
    share = -(-run.held_out // (len(sets) + bool(files)))
    count = min(share, len(files) // 5)
    held_out, rest = files[:count], files[count:]
    for name in sets:
        held_out += load_tasks(name, count=share, seed=_HELD_OUT_SEED)

    def training() -> Iterator[Task]:
        sources = [task_set(name.removeprefix(SET_PREFIX)).endless(seed=run.seed) for name in sets]
        if rest:
            sources.append(shuffled(rest, seed=run.seed))
        for tasks in zip(*sources):  # noqa: B905 (all are endless)
            yield from tasks

    return held_out, training


def _is_set(name: str) -> bool:
    return name.startswith(SET_PREFIX) or (name in task_set_names() and not Path(name).exists())


class _Log:
    """Metrics and some answers, for the trackers and the caller."""

    def __init__(self, tracker: Tracker, on_progress: Progress | None) -> None:
        self._tracker, self._on_progress = tracker, on_progress
        self._groups: list[SampleGroup] = []

    def samples(self, groups: list[SampleGroup]) -> dict[str, float]:
        """Keep the groups of the current update."""
        self._groups = groups
        return {}

    def metrics(self, metrics: dict[str, float], update: int) -> None:
        """Log an update or an evaluation."""
        self._tracker.log(metrics, update)
        if self._groups:
            self._tracker.log_table("samples", sample_rows(self._groups, update, limit=8), update)
            self._groups = []
        if self._on_progress is not None:
            self._on_progress(update, metrics)


def _settings(run: TrainingRun) -> dict[str, Any]:
    values = asdict(run)
    return {name: list(values[name]) if name == "tasks" else values[name] for name in _SAME}


def _last_checkpoint(run: TrainingRun, folder: Path) -> Path | None:
    """Return the checkpoint to continue from; None for a new run."""
    if not run.resume:
        return None
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"{folder} has no checkpoint to continue from")
    before = json.loads((folder / _SETTINGS).read_text())
    changed = [name for name, value in _settings(run).items() if before.get(name) != value]
    if changed:
        raise ValueError(f"the run in {folder} had other values of {', '.join(changed)}: start a new one")
    return found[-1]
