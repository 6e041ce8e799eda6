"""`opencode`: the OpenCode CLI, from npm.

It needs no network except the model: the provider is bundled, the model is declared, and nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from openenv.rollout.agents.base import Agent, AgentRun, Installation, Launch, start_with_instruction
from openenv.rollout.agents.install import NpmProgram, libc_suffix, needs_baseline_build
from openenv.sandboxes.base import Sandbox

VERSION = "1.18.33"
PROVIDER = "intercepted"
_PROGRAM = NpmProgram(
    name="opencode",
    package="opencode-{platform}@{version}",
    folder="opencode-{platform}",
    program="bin/opencode",
    command="opencode",
)
_DISABLED_TOOLS = ("webfetch", "question")
_QUIET = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    # The file watcher's events are for a user interface, and loading its native library takes a tenth of a second.
    "OPENCODE_EXPERIMENTAL_DISABLE_FILEWATCHER": "1",
}
_PLUGIN = "@opencode-ai/plugin"


class OpenCode(Agent):
    """Drive OpenCode.

    Options of a run: `disabled_tools`, `enabled_tools`, `system_prompt`, `extra_opencode_json`, `extra_env`,
    `run_format`, `request_timeout_ms`, `context_limit`, `output_limit`, `npm_package`.

    Args:
        version: The version to use; by default the version of `opencode` on the PATH, else a tested one.
        variant: The build: empty, `-musl`, `-baseline` (no AVX2) or `-baseline-musl`; by default the one for this
            machine.
    """

    name = "opencode"
    dialect = "openai_chat"

    def __init__(self, *, version: str | None = None, variant: str | None = None) -> None:
        self.version = version
        self.variant = variant

    def install(self, cache: Path, report: Callable[[str], None]) -> Installation:
        """Find OpenCode on the PATH or in the cache, or fetch it with npm."""
        if self.version is None and self.variant is None:
            path = _PROGRAM.on_path()
            if path is not None:
                return _PROGRAM.mount_file(path, "")
        variant = self.variant
        if variant is None:
            variant = ("-baseline" if needs_baseline_build() else "") + libc_suffix()
        return _PROGRAM.install(cache, self.version or VERSION, report, variant=variant)

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Write the configuration, and start one run with the instruction."""
        options = run.options
        config_path = f"{run.home}/.config/opencode/opencode.json"
        system_path = f"{run.home}/task/system.md" if options.get("system_prompt") else None
        sandbox.write_text(config_path, json.dumps(opencode_json(run, system_path=system_path), indent=2))
        if system_path is not None:
            sandbox.write_text(system_path, str(options["system_prompt"]))
        _skip_downloads(sandbox, run.home)
        command = [run.installation.executable, "run", "--format", str(options.get("run_format", "json"))]
        envs = {
            **_QUIET,
            **self._model_list(sandbox, run),
            "OPENCODE_CONFIG": config_path,
            "OPENAI_BASE_URL": run.base_url,
            "OPENAI_API_KEY": run.api_key,
            **_strings(options.get("extra_env")),
        }
        return start_with_instruction(sandbox, run, command, envs)

    def _model_list(self, sandbox: Sandbox, run: AgentRun) -> dict[str, str]:
        """Give OpenCode an empty list of models. Validating its built-in list of 4 MB takes a second and a half.

        The configuration declares the only model that it uses. If the options add other providers, keep the list.
        """
        extra = run.options.get("extra_opencode_json")
        if isinstance(extra, Mapping) and {"provider", "model", "small_model"} & extra.keys():
            return {}
        path = f"{run.home}/task/models.json"
        sandbox.write_text(path, "{}")
        return {"OPENCODE_MODELS_PATH": path}

    def failure(self, exit_code: int, log: str) -> str | None:
        """Report a nonzero exit code, or an error event: OpenCode exits with 0 after some errors."""
        if exit_code != 0:
            return f"opencode exited with code {exit_code}"
        last = next((line for line in reversed(log.splitlines()) if line.startswith("{")), "")
        try:
            event = json.loads(last)
        except (ValueError, RecursionError):
            return None
        if isinstance(event, dict) and event.get("type") == "error":
            return f"opencode reported an error: {json.dumps(event.get('error'))[:500]}"
        return None


def _skip_downloads(sandbox: Sandbox, home: str) -> None:
    """Mark OpenCode's plug-in interface as installed.

    Otherwise OpenCode loads npm's resolver to download it, which fails in a sandbox without a network.
    """
    lock = {"packages": {"": {"dependencies": {_PLUGIN: "*"}}}}
    sandbox.write_text(f"{home}/.config/opencode/package-lock.json", json.dumps(lock))
    sandbox.write_text(f"{home}/.config/opencode/node_modules/.keep", "")


def opencode_json(run: AgentRun, *, system_path: str | None = None) -> dict[str, Any]:
    """Return the content of `opencode.json` for a run."""
    options = run.options
    provider = {
        "npm": str(options.get("npm_package", "@ai-sdk/openai-compatible")),
        "name": "Intercepted",
        "options": {
            "baseURL": run.base_url,
            "apiKey": run.api_key,
            "timeout": options.get("request_timeout_ms", 600_000),
        },
        "models": {
            # The full ID with its vendor: OpenCode takes everything after the provider's name as the ID.
            run.model: {
                "name": run.model,
                "tool_call": True,
                "limit": {
                    "context": options.get("context_limit", 131_072),
                    "output": options.get("output_limit", 8192),
                },
            }
        },
    }
    model = f"{PROVIDER}/{run.model}"
    config: dict[str, Any] = {
        "$schema": "https://opencode.ai/config.json",
        "model": model,
        "small_model": model,
        "provider": {PROVIDER: provider},
        "agent": {"title": {"disable": True}},
        "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny", "external_directory": "allow"},
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,  # would copy the work tree at every step, for undo
        "tools": _tools(options),
    }
    if system_path is not None:
        config["instructions"] = [system_path]
    extra = options.get("extra_opencode_json")
    return merged(config, extra) if isinstance(extra, Mapping) else config


def _tools(options: Mapping[str, object]) -> dict[str, bool]:
    disabled, enabled = options.get("disabled_tools"), options.get("enabled_tools")
    off = disabled if isinstance(disabled, (list, tuple)) else _DISABLED_TOOLS
    on = enabled if isinstance(enabled, (list, tuple)) else ()
    return {**{str(tool): False for tool in off}, **{str(tool): True for tool in on}}


def merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which another one replaces or adds values, mapping by mapping."""
    result = dict(base)
    for key, value in extra.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _strings(value: object) -> dict[str, str]:
    return {str(key): str(entry) for key, entry in value.items()} if isinstance(value, Mapping) else {}
