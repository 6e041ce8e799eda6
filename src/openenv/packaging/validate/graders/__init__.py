"""Graders: each makes one check of a package and returns its result; other packages add theirs by an entry point."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, runtime_checkable

from openenv.errors import message_of

from ..manifest import CapabilitiesSpec, NormalizedManifest
from ..providers import RunningSubject
from ..report import CheckOutcome
from ..report import CheckResult as CheckResult
from ..runtime.contracts import RuntimeEvidence
from ..types import Level, ProviderCapability

ENTRY_POINT_GROUP = "openenv.packaging.validate.graders"
"""Where other packages name their graders: an object, or a class or function that makes one."""


@dataclass(frozen=True)
class Subject:
    """What a grader looks at: the package, and where it runs what was seen of it."""

    root: Path
    manifest: NormalizedManifest
    image_ref: str | None
    running: RunningSubject | None
    outputs_dir: Path
    runtime_evidence: RuntimeEvidence | None = None
    network_evidence_json: str | None = None


@runtime_checkable
class Grader(Protocol):
    """Makes one check.

    `requires_capabilities` names fields of `CapabilitiesSpec` that a package must declare, `requires_provider` what the
    provider must be able to do, `depends_on` the checks that must have passed before.
    """

    check_id: str
    level: Level
    requires_capabilities: frozenset[str]
    requires_provider: frozenset[ProviderCapability]
    depends_on: tuple[str, ...]

    def applies_to(self, manifest: NormalizedManifest) -> bool:
        """Return whether a package has what this is about."""
        ...

    def run(self, subject: Subject) -> CheckOutcome:
        """Make the check."""
        ...


class GraderRegistry:
    """The graders, by the ids of their checks."""

    def __init__(self) -> None:
        self._graders: dict[str, Grader] = {}

    def register(self, grader: Grader) -> None:
        """Add a grader.

        Raises:
            ValueError: There is one for this check, or it needs a capability that no manifest can declare.
        """
        if grader.check_id in self._graders:
            raise ValueError(f"a grader for {grader.check_id!r} is registered already")
        unknown = sorted(grader.requires_capabilities - CapabilitiesSpec.model_fields.keys())
        if unknown:
            raise ValueError(f"grader {grader.check_id!r} requires unknown capabilities: {', '.join(unknown)}")
        self._graders[grader.check_id] = grader

    def load_entry_points(self) -> int:
        """Add the graders that installed packages offer, and return how many there are.

        Raises:
            ValueError: One cannot be loaded, or cannot be added.
        """
        points = entry_points(group=ENTRY_POINT_GROUP)
        for point in points:
            try:
                grader = point.load()
                if isinstance(grader, type) or not hasattr(grader, "run"):
                    grader = grader()
            except Exception as error:  # it is the code of another package
                reason = f"{type(error).__name__}: {message_of(error)}"
                raise ValueError(f"the grader {point.name!r} ({point.value}) cannot be loaded: {reason}") from error
            self.register(grader)
        return len(points)

    def get(self, check_id: str) -> Grader | None:
        """Return the grader of a check, if there is one."""
        return self._graders.get(check_id)

    def select(self, manifest: NormalizedManifest, max_level: Level) -> list[Grader]:
        """Return the graders up to a level that a package has something for."""
        return [
            grader
            for grader in self._graders.values()
            if grader.level <= max_level
            and all(getattr(manifest.capabilities, name) for name in grader.requires_capabilities)
            and grader.applies_to(manifest)
        ]
