"""`ServerOptions`: everything that a server can be configured with, built once and passed down as one object.

Arguments of `create_app` win over settings, settings over defaults; `openenv serve` overrides all of them. A new option
is a field and a keyword here, a variable in `settings.py`, and an option of the command line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeVar

from typing_extensions import TypedDict

from openenv import settings
from openenv.protocol.server_v2 import DEFAULT_MAX_BATCH
from openenv.types import ConcurrencyConfig, ServerMode

from .access import AccessPolicy
from .runners import ProcessOptions, Runner
from .sessions.lifetime import SessionLimits
from .slow_clients import DEFAULT_MAX_UNREAD_BYTES

DEFAULT_MAX_MESSAGE_BYTES: Final = 100 * 1024 * 1024
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


class ServerArguments(TypedDict, total=False):
    """Keyword arguments of `create_app`, `HTTPEnvServer` and `reconfigure`; None keeps the current value.

    Args:
        runner: Runs environment code: `auto` (default), `thread`, `inline` or `process`.
        access: The tokens that clients must send.
        redact_errors: Hide the texts of an environment's exceptions from clients.
        max_message_bytes: The largest request (100 MB).
        max_batch: The most requests in one batch (10,000).
        max_unread_bytes: The memory of all clients for unread replies, and again for incomplete requests (1 GiB).
        session_grace_s: How long a session waits for a disconnected client (60 s; 0 ends it at once).
        close_timeout_s: How long an environment's `close` may take before its slot is freed (30 s).
        drain_timeout_s: How long sessions may continue after SIGTERM (0 s: only running calls end).
        max_agent_sessions: The most sessions that agents may open; the rest is for the orchestrator (all but one).
        env_processes: For the `process` runner, the number of processes (one per core).
        sessions_per_process: For the `process` runner, the most sessions in one process (unlimited).
        separate_sessions: Allow several sessions of a class that does not declare whether its instances share state.
        fast: Serve on the bare transport if possible (see `server/fast`).
        limits: All session limits in one object.
        record: The episodes to write to disk: `page` (of the web page's visitors; the default with a page), `all`,
            `off`.
        record_dir: The folder of recorded episodes.
        record_episodes: The most episodes to keep (1000).
        record_bytes: The most bytes to keep (256 MiB).
    """

    runner: Runner | str | None
    access: AccessPolicy | None
    redact_errors: bool | None
    max_message_bytes: int | None
    max_batch: int | None
    max_unread_bytes: int | None
    session_grace_s: float | None
    close_timeout_s: float | None
    drain_timeout_s: float | None
    max_agent_sessions: int | None
    env_processes: int | None
    sessions_per_process: int | None
    separate_sessions: bool | None
    fast: bool | None
    limits: SessionLimits | None
    record: str | None
    record_dir: Path | str | None
    record_episodes: int | None
    record_bytes: int | None


class ServerOverrides(ServerArguments, total=False):
    """More options of `reconfigure` and the command line: the session limit, and the lifetime of an unused session."""

    sessions: int | None
    session_timeout_s: float | None


def takes_server_arguments(function: _FunctionT) -> _FunctionT:
    """Show the options of `ServerArguments` to `help` and `inspect` as keyword-only parameters, not `**arguments`."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in ServerArguments.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def in_bytes(megabytes: float | None) -> int | None:
    """Convert megabytes to bytes; None stays None."""
    return None if megabytes is None else int(megabytes * 1024 * 1024)


_SETTINGS: Final[Mapping[str, Callable[[], object]]] = {
    "sessions": settings.max_sessions,
    "session_timeout_s": settings.session_timeout,
    "session_grace_s": settings.session_grace,
    "close_timeout_s": settings.close_timeout,
    "drain_timeout_s": settings.drain_timeout,
    "max_agent_sessions": settings.max_agent_sessions,
    "runner": settings.runner_name,
    "env_processes": settings.env_processes,
    "sessions_per_process": settings.sessions_per_process,
    "access": AccessPolicy.from_settings,
    "redact_errors": settings.redact_errors,
    "max_message_bytes": lambda: in_bytes(settings.max_message_mb()),
    "max_batch": settings.max_batch,
    "max_unread_bytes": lambda: in_bytes(settings.max_unread_mb()),
    "fast": settings.fast_enabled,
    "record": settings.record,
    "record_dir": settings.episodes,
    "record_episodes": settings.record_episodes,
    "record_bytes": lambda: in_bytes(settings.record_mb()),
}
RECORDED: Final = ("page", "all", "off")
DEFAULT_RECORD_EPISODES: Final = 1000
DEFAULT_RECORD_BYTES: Final = 256 * 1024 * 1024
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.-]+")
# Options that are a field of `SessionLimits` or `ProcessOptions`.
_LIMITS: Final = {
    "sessions": "sessions",
    "session_grace_s": "grace_s",
    "close_timeout_s": "close_s",
    "drain_timeout_s": "finish_s",
    "max_agent_sessions": "agents",
    "separate_sessions": "separate",
}
_PROCESSES: Final = {"env_processes": "processes", "sessions_per_process": "sessions_each"}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to serve one environment; `ServerArguments` explains the fields.

    Raises:
        ValueError: A value is invalid.
    """

    limits: SessionLimits = field(default_factory=SessionLimits)
    runner: Runner | str = "auto"
    processes: ProcessOptions = field(default_factory=ProcessOptions)
    access: AccessPolicy = field(default_factory=AccessPolicy)
    redact_errors: bool = False
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_batch: int = DEFAULT_MAX_BATCH
    max_unread_bytes: int = DEFAULT_MAX_UNREAD_BYTES
    fast: bool = True
    record: str | None = None
    record_dir: Path | str | None = None
    record_episodes: int = DEFAULT_RECORD_EPISODES
    record_bytes: int = DEFAULT_RECORD_BYTES

    def __post_init__(self) -> None:
        if self.record is not None and self.record not in RECORDED:
            raise ValueError(f"record must be one of {', '.join(RECORDED)}, not {self.record!r}")
        grace_s, agents = self.limits.grace_s, self.limits.agents
        if not (grace_s >= 0 and isfinite(grace_s)):
            raise ValueError(f"the grace period must be a number of seconds, not {grace_s!r}")
        if not (self.limits.close_s > 0 and isfinite(self.limits.close_s)):
            raise ValueError(f"the close timeout must be a number of seconds above 0, not {self.limits.close_s!r}")
        if not (self.limits.finish_s >= 0 and isfinite(self.limits.finish_s)):
            raise ValueError(f"the drain timeout must be a number of seconds, not {self.limits.finish_s!r}")
        if agents is not None and agents < 0:
            raise ValueError(f"max_agent_sessions must not be negative, not {agents}")
        for name in ("max_message_bytes", "max_batch", "max_unread_bytes", "record_episodes", "record_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")

    def recorded(self, mode: ServerMode) -> str:
        """Return the episodes that a server with a page records in a mode: `page`, `all` or `off`.

        Raises:
            ValueError: A recording is requested in production mode, which has no episodes.
        """
        if mode is ServerMode.PRODUCTION:
            if self.record not in (None, "off"):
                raise ValueError(f"record={self.record!r} and production mode exclude each other: it has no episodes")
            return "off"
        return self.record or "page"

    def episode_folder(self, env_name: str) -> Path:
        """Return the folder of an environment's episodes."""
        if self.record_dir is not None:
            return Path(self.record_dir).expanduser()
        return settings.episode_folder() / (_NOT_IN_NAMES.sub("-", env_name).strip(".-") or "environment")

    @classmethod
    def build(
        cls, arguments: ServerArguments, *, sessions: int | None = None, concurrency: ConcurrencyConfig | None = None
    ) -> ServerOptions:
        """Merge the arguments of an application with the settings.

        Args:
            arguments: The keyword arguments.
            sessions: Sessions held at once.
            concurrency: The same and a session timeout, as one object.

        Raises:
            TypeError: An argument is unknown.
            ValueError: Two arguments exclude each other, or a value is invalid.
        """
        overrides: dict[str, Any] = {**arguments, "sessions": sessions}
        limits = overrides.pop("limits", None)
        if sum(value is not None for value in (sessions, concurrency, limits)) > 1:
            raise ValueError("Give only one of max_concurrent_envs, concurrency_config and limits")
        # Read a setting only if no argument replaces it: an unused setting may be invalid.
        unset = {name for name in _SETTINGS if overrides.get(name) is None}
        if concurrency is not None:
            overrides["sessions"] = concurrency.max_concurrent_envs
            unset -= {"sessions"}
            if concurrency.session_timeout is not None:
                overrides["session_timeout_s"] = concurrency.session_timeout
                unset -= {"session_timeout_s"}
        if limits is not None:
            unset -= {*_LIMITS, "session_timeout_s"}
            overrides = {name: value for name, value in overrides.items() if name not in _LIMITS}
        overrides.update({name: _SETTINGS[name]() for name in unset})
        return cls(limits=limits or SessionLimits()).merged(overrides)

    def merged(self, overrides: Mapping[str, Any]) -> ServerOptions:
        """Return the options with some replaced; None leaves one as it is."""
        values = {name: value for name, value in overrides.items() if value is not None}
        limits = replace(self.limits, **{key: values.pop(name) for name, key in _LIMITS.items() if name in values})
        timeout_s = values.pop("session_timeout_s", None)
        if timeout_s is not None:
            limits = replace(limits, idle_s=timeout_s, soft_idle_s=min(timeout_s, limits.soft_idle_s))
        processes = {key: values.pop(name) for name, key in _PROCESSES.items() if name in values}
        return replace(self, **{"limits": limits, "processes": replace(self.processes, **processes), **values})
