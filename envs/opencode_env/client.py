"""The client of the OpenCode environment, asynchronous and blocking.

Knows the tool's arguments and its result; must not know how a rollout is run.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict, Unpack

from opencode_env.models import OpenCodeState, RolloutResult
from openenv.client.mcp_client import SyncMCPToolClient
from openenv.core.mcp_client import MCPToolClient

if TYPE_CHECKING:
    from openenv.client.flows import Flow
    from openenv.client.mcp_client import ProgressHandler

TOOL = "run_rollout"
AGENT_TIMEOUT_S = 600.0
COMMAND_TIMEOUT_S = 120.0
_SLACK_S = 300.0


class RolloutArguments(TypedDict, total=False):
    """The arguments of the tool `run_rollout`; what is left out has its default."""

    endpoint: str
    base_url: str
    api_key: str
    model: str
    instruction: str
    setup: list[str] | None
    verify: list[str | dict[str, Any]] | None
    task_id: str
    mode: str
    disable_thinking: bool | None
    max_tokens_cap: int
    top_logprobs: int
    agent_timeout_s: float
    template: str
    sandbox: str
    files: dict[str, str] | None
    verify_files: dict[str, str] | None
    script: dict[str, Any] | None
    sequences: bool
    reward_file: bool | None


_NAMES = frozenset(RolloutArguments.__annotations__)


class OpenCodeEnv(MCPToolClient):
    """Runs rollouts on a server: `await env.run_rollout(...)`, or `env.sync().run_rollout(...)`."""

    def run_rollout(
        self,
        *,
        timeout_s: float | None = None,
        on_progress: ProgressHandler | None = None,
        **arguments: Unpack[RolloutArguments],
    ) -> Coroutine[Any, Any, RolloutResult]:
        """Run a rollout and return what came of it. Cancelling the call ends the rollout and frees its sandbox.

        Name an `endpoint` of the server (`vllm`, `openai`, `hf_router`, `scripted`) or give `base_url`, `api_key` and
        `model`; `instruction` is the agent's task, `setup` and `verify` are shell lines; in `verify` also checks.

        Args:
            timeout_s: How long to wait; by default as long as the rollout may take.
            on_progress: Called with a number, the number of phases and a message, while the rollout runs.
            arguments: Those of the tool; the README lists them.

        Raises:
            TypeError: There is no such argument.
            ToolCallError: The rollout could not begin: no endpoint, or no instruction.
            ToolTimeout: It took longer than `timeout_s`; it has been ended.
        """
        unknown = sorted(set(arguments) - _NAMES)
        if unknown:
            raise TypeError(f"run_rollout has no argument {', '.join(unknown)}")
        options: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
        limit = patience(options) if timeout_s is None else timeout_s
        return self._driver.run(self._rollout_flow(options, limit, on_progress), "OpenCodeEnv.run_rollout")

    def call_tool_with(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        on_progress: ProgressHandler | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Call a tool; a rollout has as long as it may take, also where the call names no limit."""
        if timeout_s is None and name == TOOL:
            timeout_s = patience(arguments or {})
        return super().call_tool_with(name, arguments, timeout_s=timeout_s, on_progress=on_progress)

    def sync(self) -> SyncOpenCodeEnv:
        """Return the blocking twin of this client."""
        return SyncOpenCodeEnv(self)

    def _rollout_flow(
        self, arguments: dict[str, Any], timeout_s: float, on_progress: ProgressHandler | None
    ) -> Flow[RolloutResult]:
        answer = yield from self._call_flow(TOOL, arguments, timeout_s, on_progress)
        return RolloutResult.model_validate_json(_extract_text(answer))

    def _parse_state(self, payload: dict[str, Any]) -> OpenCodeState:
        return OpenCodeState.model_validate(payload)


class SyncOpenCodeEnv(SyncMCPToolClient):
    """Blocks where an `OpenCodeEnv` would be awaited."""

    _client: OpenCodeEnv

    def run_rollout(
        self,
        *,
        timeout_s: float | None = None,
        on_progress: ProgressHandler | None = None,
        **arguments: Unpack[RolloutArguments],
    ) -> RolloutResult:
        """Run a rollout and return what came of it; see `OpenCodeEnv.run_rollout`."""
        return self._driver.run_helper(
            self._client.run_rollout, timeout_s=timeout_s, on_progress=on_progress, **arguments
        )


def patience(arguments: Mapping[str, Any]) -> float:
    """Return how long a rollout with these arguments may take: its agent, each of its lines, and what is around."""
    checks = 3 * len(arguments.get("verify") or ())  # one that dies is run again without the agent's work
    lines = len(arguments.get("setup") or ()) + checks
    return float(arguments.get("agent_timeout_s") or AGENT_TIMEOUT_S) + COMMAND_TIMEOUT_S * lines + _SLACK_S


def _extract_text(answer: Any) -> str:
    """Return the text in whatever form a server gave it: bare, as a result, as content, or as an object already."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, Mapping):
        for key in ("data", "result", "structured_content", "structuredContent", "content", "text"):
            if answer.get(key) is not None:
                return _extract_text(answer[key])
        return json.dumps(dict(answer))
    if isinstance(answer, (list, tuple)) and answer:
        return _extract_text(answer[0])
    for key in ("data", "text", "content"):
        if getattr(answer, key, None) is not None:
            return _extract_text(getattr(answer, key))
    raise TypeError(f"there is no text in {answer!r}")
