"""Environment variables: the one place that reads `os.environ`.

Knows names and accepted values. Must not know who uses them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

_N = TypeVar("_N", int, float)
_TRUE = frozenset({"true", "1", "yes"})


def _environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ


def web_interface_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether `ENABLE_WEB_INTERFACE` asks for the web page."""
    return _environ(environ).get("ENABLE_WEB_INTERFACE", "").strip().lower() in _TRUE


def server_mode(environ: Mapping[str, str] | None = None) -> str:
    """Return `OPENENV_MODE`, by default `simulation`."""
    return _environ(environ).get("OPENENV_MODE", "").strip() or "simulation"


def client_mode(environ: Mapping[str, str] | None = None) -> str:
    """Return `OPENENV_CLIENT_MODE`, by default `simulation`."""
    return _environ(environ).get("OPENENV_CLIENT_MODE", "").strip() or "simulation"


def runner_name(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `OPENENV_RUNNER` (`auto`, `thread` or `inline`), or None when it is not set."""
    return _environ(environ).get("OPENENV_RUNNER", "").strip().lower() or None


def max_sessions(environ: Mapping[str, str] | None = None) -> int | None:
    """Return `OPENENV_MAX_SESSIONS` as a number, or None when it is not set."""
    return _number("OPENENV_MAX_SESSIONS", int, environ)


def session_timeout(environ: Mapping[str, str] | None = None) -> float | None:
    """Return `OPENENV_SESSION_TIMEOUT` in seconds, or None when it is not set."""
    return _number("OPENENV_SESSION_TIMEOUT", float, environ)


def allowed_origins(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the origins in `OPENENV_ALLOWED_ORIGINS`, which is separated by commas."""
    given = _environ(environ).get("OPENENV_ALLOWED_ORIGINS", "").split(",")
    return frozenset(origin.strip() for origin in given if origin.strip())


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


def redact_errors(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether `OPENENV_REDACT_ERRORS` keeps the texts of exceptions from clients."""
    return _environ(environ).get("OPENENV_REDACT_ERRORS", "").strip().lower() in _TRUE


def log_format(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `OPENENV_LOG_FORMAT` (`text` or `json`), or None when it is not set."""
    return _environ(environ).get("OPENENV_LOG_FORMAT", "").strip().lower() or None


def max_message_mb(environ: Mapping[str, str] | None = None) -> float | None:
    """Return `OPENENV_MAX_MESSAGE_MB`, the largest request that a server reads, or None when it is not set."""
    return _number("OPENENV_MAX_MESSAGE_MB", float, environ)


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


def serve_target(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `OPENENV_SERVE_TARGET`: what a reloading or worker process of `openenv serve` has to load."""
    return _environ(environ).get("OPENENV_SERVE_TARGET") or None


def export(values: Mapping[str, object | None]) -> None:
    """Set variables for child processes; None leaves a variable as it is."""
    for name, value in values.items():
        if value is not None:
            os.environ[name] = str(value)
