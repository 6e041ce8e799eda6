"""`codex`: the Codex CLI, from npm. It speaks the responses dialect; the capture proxy translates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from openenv.rollout.agents.base import Agent, AgentRun, Installation, Launch, start_with_instruction
from openenv.rollout.agents.install import NpmProgram
from openenv.sandboxes.base import Sandbox

VERSION = "0.166.0"
_PROGRAM = NpmProgram(
    name="codex",
    package="@openai/codex@{version}-{platform}",
    folder="@openai/codex",
    program="vendor/{triple}/bin/codex",
    command="codex",
    tree="vendor/{triple}",
)


class Codex(Agent):
    """Drive Codex.

    Args:
        version: The version to use.
    """

    name = "codex"
    dialect = "openai_responses"

    def __init__(self, *, version: str = VERSION) -> None:
        self.version = version

    def install(self, cache: Path, report: Callable[[str], None]) -> Installation:
        """Find Codex in the cache, or fetch it with npm."""
        return _PROGRAM.install(cache, self.version, report)

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Write the configuration, and start one run with the instruction."""
        config = "\n".join(
            (
                f"model = {json.dumps(run.model)}",
                'model_provider = "intercepted"',
                'approval_policy = "never"',
                'sandbox_mode = "danger-full-access"',  # it already runs in our sandbox
                "[model_providers.intercepted]",
                'name = "Intercepted"',
                f"base_url = {json.dumps(run.base_url)}",
                'env_key = "OPENAI_API_KEY"',
                'wire_api = "responses"',
            )
        )
        sandbox.write_text(f"{run.home}/.codex/config.toml", config + "\n")
        command = [run.installation.executable, "exec", "--skip-git-repo-check", "--json", "-"]
        envs = {"CODEX_HOME": f"{run.home}/.codex", "OPENAI_API_KEY": run.api_key}
        return start_with_instruction(sandbox, run, command, envs)
