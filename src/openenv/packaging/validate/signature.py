"""Which kind of package a folder is, by the file that every package of a kind has."""

from __future__ import annotations

from pathlib import Path

from .types import SignatureKind

WELL_KNOWN_FILES = {SignatureKind.OPENENV_SERVED: SignatureKind.OPENENV_SERVED.value}
"""The kinds that can be validated, and the file of each."""
UNSUPPORTED_CATEGORIES = {
    "hosted-verifier": "a service outside decides the reward, so its answers cannot be repeated here",
    "multi-agent": "several agents act in one episode, and the checks play one",
    "simulated-user": "a user model takes part in the episode, and none is run here",
    "parser-not-implemented": "packages of this kind are known, but their declarations are not read",
}
"""The kinds of packages that cannot be validated, and why."""


class SignatureError(Exception):
    """A folder is no package, or two kinds of packages at once."""


class UnsupportedPackageError(Exception):
    """A package of a kind that cannot be validated."""

    def __init__(self, category: str, reason: str) -> None:
        super().__init__(f"unsupported package ({category}): {reason}")
        self.category = category
        self.reason = reason


def detect_signature(package_root: Path) -> SignatureKind:
    """Return the kind of the package in a folder.

    Raises:
        SignatureError: There is no such folder, it holds no package, or files of several kinds.
    """
    if not package_root.is_dir():
        raise SignatureError(f"not a package directory: there is no folder {package_root}")
    kinds = [kind for kind in SignatureKind if (package_root / kind.value).is_file()]
    if len(kinds) > 1 and any(kind in WELL_KNOWN_FILES for kind in kinds):
        names = ", ".join(kind.value for kind in kinds)
        raise SignatureError(f"ambiguous package: {package_root} has {names}; keep the one that it is")
    if not kinds or kinds[0] not in WELL_KNOWN_FILES:
        known = ", ".join(WELL_KNOWN_FILES.values())
        hint = f" ({kinds[0].value} is validated by no command yet)" if kinds else ""
        raise SignatureError(f"unrecognized package: {package_root} is no environment package: it has no {known}{hint}")
    return kinds[0]
