"""The outcome of a rollout: status, reward and results, and the rules that choose the status. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr

from openenv._notebook import html_table
from openenv.rollout.capture.training_trace import RolloutTurn, Sequence
from openenv.rollout.progress import Phase
from openenv.rollout.tasks.task import BranchPoint, CommandResult, Trust, writable

Status = Literal["ok", "policy_failed", "truncated", "env_failed", "sandbox_failed", "grader_failed", "cancelled"]
"""- `ok`: verified.
- `policy_failed`: the agent failed (crash, exit code, memory), or an operation failed after its start and succeeds
  without it.
- `truncated`: a time or token limit ended the agent.
- `env_failed`: setup or capture failed, or the model endpoint does not answer the host either.
- `sandbox_failed`, `grader_failed`: the sandbox or the verifier failed, also without the agent's work.
"""

NO_CHECKS = "no checks"
"""The reason for a missing reward if the task has no checks."""

_Text = Annotated[str, AfterValidator(writable)]
_Document = Annotated[dict[str, Any], AfterValidator(writable)]


class Outcome(BaseModel):
    """The result of one rollout; `reward` is a number only if the status allows one."""

    model_config = ConfigDict(extra="forbid")

    rollout_id: str
    task_id: str = ""
    status: Status
    phase: Phase = "done"
    """The phase that decided the status; `done` if all phases passed."""
    reason: _Text | None = None
    """Why the status is not `ok`, or why there is no reward: `no checks`."""
    reward: float | None = None
    trust: Trust | None = None
    """The trust level of the reward: the lowest level of its checks. None if nothing was verified."""
    agent: str = ""
    model: str = ""
    agent_exit_code: int | None = None
    agent_log_tail: str = ""
    setup_results: list[CommandResult] = Field(default_factory=list)
    verify_results: list[CommandResult] = Field(default_factory=list)
    turns: list[RolloutTurn] = Field(default_factory=list)
    files: dict[_Text, str] = Field(default_factory=dict)
    files_extra: list[_Text] = Field(default_factory=list)
    sandbox: str = ""
    sandbox_id: str = ""
    started_at: float = 0.0
    wall_s: float = 0.0
    phase_s: dict[str, float] = Field(default_factory=dict)
    metadata: _Document = Field(default_factory=dict)
    start: BranchPoint | None = None
    """The call of another rollout at which it started: that of a branch, or that of a retry with recorded answers."""
    # Not fields: captured calls are stored only once, as records, and the tokens of all rollouts would fill the memory.
    _sequences: list[Sequence] = PrivateAttr(default_factory=list)
    _records: Path | None = PrivateAttr(default=None)

    @property
    def sequences(self) -> list[Sequence]:
        """The token sequences of its model calls, read from the store if possible; not part of the JSON.

        Raises:
            CaptureError: the records in the store cannot be read.
        """
        if self._records is None or not self._records.is_dir():
            return self._sequences
        from openenv.rollout.capture import export, records  # these modules import this one

        return export.sequences(records.read(self._records))

    def __eq__(self, other: object) -> bool:
        """Compare the fields, without the location of the tokens."""
        return isinstance(other, Outcome) and self.__dict__ == other.__dict__

    def keep_sequences(self, source: Iterable[Sequence] | Path) -> None:
        """Set the sequences, or the folder of the records that contain them."""
        if isinstance(source, Path):
            self._records = source
        else:
            self._sequences = list(source)

    def _repr_html_(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.phase_s.items())
        checks = "\n".join(
            f"{'ok    ' if check.exit_code == 0 else 'failed'} {check.title}" for check in self.verify_results
        )
        tokens = sum(len(turn.completion_token_ids) for turn in self.turns)
        rows = {
            "status": self.status if self.reason is None else f"{self.status}: {self.reason}",
            "reward": self.reward if self.trust is None else f"{self.reward} ({self.trust})",
            "task": self.task_id,
            "agent, model": f"{self.agent}, {self.model}",
            "model calls": f"{len(self.turns)}, {tokens:,} tokens sampled",
            "checks": checks,
            "files": "\n".join([*self.files, *self.files_extra]),
            "time": f"{self.wall_s:.1f} s ({phases})" if phases else f"{self.wall_s:.1f} s",
        }
        return html_table(f"Outcome {self.rollout_id}", [(name, value) for name, value in rows.items() if value != ""])


def sequence_of(record: Mapping[str, Any]) -> int:
    """Return the number of a record's verdict. Records of earlier versions have none: their times order them."""
    return int(record.get("sequence", 0 if record["kind"] == "rollout" else 1))


def group_of(*metadata: Mapping[str, Any] | None) -> str:
    """Return the group of a rollout: `group` in its metadata, or else in the metadata of its task."""
    named: Iterable[object] = ((each or {}).get("group") for each in metadata)
    return next((str(group) for group in named if group is not None), "")


_BAD_REQUESTS = frozenset({400, 413, 422})
"""Statuses that refuse a request of the agent, for example because the prompt is too long."""

_UNREACHABLE = 9
"""After this number of failed connections in a row (three per call), the host tests the endpoint."""
_FAILING = 30
"""The same for error answers, which are more often temporary."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The host's facts about a rollout's model calls."""

    needed: bool
    calls: int = 0
    answered: int = 0
    tokens: int = 0
    refused: str | None = None
    """The limit for which the proxy refused a call, or None."""
    failures: int = 0
    """The number of endpoint failures since its last good answer."""
    last_status: int | None = None
    last_error: str = ""
    unrecorded: str | None = None
    """The reason why records of calls are missing, or None."""
    skipped_s: float = 0.0
    """Seconds of interrupted runs of the agent that count against its time."""
    outage: str | None = None
    """The error of the host's test request, or of the connection after the last call failed; else None."""


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """The host's facts about the agent."""

    exit_code: int | None
    """None if its end was not observed."""
    timed_out: bool
    limit_s: float
    failure: str | None
    """The driver's conclusion from exit code and log, or the reason why the end was not observed."""


@dataclass(frozen=True, slots=True)
class Label:
    """A status except `ok`, with its reason."""

    status: Status
    reason: str


def label_of(agent: AgentFacts, model: ModelUse) -> Label | None:
    """Return the label of a failed agent run, or None for a good one.

    A failed call counts as the agent's failure unless `model.outage` shows that the endpoint fails the host too: an
    agent can write requests that make a working endpoint fail.
    """
    # Facts of the host come before reports of the agent, so that a broken endpoint or a limit never counts as a failing
    # policy.
    if model.unrecorded is not None:
        return Label("env_failed", f"model calls could not be recorded: {model.unrecorded}")
    if model.outage is not None:
        how = "no call was answered" if model.answered == 0 else f"{model.answered} calls were answered, then it failed"
        return Label("env_failed", f"the model endpoint failed ({how}): {model.outage}")
    if model.refused is not None:
        return Label("truncated", f"the budget is spent: {model.refused}")
    if model.needed and model.calls == 0:
        # Without an answered call the policy decided nothing, so it cannot be the reason.
        end = agent.failure or f"it exited with code {agent.exit_code}"
        return Label("env_failed", f"the agent made no model call: {end}")
    if agent.timed_out:
        return Label("truncated", f"agent timeout: it ran for {agent.limit_s:g} s and was killed")
    if agent.exit_code == 137:
        return Label("policy_failed", "the agent was killed (signal 9), as when memory runs out")
    if agent.failure is not None:
        return Label("policy_failed", agent.failure)
    return None


def is_endpoint_suspect(model: ModelUse) -> bool:
    """Return whether the endpoint may have failed, so that the host must test it before it blames the agent."""
    if not model.needed or model.calls == 0:
        return False
    has_failed = model.failures > 0 and model.last_status not in _BAD_REQUESTS
    return has_failed or (model.answered == 0 and model.tokens == 0)


def is_hopeless(model: ModelUse) -> bool:
    """Return whether so many calls failed that the host should test the endpoint and perhaps give up."""
    if model.last_status in _BAD_REQUESTS:
        return False
    return model.failures >= (_UNREACHABLE if model.last_status is None else _FAILING)
