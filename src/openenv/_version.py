"""The version of the installed package. Knows the names it has been distributed under."""

from __future__ import annotations


def load_package_version() -> str:
    """Return the installed version of `openenv`, or of its older distribution name."""
    from importlib.metadata import PackageNotFoundError, version  # costs more than everything else here

    for name in ("openenv", "openenv-core"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "0.0.0"
