"""Captured calls for trainers: a `Sequence` per conversation; a `TrainingTrace` of an agent that runs its own
loop, with a checked `TrainingTurn` per model call.

Strict, because trainers cannot check: a turn is refused, never repaired, if its log-probabilities are missing, not
finite or positive, or if its mask does not fit its tokens. Values only; knows nothing of their origin.

    prompt_token_ids      1  2  3
    completion_token_ids           4    5
    per_token_logps              -.1  -.2
    loss_mask             0  0  0  1    1      over prompt and completion
"""

# From records to a trainer:
#
#   Recording (calls.log) --> export.sequences --> Sequence        conversations of any agent, for `train.groups`
#                         \-> export.turns -----> RolloutTurn     one call with its messages, for reward functions
#   trace entries ------------------------------> TrainingTrace    one entry per call, for TRL
#
# All three check the same four facts about a call: its IDs are integers, each sampled token has a log-probability, they
# are finite and not positive, and prompt tokens are never trained on.

from __future__ import annotations

import math
from collections import abc
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self, TypedDict

from openenv.rollout.tasks.task import writable

from .routed_experts import RoutedExperts

Severity = Literal["FATAL", "WARN", "INFO"]
FATAL, WARN, INFO = "FATAL", "WARN", "INFO"
"""The severity of a finding: FATAL excludes the capture from training."""
Role = Literal["agent", "auxiliary", "discarded"]
"""`agent`: the main conversation, and others with the same system text and tools. `auxiliary`: any other, for example
to find a title; trained on as well. `discarded`: an answer that the agent did not continue."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a trainer should know."""

    severity: Severity
    code: str
    message: str
    call: int | None = None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens that one version of the policy sampled: positions from `start` up to, but not including, `end`."""

    version: str
    start: int
    end: int


_WritableText = Annotated[str, AfterValidator(writable)]
_WritableDocument = Annotated[dict[str, Any], AfterValidator(writable)]


class RolloutTurn(BaseModel):
    """One model call as trainers read it.

    The three token lists have the same length. If the model server does not report one of them, it is empty. A single
    missing log-probability is None.
    """

    turn: int
    finish_reason: _WritableText | None = None
    completion_tokens: list[_WritableText] = Field(default_factory=list)
    completion_token_ids: list[int] = Field(default_factory=list)
    per_token_logps: list[float | None] = Field(default_factory=list)
    latency_s: float = 0.0
    timestamp: float = 0.0
    upstream_status: int | None = None
    upstream_error: _WritableDocument | None = None
    not_trainable: list[str] = Field(default_factory=list)
    """Why this turn is excluded from training, such as `tool_choice: forced tool`; empty for a trainable turn."""
    constraints: _WritableDocument = Field(default_factory=dict)
    """Grammars and schemas that constrained sampling, by parameter, such as `response_format`."""


@dataclass(slots=True)
class TokenCounts:
    """The numbers of tokens that the policy sampled, of those to train on, and of the others by reason."""

    sampled: int = 0
    trained: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    """By reason: `discarded` (the agent used another answer), `no_reward`, or the code of a finding, such as
    `missing_tokens`, `missing_logprobs`, `steered_turn`, `unasked_sampling`."""

    def add(self, other: TokenCounts) -> None:
        """Add other counts to these."""
        self.sampled += other.sampled
        self.trained += other.trained
        for reason, count in other.excluded.items():
            self.excluded[reason] = self.excluded.get(reason, 0) + count

    def without(self, reason: str) -> TokenCounts:
        """Return the counts if the tokens to train on are excluded, too."""
        excluded = dict(self.excluded)
        if self.trained:
            excluded[reason] = excluded.get(reason, 0) + self.trained
        return TokenCounts(self.sampled, 0, excluded)


@dataclass(slots=True)
class Sequence:
    """One path of calls as a training example: three lists of one length."""

    role: Role
    root_id: int
    node_ids: list[int]
    """The numbers of the calls, oldest first."""
    prompt_len: int
    turn_lengths: list[int]
    input_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    policy_versions: list[str | None]
    """The version of each call; of a call with several versions, the oldest."""
    turn_starts: list[int] = field(default_factory=list)
    """The position in `input_ids` of the first sampled token of each call."""
    sampling: list[dict[str, Any]] = field(default_factory=list)
    """How each call was sampled: the parameters that were sent."""
    constraints: list[dict[str, Any]] = field(default_factory=list)
    """The grammars and schemas that constrained each call, by parameter; empty for an unconstrained call."""
    validation: list[Finding] = field(default_factory=list)
    routed_experts: RoutedExperts | None = None
    """The experts of each token; None for a dense model, and for an engine that does not report them."""
    excluded: dict[str, int] = field(default_factory=dict)
    """The sampled tokens that the mask excludes, by reason. Tokens of turns in an earlier sequence do not count."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """The versions of the sampled tokens, by their positions in `input_ids`. Tokens in no span have an unknown
    version."""

    @property
    def n_turns(self) -> int:
        """Return the number of calls."""
        return len(self.node_ids)

    @property
    def n_trainable(self) -> int:
        """Return the number of tokens to train on."""
        return sum(self.loss_mask)

    @property
    def trainable(self) -> bool:
        """Return whether the sequence may be trained on."""
        fatal = any(finding.severity == "FATAL" for finding in self.validation)
        return self.role != "discarded" and self.n_trainable > 0 and not fatal

    @property
    def not_trainable(self) -> list[str]:
        """Return the reasons against training on it; empty if there are none."""
        if self.trainable:
            return []
        reasons = [finding.message for finding in self.validation if finding.severity == "FATAL"]
        if self.role == "discarded":
            reasons.append("the agent did not go on from this answer")
        # A shared call counts for the first sequence only, so a retry may have no tokens left.
        if self.n_trainable == 0:
            reasons += [finding.message for finding in self.validation if finding.severity == "WARN"]
            reasons.append("it has no token of its own to train on")
        return list(dict.fromkeys(reasons))

    def tokens(self) -> TokenCounts:
        """Return the numbers of sampled, trained and excluded tokens; those of an earlier sequence do not count."""
        counts = TokenCounts(self.n_trainable + sum(self.excluded.values()), self.n_trainable, dict(self.excluded))
        if self.role == "discarded":
            return counts.without("discarded")
        fatal = next((finding.code for finding in self.validation if finding.severity == "FATAL"), None)
        return counts if fatal is None else counts.without(fatal)

    @property
    def policy_version(self) -> str | None:
        """Return the policy version that sampled all of it; None for several or unknown versions."""
        # A trainer that updates the weights during a rollout has several versions in one sequence.
        versions = {*self.policy_versions, *(span.version for span in self.version_spans)}
        return self.policy_versions[0] if len(versions) == 1 else None

    def token_versions(self) -> list[str | None]:
        """Return the policy version of each token; None for prompt tokens and unknown versions."""
        versions: list[str | None] = [None] * len(self.input_ids)
        for span in self.version_spans:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        return versions

    def sampled_with(self, parameter: str) -> Any:
        """Return a parameter that all calls share; None if they differ or do not have it."""
        values = [parameters.get(parameter) for parameters in self.sampling]
        if parameter == "repetition_penalty":  # the name in llama.cpp differs
            values = [parameters.get(parameter, parameters.get("repeat_penalty")) for parameters in self.sampling]
        return values[0] if values and all(value == values[0] for value in values) else None

    def document(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            **asdict(self),
            "n_turns": self.n_turns,
            "n_trainable": self.n_trainable,
            "trainable": self.trainable,
            "not_trainable": self.not_trainable,
        }


@dataclass(frozen=True)
class CaptureFinding:
    """Something that a trainer should know about captured calls."""

    level: str
    code: str
    detail: str

    def __str__(self) -> str:
        return f"[{self.level}] {self.code}: {self.detail}"


@dataclass
class CaptureReport:
    """The findings of a check."""

    findings: list[CaptureFinding] = field(default_factory=list)
    aux_node_ids: list[str] = field(default_factory=list)
    """Calls of auxiliary conversations."""

    def add(self, level: str, code: str, detail: str) -> None:
        """Add a finding."""
        self.findings.append(CaptureFinding(level, code, detail))

    def merge(self, other: CaptureReport) -> CaptureReport:
        """Add the findings of another report, and return this one."""
        self.findings += other.findings
        self.aux_node_ids += other.aux_node_ids
        return self

    @property
    def fatal(self) -> list[CaptureFinding]:
        """The findings that forbid training."""
        return [finding for finding in self.findings if finding.level == FATAL]

    @property
    def ok(self) -> bool:
        """Whether no finding forbids training."""
        return not self.fatal

    def text(self) -> str:
        """Return the findings, a line each."""
        return "\n".join(map(str, self.findings)) or "all checks passed"


def check_turn(
    prompt_ids: abc.Sequence[int] | None,
    sampled_ids: abc.Sequence[int] | None,
    logprobs: abc.Sequence[float] | None,
    *,
    finish_reason: str | None = None,
    index: int = 0,
) -> CaptureReport:
    """Check the tokens of one call: all IDs are present, and each sampled token has a log-probability.

    Args:
        prompt_ids: The prompt.
        sampled_ids: The sampled tokens.
        logprobs: A log-probability for each of them.
        finish_reason: Why the call ended.
        index: The call's number, for the texts.
    """
    # check_turn([1, 2], [5, None], [-0.1], index=3)
    #     FATAL invalid_token_id: turn 3: sampled ids must be non-negative integers
    #     FATAL logprob_misalign: turn 3: 1 log-probabilities for 2 sampled ids
    report = CaptureReport()
    if not prompt_ids:
        report.add(FATAL, "no_prompt_ids", f"turn {index}: the engine did not name the tokens of the prompt")
    for name, ids in (("prompt", prompt_ids), ("sampled", sampled_ids)):
        if not all(_is_token(token) for token in ids or ()):
            report.add(FATAL, "invalid_token_id", f"turn {index}: {name} ids must be non-negative integers")
    if not sampled_ids:
        report.add(WARN, "no_sampled_ids", f"turn {index}: nothing was sampled (finish={finish_reason})")
    elif logprobs is None:
        text = f"turn {index}: {len(sampled_ids)} sampled tokens have no log-probabilities"
        report.add(FATAL, "no_logprobs", text)
    if logprobs is not None:
        _check_logprobs(report, logprobs, len(sampled_ids or ()), index)
    if finish_reason == "length":
        report.add(WARN, "truncated_turn", f"turn {index}: the limit of tokens ended it; its tokens are valid")
    return report


def _check_logprobs(report: CaptureReport, logprobs: abc.Sequence[float], count: int, index: int) -> None:
    if len(logprobs) != count:
        text = f"turn {index}: {len(logprobs)} log-probabilities for {count} sampled ids"
        report.add(FATAL, "logprob_misalign", text)
    if not all(_is_finite(value) for value in logprobs):
        report.add(FATAL, "invalid_logprob", f"turn {index}: log-probabilities must be finite numbers")
    elif any(value > 0 for value in logprobs):
        report.add(FATAL, "positive_logprob", f"turn {index}: log-probabilities must not be positive")


# `bool` is an `int` in Python: True would pass as token 1.
def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# The last check before training, for values from anywhere: our own captures, files, other packages. Whatever passes is
# safe to train on, so it checks the mask as well as the tokens.
def validate_training_turn(
    prompt_ids: abc.Sequence[int],
    sampled_ids: abc.Sequence[int],
    logprobs: abc.Sequence[float],
    loss_mask: abc.Sequence[int],
) -> None:
    """Check a turn as a trainer gets it.

    Raises:
        ValueError: The turn cannot be trained on; the text has every reason.
    """
    report = check_turn(prompt_ids, sampled_ids, logprobs)
    if len(loss_mask) != len(prompt_ids) + len(sampled_ids):
        report.add(FATAL, "length_mismatch", "loss_mask must cover prompt plus completion")
    if any(isinstance(value, bool) or value not in (0, 1) for value in loss_mask):
        report.add(FATAL, "invalid_loss_mask", "loss_mask must contain only integer 0 or 1")
    if any(loss_mask[: len(prompt_ids)]):
        report.add(FATAL, "trainable_prompt", "prompt tokens must remain context")
    if not report.ok:
        raise ValueError(f"invalid training turn: {'; '.join(map(str, report.fatal))}")


class TraceEntry(TypedDict, total=False):
    """One model call of an agent that runs its own loop: request, answer and tokens. All are optional.

    A consumer takes the prompt from `prompt_token_ids`, never from its own tokeniser: templates differ, and a prompt
    that is off by a token trains on positions that the model never saw.
    """

    request: dict[str, Any]
    response: dict[str, Any]
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    completion_tokens: list[str]
    per_token_logps: list[float]
    loss_mask: list[int]
    """Over prompt and completion: 1 for tokens to train on."""
    reward: float | None
    """What `verify` returned; None for a rollout without a verdict, which is not a reward of 0."""
    metadata: dict[str, Any]


class TrainingTurn(BaseModel):
    """One model call, with a mask over prompt and completion.

    Raises:
        ValueError: IDs, log-probabilities and mask do not fit together, or a value is out of range.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    node_id: Annotated[str, Field(min_length=1)]
    """Identifies the call in its rollout."""
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any] = Field(default_factory=dict)
    response: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def validate_capture(self) -> Self:
        """Refuse tokens that cannot be trained on."""
        validate_training_turn(self.prompt_token_ids, self.completion_token_ids, self.per_token_logps, self.loss_mask)
        return self


# Required in every entry: a default mask would be a guess about the policy's choices.
_REQUIRED = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask", "metadata")
# For readers only; TRL's entries have none.
_OPTIONAL = ("request", "response")


class TrainingTrace(BaseModel):
    """The calls of an agent in one rollout, each of them once.

    A turn with a mask of zeros is context: the policy did not choose it. The reward is the result of `verify`.

    Raises:
        ValueError: Two turns have the same `node_id`.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_version: Literal[1] = 1
    turns: list[TrainingTurn]

    @model_validator(mode="after")
    def unique_calls(self) -> Self:
        """Refuse a call that would be trained on twice."""
        if len({turn.node_id for turn in self.turns}) != len(self.turns):
            raise ValueError("training trace contains duplicate node_ids")
        return self

    @classmethod
    def from_entries(cls, entries: Iterable[Mapping[str, Any]]) -> TrainingTrace:
        """Make a trace from trace entries with their call's ID as `metadata["node_id"]`. Nothing is inferred.

        `request` and `response` are optional: they explain a call, and no tokens come from them.

        Raises:
            ValueError: An entry lacks its ID, tokens or mask, or they do not fit together.
        """
        return cls(turns=[_turn_of(entry, number) for number, entry in enumerate(entries)])

    def to_trace_entries(self) -> list[TraceEntry]:
        """Return the turns as trace entries, for reward functions and viewers."""
        return [
            TraceEntry(
                prompt_token_ids=list(turn.prompt_token_ids),
                completion_token_ids=list(turn.completion_token_ids),
                per_token_logps=list(turn.per_token_logps),
                loss_mask=list(turn.loss_mask),
                request=turn.request,
                response=turn.response,
                metadata=turn.metadata,
            )
            for turn in self.turns
        ]


def _turn_of(entry: Mapping[str, Any], number: int) -> TrainingTurn:
    missing = [name for name in _REQUIRED if name not in entry]
    metadata = entry.get("metadata")
    if not missing and not (isinstance(metadata, Mapping) and "node_id" in metadata):
        missing = ["metadata.node_id"]
    if missing:
        raise ValueError(f"trace entry {number} has no {', '.join(missing)}")
    fields = {name: entry[name] for name in (*_REQUIRED, *_OPTIONAL) if name in entry}
    return TrainingTurn(node_id=entry["metadata"]["node_id"], **fields)
