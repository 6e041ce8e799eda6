"""Environments of the page's tests, and a browser's part of it: a cookie, requests, and the live socket."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import Field
from websockets.sync.client import ClientConnection, connect

from openenv.env.environment import Environment
from openenv.server.app import create_app
from openenv.types import Action, Observation, State
from servers import Serve


class Walk(Action):
    """Go somewhere."""

    direction: Literal["left", "right"]
    paces: int = Field(default=1, ge=1, le=5)


class View(Observation):
    """Where one stands."""

    place: int = 0
    text: str = ""


class Road(State):
    """Where one stands, as the owner knows it."""

    place: int = 0


class Street(Environment[Walk, View, Road]):
    """A street of houses; three to the right is the end. `render_web` draws it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._road = Road()
        self.threads: set[int] = set()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, start: int = 0, greeting: str = "hello"
    ) -> View:
        self._road = Road(episode_id=episode_id or "street", place=start)
        return View(place=start, text=greeting)

    def step(self, action: Walk, timeout_s: float | None = None, **kwargs: Any) -> View:
        self._road.step_count += 1
        self._road.place += action.paces if action.direction == "right" else -action.paces
        if self._road.place < -2:
            raise ValueError("there is no road there, says secret-map")
        return View(place=self._road.place, text="walked", reward=float(self._road.place), done=self._road.place >= 3)

    @property
    def state(self) -> Road:
        return self._road

    def render_web(self, observation: dict[str, Any]) -> str | None:
        if observation["place"] == 2:
            raise RuntimeError("the painter is ill")
        return f"<b style='color:red'>{observation['place']} {observation['reward']} {observation['done']}</b>"

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return [("To the right", {"direction": "right"})]


class AsyncStreet(Street):
    """The same, on the event loop; it notes where its hooks run."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> View:
        return self.reset(seed, episode_id)

    async def step_async(self, action: Walk, timeout_s: float | None = None, **kwargs: Any) -> View:
        return self.step(action)

    def render_web(self, observation: dict[str, Any]) -> str | None:
        return threading.current_thread().name


class Slow(Street):
    """Waits in each step until the test lets it go on."""

    gate = threading.Event()

    def step(self, action: Walk, timeout_s: float | None = None, **kwargs: Any) -> View:
        self.gate.wait(30)
        return super().step(action)


def street_app(env: Any = Street, **kwargs: Any) -> FastAPI:
    """Build an application with the page."""
    from openenv.server.web.web_page import add_page

    kwargs.setdefault("max_concurrent_envs", 8)
    app = create_app(env, Walk, View, **kwargs)
    add_page(app)
    return app


class Browser:
    """A visitor: keeps cookies, and opens sockets with them."""

    def __init__(self, url: str, *, cookie: bool = True, token: str | None = None) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.url = url
        self.client = httpx2.Client(base_url=url, headers=headers, trust_env=False, timeout=30)
        if cookie:
            self.client.get("/web/")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def get(self, path: str, **kwargs: Any) -> httpx2.Response:
        return self.client.get(path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx2.Response:
        return self.client.post(path, json={} if body is None else body, **kwargs)

    def step(self, direction: str = "right", **fields: Any) -> httpx2.Response:
        return self.post("/web/step", {"action": {"direction": direction, **fields}})

    @property
    def cookies(self) -> str:
        return "; ".join(f"{name}={value}" for name, value in self.client.cookies.items())

    @contextlib.contextmanager
    def live(self, *, page: bool = True, **kwargs: Any) -> Iterator[Live]:
        """Open the live socket."""
        protocols: Any = ["openenv.ui.v1"] if page else None
        headers = {"Cookie": self.cookies} if self.client.cookies else {}
        address = f"ws{self.url.removeprefix('http')}/ws/ui"
        with connect(
            address, proxy=None, subprotocols=protocols, additional_headers=headers, max_size=None, **kwargs
        ) as socket:
            yield Live(socket)


class Live:
    """The frames of a socket."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def next(self) -> dict[str, Any]:
        """Return the next frame."""
        frame: dict[str, Any] = json.loads(self.socket.recv(timeout=30))
        return frame

    def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the next frame of a kind."""
        while True:
            frame = self.next()
            if frame["type"] == kind and all(frame.get(name) == value for name, value in fields.items()):
                return frame


@pytest.fixture
def visit() -> Iterator[Callable[..., Browser]]:
    """Open browsers; all are closed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda url, **kwargs: stack.enter_context(Browser(url, **kwargs))


@pytest.fixture(scope="module")
def street(serve_once: Serve) -> Any:
    """A server that the tests of a module share."""
    return serve_once(street_app(max_concurrent_envs=64))


@pytest.fixture(scope="session")
def make_app() -> Callable[..., FastAPI]:
    """Builds applications with the page."""
    return street_app


@pytest.fixture(scope="session")
def envs() -> dict[str, type[Any]]:
    """The environments, by name."""
    return {"Street": Street, "AsyncStreet": AsyncStreet, "Slow": Slow, "Walk": Walk, "View": View}
