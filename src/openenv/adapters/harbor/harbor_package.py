"""Names for the third-party package `harbor`: trials of its agents behind a capture session. Nothing else needs it.

    build_trial_config(...)    a `TrialConfig` for Harbor's own trial runner
    InterceptPi, ...           Harbor's agents, changed to call a capture session instead of their provider
    overlay(...)               variables of this process while one of these agents reads them

The package is imported on first use. If it is not installed, the error says how to install it.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from openenv import settings

from . import seams
from .options import takes_fields

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


def harbor_package_name(module: str, name: str) -> Any:
    """Import a name from the third-party package `harbor`.

    Raises:
        ImportError: The package is not installed; the message says how to install it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as exc:
        raise ImportError(
            f"{module}.{name} needs the package `harbor` and Python 3.12 or newer: pip install harbor. "
            "Task folders run without it."
        ) from exc


# -- trials ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HarborTrial:
    """Options of `build_trial_config`, as in `HarborRun`."""

    task_dir: Path | str
    harness: str
    sandbox: str
    intercept_url: str
    session_id: str
    model: str
    trial_name: str
    trials_dir: Path | str
    keep_sandbox: bool = False
    agent_timeout_sec: float | None = None
    agent_step_limit: int | None = None
    force_build: bool = False
    training: bool = False
    """Add the wrapper's settings for training."""
    harness_profile: str | None = None
    """Always refused: agents here have no profiles."""


def trial_config(trial: HarborTrial) -> Any:
    """Return a `TrialConfig` of the package `harbor`, to run its own trials behind a capture session.

    Raises:
        ImportError: The package `harbor` is not installed.
        ValueError: The agent is unknown.
    """

    def config_class(name: str) -> Any:
        return harbor_package_name("harbor.models.trial.config", name)

    make = config_class("TrialConfig")  # first, so that a missing package is reported before anything else
    seam = seams.get(trial.harness, profile=trial.harness_profile)
    model_name, arguments, agent_env, _ = seam.resolve(
        base_url=trial.intercept_url,
        session=trial.session_id,
        model=trial.model,
        step_limit=trial.agent_step_limit,
        training=trial.training,
    )
    agent = config_class("AgentConfig")(
        name=None if seam.import_path else trial.harness,
        import_path=seam.import_path,
        model_name=model_name,
        kwargs=arguments,
        env=agent_env,
        override_timeout_sec=trial.agent_timeout_sec,
    )
    environment = config_class("EnvironmentConfig")(
        type=trial.sandbox, delete=not trial.keep_sandbox, force_build=trial.force_build
    )
    return make(
        task=config_class("TaskConfig")(path=Path(str(trial.task_dir))),
        agent=agent,
        environment=environment,
        verifier=config_class("VerifierConfig")(),
        trial_name=trial.trial_name,
        trials_dir=Path(str(trial.trials_dir)),
    )


build_trial_config = takes_fields(HarborTrial, trial_config, name="build_trial_config")


def enable_shared_templates(name: str = "") -> bool:
    """Return True: images are named after their content, so tasks with equal environments always share one.

    Args:
        name: Unused. Published callers pass a common name for E2B templates.
    """
    return True


# -- variables of this process -----------------------------------------------------------------------------------------


def enabled() -> bool:
    """Return False: overlays change the environment of the whole process, so only one can be active."""
    return False


def install() -> bool:
    """Return False: `os.environ` is never replaced by an object that differs between tasks."""
    return False


def overlay(values: Mapping[str, str]) -> AbstractContextManager[None]:
    """Set variables for a block and restore them afterwards. A second overlay waits for the first."""
    return settings.exported(values)


# -- agents ------------------------------------------------------------------------------------------------------------


def build_models_json(base_url: str, api_key: str, model: str) -> str:
    """Return the `models.json` that points the agent pi to a capture server."""
    provider = {
        "baseUrl": f"{base_url}/v1",
        "api": "openai-completions",
        "apiKey": api_key,
        "models": [{"id": model}],
    }
    return json.dumps({"providers": {PROVIDER: provider}}, indent=2)


@cache  # one class per name, so that `isinstance` works
def _wrapper(name: str) -> type[Any]:
    """Return a wrapper that takes `intercept_config`: the URL, the key and the model of a capture session."""
    base: type[Any] = _base(_WRAPPERS[name])

    class Wrapper(base):  # type: ignore[misc]  # a class of an optional package
        def __init__(self, *args: Any, intercept_config: dict[str, str] | None = None, **kwargs: Any) -> None:
            self._intercept_config = dict(intercept_config or {})
            if self._intercept_config:
                url, key = self._intercept_config["base_url"], self._intercept_config["api_key"]
                session = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
                kwargs["extra_env"] = {**(kwargs.get("extra_env") or {}), **session}
            super().__init__(*args, **kwargs)

        async def setup(self, environment: Any) -> None:
            await super().setup(environment)
            config = self._intercept_config
            if name == "InterceptPi" and config:  # pi reads no variables, only this file
                model = seams.agent_facing_model(config["model"])
                text = build_models_json(config["base_url"], config["api_key"], model)
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


INSTALL_FIXES = sorted([*_BASES, *_WRAPPERS, "PROVIDER", "build_models_json"])
"""The names that the published module `openenv.harbor.install_fixes` exports."""
