"""OpenCode for sandboxes that mount nothing of this machine: the one in their template, else a copy of ours.

A driver as `openenv.rollout` has them; differs from `opencode` only in how the program gets inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from opencode_env.opencode_runtime import SandboxPaths
from openenv.rollout.agents.base import AgentRun, Installation, Launch
from openenv.rollout.agents.opencode import OpenCode
from openenv.sandboxes.base import Sandbox


class CarriedOpenCode(OpenCode):
    """Drive an OpenCode that lies in the sandbox's home."""

    def __init__(self, *, version: str | None = None) -> None:
        super().__init__(version=version)
        self._cache: Path | None = None
        self._report: Callable[[str], None] = lambda message: None

    def install(self, cache: Path, report: Callable[[str], None]) -> Installation:
        """Fetch nothing yet: a template may have the program."""
        self._cache, self._report = cache, report
        return Installation()

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Put the program inside where it is not there, then do as `opencode` does."""
        program = SandboxPaths(run.home).opencode
        if sandbox.exec([program, "--version"], timeout=30).exit_code != 0:
            assert self._cache is not None, "install comes before prepare"
            [mount] = super().install(self._cache, self._report).mounts
            sandbox.upload(mount.source, program)
        return super().prepare(sandbox, replace(run, installation=replace(run.installation, executable=program)))
