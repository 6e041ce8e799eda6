"""A book on disk, for environments in other processes than their judge, and environments that write into it.

What is written stays when a process is killed: each deed is one write to a file of its own owner and environment.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .environment import Counting, CountingAsync, Deed

_NUMBERS = itertools.count(1)


class FileBook:
    """What environments of one or several processes did."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._alive = self._folder / "alive"
        self._alive.mkdir(parents=True, exist_ok=True)

    def open(self) -> str:
        """Count an environment and name it after its process."""
        serial = f"{os.getpid()}.{next(_NUMBERS)}"
        (self._alive / serial).touch()
        return serial

    def note(self, serial: str, owner: int, deed: Deed) -> None:
        """Write down what an environment did for whom."""
        place = self._folder / str(owner)
        place.mkdir(exist_ok=True)
        with (place / serial).open("ab", buffering=0) as file:
            file.write(f"{deed.kind} {deed.number}\n".encode())

    def close(self, serial: str) -> None:
        """Count an environment that has been closed."""
        (self._alive / serial).unlink(missing_ok=True)

    def deeds(self, owner: int) -> dict[str, list[Deed]]:
        """What was done for one client, by environment."""
        place = self._folder / str(owner)
        files = sorted(place.iterdir()) if place.exists() else []
        return {file.name: _read(file) for file in files}

    def holders(self, owner: int) -> list[int]:
        """The processes whose environments did something for one client, the latest last."""
        place = self._folder / str(owner)
        files = sorted(place.iterdir(), key=lambda file: file.stat().st_mtime_ns) if place.exists() else []
        return [process_of(file.name) for file in files]

    def unclosed(self) -> list[int]:
        """The processes of environments that have not been closed; one that was killed could not close its own."""
        return [process_of(file.name) for file in self._alive.iterdir()]


def process_of(serial: str) -> int:
    """Return the process of an environment."""
    return int(serial.partition(".")[0])


def _read(file: Path) -> list[Deed]:
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return [Deed(kind, int(number)) for kind, number in lines]


class FiledCounting(Counting):
    """Counts, and writes it down in a file."""

    def __init__(self, folder: str) -> None:
        self.book = FileBook(folder)
        super().__init__()


class FiledCountingAsync(CountingAsync):
    """The same in a coroutine."""

    def __init__(self, folder: str) -> None:
        self.book = FileBook(folder)
        super().__init__()


def filed_counting(folder: Path, *, coroutine: bool) -> Callable[[], Any]:
    """Return a factory of environments that write into a folder; it can be sent to other processes."""
    return partial(FiledCountingAsync if coroutine else FiledCounting, str(folder))
