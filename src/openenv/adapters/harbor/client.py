"""The client of a Harbor server: its catalogue, and rollouts, awaited or blocking."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from openenv.client.mcp_client import MCPToolClient
from openenv.client.task_client import TaskClient

from .models import HarborRolloutResult, HarborState, HarborTaskRef

if TYPE_CHECKING:
    from openenv.client.flows import Flow

# Part of the Task API's paths: /harbor_env/splits
ENV_NAME = "harbor_env"
# The usual limit of a message is far below a rollout's duration.
MESSAGE_TIMEOUT_S = 1800.0
"""A rollout takes minutes."""


class HarborEnv(MCPToolClient):
    """Lists tasks and runs rollouts: `with HarborEnv(base_url=URL) as env`, or `async with`.

    In a `with` block calls block and return results; in an `async with` block `run_rollout` and `capabilities` are
    awaited. The catalogue always blocks: it is one short request.

    Args:
        base_url: The server's address.
        message_timeout_s: How long a rollout may take.
        **kwargs: More options of the client.
    """

    def __init__(self, base_url: str, *, message_timeout_s: float = MESSAGE_TIMEOUT_S, **kwargs: Any) -> None:
        super().__init__(base_url=base_url, message_timeout_s=message_timeout_s, **kwargs)
        self._limit_s = message_timeout_s
        # The catalogue is plain HTTP; rollouts go over the session's socket.
        self._tasks = TaskClient(base_url, name=ENV_NAME, token=kwargs.get("token"), timeout_s=120.0)

    def splits(self) -> list[dict[str, Any]]:
        """Return the datasets, with their numbers of tasks."""
        return self._tasks.splits()

    def num_tasks(self, split: str = "") -> int:
        """Return how many tasks a dataset has; by default the first."""
        return self._tasks.num_tasks(split)

    def get_task(self, split: str, index: int) -> HarborTaskRef:
        """Return a task by its number."""
        return HarborTaskRef.model_validate(self._tasks.task(split, index))

    def get_task_range(self, split: str, start: int = 0, stop: int = 20) -> list[HarborTaskRef]:
        """Return the tasks from one number to another."""
        return [HarborTaskRef.model_validate(task) for task in self._tasks.task_range(split, start, stop)]

    def run_rollout(
        self,
        *,
        split: str = "",
        task_index: int = 0,
        harness: str = "opencode",
        sandbox: str = "docker",
        reward_key: str = "",
        keep_sandbox: bool = False,
        force_build: bool = False,
        llm_url: str = "",
        model: str = "",
        api_key: str = "",
        auth_header: str = "",
        provider: str = "openai",
        purpose: str = "auto",
        eval_sampling: dict[str, Any] | None = None,
        agent_timeout_sec: float = 0.0,
        agent_step_limit: int = 0,
        sampling: dict[str, Any] | None = None,
    ) -> Coroutine[Any, Any, HarborRolloutResult]:
        """Run a rollout on the server. The arguments are described in `HarborRun`; the defaults are the server's.

        Raises:
            ToolCallError: the server could not run the tool. A rollout that fails is a result with `ok=False`.
            ToolTimeout: it took longer than `message_timeout_s`; it has been ended.
        """
        arguments: dict[str, Any] = {
            "split": split,
            "task_index": task_index,
            "harness": harness,
            "sandbox": sandbox,
            "reward_key": reward_key,
            "keep_sandbox": keep_sandbox,
            "force_build": force_build,
            "llm_url": llm_url,
            "model": model,
            "api_key": api_key,
            "auth_header": auth_header,
            "agent_timeout_sec": agent_timeout_sec,
            "agent_step_limit": agent_step_limit,
        }
        # Servers of before these arguments were there refuse them.
        # Older servers refuse unknown arguments, so new ones are sent only if they are set.
        arguments |= {} if provider == "openai" else {"provider": provider}
        arguments |= {} if purpose == "auto" else {"purpose": purpose}
        arguments |= {} if eval_sampling is None else {"eval_sampling": eval_sampling}
        arguments |= {} if sampling is None else {"sampling": sampling}
        # The driver blocks or awaits, depending on the kind of `with` block.
        return self._driver.run(self._rollout_flow(arguments), "HarborEnv.run_rollout")

    def capabilities(self) -> Coroutine[Any, Any, dict[str, Any]]:
        """Return agents, sandboxes, datasets and endpoint of the server."""
        return self._driver.run(self._capabilities_flow(), "HarborEnv.capabilities")

    def close(self) -> Coroutine[Any, Any, None]:
        """End the session and the connections."""
        # Two clients, both closed on every path.
        self._tasks.close()
        return super().close()

    def __exit__(self, *exc_info: object) -> None:
        self._tasks.close()
        super().__exit__(*exc_info)

    def _rollout_flow(self, arguments: dict[str, Any]) -> Flow[HarborRolloutResult]:
        answer = yield from self._call_flow("run_rollout", arguments, self._limit_s, None)
        return HarborRolloutResult.model_validate_json(_text_of(answer))

    def _capabilities_flow(self) -> Flow[dict[str, Any]]:
        answer = yield from self._call_flow("capabilities", {}, self._limit_s, None)
        document: dict[str, Any] = json.loads(_text_of(answer))
        return document

    def _parse_state(self, payload: dict[str, Any]) -> HarborState:
        return HarborState.model_validate(payload)


def _text_of(answer: Any) -> str:
    """Return the text of a tool's response in any of its forms."""
    # FastMCP, our server and older servers wrap the text differently.
    if isinstance(answer, str):
        return answer
    if isinstance(answer, Mapping):
        # The order matters: the first key has the most direct form.
        for key in ("data", "result", "structured_content", "structuredContent", "content", "text"):
            if answer.get(key) is not None:
                return _text_of(answer[key])
        return json.dumps(dict(answer))
    if isinstance(answer, list | tuple) and answer:
        return _text_of(answer[0])
    for key in ("data", "text", "content"):
        if getattr(answer, key, None) is not None:
            return _text_of(getattr(answer, key))
    raise TypeError(f"the response has no text: {answer!r}")
