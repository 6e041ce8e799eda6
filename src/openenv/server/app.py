"""Application factories: an environment class in, a FastAPI application out.

Knows how an application is put together; routes and sessions are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from ..env.environment import Environment
from ..settings import server_mode, web_interface_enabled
from ..types import ConcurrencyConfig, ServerMode, State
from .access import AccessPolicy
from .compat import HTTPEnvServer, parse_mode

_TITLE = "OpenEnv Environment HTTP API"
_API_VERSION = "1.0.0"
_DESCRIPTION = (
    "Serves one environment. Over WebSocket connect to `/ws`; over HTTP call `/reset` with `X-OpenEnv-Session: new` "
    "and send the name that comes back with each `/step` and `/state`."
)
_HOT = {path: rank for rank, path in enumerate(("/step", "/ws", "/reset", "/state", "/mcp", "/health"))}
_TAGS = [
    {"name": "Environment Control", "description": "Begin episodes and take actions"},
    {"name": "State Management", "description": "Look at the state of an episode"},
    {"name": "Environment Info", "description": "What is served here"},
    {"name": "Schema", "description": "JSON schemas of the models"},
    {"name": "Health", "description": "Whether the server is alive"},
    {"name": "Task API", "description": "The environment's catalogue of tasks"},
]


@dataclass(frozen=True, slots=True)
class PageWish:
    """What an application says about its web page.

    Args:
        gradio_builder: Builds a Gradio page of the environment's own.
        tab_name: Label of that page's tab.
        tab_is_primary: Whether that tab comes first.
        shows_default: Whether the standard page is there as well.
        title: Title of the page, in place of the environment's name.
    """

    gradio_builder: Callable[..., Any] | None = None
    tab_name: str = "Custom"
    tab_is_primary: bool = False
    shows_default: bool = True
    title: str | None = None


def create_app(
    env: Callable[[], Environment[Any, Any, Any]],
    action_cls: type[Any],
    observation_cls: type[Any],
    env_name: str | None = None,
    max_concurrent_envs: int | None = None,
    concurrency_config: ConcurrencyConfig | None = None,
    gradio_builder: Callable[..., Any] | None = None,
    custom_tab_name: str = "Custom",
    custom_tab_primary: bool = False,
    show_default_tab: bool = True,
    title_override: str | None = None,
    state_cls: type[Any] = State,
    *,
    mode: ServerMode | str | None = None,
    reset_observation_cls: type[Any] | None = None,
    runner: str | None = None,
    access: AccessPolicy | None = None,
    redact_errors: bool | None = None,
    max_message_bytes: int | None = None,
    session_grace_s: float | None = None,
    max_agent_sessions: int | None = None,
    env_processes: int | None = None,
    sessions_per_process: int | None = None,
) -> FastAPI:
    """Build the application of an environment.

    With `ENABLE_WEB_INTERFACE` (`true`, `1` or `yes`) it has a web page at `/web`; under `openenv serve` it always has.

    Args:
        env: The environment class, or a function without arguments that returns an environment.
        action_cls: The action model.
        observation_cls: The observation model.
        env_name: Name in the Task API and on the page.
        max_concurrent_envs: Sessions held at once; by default 1.
        concurrency_config: The same and a session timeout, as one object.
        gradio_builder: Builds a Gradio page of the environment's own, shown as a tab of the web page; needs the extra
            `openenv[gradio]`.
        custom_tab_name: Label of that page's tab.
        custom_tab_primary: Whether that tab comes first.
        show_default_tab: Whether the standard page is there as well.
        title_override: Title of the page.
        state_cls: The state model; by default what the environment declares.
        mode: `simulation` (default, or `OPENENV_MODE`) or `production`.
        reset_observation_cls: Model of the first observation where it differs.
        runner: Where environment code runs: `auto` (default), `thread`, `inline`, `process`.
        access: The tokens that are asked for; by default those in `OPENENV_TOKEN` and its kin, and none without.
        redact_errors: Whether the texts of the environment's exceptions are kept from clients.
        max_message_bytes: The largest request that is read; by default 100 MB.
        session_grace_s: How long a session is kept for a client whose connection broke; by default 60 s, 0 for not at
            all.
        max_agent_sessions: Sessions held at once that agents have opened, so that some are left for the orchestrator;
            by default any number.
        env_processes: With the `process` runner: over how many processes sessions are spread; by default as many as
            there are cores.
        sessions_per_process: With the `process` runner: how many sessions one process may hold; by default any number.
    """
    app = create_fastapi_app(
        env,
        action_cls,
        observation_cls,
        max_concurrent_envs,
        concurrency_config,
        env_name,
        state_cls,
        mode=mode,
        reset_observation_cls=reset_observation_cls,
        runner=runner,
        access=access,
        redact_errors=redact_errors,
        max_message_bytes=max_message_bytes,
        session_grace_s=session_grace_s,
        max_agent_sessions=max_agent_sessions,
        env_processes=env_processes,
        sessions_per_process=sessions_per_process,
    )
    wish = PageWish(gradio_builder, custom_tab_name, custom_tab_primary, show_default_tab, title_override)
    app.state.openenv_page_wish = wish  # for `openenv serve`, which has a page in any case
    if web_interface_enabled():
        from ..web.attach import add_page  # servers without the page do not load it

        add_page(app, wish)
    return app


def create_fastapi_app(
    env: Callable[[], Environment[Any, Any, Any]],
    action_cls: type[Any],
    observation_cls: type[Any],
    max_concurrent_envs: int | None = None,
    concurrency_config: ConcurrencyConfig | None = None,
    env_name: str | None = None,
    state_cls: type[Any] = State,
    *,
    mode: ServerMode | str | None = None,
    reset_observation_cls: type[Any] | None = None,
    runner: str | None = None,
    access: AccessPolicy | None = None,
    redact_errors: bool | None = None,
    max_message_bytes: int | None = None,
    session_grace_s: float | None = None,
    max_agent_sessions: int | None = None,
    env_processes: int | None = None,
    sessions_per_process: int | None = None,
) -> FastAPI:
    """Build the application of an environment without a web page; arguments as for `create_app`."""
    server = HTTPEnvServer(
        env,
        action_cls,
        observation_cls,
        max_concurrent_envs,
        concurrency_config,
        env_name,
        state_cls,
        reset_observation_cls=reset_observation_cls,
        runner=runner,
        access=access,
        redact_errors=redact_errors,
        max_message_bytes=max_message_bytes,
        session_grace_s=session_grace_s,
        max_agent_sessions=max_agent_sessions,
        env_processes=env_processes,
        sessions_per_process=sessions_per_process,
    )
    app = new_application()
    app.state.openenv_server = server
    server.register_routes(app, parse_mode(server_mode() if mode is None else mode))
    # Routes are tried in order: the ones that are called all the time come first.
    app.router.routes.sort(key=lambda route: _HOT.get(getattr(route, "path", ""), len(_HOT)))
    return app


def new_application() -> FastAPI:
    """Return an empty application with the title, version and tags of an environment's API."""
    return FastAPI(title=_TITLE, version=_API_VERSION, description=_DESCRIPTION, openapi_tags=_TAGS)
