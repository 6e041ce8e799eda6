"""A model class for mini-swe-agent that sends its calls to the rollout's endpoint without litellm.

Runs inside the sandbox, in the agent's process, and imports nothing of this project. Importing litellm takes 90 % of
the processor time of a short rollout, and an agent behind the capture proxy needs only one POST request of it.
Functions of mini-swe-agent build messages, tool and observations, so the model's view does not change.
"""

from __future__ import annotations

import collections
import http.client
import json
import logging
import os
import time
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import urlsplit

from minisweagent.exceptions import FormatError  # type: ignore[import-not-found]
from minisweagent.models import GLOBAL_MODEL_STATS  # type: ignore[import-not-found]
from minisweagent.models.utils.actions_toolcall import (  # type: ignore[import-not-found]
    BASH_TOOL,
    format_toolcall_observation_messages,
    parse_toolcall_actions,
)
from minisweagent.models.utils.cache_control import set_cache_control  # type: ignore[import-not-found]
from minisweagent.models.utils.openai_multimodal import expand_multimodal_content  # type: ignore[import-not-found]
from minisweagent.models.utils.retry import retry  # type: ignore[import-not-found]
from pydantic import BaseModel, ConfigDict

logger = logging.getLogger("endpoint_model")

_TIMEOUT_S = 600.0
_FINAL = frozenset({400, 401, 403, 404, 405, 413, 422})
"""Statuses that a repeated request would get again."""
_KEPT = ("content", "role", "tool_calls", "reasoning_content")
"""The fields of a reply that the next request repeats."""
_OF_LITELLM = frozenset(
    {
        "additional_drop_params", "allowed_openai_params", "api_base", "api_key", "api_type", "api_version", "base_url",
        "cache", "client", "custom_llm_provider", "fallbacks", "max_retries", "mock_response", "num_retries",
        "organization", "stream",
    }
)  # fmt: skip


class EndpointRefusal(Exception):
    """The endpoint refuses a request; repeating it is pointless."""


class EndpointFailure(Exception):
    """The endpoint gave no usable reply; repeat the request."""


class EndpointModelConfig(BaseModel):
    """The `model` section of a configuration; its names and defaults are mini-swe-agent's."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_name: str
    model_kwargs: dict[str, Any] = {}
    set_cache_control: Literal["default_end"] | None = None
    cost_tracking: Literal["ignore_errors"] = "ignore_errors"  # this class has no prices
    format_error_template: str = "{{ error }}"
    observation_template: str = (
        "{% if output.exception_info %}<exception>{{output.exception_info}}</exception>\n{% endif %}"
        "<returncode>{{output.returncode}}</returncode>\n<output>\n{{output.output}}</output>"
    )
    multimodal_regex: str = ""


class EndpointModel:
    """A model behind `OPENAI_API_BASE`, spoken to in chat completions with one tool, `bash`."""

    abort_exceptions = (EndpointRefusal, KeyboardInterrupt)

    def __init__(self, **config: Any) -> None:
        self.config = EndpointModelConfig(**config)
        parameters = dict(self.config.model_kwargs)
        parameters.pop("drop_params", None)  # for litellm: drop parameters that the endpoint does not support
        if foreign := sorted(_OF_LITELLM & parameters.keys()):
            raise ValueError(
                f"model_kwargs has {', '.join(foreign)}, which is litellm's: pass the option model_class='litellm'"
            )
        self._timeout_s = float(parameters.pop("timeout", _TIMEOUT_S))
        self._headers = {**parameters.pop("extra_headers", {}), "Content-Type": "application/json"}
        self._headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        self._parameters = {**parameters.pop("extra_body", {}), **parameters}
        self._model = self.config.model_name.removeprefix("openai/")  # litellm's names start with the API
        self._skipped = _taken_observations()
        self._observations: list[dict[str, Any]] | None = None
        self._url = urlsplit(os.environ["OPENAI_API_BASE"].rstrip("/") + "/chat/completions")

    def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
        """Request the next message, and return it with its commands."""
        sent = [{key: value for key, value in message.items() if key != "extra"} for message in messages]
        sent = set_cache_control(sent, mode=self.config.set_cache_control)
        for attempt in retry(logger=logger, abort_exceptions=list(self.abort_exceptions)):
            with attempt:
                response = self._post(sent, kwargs)
        GLOBAL_MODEL_STATS.add(0.0)
        self._observations = self._skipped.popleft() if self._skipped else None
        choice = response["choices"][0]
        about = {"response": response, "cost": 0.0, "timestamp": time.time()}
        try:
            actions = parse_toolcall_actions(
                [_tool_call(call) for call in choice["message"].get("tool_calls") or ()],
                format_error_template=self.config.format_error_template,
                template_kwargs={"finish_reason": choice.get("finish_reason")},
            )
        except FormatError as error:
            error.messages[0]["extra"].update(about)
            raise
        if self._observations is not None:  # the files are those after the commands
            actions = []
        message = {key: choice["message"][key] for key in _KEPT if choice["message"].get(key) is not None}
        return {"content": None, "role": "assistant", **message, "extra": {"actions": actions, **about}}

    def format_message(self, **message: Any) -> dict[str, Any]:
        """Return a message, with pictures if the configuration has a pattern for them."""
        formatted: dict[str, Any] = expand_multimodal_content(message, pattern=self.config.multimodal_regex)
        return formatted

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Return messages with the output of the commands in `message`."""
        if self._observations is not None:
            return self._observations
        observations: list[dict[str, Any]] = format_toolcall_observation_messages(
            actions=message.get("extra", {}).get("actions", []),
            outputs=outputs,
            observation_template=self.config.observation_template,
            template_vars=template_vars,
            multimodal_regex=self.config.multimodal_regex,
        )
        return observations

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Return the variables of prompt templates."""
        return self.config.model_dump()

    def serialize(self) -> dict[str, Any]:
        """Return the description of the model for a trajectory."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        return {"info": {"config": {"model": self.config.model_dump(mode="json"), "model_type": kind}}}

    def _post(self, messages: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        """Send one request.

        Raises:
            EndpointRefusal: repeating the request is pointless.
            EndpointFailure: any other failure.
        """
        body = {"messages": messages, "model": self._model, "tools": [BASH_TOOL], **self._parameters, **more}
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.netloc, timeout=self._timeout_s)
        try:
            connection.request("POST", self._url.path, json.dumps(body).encode(), self._headers)
            reply = connection.getresponse()
            status, content = reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise EndpointFailure(f"no reply: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        text = content.decode("utf-8", "replace")
        if status != 200:
            raise (EndpointRefusal if status in _FINAL else EndpointFailure)(f"status {status}: {text[:2000]}")
        try:
            response = json.loads(text)
            response["choices"][0]["message"].get("tool_calls")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EndpointFailure(f"not a chat completion: {text[:2000]}") from error
        return dict(response)


def _taken_observations() -> collections.deque[list[dict[str, Any]]]:
    """Return the recorded results of the first answers, in a branch that starts with the files after them.

    The agent's commands find neither the file nor the variable.
    """
    path = os.environ.pop("OPENENV_OBSERVATIONS", None)
    if path is None:
        return collections.deque()
    with open(path, "rb") as file:
        observations = collections.deque(json.load(file))
    os.unlink(path)
    return observations


def _tool_call(call: dict[str, Any]) -> SimpleNamespace:
    """Return a tool call with attributes, as mini-swe-agent reads it."""
    function = call.get("function") or {}
    named = SimpleNamespace(name=function.get("name"), arguments=function.get("arguments"))
    return SimpleNamespace(id=call.get("id"), function=named)
