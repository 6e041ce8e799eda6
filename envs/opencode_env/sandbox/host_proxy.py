"""The proxy on the host: for sandboxes that can reach a socket of their host and nothing else.

A thin handle on `openenv.rollout.capture`: the sandbox gets an address and a key that is worth nothing elsewhere; the
real key and the records stay outside.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from pydantic import SecretStr

from opencode_env.config import OpenCodeConfig
from opencode_env.opencode_runtime import model_id
from openenv.rollout.capture import Call, CaptureOptions, CaptureServer, export
from openenv.rollout.capture.training_trace import TrainingTrace
from openenv.rollout.tasks.task import Model
from openenv.sandboxes.base import Sandbox
from openenv.sandboxes.host import scratch


class HostProxy:
    """A capture proxy for one sandbox.

    Args:
        sandbox: Who may reach it.
        config: Whose model it stands before.
        port: Where it answers inside.

    Raises:
        SandboxUnsupported: The sandbox cannot reach its host.
    """

    def __init__(self, sandbox: Sandbox, config: OpenCodeConfig, *, port: int) -> None:
        with ExitStack() as stack:
            folder = stack.enter_context(scratch())  # removed by the next one, should this process be killed
            server = stack.enter_context(CaptureServer(folder / "captures", CaptureOptions(sockets=folder)))
            self._capture = stack.enter_context(server.open(None, model_of(config)))
            self.base_url = sandbox.expose(server.socket, port=port).rstrip("/") + "/v1"
            self.api_key = self._capture.key
            self._stack = stack.pop_all()

    def trace(self) -> list[dict[str, Any]]:
        """Return what it recorded."""
        return [_record(call) for call in self._capture.calls()]

    def training_trace(self) -> TrainingTrace:
        """Return the agent's calls for a trainer; raises ValueError where they are not to be trained on."""
        return export.training_trace(self._capture.recording())

    def close(self) -> None:
        """Make the key worthless, and remove the records."""
        self._stack.close()


def model_of(config: OpenCodeConfig) -> Model:
    """Return the model that a configuration names."""
    return Model(
        base_url=config.base_url,
        name=model_id(config.model),
        api_key=SecretStr(config.api_key),
        dialect="anthropic" if config.provider == "anthropic" else "openai_chat",
        top_logprobs=config.proxy_top_logprobs,
        max_tokens_cap=config.proxy_max_tokens_cap,
        disable_thinking=config.proxy_disable_thinking,
        request_timeout_s=config.request_timeout_ms / 1000,
        sampling=config.proxy_sampling,
    )


def _record(call: Call) -> dict[str, Any]:
    """Return a call in the shape of the trace."""
    sampled = call.completion.sampled
    response: dict[str, Any] = dict(call.response or {"choices": [], "usage": None})
    if call.error is not None:
        response |= {"upstream_status": call.status, "upstream_error": call.error}
    reasons = {"not_trainable": list(call.not_trainable)} if call.not_trainable else {}
    return {
        **reasons,
        "turn": call.number,
        "request": call.sent,
        "response": response,
        "logprobs": _entries(response),
        "completion_tokens": list(sampled.texts),
        "completion_token_ids": list(sampled.ids) if sampled.has_ids else [],
        "per_token_logps": [] if None in sampled.logprobs else list(sampled.logprobs),
        "prompt_token_ids": None if call.completion.prompt_ids is None else list(call.completion.prompt_ids),
        "finish_reason": call.completion.finish_reason,
        "latency_s": call.latency_s,
        "timestamp": call.started_at,
        "upstream_status": call.status,
        "upstream_error": call.error,
    }


def _entries(response: dict[str, Any]) -> list[Any]:
    choices = response.get("choices") or [{}]
    entries = (choices[0].get("logprobs") or {}).get("content") if isinstance(choices[0], dict) else None
    return entries if isinstance(entries, list) else []
