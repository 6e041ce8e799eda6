"""Adapters between environments and other interfaces: Gymnasium, PettingZoo, verifiers, ORS, Inspect, Harbor, turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from openenv.errors import PackageUnavailable


@contextmanager
def importing(requirement: str, *, needed_by: str) -> Iterator[None]:
    """Import an adapter's package in the block, if its version fits. With an empty block, the package is optional.

    Args:
        requirement: The package and its oldest version, such as `verl>=0.8`.
        needed_by: The name of the adapter's module.

    Raises:
        PackageUnavailable: The package is missing, too old, or cannot be imported.
    """
    wanted = Requirement(requirement)
    command = f"{needed_by} needs {requirement}: pip install '{requirement}'"
    try:
        installed = version(wanted.name)
    except PackageNotFoundError:
        installed = None  # the block decides
    if installed is not None and not wanted.specifier.contains(installed, prereleases=True):
        raise PackageUnavailable(f"{command} ({installed} is installed)")
    try:
        yield
    except ImportError as exc:
        raise PackageUnavailable(f"{command} ({exc})") from exc
