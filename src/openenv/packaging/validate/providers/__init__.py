"""What a validation provider does: build the image of a package and run it, isolated as its manifest declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from openenv.errors import ProviderError
from openenv.sandboxes.base import ExecResult as ExecResult

from ..manifest import ExecutionDeclaration
from ..runtime.contracts import LaunchSpec
from ..types import ProviderCapability


class StartupError(ProviderError):
    """The image was started, and its server did not answer in time or ended."""

    code = "STARTUP_ERROR"


class UnsupportedCapability(ProviderError):
    """The package declares something that this provider cannot give it."""

    code = "UNSUPPORTED_CAPABILITY"


@runtime_checkable
class RunningSubject(Protocol):
    """A package that runs; `base_url` is the address of its server."""

    base_url: str

    def inspect(self) -> dict[str, Any]:
        """Return what is known of how it runs."""
        ...

    def logs(self, max_bytes: int = 65536) -> str:
        """Return the end of what its server has written."""
        ...

    def exec(self, argv: list[str], timeout_s: float) -> ExecResult:
        """Run a command beside the server."""
        ...

    def stop(self) -> None:
        """Stop it; harmless when it is stopped."""
        ...


@runtime_checkable
class ValidationProvider(Protocol):
    """Builds and runs packages for their checks."""

    name: str
    capabilities: frozenset[ProviderCapability]
    supported_network_modes: frozenset[str]

    def build(self, root: Path, execution: ExecutionDeclaration) -> str:
        """Build the image of a package and return its digest, `sha256:…`."""
        ...

    def start(self, spec: LaunchSpec) -> RunningSubject:
        """Run an image, and return when its server answers."""
        ...
