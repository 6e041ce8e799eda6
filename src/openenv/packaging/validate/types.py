"""The words of a validation report: levels, lanes, severities, statuses and verdicts."""

from __future__ import annotations

from enum import Enum, IntEnum

from openenv.env.manifest import MANIFEST


class Level(IntEnum):
    """How much a check needs: files, a served environment, its meaning, or many episodes of a model."""

    STATIC = 1
    RUNTIME = 2
    SEMANTIC = 3
    STATISTICAL = 4


class ValidationLane(str, Enum):
    """Where a report is made; the Hub's lane has all checks of the local one, and its own."""

    LOCAL = "local"
    HUB = "hub"


class Severity(str, Enum):
    """What the failure of a check means for the verdict."""

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
    """What a validation provider can do."""

    NETWORK_POLICY = "network_policy"
    EXEC = "exec"
    IMAGE_BUILD = "image_build"
    GPU = "gpu"
    REMOTE = "remote"


class SignatureKind(str, Enum):
    """The file that says what kind of package a folder is."""

    OPENENV_SERVED = MANIFEST
    HARBOR_TASK = "task.toml"
    POSTTRAIN_TASK = "task.md"


# The published names of the two that are called otherwise here.
Lane = ValidationLane
Verdict = ReportVerdict
