"""`WebInterfaceManager`: what custom pages use, on a server and on its own, from threads and from coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from pydantic import ValidationError
from websockets.sync.client import connect

from openenv.core.env_server.web_interface import (
    ActionLog,
    EpisodeState,
    WebInterfaceManager,
    create_web_interface_app,
)
from openenv.errors import SessionLost
from servers import Serve


@pytest.fixture
def managed(serve: Serve, make_app: Callable[..., Any]) -> tuple[Any, WebInterfaceManager]:
    """A server, and a manager of its own page."""
    app = make_app()
    page = app.state.openenv_web
    service = page.service
    manager = WebInterfaceManager(
        service.factory,
        service.action_cls,
        service.observation_cls,
        served=(service, page.visitors, page.actions),
    )
    return serve(app), manager


def on_loop_of(server: Any, work: Callable[[], Any]) -> Any:
    """Do something on the server's own loop."""
    loops = [server.app.state.openenv_web.visitors._loop]
    return asyncio.run_coroutine_threadsafe(work(), loops[0]).result(30)


def test_it_plays_the_shared_episode_and_knows_what_others_do_in_it(
    managed: tuple[Any, WebInterfaceManager], visit: Callable[..., Any]
) -> None:
    server, manager = managed
    program = visit(server.url, cookie=False)
    program.get("/web/sessions")  # now the page knows its loop

    async def play() -> None:
        manager.begin()
        began = await manager.reset_environment({"episode_id": "shared", "start": 1})
        assert began["observation"]["place"] == 1
        went = await manager.step_environment({"direction": "right"})
        assert (went["reward"], went["done"]) == (2.0, False)
        with pytest.raises(ValidationError):
            await manager.step_environment({"direction": "up"})

    with connect(f"ws://127.0.0.1:{server.port}/ws/ui", proxy=None) as looking:
        looking.recv(timeout=30)
        on_loop_of(server, play)
        assert '"episode_id":"shared"' in str(looking.recv(timeout=30))
    assert program.get("/web/state").json()["place"] == 2
    state = manager.episode_state
    assert isinstance(state, EpisodeState)
    assert (state.episode_id, state.step_count, state.is_reset) == ("shared", 1, False)
    assert isinstance(state.action_logs[0], ActionLog)
    assert state.action_logs[0].action == {"direction": "right", "paces": 1}
    program.step()
    server.wait_for(lambda: manager.episode_state.step_count == 2)
    assert manager.get_state() == {"episode_id": "shared", "step_count": 2, "place": 3}


def test_the_environment_itself_is_used_from_threads_and_from_the_loop(
    managed: tuple[Any, WebInterfaceManager], visit: Callable[..., Any], envs: dict[str, Any]
) -> None:
    server, manager = managed
    visit(server.url, cookie=False).get("/web/sessions")
    walk = envs["Walk"](direction="right")

    async def use() -> Any:
        manager.begin()
        assert manager.env.threads == set()  # no session yet: it is opened
        await manager._run_sync_in_thread_pool(manager.env.reset, start=1)
        seen = await manager._run_sync_in_thread_pool(manager.env.step, walk)
        assert manager.env.state.place == 2
        return seen.place

    assert on_loop_of(server, use) == 2
    results: list[Any] = []

    def play() -> None:
        results.extend([manager.env.step(walk).place, manager.get_state()["place"]])

    thread = threading.Thread(target=play)
    thread.start()
    thread.join(30)
    assert results == [3, 3]
    assert server.manager.active == 1


def test_an_environment_that_is_lost_is_not_replaced_by_a_step(
    managed: tuple[Any, WebInterfaceManager], visit: Callable[..., Any], envs: dict[str, Any]
) -> None:
    server, manager = managed
    program = visit(server.url, cookie=False)
    program.post("/web/reset")
    [session] = server.manager.sessions()
    session.close("ended by a test")
    server.wait_for(lambda: server.manager.active == 0)

    async def play() -> None:
        with pytest.raises(SessionLost, match="ended by a test"):
            await manager.step_environment({"direction": "right"})

    on_loop_of(server, play)
    server.wait_for(lambda: manager.visitor.lost is not None)
    with pytest.raises(SessionLost):
        manager.env.step(envs["Walk"](direction="right"))
    manager.env.reset()
    assert program.step().json()["observation"]["place"] == 1


@pytest.mark.parametrize("as_instance", [True, False])
def test_it_works_on_its_own_with_an_instance_or_a_class(envs: dict[str, Any], as_instance: bool) -> None:
    street = envs["Street"]
    env = street() if as_instance else street
    manager = WebInterfaceManager(env, envs["Walk"], envs["View"])
    assert manager.metadata.name == "Street"
    assert (manager.env is env) is as_instance
    assert WebInterfaceManager.MAX_ACTION_LOGS == 1000

    async def play() -> None:
        await manager.reset_environment()
        for _ in range(2):
            await manager.step_environment({"direction": "right"})
        assert manager.episode_state.step_count == 2
        assert len(manager.episode_state.action_logs) == 2
        assert (await asyncio.to_thread(manager.get_state))["place"] == 2
        if as_instance:
            assert env.state.place == 2
        manager.visitor.end()

    asyncio.run(play())


def test_sockets_of_a_custom_page_see_each_change(serve: Serve, envs: dict[str, Any]) -> None:
    manager = WebInterfaceManager(envs["Street"], envs["Walk"], envs["View"])
    app = FastAPI()

    @app.websocket("/mine")
    async def mine(websocket: WebSocket) -> None:
        await manager.connect_websocket(websocket)
        await manager.reset_environment({"episode_id": "seen"})
        manager.episode_state.step_count = 7
        await manager._send_state_update()
        await websocket.receive_text()
        await manager.disconnect_websocket(websocket)
        await websocket.close()

    app.add_api_websocket_route("/other", mine)
    server = serve(app)
    with connect(f"ws://127.0.0.1:{server.port}/mine", proxy=None) as socket:
        assert '"is_reset":true' in str(socket.recv(timeout=30))
        frame = ""
        while '"step_count":7' not in frame:
            frame = str(socket.recv(timeout=30))
        assert '"episode_id":"seen"' in frame
        assert len(manager.connected_clients) == 1
        socket.send("bye")
        server.wait_for(lambda: manager.connected_clients == [])


def test_the_factory_of_the_contract_makes_an_application_with_the_page(
    serve: Serve, visit: Callable[..., Any], envs: dict[str, Any]
) -> None:
    app = create_web_interface_app(
        envs["Street"], envs["Walk"], envs["View"], env_name="street_env", title_override="My street"
    )
    page = visit(serve(app).url).get("/web/page").json()
    assert (page["title"], page["name"]) == ("My street", "street_env")
