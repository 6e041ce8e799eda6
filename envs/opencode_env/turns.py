"""`OpenCodeAdapter`: OpenCode as a turn-based agent, for `openenv.adapters.turns.HarnessEnvironment`.

One `opencode run` per turn; its session goes on from turn to turn. It runs on this machine and not in a sandbox, with a
home of its own; `OpenCodeSessionFactory` and the environment itself are for work that has to be isolated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from opencode_env.config import OpenCodeConfig
from opencode_env.opencode_runtime import build_envs, build_opencode_json, render
from openenv.adapters.turns.command_line import CommandAdapter
from openenv.adapters.turns.turns import HarnessConfig
from openenv.errors import AgentUnavailable, HarnessError, HarnessStartupError
from openenv.protocol.turn_messages import HarnessEvent, HarnessEventType
from openenv.rollout.agents.opencode import OpenCode
from openenv.settings import cache_dir

logger = logging.getLogger(__name__)

SERVER = "environment"
"""What OpenCode calls the environment's tools: `environment_NAME`."""


class OpenCodeAdapter(CommandAdapter):
    """Takes turns with OpenCode.

    Args:
        config: Model, tools and limits; a turn may take `agent_timeout_s`. The agent can read the key.
        working_directory: Where it works.
        name: What clients see as its name.
        executable: The program; by default OpenCode of the PATH or the cache, fetched with npm where it is in neither.
    """

    def __init__(
        self,
        config: OpenCodeConfig,
        *,
        working_directory: str,
        name: str = "opencode",
        executable: str | None = None,
    ) -> None:
        super().__init__(
            HarnessConfig(
                name=name,
                command=[executable or "opencode", "run", "--format", "json"],
                working_directory=working_directory,
                session_timeout_s=config.agent_timeout_s,
                model=config.model,
            )
        )
        self._opencode = config
        self._executable = executable
        self._home: Path | None = None
        self._session: str | None = None

    async def _begin(self) -> None:
        await super()._begin()
        self._session = None
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        if self._executable is None:
            self._executable = _installed(self._opencode.opencode_version)
        self._home = Path(tempfile.mkdtemp(prefix="opencode-"))
        made = build_opencode_json(self._opencode)
        if self._bridge_url is not None:
            made["mcp"] = {**made.get("mcp", {}), SERVER: {"type": "remote", "url": self._bridge_url, "enabled": True}}
        if self._opencode.system_prompt is not None:
            path = self._home / "system.md"
            path.write_text(self._opencode.system_prompt, encoding="utf-8")
            made["instructions"] = [str(path)]
        (self._home / "opencode.json").write_text(render(made), encoding="utf-8")

    def _variables(self) -> dict[str, str]:
        assert self._home is not None
        config = self._opencode.model_copy(update={"sandbox_home": str(self._home)})
        folders = {"CONFIG": ".config", "DATA": ".local/share", "STATE": ".local/state", "CACHE": ".cache"}
        return {
            **super()._variables(),
            **build_envs(config, base_url=config.base_url, api_key=config.api_key),
            **{f"XDG_{name}_HOME": str(self._home / folder) for name, folder in folders.items()},
            "OPENCODE_CONFIG": str(self._home / "opencode.json"),
            **config.extra_env,
        }

    async def stop(self) -> None:
        """End OpenCode, and remove its home."""
        await super().stop()
        home, self._home = self._home, None
        if home is not None:
            await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)

    def command(self, message: str) -> list[str]:
        """Return the command line of the next turn, which reads the message from its input."""
        session = [] if self._session is None else ["--session", self._session]
        return [self._executable or "opencode", *self.config.command[1:], *session]

    def events_of(self, line: str) -> list[HarnessEvent]:
        """Return the events of a line; OpenCode prints one JSON object in each.

        Raises:
            HarnessError: OpenCode reports an error; it may end with exit code 0 all the same.
        """
        try:
            printed = json.loads(line)
        except ValueError:
            logger.debug("opencode: %s", line)
            return []
        if not isinstance(printed, dict):
            return []
        self._session = printed.get("sessionID") or self._session
        part = printed.get("part") if isinstance(printed.get("part"), dict) else {}
        match printed.get("type"):
            case "text":
                return [_event(HarnessEventType.TEXT_OUTPUT, printed, text=part.get("text", ""))]
            case "tool_use":
                return _tool_events(printed, part)
            case "step_start":
                return [_event(HarnessEventType.LLM_REQUEST, printed)]
            case "step_finish":
                kept = {name: part.get(name) for name in ("reason", "tokens", "cost")}
                return [_event(HarnessEventType.LLM_RESPONSE, printed, **kept)]
            case "error":
                raise HarnessError(f"opencode reported an error: {json.dumps(printed.get('error'))[:2000]}")
        return []


def _installed(version: str) -> str:
    try:
        [mount] = OpenCode(version=None if version == "latest" else version).install(cache_dir(), logger.info).mounts
    except AgentUnavailable as exc:
        raise HarnessStartupError(f"OpenCode is not there: {exc}") from exc
    return str(mount.source)


def _tool_events(printed: dict[str, Any], part: dict[str, Any]) -> list[HarnessEvent]:
    state = part.get("state") or {}
    known = {"name": part.get("tool"), "call_id": part.get("callID")}
    is_error = state.get("status") == "error"
    output = state.get("error") if is_error else state.get("output")
    return [
        _event(HarnessEventType.TOOL_CALL, printed, **known, arguments=state.get("input")),
        _event(HarnessEventType.TOOL_RESULT, printed, **known, output=output, is_error=is_error),
    ]


def _event(kind: HarnessEventType, printed: dict[str, Any], **data: Any) -> HarnessEvent:
    at = printed.get("timestamp")  # in milliseconds
    when = {"timestamp": at / 1000} if isinstance(at, (int, float)) else {}
    return HarnessEvent(type=kind, data=data, **when)
