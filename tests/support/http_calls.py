"""HTTP requests of tests: those of httpx2, with a minute for each part where that has five seconds.

Five seconds are little on a busy machine. A test of a timeout passes its own.
"""

from __future__ import annotations

import functools
from typing import Any

import httpx2

TIMEOUT = httpx2.Timeout(60.0)

get = functools.partial(httpx2.get, timeout=TIMEOUT)
post = functools.partial(httpx2.post, timeout=TIMEOUT)
delete = functools.partial(httpx2.delete, timeout=TIMEOUT)
request = functools.partial(httpx2.request, timeout=TIMEOUT)


class Client(httpx2.Client):
    """A client with time for a busy machine."""

    def __init__(self, *, timeout: Any = TIMEOUT, **options: Any) -> None:
        super().__init__(timeout=timeout, **options)


class AsyncClient(httpx2.AsyncClient):
    """The same for asyncio."""

    def __init__(self, *, timeout: Any = TIMEOUT, **options: Any) -> None:
        super().__init__(timeout=timeout, **options)


def open_session(http: httpx2.Client, **headers: str) -> str:
    """Begin an episode in a session of its own; return its id."""
    response = http.post("/reset", json={}, headers={"X-OpenEnv-Session": "new", **headers})
    assert response.status_code == 200, response.text
    return str(response.headers["x-openenv-session"])


def close_sessions(http: httpx2.Client, *names: str) -> None:
    """End sessions, which there have to be."""
    for name in names:
        assert http.delete(f"/sessions/{name}").status_code == 200
