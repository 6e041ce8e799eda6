"""Where the agents' unix socket lies: a folder of its own in the system's place for such, short enough for a socket.

Knows paths. A folder whose proxy was killed is removed by the next one that starts.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from pathlib import Path

PREFIX = "openenv-capture-"
NAME = "agents.sock"
_PATH_LIMIT = 100


def make(wanted: Path | None = None) -> Path:
    """Make a folder for a socket, where it is wanted if its path is short enough; remove those that were left there."""
    place = _place(wanted)
    for folder in place.glob(f"{PREFIX}*"):
        if _is_left(folder / NAME):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))


def _place(wanted: Path | None) -> Path:
    """Return a folder whose path leaves room for a socket's: the kernel takes little more than a hundred bytes."""
    places = [place for place in (wanted, Path(tempfile.gettempdir())) if place is not None]
    room = _PATH_LIMIT - len(f"/{PREFIX}12345678/{NAME}")
    return next((place for place in places if len(str(place)) <= room), Path("/tmp"))


def _is_left(path: Path) -> bool:
    """Say whether nobody listens on a socket any more."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if not path.is_socket():
            return False
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
