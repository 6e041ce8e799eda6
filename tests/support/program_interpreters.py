"""Interpreters with one of the two packages, ours or the published one, for programs that tests start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NOT_INHERITED = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OPENENV_MODE", "ENABLE_WEB_INTERFACE"}


@dataclass(frozen=True)
class Interpreter:
    """A Python with one of the two packages in it."""

    name: str
    python: str
    source: Path | None = None

    def environment(self, folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """What its processes inherit: a folder of test code on the path, and our source where it is ours."""
        path = [str(folder)] if self.source is None else [str(self.source), str(folder)]
        inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        return {**inherited, "PYTHONPATH": os.pathsep.join(path), **(extra or {})}
