"""Wrappers of the package `harbor` for agents that read their endpoint from a file or a variable.

All but `build_models_json` are made from that package's own classes when they are asked for, and raise an ImportError
that says what to install where it is missing.
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from typing import Any

from .seams import agent_facing_model
from .tasks import harbor_package_name

PROVIDER = "intercept"
_INSTALLED = "harbor.agents.installed"
_BASES = {
    "BaseEnvironment": ("harbor.environments.base", "BaseEnvironment"),
    "ClineCli": (f"{_INSTALLED}.cline.cline", "ClineCli"),
    "ExecInput": (f"{_INSTALLED}.cline.cline", "ExecInput"),
    "GeminiCli": (f"{_INSTALLED}.gemini_cli", "GeminiCli"),
    "KimiCli": (f"{_INSTALLED}.kimi_cli", "KimiCli"),
    "OpenClaw": (f"{_INSTALLED}.openclaw", "OpenClaw"),
    "OpenHands": (f"{_INSTALLED}.openhands", "OpenHands"),
    "Pi": (f"{_INSTALLED}.pi", "Pi"),
    "SweAgent": (f"{_INSTALLED}.swe_agent", "SweAgent"),
}
_WRAPPERS = {
    "InterceptCline": "ClineCli",
    "InterceptGeminiCli": "GeminiCli",
    "InterceptKimi": "KimiCli",
    "InterceptOpenClaw": "OpenClaw",
    "InterceptOpenHands": "OpenHands",
    "InterceptPi": "Pi",
    "InterceptSweAgent": "SweAgent",
}
_WRITE = 'mkdir -p "$HOME/.pi/agent" && printf %s {text} > "$HOME/.pi/agent/models.json"'


def build_models_json(base_url: str, api_key: str, model: str) -> str:
    """Return the file in which the agent pi finds a model behind a capture server."""
    provider = {
        "baseUrl": f"{base_url}/v1",
        "api": "openai-completions",
        "apiKey": api_key,
        "models": [{"id": model}],
    }
    return json.dumps({"providers": {PROVIDER: provider}}, indent=2)


@cache
def _wrapper(name: str) -> type[Any]:
    """Return a wrapper that takes `intercept_config`: the address, the key and the model of a capture session."""
    base: type[Any] = _base(_WRAPPERS[name])

    class Wrapper(base):  # type: ignore[misc]  # a class of a package that is not always there
        def __init__(self, *args: Any, intercept_config: dict[str, str] | None = None, **kwargs: Any) -> None:
            self._intercept_config = dict(intercept_config or {})
            if self._intercept_config:
                url, key = self._intercept_config["base_url"], self._intercept_config["api_key"]
                own = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
                kwargs["extra_env"] = {**(kwargs.get("extra_env") or {}), **own}
            super().__init__(*args, **kwargs)

        async def setup(self, environment: Any) -> None:
            await super().setup(environment)
            config = self._intercept_config
            if name == "InterceptPi" and config:  # which reads no variable
                text = build_models_json(config["base_url"], config["api_key"], agent_facing_model(config["model"]))
                await self.exec_as_agent(environment, command=_WRITE.format(text=shlex.quote(text)))

    Wrapper.__name__ = Wrapper.__qualname__ = name
    return Wrapper


def _base(name: str) -> Any:
    return harbor_package_name(*_BASES[name])


def __getattr__(name: str) -> Any:
    if name in _WRAPPERS:
        return _wrapper(name)
    if name in _BASES:
        return _base(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_BASES, *_WRAPPERS, "build_models_json"])
