"""The bridge to Gradio: shows an environment's custom Gradio page as a tab of the page.

Only this module and `gradio_ui` import Gradio. The routes are for orchestrators; the custom page uses the environment
through a `WebInterfaceManager`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.routing import Mount

from openenv.errors import install_command

from ..app import HTTPEnvServer
from ..asgi import Handler, Message, Receive, Scope, Send
from .page_description import CUSTOM_PATH, action_fields, is_chat, load_environment_metadata, title_of
from .quickstart import get_quick_start_markdown
from .web_interface import WebInterfaceManager
from .web_page import WebPage, wrap_lifespan

try:
    gr: Any = importlib.import_module("gradio")
except ModuleNotFoundError as exc:
    raise ImportError(f"a gradio_builder needs Gradio: {install_command('gradio')}") from exc

logger = logging.getLogger(__name__)
_PATH = f"/web/{CUSTOM_PATH.rstrip('/')}"


def mount_gradio(app: FastAPI, page: WebPage, builder: Callable[..., Any]) -> WebInterfaceManager:
    """Build an environment's custom Gradio page and mount it.

    Args:
        app: The application, which has the page.
        page: The page.
        builder: Called with manager, action fields, metadata, `is_chat`, title and quick start.

    Raises:
        TypeError: The builder did not return `gradio.Blocks`.
    """
    service = page.service
    metadata = load_environment_metadata(service.factory, service.env_name)
    manager = WebInterfaceManager(
        service.factory,
        service.action_cls or dict,
        service.observation_cls or dict,
        metadata,
        served=(service, page.visitors, page.actions),
    )
    app.state.openenv_web_manager = manager
    title = title_of(metadata, page.arguments.title)
    quick_start = get_quick_start_markdown(metadata, service.action_cls or dict, service.observation_cls or dict)
    fields = action_fields(service.action_cls)
    blocks = builder(manager, fields, metadata, is_chat(service.action_cls), title, quick_start)
    if not isinstance(blocks, gr.Blocks):
        raise TypeError(f"gradio_builder has to return gradio.Blocks, not {type(blocks).__name__}")
    blocks.title = title
    known = {id(route) for route in app.router.routes}
    gr.mount_gradio_app(app, blocks, path=_PATH)
    added = [route for route in app.router.routes if id(route) not in known]
    server = app.state.openenv_server
    assert isinstance(server, HTTPEnvServer)
    mounts = [route for route in added if isinstance(route, Mount)]
    for mount in mounts:
        mount.app = streams = EndableStreams(mount.app)
        server.stream_enders.append(streams.end)
        wrap_lifespan(app, on_start=streams.begin)
    server.guard(mounts)
    wrap_lifespan(app, on_start=manager.begin)
    return manager


class EndableStreams:
    """An ASGI application with a way to end open responses, as if their clients had disconnected."""

    def __init__(self, app: Handler) -> None:
        self._app = app
        self._ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def receive_or_end() -> Message:
            coming = asyncio.ensure_future(receive())
            ending = asyncio.ensure_future(self._ended.wait())
            try:
                await asyncio.wait([coming, ending], return_when=asyncio.FIRST_COMPLETED)
                return await coming if coming.done() else {"type": "http.disconnect"}
            finally:
                coming.cancel()
                ending.cancel()

        await self._app(scope, receive_or_end, send)

    def begin(self) -> None:
        """Let responses stay open, now that the server runs."""
        self._ended = asyncio.Event()

    def end(self) -> None:
        """End the open responses."""
        self._ended.set()
