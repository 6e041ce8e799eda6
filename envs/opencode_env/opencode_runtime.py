"""Where things lie in an OpenCode sandbox, and the texts that OpenCode is configured and started with.

Pure functions of a configuration; must not know sandboxes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opencode_env.config import OpenCodeConfig

PROVIDER = "intercepted"
"""What OpenCode calls the model's provider."""
PROXY_PORT = 7000
"""Where the proxy answers inside the sandbox."""
INSTALL_URL = "https://opencode.ai/install"

_QUIET = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
}
_CONTEXT_TOKENS = 128_000
_OUTPUT_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class SandboxPaths:
    """The files of one sandbox, all below its home."""

    home: str

    @property
    def workdir(self) -> str:
        """Where the agent works."""
        return f"{self.home}/workdir"

    @property
    def instruction(self) -> str:
        """The agent's instruction."""
        return f"{self.home}/task/instruction.md"

    @property
    def system_prompt(self) -> str:
        """The system prompt beside OpenCode's own."""
        return f"{self.home}/task/system.md"

    @property
    def config(self) -> str:
        """OpenCode's configuration."""
        return f"{self.home}/.config/opencode/opencode.json"

    @property
    def opencode(self) -> str:
        """Where OpenCode's installer puts it."""
        return f"{self.home}/.opencode/bin/opencode"

    @property
    def agent_log(self) -> str:
        """What the agent printed."""
        return f"{self.home}/logs/agent/opencode.jsonl"

    @property
    def proxy_log(self) -> str:
        """What the proxy printed."""
        return f"{self.home}/logs/agent/proxy.log"

    @property
    def proxy_trace(self) -> str:
        """What the proxy recorded."""
        return f"{self.home}/logs/agent/proxy_trace.jsonl"

    @property
    def proxy_source(self) -> str:
        """The proxy itself."""
        return f"{self.home}/proxy/interception.py"

    @property
    def reward(self) -> str:
        """Where a verifier leaves a reward."""
        return f"{self.home}/logs/verifier/reward.txt"


def proxy_dir(config: OpenCodeConfig) -> str:
    """Return the folder of the proxy inside the sandbox."""
    return proxy_source_path(config).rpartition("/")[0]


def proxy_source_path(config: OpenCodeConfig) -> str:
    """Return where the proxy lies inside the sandbox."""
    return SandboxPaths(config.sandbox_home).proxy_source


def proxy_trace_path(config: OpenCodeConfig) -> str:
    """Return where a proxy inside the sandbox records calls."""
    return SandboxPaths(config.sandbox_home).proxy_trace


def proxy_log_path(config: OpenCodeConfig) -> str:
    """Return where a proxy inside the sandbox logs."""
    return SandboxPaths(config.sandbox_home).proxy_log


def build_opencode_json(
    config: OpenCodeConfig, *, base_url: str | None = None, api_key: str | None = None, npm: str | None = None
) -> dict[str, Any]:
    """Return OpenCode's configuration.

    Args:
        config: The setup.
        base_url: Where OpenCode finds the model, if not where the setup says: the proxy's address.
        api_key: What it sends as a key, if not the setup's.
        npm: The package through which it speaks, if not the provider's.
    """
    alias = model_alias(config.model)
    made: dict[str, Any] = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"{PROVIDER}/{alias}",
        "small_model": f"{PROVIDER}/{alias}",
        "provider": {
            PROVIDER: {
                "npm": npm or config.provider_npm_package(),
                "name": PROVIDER,
                "options": {
                    "baseURL": base_url or config.base_url,
                    "apiKey": api_key if api_key is not None else config.api_key,
                    "timeout": config.request_timeout_ms,
                },
                "models": {
                    alias: {
                        "id": model_id(config.model),
                        "name": alias,
                        "tool_call": True,
                        "limit": {"context": _CONTEXT_TOKENS, "output": config.proxy_max_tokens_cap or _OUTPUT_TOKENS},
                    }
                },
            }
        },
        "tools": {
            **dict.fromkeys(config.disabled_tools, False),
            **dict.fromkeys(config.enabled_tools or (), True),
        },
        "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny", "external_directory": "allow"},
        "agent": {"title": {"disable": True}},
        "autoupdate": False,
        "share": "disabled",
    }
    if config.system_prompt is not None:
        made["instructions"] = [SandboxPaths(config.sandbox_home).system_prompt]
    return _merged(made, config.extra_opencode_json)


def model_id(model: str) -> str:
    """Return the id that the model's endpoint knows: all of it, but for our own provider's name."""
    return model.removeprefix(f"{PROVIDER}/")


def model_alias(model: str) -> str:
    """Return what OpenCode calls the model: its id without the vendor."""
    return model.partition("/")[2] or model


def build_run_command(config: OpenCodeConfig, executable: str) -> str:
    """Return the shell line that runs the agent; its exit code is the agent's, its output goes to the log."""
    paths = SandboxPaths(config.sandbox_home)
    run = f"{shlex.quote(executable)} run --format {config.run_format}"
    # The instruction comes as input: it may be long, and may begin with a dash. No pipe, which would have an exit code.
    inout = f"< {shlex.quote(paths.instruction)} > {shlex.quote(paths.agent_log)} 2>&1"
    return f"cd {shlex.quote(paths.workdir)} && exec {run} {inout}"


def build_envs(config: OpenCodeConfig, *, base_url: str, api_key: str) -> dict[str, str]:
    """Return the agent's variables."""
    return {
        **_QUIET,
        "HOME": config.sandbox_home,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "OPENCODE_CONFIG": SandboxPaths(config.sandbox_home).config,
        **config.extra_env,
    }


def build_install_command(config: OpenCodeConfig) -> str:
    """Return the shell line that installs OpenCode; it fails where the download or the installer does."""
    version = "" if config.opencode_version == "latest" else f"OPENCODE_VERSION={shlex.quote(config.opencode_version)} "
    # A pipe would hide a download that failed, and not every shell has pipefail.
    return (
        f"script=$(mktemp) && curl -fsSL {INSTALL_URL} -o $script && "
        f"HOME={shlex.quote(config.sandbox_home)} {version}bash $script; code=$?; rm -f $script; exit $code"
    )


def render(config: Mapping[str, Any]) -> str:
    """Return a configuration as text."""
    return json.dumps(config, indent=2) + "\n"


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(base)
    for key, value in over.items():
        below = made.get(key)
        made[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return made
