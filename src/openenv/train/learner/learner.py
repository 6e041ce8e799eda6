"""`Learner`: trains a policy on the groups of a stream, evaluates, logs, and continues after a restart.

    stream (`play`, `rollouts`) ──> groups ──> collate ──> Policy.update ──> stream.policy_version
             ▲                                                  │
             └──────── PolicyEndpoint, Sampler <────────────────┘   the same weights, in this process

Knows the order of these steps and the run's folder. The stream decides how episodes are played.
"""

# The run's folder:
#
#   checkpoints/000012/   model and tokenizer as transformers reads them, `policy.pt`, `stream.json`
#   metrics.jsonl         one line per update and evaluation, from the tracker `jsonl`

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..groups import Method, Objective, SampleGroup, collate
from ..stream import GroupStream
from ..trackers import group_metrics
from .policy import Policy
from .sampler import Sampler

OpenStream = Callable[[], AbstractAsyncContextManager[GroupStream[Any]]]
"""Opens a stream, such as `lambda: rollouts(tasks, ...)`."""
Log = Callable[[dict[str, float], int], None]
"""Takes metrics and the number of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """How a policy is trained.

    Raises:
        ValueError: a value is out of range.
    """

    groups: int = 16
    """The number of groups per update."""
    updates: int | None = None
    """The number of updates; None for no limit."""
    seconds: float | None = None
    """The time of the run, evaluations included; None for no limit."""
    method: Method = "grpo"
    """How rewards become advantages."""
    evaluate_every: int = 0
    """The number of updates between two evaluations; 0 for none."""
    checkpoint_every: int = 0
    """The number of updates between two checkpoints; 0 for none but the last one."""
    keep_checkpoints: int = 2
    """The number of checkpoints that stay."""

    def __post_init__(self) -> None:
        if self.groups < 1 or self.keep_checkpoints < 1 or min(self.evaluate_every, self.checkpoint_every) < 0:
            raise ValueError("groups and keep_checkpoints must be at least 1, evaluate_every and checkpoint_every 0")
        if self.updates is None and self.seconds is None:
            raise ValueError("set updates, seconds or both: otherwise the run never ends")


class Learner:
    """Trains a policy.

    Args:
        sampler: The running sampler of the policy.
        options: How to train.
        log: Receives the metrics.
        folder: The folder of checkpoints; None writes none.
        evaluate: Evaluates the policy, and returns metrics.
        describe: Returns more metrics of the groups of an update.
    """

    def __init__(
        self,
        sampler: Sampler,
        options: LearnerOptions,
        *,
        log: Log,
        folder: Path | None = None,
        evaluate: Callable[[], Awaitable[dict[str, float]]] | None = None,
        describe: Callable[[list[SampleGroup]], dict[str, float]] | None = None,
    ) -> None:
        self._sampler, self._policy = sampler, sampler.policy
        self._options, self._log, self._folder, self._evaluate = options, log, folder, evaluate
        self._describe = describe
        self._began = time.monotonic()
        self._spent: Counter[str] = Counter()
        self.trusts: Counter[str] = Counter()
        """The number of rewards by trust label."""

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self._policy

    async def run(self, open_stream: OpenStream, state: dict[str, Any] | None = None) -> None:
        """Train until the limit of updates or time.

        Args:
            open_stream: Opens the stream of groups.
            state: The state of a stream to continue, from a checkpoint.
        """
        options, policy = self._options, self._policy
        await self._evaluated(is_due=options.evaluate_every > 0)
        async with open_stream() as stream:
            if state is not None:
                stream.load_state_dict(state)
            stream.policy_version = policy.version
            while not self._is_over():
                began = time.monotonic()
                sampled_s = self._sampler.figures.seconds
                groups = await stream.take(options.groups)
                if not groups:
                    break
                taken = time.monotonic()
                figures = await self._learn(groups)
                ended = time.monotonic()
                stream.policy_version = policy.version
                metrics = {
                    **figures,
                    **self._metrics(groups),
                    "time/rollouts_s": taken - began,
                    "time/update_s": ended - taken,
                    "time/sampling_s": self._sampler.figures.seconds - sampled_s,
                    "time/since_start_s": ended - self._began,
                }
                self._log(metrics, policy.version)
                if options.checkpoint_every and policy.version % options.checkpoint_every == 0:
                    await self._save(stream)
                await self._evaluated(
                    is_due=options.evaluate_every > 0 and policy.version % options.evaluate_every == 0
                )
            await self._save(stream)
        await self._evaluated(
            is_due=options.evaluate_every > 0 and policy.version % options.evaluate_every != 0, is_last=True
        )

    def _is_over(self) -> bool:
        options = self._options
        has_time = options.seconds is None or time.monotonic() - self._began < options.seconds
        has_updates = options.updates is None or self._policy.version < options.updates
        return not (has_time and has_updates)

    async def _learn(self, groups: list[SampleGroup]) -> dict[str, float]:
        """Update the policy with groups; without any trainable sequence, only count."""
        useful = [group for group in groups if group.spread > 0 and any(sample.trainable for sample in group.samples)]
        if not useful:
            self._policy.version += 1
            return {"update/groups": 0.0}
        batch = collate(useful, Objective(method=self._options.method), layout="packed")
        update = await asyncio.wrap_future(self._sampler.alone(lambda: self._policy.update(batch)))
        figures = {f"update/{name}": float(value) for name, value in asdict(update).items()}
        return {**figures, "update/groups": float(len(useful))}

    def _metrics(self, groups: list[SampleGroup]) -> dict[str, float]:
        samples = [sample for group in groups for sample in group.samples]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        self.trusts.update(sample.outcome.trust or "none" for sample in samples if sample.reward is not None)
        sequences = [sequence for sample in samples for sequence in sample.sequences]
        phases: Counter[str] = Counter()
        for sample in samples:
            phases.update(sample.outcome.phase_s)
        return {
            **group_metrics(groups),
            "train/solved": sum(reward >= 1 for reward in rewards) / max(1, len(rewards)),
            "train/excluded_sequences": float(sum(not sequence.trainable for sequence in sequences)),
            **{f"phase/{name}_s": seconds / len(samples) for name, seconds in sorted(phases.items())},
            **(self._describe(groups) if self._describe else {}),
        }

    async def _evaluated(self, *, is_due: bool, is_last: bool = False) -> None:
        if self._evaluate is None or not is_due:
            return
        began = time.monotonic()
        metrics = await self._evaluate()
        now = time.monotonic()
        times = {"time/evaluation_s": now - began, "time/since_start_s": now - self._began}
        self._log({**metrics, **times}, self._policy.version)

    async def _save(self, stream: GroupStream[Any]) -> None:
        """Write a checkpoint; it appears whole or not at all."""
        if self._folder is None:
            return
        folder = self._folder / "checkpoints" / f"{self._policy.version:06d}"
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        await asyncio.wrap_future(self._sampler.alone(lambda: self._policy.save(partial)))
        (partial / "stream.json").write_text(json.dumps(stream.state_dict()))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        for old in checkpoints(self._folder)[: -self._options.keep_checkpoints]:
            shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(path for path in (folder / "checkpoints").glob("*") if path.name.isdigit())
