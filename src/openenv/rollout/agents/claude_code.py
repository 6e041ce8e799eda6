"""`claude-code`: the Claude Code CLI, from npm. It speaks Anthropic's dialect; the capture proxy translates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from openenv.rollout.agents.base import Agent, AgentRun, Installation, Launch, start_with_instruction
from openenv.rollout.agents.install import NpmProgram, libc_suffix
from openenv.sandboxes.base import Sandbox

VERSION = "2.1.197"
_PROGRAM = NpmProgram(
    name="claude-code",
    package="@anthropic-ai/claude-code-{platform}@{version}",
    folder="@anthropic-ai/claude-code-{platform}",
    program="claude",
    command="claude",
)


class ClaudeCode(Agent):
    """Drive Claude Code; `allowed_tools` and `permission_mode` are options of a run.

    Args:
        version: The version to use.
    """

    name = "claude-code"
    dialect = "anthropic"

    def __init__(self, *, version: str = VERSION) -> None:
        self.version = version

    def install(self, cache: Path, report: Callable[[str], None]) -> Installation:
        """Find Claude Code in the cache, or fetch it with npm."""
        return _PROGRAM.install(cache, self.version, report, variant=libc_suffix())

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Start one run with the instruction."""
        allowed = run.options.get("allowed_tools", "Bash Edit Write Read Glob Grep")
        command = [
            run.installation.executable,
            *("-p", "--model", run.model, "--output-format", "json"),
            *("--permission-mode", str(run.options.get("permission_mode", "acceptEdits"))),
            *("--allowedTools", str(allowed)),
        ]
        envs = {
            # Without /v1, which the CLI adds.
            "ANTHROPIC_BASE_URL": run.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": run.api_key,
            "ANTHROPIC_SMALL_FAST_MODEL": run.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
        }
        return start_with_instruction(sandbox, run, command, envs)
