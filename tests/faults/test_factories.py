"""How servers learn about an environment: from its class or its first real instance, never by building one to look."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from environments import Idle
from openenv.core.env_server.exceptions import ConcurrencyConfigurationError
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.types import Action, Observation
from openenv.server.sessions.lifetime import SessionLimits
from openenv.server.sessions.manager import SessionManager
from openenv.server.sessions.session import SessionKind, SessionState
from servers import Serve

BUILT: list[int] = []


class Plain(Idle):
    """Notes the thread of every call on itself."""

    SUPPORTS_CONCURRENT_SESSIONS = False

    def __init__(self, log: list[int] | None = None) -> None:
        super().__init__()
        self.log = BUILT if log is None else log
        self.log.append(threading.get_ident())

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.log.append(threading.get_ident())
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self.log.append(threading.get_ident())
        return Observation(reward=1.0)


class Concurrent(Plain):
    """Allows several sessions."""

    SUPPORTS_CONCURRENT_SESSIONS = True


class SingleThread(Concurrent):
    """Wants one thread for all sessions."""

    REQUIRES_SINGLE_THREAD_EXECUTOR = True


FORMS: dict[str, Callable[[type[Plain], list[int]], Callable[[], Any]]] = {
    "partial": lambda cls, log: functools.partial(cls, log),
    "lambda": lambda cls, log: lambda: cls(log),
    "annotated function": lambda cls, log: _annotated(cls, log),
}


def _annotated(cls: type[Plain], log: list[int]) -> Callable[[], Any]:
    def make() -> Any:
        return cls(log)

    make.__annotations__["return"] = cls
    return make


@pytest.mark.parametrize("form", FORMS)
def test_a_factory_is_not_called_before_the_first_session(serve: Serve, http: Any, peer: Any, form: str) -> None:
    """W24: neither building the application nor starting the server makes an environment."""
    log: list[int] = []
    server = serve(create_app(FORMS[form](Concurrent, log), Action, Observation, max_concurrent_envs=4))
    http(server.url).get("/health")
    http(server.url).get("/schema")
    http(server.url).get("/openapi.json")
    assert log == []
    peer(server.port).reset()
    assert len(log) == 2


@pytest.mark.parametrize("form", ["class", *FORMS])
def test_environments_that_want_one_thread_get_one_thread(serve: Serve, peer: Any, form: str) -> None:
    """W24: `REQUIRES_SINGLE_THREAD_EXECUTOR` counts for classes, partials and functions alike."""
    log: list[int] = BUILT if form == "class" else []
    log.clear()
    factory = SingleThread if form == "class" else FORMS[form](SingleThread, log)
    server = serve(create_app(factory, Action, Observation, max_concurrent_envs=16))
    peers = [peer(server.port) for _ in range(10)]
    for one in peers:
        one.send({"type": "reset"})
    for one in peers:
        assert one.receive()["type"] == "observation"
    for one in peers:
        one.step()
    assert len(log) == 30
    assert len(set(log)) == 1


def test_sessions_without_that_wish_are_spread(serve: Serve, peer: Any) -> None:
    """W24: the test above tells something."""
    log: list[int] = []
    server = serve(create_app(lambda: Concurrent(log), Action, Observation, max_concurrent_envs=16))
    peers = [peer(server.port) for _ in range(5)]
    for one in peers:
        one.reset()
    assert len(set(log)) > 1


@pytest.mark.parametrize("form", ["class", "partial", "annotated function"])
def test_a_known_class_that_shares_state_is_refused_at_once(form: str) -> None:
    """W24: where the class can be known without calling the factory, the mistake is reported when the app is built."""
    factory = Plain if form == "class" else FORMS[form](Plain, [])
    with pytest.raises(ConcurrencyConfigurationError):
        create_app(factory, Action, Observation, max_concurrent_envs=2)


def test_an_unknown_class_that_shares_state_gets_one_session(
    serve: Serve, peer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """W24: the first real environment of a bare function tells; from then on one session is the limit."""
    log: list[int] = []
    server = serve(create_app(lambda: Plain(log), Action, Observation, max_concurrent_envs=4))
    first = peer(server.port)
    first.reset()
    assert peer(server.port).receive()["data"]["code"] == "CAPACITY_REACHED"
    assert server.manager.max_sessions == 1
    assert len(log) == 2
    assert "SUPPORTS_CONCURRENT_SESSIONS" in caplog.text


def test_clients_that_come_at_once_to_an_unknown_class_wait_for_the_first(serve: Serve, peer: Any) -> None:
    """W24: while the first environment is being built the limit is unknown, so no client is let past it."""
    entered, gate, log = threading.Event(), threading.Event(), []

    def make() -> Any:
        entered.set()
        assert gate.wait(10)
        log.append(1)
        return Plain([])

    server = serve(create_app(make, Action, Observation, max_concurrent_envs=4))
    peers = [peer(server.port) for _ in range(4)]
    assert entered.wait(10)
    for one in peers:
        one.send({"type": "reset"})
    gate.set()
    answers = sorted(one.receive()["type"] for one in peers)
    assert answers == ["error", "error", "error", "observation"]
    assert log == [1]


def test_what_the_first_environment_tells_is_known_before_others_are_let_in() -> None:
    """W24: the class is learned while the session still counts as being created, so no client slips in between."""
    seen: list[tuple[SessionState, int]] = []

    async def scenario() -> None:
        manager = SessionManager(lambda: Plain([]), SessionLimits(sessions=4), runner="inline")
        manager.listeners.append(lambda event: seen.extend((s.state, manager.max_sessions) for s in manager.sessions()))
        await manager.open(SessionKind.SOCKET)
        await manager.drain()

    asyncio.run(scenario())
    assert seen[:2] == [(SessionState.CREATING, 4), (SessionState.CREATING, 1)]


MAIN_ENV = """
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Shout(Action):
    word: str


class Echo(Observation):
    word: str = ""


class ShoutEnv(Environment[Shout, Echo, State]):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Echo:
        return Echo()

    def step(self, action: Shout, timeout_s: float | None = None, **kwargs: Any) -> Echo:
        return Echo(word=action.word.upper())

    @property
    def state(self) -> State:
        return State()
"""

RUN_AS_MAIN = (
    MAIN_ENV
    + """
if __name__ == "__main__":
    import socket
    import threading
    import time
    import uvicorn
    from openenv.core import GenericEnvClient
    from openenv.core.env_server.http_server import create_app

    assert Shout.__module__ == "__main__"
    app = create_app(ShoutEnv, Shout, Echo, env_name="shout")
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with GenericEnvClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}") as env:
        env.reset()
        print(env.step({"word": "hey"}).observation["word"])
    server.should_exit = True
    thread.join()
"""
)


@pytest.mark.parametrize("web", ["false", "true"])
def test_a_class_in_a_plain_file_is_served(serve_process: Any, peer: Any, http: Any, web: str) -> None:
    """W25: `openenv serve file.py` works for a file that is no package, also with the web page asked for."""
    server = serve_process(MAIN_ENV, env={"ENABLE_WEB_INTERFACE": web})
    one = peer(server.port)
    one.reset()
    assert one.step(word="hey")["data"]["observation"]["word"] == "HEY"
    assert "word" in http(server.url).get("/schema").json()["action"]["properties"]
    assert server.stop() in (0, 130)
    assert "Traceback" not in server.log


def test_an_action_class_in_main_works_with_the_web_page_on(run_script: Any) -> None:
    """W25: an application whose models live in `__main__` starts and steps."""
    assert run_script(RUN_AS_MAIN, env={"ENABLE_WEB_INTERFACE": "true"}).strip() == "HEY"
