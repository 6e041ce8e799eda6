"""Start-up and shutdown of a served environment, composed with whatever lifespan the application brings.

Knows Starlette's lifespan hook and the session manager's drain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from ..sessions.manager import SessionManager


def add_to_lifespan(app: FastAPI, manager: SessionManager, *, on_start: Callable[[], object]) -> None:
    """Let the application call back when it starts, and drain the manager when it shuts down."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[Any]:
        manager.resume()
        async with inner(application) as state:
            on_start()
            try:
                yield state
            finally:
                await manager.drain()

    app.router.lifespan_context = lifespan
