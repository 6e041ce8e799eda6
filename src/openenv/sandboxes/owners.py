"""The owner of a sandbox, container or control group: a label that names one process for good.

A PID alone is not a unique name: it is reused, and means another process in another container or machine. So a label
is `<boot id>.<pid namespace>/<pid>/<start time>`.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

CLOUD_OWNER_LABEL = "openenv-owner"
"""The label of resources in a cloud: `ProcessOwner.short`."""


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """A process, distinct from every other that had or will have its pid."""

    place: str
    """The boot of the machine and the PID namespace."""
    pid: int
    started: str

    @classmethod
    def current(cls) -> ProcessOwner:
        """Return this process."""
        return cls(_place(), os.getpid(), _start_time(os.getpid()) or "0")

    @classmethod
    def parse(cls, text: str) -> ProcessOwner | None:
        """Parse a label; None if it is not one."""
        parts = text.split("/")
        return cls(parts[0], int(parts[1]), parts[2]) if len(parts) == 3 and parts[1].isdigit() else None

    def __str__(self) -> str:
        return f"{self.place}/{self.pid}/{self.started}"

    @property
    def short(self) -> str:
        """The label for clouds, which allow few characters, and not many of them."""
        return f"{_digest(self.place)}-{self.pid}-{self.started}"

    @classmethod
    def parse_short(cls, text: str) -> ProcessOwner | None:
        """Parse a short label; None if it is malformed."""
        digest, _, rest = text.partition("-")
        pid, _, started = rest.partition("-")
        if not (pid.isdigit() and started.isdigit()):
            return None
        here = _place()
        return cls(here if _digest(here) == digest else digest, int(pid), started)

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine and visible from here."""
        return self.place == _place()

    def is_dead(self) -> bool:
        """Return whether the process has certainly ended; False if that cannot be determined from here."""
        if not self.is_here or self.started == "0":
            return False
        return _start_time(self.pid) != self.started


def _digest(place: str) -> str:
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"


def _start_time(pid: int) -> str | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
