"""The cache of agents: what was installed once per machine, found again by name and version.

Knows folders, locks and child processes. Must not know any agent. An installation is made beside its place and moved
there when it is complete, so one that was interrupted is never taken for one that is there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from openenv.errors import AgentUnavailable

try:
    import fcntl
except ImportError:  # no such locks on this platform: two installations at once do the work twice, no harm
    fcntl = None  # type: ignore[assignment]

_TAIL = 2000


def installed(place: Path, build: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, which `build` fills when it is not there; one process at a time.

    Raises:
        AgentUnavailable: the cache cannot be written, or `build` said so.
    """
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_name(f"{place.name}.lock")):
            if not place.is_dir():
                _build(place, build)
    except OSError as exc:
        raise AgentUnavailable(f"The cache {place.parent} cannot be used: {exc}") from exc
    return place


def run_installer(argv: Sequence[str], *, cwd: Path, what: str, timeout_s: float = 900.0) -> None:
    """Run a package manager.

    Raises:
        AgentUnavailable: it failed; the text has the command and the end of what it said.
    """
    command = " ".join(argv)
    try:
        done = subprocess.run(
            list(argv), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError as exc:
        raise AgentUnavailable(f"{what} cannot be installed: {argv[0]} is missing. It would run `{command}`.") from exc
    except subprocess.TimeoutExpired as exc:
        raise AgentUnavailable(f"{what} cannot be installed: `{command}` took more than {timeout_s:g} s.") from exc
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode("utf-8", "replace")[-_TAIL:].strip()
        raise AgentUnavailable(f"{what} cannot be installed: `{command}` exited with {done.returncode}: {said}")


def _build(place: Path, build: Callable[[Path], None]) -> None:
    for left in place.parent.glob(f".{place.name}.*"):  # of an installation that was interrupted
        shutil.rmtree(left, ignore_errors=True)
    draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        build(draft)
        draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
