"""The checks of `openenv validate`, and the vocabulary of its reports: levels, lanes, severities, statuses, verdicts.

A check returns `CheckEvidence`, or raises `CheckFailed` or `CheckSkipped`. The functions are in `checks_files`,
`checks_behaviour` and `checks_server`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from openenv.env.manifest import MANIFEST


# Each level includes those before it: files, behaviour, meaning, statistics.
class Level(IntEnum):
    """How much a check needs: files, a served environment, its meaning, or many episodes of a model."""

    STATIC = 1
    RUNTIME = 2
    SEMANTIC = 3
    STATISTICAL = 4


class ValidationLane(str, Enum):
    """The place of a report; the Hub's lane has all checks of the local one, and more."""

    LOCAL = "local"
    HUB = "hub"


class Severity(str, Enum):
    """The effect of a failed check on the verdict."""

    FAIL = "fail"
    WARN = "warn"
    ADVISORY = "advisory"


class CheckStatus(str, Enum):
    """How a check ended."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"
    ERROR = "error"


class ReportVerdict(str, Enum):
    """What follows from all results of a report."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


class ProviderCapability(str, Enum):
    """Capabilities of validation providers."""

    NETWORK_POLICY = "network_policy"
    EXEC = "exec"
    IMAGE_BUILD = "image_build"
    GPU = "gpu"
    REMOTE = "remote"


# One file names the kind: openenv.yaml, task.toml or task.md.
class SignatureKind(str, Enum):
    """The file that says what kind of package a folder is."""

    OPENENV_SERVED = MANIFEST
    HARBOR_TASK = "task.toml"
    POSTTRAIN_TASK = "task.md"


# Published names. Class names are unique in the package, so the classes have longer ones.
Lane = ValidationLane
Verdict = ReportVerdict


_WARN = Severity.WARN
_BOTH = ("v1", "v2")
_NONE: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A check: the property it confirms, and the effect of its failure."""

    id: str  # its level and the name of the function that makes it
    says: str  # what holds when it passes
    severity: Severity = Severity.FAIL  # the effect on the verdict
    # The reason if the check is always skipped. Reports list it anyway, as the published package does.
    skipped: str | None = None
    needs: str | None = None  # the declared capability that the check is about
    any_server: bool = False  # whether any client that may reset and step can check a running server
    policies: tuple[str, ...] = _BOTH  # the published policies that name it; empty for checks that only we have

    @property
    def level(self) -> Level:
        """From which level on it runs."""
        return Level[self.id.partition(".")[0].upper()]


# The published policies name checks that need a reference solution.
_NO_ORACLE = "no oracle is run here"
RULES = (
    # Files: these run first, and need neither an installation nor a server.
    Rule("static.manifest", "openenv.yaml says what the environment promises"),
    Rule("static.layout", "the files are there that serving, building and sharing need", _WARN),
    Rule("static.entry_point", "`server` is a command, and server/app.py can be run", _WARN, policies=_NONE),
    # Behaviour: an installed package is served and played. `startup` comes first, the others depend on it.
    Rule("runtime.startup", "it can be served", policies=("v2",)),
    Rule("runtime.reward_well_formed", "rewards are finite numbers within the range", any_server=True),
    Rule(
        "runtime.rubric_introspectable",
        "the rubric can be looked into",
        _WARN,
        "a rubric is not visible to clients",
        needs="rubric_tree",
    ),
    Rule("runtime.observation_schema", "observations fit their schema", any_server=True),
    Rule("runtime.state_contract", "the state names the episode and counts its steps", any_server=True),
    Rule("runtime.trajectory_record", "an episode can be written down", _WARN),
    Rule(
        "runtime.reward_attribution",
        "rewards say what they are for",
        _WARN,
        "a reward comes without its reason",
        needs="rubric_tree",
    ),
    # Declarations: the served environment against its manifest.
    Rule("runtime.tool_declaration_accuracy", "the tools are those that are declared"),
    Rule("runtime.task_declaration_accuracy", "the tasks are as many as are declared"),
    # Repetition: trainers compare episodes, so seeds must be reliable.
    Rule("runtime.seed_control", "a seed gives the same beginning again", any_server=True),
    Rule("runtime.episode_determinism", "a seed and actions give the same episode again", any_server=True),
    # Containment: the package against its machine.
    Rule("runtime.network_policy", "only declared hosts are reached"),
    Rule("runtime.host_containment", "the host cannot be touched"),
    Rule("runtime.resource_bounds", "an episode stays within its memory and time"),
    # Sessions: several episodes at once must not meet.
    Rule("runtime.episode_isolation", "concurrent sessions do not affect each other", any_server=True),
    Rule(
        "runtime.fork",
        "a copy in mid-episode goes on as its original, or is refused",
        _WARN,
        any_server=True,
        policies=_NONE,
    ),
    Rule("runtime.oracle_containment", "agents cannot reach the oracle", skipped=_NO_ORACLE, needs="oracle"),
    Rule(
        "runtime.step_before_reset",
        "a step before the first reset does no harm",
        _WARN,
        any_server=True,
        policies=_NONE,
    ),
    Rule(
        "runtime.invalid_action",
        "an action that does not fit is refused, and the episode goes on",
        _WARN,
        any_server=True,
        policies=_NONE,
    ),
    Rule("runtime.session_cleanup", "a session leaves nothing behind when it ends", any_server=True, policies=_NONE),
    # Meaning: are rewards worth learning from?
    Rule("semantic.oracle_max", "the oracle earns the best reward", skipped=_NO_ORACLE, needs="oracle"),
    Rule("semantic.floor_gap", "doing the least stays well below the best reward"),
    Rule("semantic.canary_floor", "canaries earn nothing", skipped="no canaries are run here", needs="canaries"),
    Rule("semantic.no_solution_leakage", "observations do not reveal the solution", skipped=_NO_ORACLE, needs="oracle"),
    # A reward that changes by itself teaches noise.
    Rule("semantic.verifier_determinism", "the same episode earns the same reward"),
    Rule("semantic.verifier_portability", "another process gives the same reward"),
    Rule("semantic.resource_envelope", "many episodes stay within memory and time"),
    Rule("semantic.replayability", "another process replays the same episode"),
)
# Results carry IDs only.
RULE = {rule.id: rule for rule in RULES}


@dataclass(frozen=True, slots=True)
class CheckEvidence:
    """The evidence of a passed check."""

    text: str
    measured: dict[str, Any] = field(default_factory=dict)


# A check returns evidence or raises: CheckFailed -> FAIL, CheckSkipped -> SKIP, any other exception -> ERROR.
class CheckFailed(Exception):
    """A check failed: the problems and a remedy."""

    def __init__(self, *problems: str, fix: str | None = None, measured: dict[str, Any] | None = None) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.fix = fix
        self.measured = measured or {}


class CheckSkipped(Exception):
    """A check cannot be made; the text says why."""


class CheckNotApplicable(CheckSkipped):
    """The package lacks the subject of the check; the text names it."""
