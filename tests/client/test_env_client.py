"""`EnvClient` and its blocking twin: dual use, lost episodes, time-outs, concurrency, children, helpers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from openenv import EnvClient, GenericAction, GenericEnvClient, SyncEnvClient
from openenv.client.driver import run_async_safely
from openenv.errors import (
    ClientModeError,
    ConnectFailed,
    ProtocolError,
    RequestTimeout,
    RequestValidationError,
    SessionCapacityError,
    SessionLost,
)
from openenv.types import Action, StepResult
from servers import Serve


class ParrotClient(EnvClient[Any, str, int]):
    """A typed client with helpers, as environments bring them."""

    def _step_payload(self, action: Any) -> dict[str, Any]:
        return {"message": action}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[str]:
        return StepResult(payload["observation"]["text"], payload.get("reward"), payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> int:
        count: int = payload["step_count"]
        return count

    async def twice(self, message: str) -> list[str]:
        return [(await self.step(message)).observation for _ in range(2)]

    def plain(self) -> str:
        return "plain"

    @property
    def label(self) -> str:
        return "a label"


def test_outside_a_loop_the_client_blocks(parrot: Any) -> None:
    with ParrotClient(parrot.url) as client:
        assert client.reset(seed=3).observation == "seed 3"
        assert client.step("hi").observation == "hi"
        assert client.state() == 1
    parrot.wait_for(lambda: parrot.manager.active == 0)


@pytest.mark.anyio
async def test_inside_a_loop_the_client_is_awaited(parrot: Any) -> None:
    async with ParrotClient(parrot.url) as client:
        assert (await client.reset(seed=3)).observation == "seed 3"
        assert (await client.step("hi")).observation == "hi"
        assert await client.state() == 1
        assert await client.twice("x") == ["x", "x"]


def test_an_awaited_client_works_on_uvloop(parrot: Any) -> None:
    async def episode() -> str:
        async with ParrotClient(parrot.url) as client:
            await client.reset()
            return (await client.step("hi")).observation

    assert uvloop.run(episode()) == "hi"


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", ["v1", "v2"])
async def test_private_names_of_the_published_client_work(parrot: Any, protocol: Any) -> None:
    client = ParrotClient(parrot.url, protocol=protocol)
    assert client._ws is None
    client._connect_timeout = 3.0
    assert (client._connect_timeout, client._driver.options.connect_timeout_s) == (3.0, 3.0)
    async with client:
        assert client._ws is not None
        began = await client._send_and_receive({"type": "reset", "data": {"seed": 3}})
        assert (began["type"], began["data"]["observation"]["text"]) == ("observation", "seed 3")
        stepped = await client._send_and_receive({"type": "step", "data": {"message": "hi"}})
        assert (stepped["type"], stepped["data"]["observation"]["text"]) == ("observation", "hi")
        state = await client._send_and_receive({"type": "state"})
        assert (state["type"], state["data"]["step_count"]) == ("state", 1)
        with pytest.raises(RequestValidationError):
            await client._send_and_receive({"type": "step", "data": {"message": 7}})
    assert client._ws is None


@pytest.mark.anyio
async def test_the_blocking_twin_works_inside_a_running_loop(parrot: Any) -> None:
    with ParrotClient(parrot.url).sync() as client:
        client.reset()
        assert client.step("hi").observation == "hi"
        assert client.twice("x") == ["x", "x"]


def test_the_blocking_twin_has_everything_the_client_has(parrot: Any) -> None:
    client = ParrotClient(parrot.url)
    with client.sync() as sync:
        assert sync.async_client is client
        assert (sync.plain(), sync.label, sync.base_url) == ("plain", "a label", parrot.url)
        sync.reset()
        assert sync.twice("x") == ["x", "x"]
        with pytest.raises(AttributeError):
            _ = sync.nonsense
        assert sync.new_session().__class__ is SyncEnvClient


def test_async_helpers_of_a_blocking_client_can_be_awaited_through_the_twin_only(parrot: Any) -> None:
    with ParrotClient(parrot.url) as client:
        client.reset()
        assert client.sync().twice("y") == ["y", "y"]


def test_a_client_in_blocking_use_cannot_be_awaited(parrot: Any) -> None:
    client = ParrotClient(parrot.url)
    client.reset()

    async def use() -> None:
        await client.step("hi")

    with pytest.raises(ClientModeError, match="blocking use"):
        asyncio.run(use())
    client.close()


@pytest.mark.anyio
async def test_a_client_in_asynchronous_use_cannot_block(parrot: Any) -> None:
    async with ParrotClient(parrot.url) as client:
        await client.reset()
        with pytest.raises(ClientModeError, match="asynchronous use"):
            client.sync()
        with pytest.raises(ClientModeError), client:
            pass


def test_a_client_whose_loop_has_ended_says_that_the_episode_is_lost(parrot: Any) -> None:
    client = ParrotClient(parrot.url, protocol="v1")  # a session of v2 is resumed on the next loop

    async def reset() -> str:
        return (await client.reset()).observation

    async def step() -> None:
        await client.step("hi")

    assert asyncio.run(reset()) == "seed None"
    with pytest.raises(SessionLost, match="loop"):
        asyncio.run(step())
    assert asyncio.run(reset()) == "seed None"


def test_a_client_needs_an_address_or_a_provider() -> None:
    with pytest.raises(ValueError, match="base_url"):
        GenericEnvClient()


def test_an_unknown_mode_is_refused_and_a_known_one_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"invalid.*simulation.*production.*OPENENV_CLIENT_MODE"):
        GenericEnvClient("http://x", mode="dream")
    monkeypatch.setenv("OPENENV_CLIENT_MODE", "Production")
    client = GenericEnvClient("http://x")
    assert client._mode == "production"
    with pytest.raises(AttributeError):
        client._mode = "simulation"


def test_a_server_that_is_not_there_is_a_failed_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConnectFailed, match="Failed to connect"):
            GenericEnvClient(url).sync().reset()
        with pytest.raises(ConnectionError):
            run_async_safely(_awaited_reset(GenericEnvClient(url)))


async def _awaited_reset(client: Any) -> Any:
    return await client.reset()


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])
def test_a_server_that_never_answers_the_handshake_is_given_up(blocking: bool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = GenericEnvClient(f"http://127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.2)
        with pytest.raises(ConnectFailed):
            client.sync().connect() if blocking else asyncio.run(_awaited_reset(client))


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])
def test_an_http_server_without_the_route_is_a_failed_connection_that_says_so(parrot: Any, blocking: bool) -> None:
    client = GenericEnvClient(f"{parrot.url}/nowhere")
    with pytest.raises(ConnectFailed, match="WebSocket handshake"):
        client.sync().connect() if blocking else asyncio.run(_awaited_reset(client))


def test_a_request_that_times_out_loses_the_episode_until_reset(
    parrot: Any, gate: threading.Event, in_a_hurry: Callable[..., Any]
) -> None:
    client = GenericEnvClient(parrot.url).sync()
    client.reset()
    with pytest.raises(RequestTimeout), in_a_hurry(client, 0.2):
        client.step({"message": "wait"})
    for use in (lambda: client.step({"message": "a"}), client.state):
        with pytest.raises(SessionLost, match="timed out"):
            use()
    gate.set()
    assert client.reset().observation["text"] == "seed None"
    client.close()


@pytest.mark.anyio
async def test_an_awaited_request_that_times_out_or_is_cancelled_loses_the_episode(
    parrot: Any, gate: threading.Event, entered: threading.Event, in_a_hurry: Callable[..., Any]
) -> None:
    client = GenericEnvClient(parrot.url)
    await client.reset()
    with pytest.raises(RequestTimeout), in_a_hurry(client, 0.2):
        await client.step({"message": "wait"})
    with pytest.raises(SessionLost, match="timed out"):
        await client.step({"message": "a"})
    gate.set()
    await client.reset()
    await asyncio.to_thread(parrot.wait_for, lambda: parrot.manager.active == 1)  # nothing waits any more
    gate.clear()
    entered.clear()
    step = asyncio.ensure_future(client.step({"message": "wait"}))
    assert await asyncio.to_thread(entered.wait, 30)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    gate.set()
    with pytest.raises(SessionLost):
        await client.step({"message": "a"})
    assert (await client.reset()).observation["text"] == "seed None"
    await client.close()


@pytest.mark.parametrize("protocol", ["v1", "v2"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])
def test_a_server_that_goes_away_loses_the_episode(
    serve: Serve, parrot_app: Callable[..., Any], blocking: bool, protocol: Any
) -> None:
    server = serve(parrot_app())
    options = {"protocol": protocol, "reconnect_timeout_s": 0.3}

    def stop() -> None:
        server.server.should_exit = True
        server.wait_for(lambda: not server.server.started or not server.server.servers[0].is_serving())
        server.wait_for(lambda: server.manager.active == 0)

    if blocking:
        with GenericEnvClient(server.url, **options).sync() as client:
            client.reset()
            stop()
            with pytest.raises(SessionLost):
                client.step({"message": "a"})
        return

    async def use() -> None:
        async with GenericEnvClient(server.url, **options) as client:
            await client.reset()
            await asyncio.to_thread(stop)
            with pytest.raises(SessionLost):
                await client.step({"message": "a"})

    asyncio.run(use())


def test_a_closed_client_says_so_and_reset_opens_a_new_session(parrot: Any) -> None:
    client = GenericEnvClient(parrot.url).sync()
    client.reset()
    client.disconnect()
    with pytest.raises(SessionLost, match="closed by the client"):
        client.step({"message": "a"})
    assert client.reset().observation["text"] == "seed None"
    client.close()
    client.close()


def test_closing_a_client_that_was_never_used_is_harmless(parrot: Any) -> None:
    GenericEnvClient(parrot.url).close()
    GenericEnvClient(parrot.url).sync().close()


def test_calls_of_several_threads_take_turns(parrot: Any) -> None:
    with GenericEnvClient(parrot.url).sync() as client:
        client.reset()
        answers: list[tuple[str, str]] = []

        def use(name: str) -> None:
            for i in range(20):
                text = f"{name}{i}"
                answers.append((text, client.step({"message": text}).observation["text"]))

        threads = [threading.Thread(target=use, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 60
        assert all(sent == echoed for sent, echoed in answers)


@pytest.mark.anyio
async def test_concurrent_awaited_calls_take_turns(parrot: Any) -> None:
    async with GenericEnvClient(parrot.url) as client:
        await client.reset()
        results = await asyncio.gather(*(client.step({"message": str(i)}) for i in range(30)))
        assert [result.observation["text"] for result in results] == [str(i) for i in range(30)]


def test_children_have_sessions_of_their_own_and_end_with_their_parent(parrot: Any) -> None:
    with GenericEnvClient(parrot.url, message_timeout_s=7).sync() as client:
        client.reset()
        children = [client.new_session() for _ in range(3)]
        for child in children:
            child.reset()
        assert parrot.manager.active == 4
        assert children[0].async_client._options.message_timeout_s == 7
    parrot.wait_for(lambda: parrot.manager.active == 0)


@pytest.mark.parametrize("connect_first", [True, False])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])
def test_a_full_server_is_always_a_capacity_error_on_reset(
    serve: Serve, parrot_app: Callable[..., Any], connect_first: bool, blocking: bool
) -> None:
    server = serve(parrot_app(sessions=1))
    holder = GenericEnvClient(server.url).sync()
    holder.reset()

    async def refused() -> None:
        client = GenericEnvClient(server.url)
        if connect_first:
            await client.connect()
        await client.reset()

    for _ in range(10):
        client = GenericEnvClient(server.url)
        with pytest.raises(SessionCapacityError) as caught:
            if blocking:
                client.sync().connect().reset() if connect_first else client.sync().reset()
            else:
                asyncio.run(refused())
        assert (caught.value.active_sessions, caught.value.max_sessions) == (1, 1)
    assert holder.step({"message": "still here"}).observation["text"] == "still here"
    holder.close()


def test_a_reply_over_the_limit_loses_the_episode_and_says_why(parrot: Any) -> None:
    with GenericEnvClient(parrot.url, max_message_size_mb=0.01).sync() as client:
        client.reset()
        with pytest.raises(SessionLost, match="over the limit"):
            client.step({"message": "x" * 100_000})


def test_a_peer_that_speaks_another_protocol_is_a_protocol_error(serve: Serve) -> None:
    async def chatty(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        await send({"type": "websocket.send", "text": "hello there"})
        await receive()

    server = serve(chatty, lifespan="off")
    with pytest.raises(ProtocolError, match="not JSON"):
        GenericEnvClient(server.url).sync().reset()


def test_headers_reach_the_server(serve: Serve) -> None:
    headers: dict[bytes, bytes] = {}

    async def nosy(scope: Any, receive: Any, send: Any) -> None:
        headers.update(scope["headers"])
        await receive()
        await send({"type": "websocket.close"})

    server = serve(nosy, lifespan="off")
    with pytest.raises(ConnectFailed, match="403"):
        GenericEnvClient(server.url, headers={"X-Key": "secret"}).sync().connect()
    assert headers[b"x-key"] == b"secret"


def test_actions_of_the_generic_client_may_be_dicts_models_or_objects(parrot: Any) -> None:
    class Say(Action):
        message: str

    class Plain:
        def __init__(self) -> None:
            self.message = "object"

    with GenericEnvClient(parrot.url).sync() as client:
        client.reset()
        for action in ({"message": "dict"}, GenericAction(message="generic"), Say(message="model"), Plain()):
            assert client.step(action).observation["text"] in ("dict", "generic", "model", "object")
        with pytest.raises(TypeError, match="action"):
            client.step(7)
        assert client.step({"message": "still"}).observation["text"] == "still"
    assert repr(GenericAction(a=1, b="x")) == "GenericAction(a=1, b='x')"


@pytest.mark.anyio
async def test_a_coroutine_can_be_run_from_code_that_is_none() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    assert run_async_safely(answer()) == 42
    assert await asyncio.to_thread(lambda: run_async_safely(answer())) == 42
