"""Scratch folders: where a running engine keeps archives and sockets, and how those of a dead one are found.

Each folder is held by a file lock that ends with its process, so a folder whose lock is free has no owner any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this platform: folders are removed by their owners only
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)


def scratch_root() -> Path:
    """Return the folder of all scratch folders of this user."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"openenv-rollouts-{user}"


@contextlib.contextmanager
def scratch(root: Path | None = None) -> Iterator[Path]:
    """Give a private folder that is removed at the end; sweep those of dead engines first."""
    root = root or scratch_root()
    sweep(root)
    folder = root / secrets.token_hex(6)
    lock = _claim(root, folder.name)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        _remove(folder)
        _release(root, folder.name, lock)


def sweep(root: Path | None = None) -> list[Path]:
    """Remove what dead engines left behind, and return it."""
    root = root or scratch_root()
    removed: list[Path] = []
    if fcntl is None or not root.is_dir():
        return removed
    for path in sorted(root.glob("*.lock")):
        with contextlib.suppress(OSError), path.open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
            folder = root / path.stem
            if folder.exists():
                _remove(folder)
                removed.append(folder)
            path.unlink(missing_ok=True)
    return removed


def _claim(root: Path, name: str) -> int:
    # Made under another name and locked before it can be seen, or a sweeper could find it unlocked.
    hidden = root / f".{name}"
    while True:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            handle = os.open(hidden, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            break
        except FileNotFoundError:  # the last other engine has just removed the folder of all
            continue
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX)
    hidden.rename(root / f"{name}.lock")
    return handle


def _release(root: Path, name: str, handle: int) -> None:
    (root / f"{name}.lock").unlink(missing_ok=True)
    os.close(handle)
    with contextlib.suppress(OSError):  # another engine still has its own folder there
        root.rmdir()


def _remove(folder: Path) -> None:
    def make_writable(function: object, path: str, error: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(Path(path).parent, 0o700)
            os.unlink(path)

    shutil.rmtree(folder, onerror=make_writable)
    if folder.exists():
        logger.warning("%s could not be removed", folder)
