"""Environment variables: the one place that reads `os.environ` (documented in docs/reference/settings.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

_N = TypeVar("_N", int, float)
_TRUE = frozenset({"true", "1", "yes"})
_FALSE = frozenset({"false", "0", "no"})


def _environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ


def web_interface_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether `ENABLE_WEB_INTERFACE` asks for the web page."""
    return _environ(environ).get("ENABLE_WEB_INTERFACE", "").strip().lower() in _TRUE


def web_interface_setting(environ: Mapping[str, str] | None = None) -> bool | None:
    """Return what `ENABLE_WEB_INTERFACE` says of the web page, or None when it is not set."""
    return web_interface_enabled(environ) if _environ(environ).get("ENABLE_WEB_INTERFACE", "").strip() else None


def readme_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return `ENV_README_PATH`, the README that the web page shows, or None when it is not set."""
    path = _environ(environ).get("ENV_README_PATH", "").strip()
    return Path(path) if path else None


def space_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `SPACE_ID`, the name of the Hugging Face Space that this runs in, or None elsewhere."""
    return _environ(environ).get("SPACE_ID", "").strip() or None


def space_host(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `SPACE_HOST`, the host name of that Space, or None elsewhere."""
    return _environ(environ).get("SPACE_HOST", "").strip() or None


def server_mode(environ: Mapping[str, str] | None = None) -> str:
    """Return `OPENENV_MODE`, by default `simulation`."""
    return _environ(environ).get("OPENENV_MODE", "").strip() or "simulation"


def client_mode(environ: Mapping[str, str] | None = None) -> str:
    """Return `OPENENV_CLIENT_MODE`, by default `simulation`."""
    return _environ(environ).get("OPENENV_CLIENT_MODE", "").strip() or "simulation"


def runner_name(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `OPENENV_RUNNER` (`auto`, `thread`, `inline` or `process`), or None when it is not set."""
    return _environ(environ).get("OPENENV_RUNNER", "").strip().lower() or None


def env_processes(environ: Mapping[str, str] | None = None) -> int | None:
    """Return `OPENENV_ENV_PROCESSES`, over how many processes sessions are spread, or None when it is not set."""
    return _number("OPENENV_ENV_PROCESSES", int, environ)


def sessions_per_process(environ: Mapping[str, str] | None = None) -> int | None:
    """Return `OPENENV_SESSIONS_PER_PROCESS`, how many sessions a process may hold, or None when it is not set."""
    return _number("OPENENV_SESSIONS_PER_PROCESS", int, environ)


def max_sessions(environ: Mapping[str, str] | None = None) -> int | None:
    """Return `OPENENV_MAX_SESSIONS` as a number, or None when it is not set."""
    return _number("OPENENV_MAX_SESSIONS", int, environ)


def session_timeout(environ: Mapping[str, str] | None = None) -> float | None:
    """Return `OPENENV_SESSION_TIMEOUT` in seconds, or None when it is not set."""
    return _number("OPENENV_SESSION_TIMEOUT", float, environ)


def session_grace(environ: Mapping[str, str] | None = None) -> float | None:
    """Return `OPENENV_SESSION_GRACE`, how many seconds a session is kept without a connection, or None."""
    return _number("OPENENV_SESSION_GRACE", float, environ)


def max_agent_sessions(environ: Mapping[str, str] | None = None) -> int | None:
    """Return `OPENENV_MAX_AGENT_SESSIONS`, how many sessions agents may open at once, or None."""
    return _number("OPENENV_MAX_AGENT_SESSIONS", int, environ)


def allowed_origins(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the origins in `OPENENV_ALLOWED_ORIGINS`, which is separated by commas."""
    origins = _environ(environ).get("OPENENV_ALLOWED_ORIGINS", "").split(",")
    return frozenset(origin.strip() for origin in origins if origin.strip())


def orchestrator_tokens(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tokens in `OPENENV_TOKEN`, which may do everything."""
    return _tokens("OPENENV_TOKEN", environ)


def agent_tokens(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tokens in `OPENENV_AGENT_TOKEN`, which may call tools."""
    return _tokens("OPENENV_AGENT_TOKEN", environ)


def observer_tokens(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tokens in `OPENENV_OBSERVER_TOKEN`, which may look."""
    return _tokens("OPENENV_OBSERVER_TOKEN", environ)


def client_token(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the token that clients send: `OPENENV_TOKEN`, the first where there are several."""
    return next(iter(_tokens("OPENENV_TOKEN", environ)), None)


def capture_admin_key(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `OPENENV_CAPTURE_ADMIN_KEY`, which opens the control routes of the capture proxy, or None."""
    return _environ(environ).get("OPENENV_CAPTURE_ADMIN_KEY", "").strip() or None


def redact_errors(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether `OPENENV_REDACT_ERRORS` keeps the texts of exceptions from clients."""
    return _environ(environ).get("OPENENV_REDACT_ERRORS", "").strip().lower() in _TRUE


def log_format(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `OPENENV_LOG_FORMAT` (`text` or `json`), or None when it is not set."""
    return _environ(environ).get("OPENENV_LOG_FORMAT", "").strip().lower() or None


def max_message_mb(environ: Mapping[str, str] | None = None) -> float | None:
    """Return `OPENENV_MAX_MESSAGE_MB`, the largest request that a server reads, or None when it is not set."""
    return _number("OPENENV_MAX_MESSAGE_MB", float, environ)


def fast_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether servers use `openenv.server.fast`; `OPENENV_FAST=0` leaves everything to uvicorn."""
    return _environ(environ).get("OPENENV_FAST", "").strip().lower() not in _FALSE


def _tokens(name: str, environ: Mapping[str, str] | None) -> tuple[str, ...]:
    text = _environ(environ).get(name, "").strip()
    tokens = tuple(token.strip() for token in text.split(",") if token.strip())
    if text and not tokens:  # never mistake this for "no token is asked for"
        raise ValueError(f"{name} is set, but there is no token in it")
    return tokens


def _number(name: str, kind: Callable[[str], _N], environ: Mapping[str, str] | None) -> _N | None:
    text = _environ(environ).get(name, "").strip()
    if not text:
        return None
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {text!r}") from None


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what is fetched once: `OPENENV_CACHE`, or `openenv` in the user's cache folder."""
    values = _environ(environ)
    path = values.get("OPENENV_CACHE", "").strip()
    return Path(path).expanduser() if path else _user_folder(values, "XDG_CACHE_HOME", ".cache") / "openenv"


def rollout_store(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of stored rollouts: `OPENENV_ROLLOUTS`, or `openenv/rollouts` in the user's data folder."""
    values = _environ(environ)
    path = values.get("OPENENV_ROLLOUTS", "").strip()
    if path:
        return Path(path).expanduser()
    return _user_folder(values, "XDG_DATA_HOME", ".local/share") / "openenv/rollouts"


def model_key(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `OPENENV_MODEL_KEY`: the key of the model endpoint that rollouts are run with."""
    return _environ(environ).get("OPENENV_MODEL_KEY", "").strip() or None


def _user_folder(values: Mapping[str, str], name: str, default: str) -> Path:
    path = values.get(name, "").strip()
    return Path(path) if path.startswith("/") else Path(values.get("HOME") or Path.home()) / default


def export(values: Mapping[str, object | None]) -> None:
    """Set variables for child processes; None leaves a variable as it is."""
    for name, value in values.items():
        if value is not None:
            os.environ[name] = str(value)


def sandbox_name(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `OPENENV_SANDBOX`, the backend for rollouts that name none, or None when it is not set."""
    return _environ(environ).get("OPENENV_SANDBOX", "").strip() or None


def sandbox_image(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `OPENENV_SANDBOX_IMAGE`, the image of container sandboxes, or None when it is not set."""
    return _environ(environ).get("OPENENV_SANDBOX_IMAGE", "").strip() or None


def e2b_api_key(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `E2B_API_KEY`, or None when it is not set."""
    return _environ(environ).get("E2B_API_KEY", "").strip() or None


def child_environment(
    extra: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what a child process gets: this process's variables, and more."""
    return {**_environ(environ), **(extra or {})}


def secret(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the variable that a configuration names as the place of a key.

    Raises:
        ValueError: It is not set.
    """
    value = _environ(environ).get(name, "").strip()
    if not value:
        raise ValueError(f"{name} is not set")
    return value
