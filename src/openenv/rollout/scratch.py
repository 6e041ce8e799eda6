"""Scratch folders and file locks. A locked folder belongs to a running process.

A lock ends with its process, even if the process is killed. So a folder without a lock can be removed.
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
except ImportError:  # this platform lacks flock: folders of dead processes stay, installations may run twice
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)


def open_locked(path: Path) -> int:
    """Open or create a file, wait for its lock, and return the handle; closing it frees the lock."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file."""
    if fcntl is None:
        return False
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def scratch_root() -> Path:
    """Return the folder of all scratch folders of this user."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"openenv-rollouts-{user}"


@contextlib.contextmanager
def scratch(root: Path | None = None) -> Iterator[Path]:
    """Create a private folder and remove it at the end. First remove the folders of dead processes."""
    root = root or scratch_root()
    sweep(root)
    folder = root / secrets.token_hex(6)
    handle = _claim(root, folder.name)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        _remove(folder)
        (root / f"{folder.name}.lock").unlink(missing_ok=True)
        os.close(handle)
        with contextlib.suppress(OSError):  # another engine has a folder there
            root.rmdir()


def sweep(root: Path | None = None) -> list[Path]:
    """Remove the folders of dead processes, and return them."""
    root = root or scratch_root()
    removed: list[Path] = []
    if fcntl is None or not root.is_dir():
        return removed
    for path in sorted(root.glob("*.lock")):
        with contextlib.suppress(OSError), path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
            folder = root / path.stem
            if folder.exists():
                _remove(folder)
                removed.append(folder)
            path.unlink(missing_ok=True)
    return removed


def _claim(root: Path, name: str) -> int:
    # Create and lock the file under a hidden name, so that a sweep never sees it unlocked.
    hidden = root / f".{name}"
    while True:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            handle = open_locked(hidden)
            break
        except FileNotFoundError:  # another process has just removed the empty root
            continue
    hidden.rename(root / f"{name}.lock")
    return handle


def _remove(folder: Path) -> None:
    def make_writable(function: object, path: str, error: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(Path(path).parent, 0o700)
            os.unlink(path)

    shutil.rmtree(folder, onerror=make_writable)
    if folder.exists():
        logger.warning("%s could not be removed", folder)
