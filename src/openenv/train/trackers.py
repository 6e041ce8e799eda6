"""Experiment trackers: metrics and tables of samples, in wandb, trackio, TensorBoard or JSON lines.

    with open_tracker(["wandb", "jsonl"], TrackedRun(name="run-7", config={"lr": 1e-5})) as tracker:
        tracker.log({"loss": loss, **group_metrics(groups)}, step)
        tracker.log_samples(groups, step)

Each tracker imports its package when it is opened. Errors of an open tracker are logged; the training continues.
"""

# Steps after a restart: the trainer repeats the steps since its checkpoint, and a tracker gets them twice.
#
#   wandb        refuses steps below its last one, so the step is a metric, and the charts use it as x-axis
#   trackio      keeps both values
#   TensorBoard  a START event hides earlier values from this step on, as TensorBoard does for restarts
#   jsonl        keeps both lines; the last line of a step counts

from __future__ import annotations

import json
import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from typing_extensions import Self

from openenv.adapters import importing

from .groups import EpisodeSample, SampleGroup

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
"""A row of a table: values by column."""
_LONGEST_TEXT = 4000
"""Characters of a text in a table."""
_RUN_ID = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that trackers show.

    Raises:
        ValueError: the name has no letter or digit.
    """

    name: str
    """The name of the run; a run that continues has the same name."""
    project: str = "openenv"
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings, shown beside the metrics."""
    folder: Path = Path("runs")
    """The files of wandb, TensorBoard and JSON lines are in a folder here, which has the run's name."""
    resume: bool = False
    """Whether to continue the run of this name. Without one, it is a new run."""

    def __post_init__(self) -> None:
        if not re.search(r"[A-Za-z0-9]", self.name):
            raise ValueError(f"the name of a run needs a letter or digit: {self.name!r}")

    @property
    def run_id(self) -> str:
        """The name as part of a path."""
        return _RUN_ID.sub("-", self.name).strip(".-")

    @property
    def files(self) -> Path:
        """The folder of this run."""
        return self.folder / self.run_id

    def check_new(self, path: Path) -> None:
        """Check that a new run has no files yet.

        Raises:
            FileExistsError: an earlier run of this name wrote them.
        """
        if path.exists() and not self.resume:
            raise FileExistsError(
                f"{path} is from an earlier run: choose another name, or continue it with resume=True"
            )


class Tracker(ABC):
    """Shows the metrics and samples of a run. Subclasses write them; use a tracker as a context manager."""

    _has_failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record numbers at a step. Values may be tensors with one element; None is left out.

        Raises:
            TypeError: a value is not a number.
        """
        numbers = {name: _number(name, value) for name, value in metrics.items() if value is not None}
        self._guarded(lambda: self.write_metrics(numbers, step))

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Record a table at a step; its columns are those of the first row."""
        if rows:
            self._guarded(lambda: self.write_table(name, rows, step))

    def log_samples(self, groups: Iterable[SampleGroup], step: int, *, limit: int = 32, name: str = "samples") -> None:
        """Record a table of samples, from as many groups as possible; `sample_rows` has the columns."""
        self.log_table(name, sample_rows(groups, step, limit=limit), step)

    def close(self, *, failed: bool = False) -> None:
        """Write everything and end; `failed` marks the run as failed if the tracker shows that."""
        self._guarded(lambda: self.finish(failed=failed))

    @abstractmethod
    def write_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        """Write numbers."""

    @abstractmethod
    def write_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Write a table with at least one row."""

    @abstractmethod
    def finish(self, *, failed: bool) -> None:
        """Write everything and release what the tracker holds."""

    def _guarded(self, write: Callable[[], None]) -> None:
        """Log an error of the tracker, the first one with its traceback."""
        try:
            write()
        except Exception as exc:  # a run of several days must not end because its metrics cannot be sent
            level = logging.DEBUG if self._has_failed else logging.ERROR
            logger.log(level, "%s failed: %s", type(self).__name__, exc, exc_info=not self._has_failed)
            self._has_failed = True


class WandbTracker(Tracker):
    """Weights & Biases. `WANDB_MODE=offline` writes files only, for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        with importing("wandb>=0.17", needed_by="the tracker 'wandb'"):
            import wandb
        run.files.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,  # so that a later process finds the run
            resume="allow" if run.resume else "never",
            config=dict(run.config),
            dir=run.files,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "step": step})

    def write_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        columns = list(rows[0])
        table = self._wandb.Table(
            columns=columns, data=[[row.get(column) for column in columns] for row in rows], allow_mixed_types=True
        )
        self._run.log({name: table, "step": step})

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TrackioTracker(Tracker):
    """Trackio, on this machine or, with `TRACKIO_SPACE_ID`, in a Space of Hugging Face."""

    def __init__(self, run: TrackedRun) -> None:
        with importing("trackio>=0.10", needed_by="the tracker 'trackio'"):
            import trackio
        self._trackio = trackio
        self._run = trackio.init(
            project=run.project,
            name=run.name,
            config=dict(run.config),
            resume="allow" if run.resume else "never",
            embed=False,
        )

    def write_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def write_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        columns = list(rows[0])
        data = [[row.get(column) for column in columns] for row in rows]
        self._run.log({name: self._trackio.Table(columns=columns, data=data)}, step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish()


class TensorBoardTracker(Tracker):
    """TensorBoard's event files in the run's folder; tables are texts. Needs neither TensorFlow nor PyTorch."""

    def __init__(self, run: TrackedRun) -> None:
        with importing("tensorboard>=2.12", needed_by="the tracker 'tensorboard'"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.plugins.scalar.summary_v2 import scalar_pb
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        folder = run.files / "tensorboard"
        run.check_new(folder)
        self._event, self._session_log = Event, SessionLog
        self._scalar, self._text = scalar_pb, text_pb
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        self._has_started = False
        if run.config:
            self._add(self._text("config", _markdown([{"setting": k, "value": v} for k, v in run.config.items()])), 0)

    def write_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self._start(step)
        for name, value in numbers.items():
            self._add(self._scalar(name, value), step)

    def write_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        self._start(step)
        self._add(self._text(name, _markdown(rows)), step)

    def finish(self, *, failed: bool) -> None:
        self._writer.close()

    def _start(self, step: int) -> None:
        """Mark the start of this process; the second mark of a run hides earlier values from this step on."""
        if not self._has_started:
            self._has_started = True
            start = self._session_log(status=self._session_log.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=start))

    def _add(self, summary: Any, step: int) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))


class JsonlTracker(Tracker):
    """JSON lines in the run's folder: `metrics.jsonl`, and one file per table, such as `samples.jsonl`."""

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.files
        run.check_new(self._folder / "metrics.jsonl")
        self._folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(dict(run.config), default=str, indent=1)
        (self._folder / "config.json").write_text(config, encoding="utf-8")

    def write_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._append("metrics", [{"step": step, "time": round(time.time(), 3), **finite}])

    def write_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        self._append(_RUN_ID.sub("-", name), [{"step": step, **row} for row in rows])

    def finish(self, *, failed: bool) -> None:
        """Do nothing: each line was written at once."""

    def _append(self, name: str, lines: Iterable[Row]) -> None:
        text = "".join(json.dumps(dict(line), default=str) + "\n" for line in lines)
        with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(text)


class Trackers(Tracker):
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def write_metrics(self, numbers: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def write_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        for tracker in self._trackers:
            tracker.log_table(name, rows, step)

    def finish(self, *, failed: bool) -> None:
        for tracker in self._trackers:
            tracker.close(failed=failed)


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
}
"""The trackers by name."""


def open_tracker(names: str | Iterable[str], run: TrackedRun) -> Tracker:
    """Open one or several trackers.

    Args:
        names: Names from `TRACKERS`. An empty list is a tracker that drops everything.
        run: The run.

    Raises:
        ValueError: a name is unknown.
        PackageUnavailable: the package of a tracker is missing; the text names the command that installs it.
        FileExistsError: the run's folder has files of an earlier run, and `resume` is not set.
    """
    wanted = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    for name in wanted:
        if name not in TRACKERS:
            raise ValueError(f"unknown tracker {name!r}; choose from {', '.join(TRACKERS)}")
    opened: list[Tracker] = []
    try:
        for name in wanted:
            opened.append(TRACKERS[name](run))
    except BaseException:
        Trackers(opened).close(failed=True)
        raise
    return opened[0] if len(opened) == 1 else Trackers(opened)


# -- what to log ------------------------------------------------------------------------------------------------------


def group_metrics(groups: Iterable[SampleGroup], prefix: str = "train/") -> dict[str, float]:
    """Return metrics of the groups of an update: rewards, their spread, lengths, limits, tokens and failures."""
    groups = list(groups)
    samples = [sample for group in groups for sample in group.samples]
    rewarded = [sample for sample in samples if sample.reward is not None]
    metrics: dict[str, float] = {
        "groups": len(groups),
        "samples": len(samples),
        "unscored": len(samples) - len(rewarded),
        "retried": sum(len(group.failed) for group in groups),
    }
    if rewarded:
        tokens = [sample.tokens() for sample in rewarded]
        sampled, trained = sum(count.sampled for count in tokens), sum(count.trained for count in tokens)
        metrics |= {
            "reward": fmean(sample.reward or 0.0 for sample in rewarded),
            "reward_spread": fmean(group.spread for group in groups),
            "groups_with_spread": fmean(group.spread > 0 for group in groups),
            "cut_off": fmean(sample.is_cut_off for sample in rewarded),
            "turns": fmean(len(sample.outcome.turns) for sample in rewarded),
            "tokens": trained / len(rewarded),
            "tokens_excluded": 1 - trained / sampled if sampled else 0.0,
            "seconds": fmean(sample.outcome.wall_s for sample in rewarded),
        }
    statuses = Counter(sample.outcome.status for sample in samples)
    metrics |= {f"status/{status}": count / len(samples) for status, count in statuses.items()}
    return {f"{prefix}{name}": float(value) for name, value in metrics.items()}


def sample_rows(groups: Iterable[SampleGroup], step: int, *, limit: int = 32) -> list[dict[str, Any]]:
    """Return a row per sample: step, group, sample, reward, status, trust, versions, turns, tokens, task and answers.

    At most `limit` samples come, first one of each group, then the next ones.
    """
    groups = list(groups)
    most = max((len(group.samples) for group in groups), default=0)
    chosen = [(group, place) for place in range(most) for group in groups if place < len(group.samples)][:limit]
    return [_row(group, place, group.samples[place], step) for group, place in chosen]


def _row(group: SampleGroup, place: int, sample: EpisodeSample, step: int) -> dict[str, Any]:
    outcome = sample.outcome
    task = group.task.instruction if group.task is not None else json.dumps(dict(group.start), default=str)
    answers = ["".join(turn.completion_tokens) for turn in outcome.turns]
    return {
        "step": step,
        "group": group.name,
        "sample": place,
        "reward": sample.reward,
        "status": outcome.status,
        "trust": outcome.trust or "",
        "policy_versions": ", ".join(sorted(sample.policy_versions)),
        "turns": len(outcome.turns),
        "tokens": sample.n_tokens,
        "task": _cut(task),
        "answers": _cut("\n\n".join(answers)),
    }


def _cut(text: str) -> str:
    """Shorten a text in its middle, and replace what UTF-8 cannot encode."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _number(name: str, value: Any) -> float:
    try:
        return float(value)  # also a tensor with one element
    except (TypeError, ValueError) as exc:
        raise TypeError(f"the metric {name!r} must be a number, not {type(value).__name__}") from exc


def _markdown(rows: Sequence[Row]) -> str:
    """Return a table in Markdown; texts of models are shown as they are, not as markup."""
    columns = list(rows[0])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(_cell(row.get(column)) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> str:
    text = str("" if value is None else value)
    for character, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "\n": "<br>"}.items():
        text = text.replace(character, entity)
    return re.sub(r"([\\`*_{}\[\]])", r"\\\1", text)
