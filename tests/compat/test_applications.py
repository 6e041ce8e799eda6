"""Applications as published environments write them: all of them must keep working.

They inspect `create_app`, take routes out and put their own in, bring routers, middleware and a lifespan, subclass the
server, and are tried with Starlette's test client.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import APIRouter, Body, FastAPI, HTTPException, Request, WebSocket
from sample_echo import EchoAction, EchoEnvironment, EchoObservation, echo_app, frames, played
from starlette.testclient import TestClient

import http_calls
from openenv.core.env_server.http_server import HTTPEnvServer, create_app, create_fastapi_app
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import (
    ResetRequest,
    ResetResponse,
    ServerMode,
    State,
    StepRequest,
    StepResponse,
)
from servers import Serve

# -- applications that look at create_app -----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [create_app, create_fastapi_app])
def test_an_application_that_reads_the_annotation_passes_the_class(function: Any) -> None:
    first = next(iter(inspect.signature(function).parameters.values()))
    text = str(first.annotation)
    takes_instance = "Environment" in text and "Callable" not in text
    assert not takes_instance
    env = EchoEnvironment() if takes_instance else EchoEnvironment
    assert "/ws" in {getattr(route, "path", None) for route in function(env, EchoAction, EchoObservation).routes}


def test_an_application_that_asks_for_optional_parameters_may_pass_them(serve: Serve) -> None:
    wanted = {
        "gradio_builder": lambda *args, **kwargs: None,
        "custom_tab_name": "Mine",
        "custom_tab_primary": True,
        "show_default_tab": False,
        "title_override": "Title",
    }
    known = inspect.signature(create_app).parameters
    assert set(wanted) <= set(known)
    app = create_app(
        EchoEnvironment, EchoAction, EchoObservation, **{key: value for key, value in wanted.items() if key in known}
    )
    assert played(serve(app).url) == ("hi", 2.0)


@pytest.mark.parametrize("function", [create_app, create_fastapi_app, HTTPEnvServer])
def test_constructors_keep_the_order_of_their_parameters(function: Any) -> None:
    expected = {
        create_app: "env action_cls observation_cls env_name max_concurrent_envs concurrency_config gradio_builder "
        "custom_tab_name custom_tab_primary show_default_tab title_override state_cls mode reset_observation_cls",
        create_fastapi_app: "env action_cls observation_cls max_concurrent_envs concurrency_config env_name state_cls "
        "mode reset_observation_cls",
        HTTPEnvServer: "env action_cls observation_cls max_concurrent_envs concurrency_config env_name state_cls "
        "reset_observation_cls",
    }[function].split()
    assert list(inspect.signature(function).parameters)[: len(expected)] == expected


# -- routes taken out and put in --------------------------------------------------------------------------------------

GYM = {"/reset", "/step", "/state"}


def assign_router_routes(app: FastAPI) -> None:
    """One way to take routes out."""
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) not in GYM]


def assign_slice(app: FastAPI) -> None:
    """Another."""
    app.routes[:] = [route for route in app.routes if route.path not in GYM]  # type: ignore[attr-defined]


def remove_each(app: FastAPI) -> None:
    """And a third."""
    for route in list(app.routes):
        if route.path in GYM and "POST" in route.methods | {"POST"}:  # type: ignore[attr-defined]
            app.routes.remove(route)


def register_stateful_routes(app: FastAPI) -> None:
    """Put one shared environment behind plain HTTP, as some published environments do."""
    env = EchoEnvironment()

    @app.post("/reset", response_model=ResetResponse, tags=["Environment Control"])
    async def reset(request: ResetRequest = Body(default_factory=ResetRequest)) -> ResetResponse:  # noqa: B008
        kwargs = request.model_dump(exclude_unset=True)
        return ResetResponse(**serialize_observation(env.reset(**kwargs)))

    @app.post("/step", response_model=StepResponse, tags=["Environment Control"])
    async def step(request: StepRequest) -> StepResponse:
        try:
            action = EchoAction.model_validate(request.action)
        except ValueError as exc:
            raise HTTPException(422, str(exc)) from exc
        return StepResponse(**serialize_observation(env.step(action)))

    @app.get("/state", response_model=State, tags=["State Management"])
    async def state() -> State:
        return env.state


@pytest.mark.parametrize("take_out", [assign_router_routes, assign_slice, remove_each])
def test_routes_can_be_taken_out_and_put_in_again(take_out: Callable[[FastAPI], None], serve: Serve) -> None:
    app = echo_app()
    take_out(app)
    assert GYM.isdisjoint({route.path for route in app.routes})  # type: ignore[attr-defined]
    register_stateful_routes(app)
    url = serve(app).url
    with http_calls.Client(base_url=url, trust_env=False) as http:
        assert http.post("/reset", json={"episode_id": "mine", "more": 1}).json() == {
            "observation": {"metadata": {"more": 1}, "echoed": "ready"},
            "reward": None,
            "done": False,
            "metadata": {"more": 1},
        }
        assert http.post("/reset").status_code == 200
        for count in (1, 2):
            assert http.post("/step", json={"action": {"message": "abc"}}).json()["reward"] == 3.0
            assert http.get("/state").json() == {"episode_id": None, "step_count": count}
        assert http.post("/step", json={"action": {}}).status_code == 422
        assert set(http.get("/openapi.json").json()["paths"]) >= GYM
    assert played(url) == ("hi", 2.0)


def test_taken_out_routes_are_gone(serve: Serve) -> None:
    app = echo_app()
    assign_router_routes(app)
    url = serve(app).url
    assert http_calls.post(url + "/reset", trust_env=False).status_code == 404
    assert GYM.isdisjoint(http_calls.get(url + "/openapi.json", trust_env=False).json()["paths"])


def test_the_socket_route_can_be_replaced_as_well(serve: Serve) -> None:
    app = echo_app()
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) != "/ws"]

    @app.websocket("/ws")
    async def own(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.receive_text()
        await websocket.send_json({"type": "mine", "data": {}})
        await websocket.close()

    assert frames(serve(app).url, {"type": "state"})[0]["type"] == "mine"


def test_routers_middleware_and_an_own_lifespan(serve: Serve) -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        events.append("started")
        yield
        events.append("stopped")

    app = FastAPI(lifespan=lifespan)
    server = HTTPEnvServer(EchoEnvironment, EchoAction, EchoObservation)
    server.register_routes(app)
    router = APIRouter(prefix="/extra")

    @router.get("/hello")
    def hello() -> dict[str, str]:
        return {"hello": "world"}

    app.include_router(router)

    @app.middleware("http")
    async def mark(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-marked"] = request.url.path
        return response

    url = serve(app).url
    assert events == ["started"]
    assert http_calls.get(url + "/extra/hello", trust_env=False).json() == {"hello": "world"}
    for method, path in (("POST", "/reset"), ("GET", "/health"), ("GET", "/state")):
        response = http_calls.request(method, url + path, trust_env=False)
        assert (response.status_code, response.headers["x-marked"]) == (200, path)
    assert played(url) == ("hi", 2.0)


def test_an_own_lifespan_is_stopped_with_the_sessions_closed() -> None:
    events: list[str] = []

    class Noted(EchoEnvironment):
        def close(self) -> None:
            events.append("environment closed")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        yield {"shared": 7}
        events.append("stopped")

    app = FastAPI(lifespan=lifespan)
    HTTPEnvServer(Noted, EchoAction, EchoObservation).register_routes(app)

    @app.get("/shared")
    def shared(request: Request) -> int:
        return int(request.state.shared)

    with TestClient(app) as client:
        assert client.get("/shared").json() == 7
        assert client.post("/reset", headers={"X-OpenEnv-Session": "new"}).status_code == 200
    assert events == ["environment closed", "stopped"]


@pytest.mark.filterwarnings("ignore:.*websockets.*", "ignore:remove second")
@pytest.mark.parametrize("ws", ["auto", "websockets", "websockets-sansio"])
def test_an_application_runs_on_uvicorns_own_settings(ws: str, serve: Serve) -> None:
    url = serve(echo_app(), ws=ws, http="auto", ws_per_message_deflate=True).url
    assert played(url) == ("hi", 2.0)
    assert http_calls.post(url + "/reset", trust_env=False).status_code == 200


def test_an_application_can_be_mounted_in_another(serve: Serve) -> None:
    outer = FastAPI()
    outer.mount("/envs/echo", echo_app())
    url = serve(outer).url + "/envs/echo"
    assert http_calls.post(url + "/reset", trust_env=False).json()["observation"]["echoed"] == "ready"
    assert http_calls.get(url + "/health", trust_env=False).json() == {"status": "healthy"}
    assert played(url) == ("hi", 2.0)


# -- subclassed servers -----------------------------------------------------------------------------------------------


class CountingServer(HTTPEnvServer):
    """Adds a route that builds an environment from its factory."""

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        super().register_routes(app, mode)

        @app.get("/describe")
        def describe() -> dict[str, Any]:
            env = self._env_factory()
            return {"name": env.get_metadata().name, "limit": self.max_concurrent_envs, "cls": self.action_cls.__name__}


def test_a_server_can_be_subclassed_with_routes_of_its_own(serve: Serve) -> None:
    app = FastAPI(title="mine")
    server = CountingServer(env=EchoEnvironment, action_cls=EchoAction, observation_cls=EchoObservation)
    server.register_routes(app)
    url = serve(app).url
    assert http_calls.get(url + "/describe", trust_env=False).json() == {
        "name": "EchoEnvironment",
        "limit": 1,
        "cls": "EchoAction",
    }
    assert played(url) == ("hi", 2.0)


# -- Starlette's test client ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entered", [True, False])
def test_starlettes_test_client_speaks_http(entered: bool) -> None:
    client = TestClient(echo_app())
    if entered:
        client.__enter__()
    try:
        assert client.get("/health").json() == {"status": "healthy"}
        assert client.post("/reset", json={"episode_id": "e"}).json()["observation"]["echoed"] == "ready"
        assert client.post("/step", json={"action": {"message": "abc"}}).json()["reward"] == 3.0
        assert client.get("/state").status_code == 200
        assert client.get("/schema").json().keys() == {"action", "observation", "state", "reset_observation"}
        assert client.get("/metadata").json()["name"] == "EchoEnvironment"
        assert client.post("/step", json={"action": {}}).json()["detail"][0]["loc"] == ["message"]
        rpc = client.post("/mcp", json={"jsonrpc": "2.0", "method": "nope", "id": 1}).json()
        assert rpc["error"]["code"] == -32601
    finally:
        if entered:
            client.__exit__()


@pytest.mark.parametrize("entered", [True, False])
def test_starlettes_test_client_speaks_websocket(entered: bool) -> None:
    client = TestClient(echo_app())
    if entered:
        client.__enter__()
    try:
        for _ in range(2):
            with client.websocket_connect("/ws") as ws:
                ws.send_json({"type": "reset", "data": {"episode_id": "e"}})
                assert ws.receive_json()["type"] == "observation"
                ws.send_text(json.dumps({"type": "step", "data": {"message": "abc"}}))
                assert ws.receive_json()["data"]["reward"] == 3.0
                ws.send_json({"type": "state"})
                assert ws.receive_json()["data"] == {"episode_id": "e", "step_count": 1}
                ws.send_json({"type": "close"})
                assert ws.receive()["type"] == "websocket.close"
    finally:
        if entered:
            client.__exit__()


@pytest.mark.parametrize("entered", [True, False])
def test_starlettes_test_client_plays_on_the_page(entered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    client = TestClient(echo_app())
    if entered:
        client.__enter__()
    try:
        assert client.get("/web").status_code == 200
        for _ in range(2):
            assert client.post("/web/reset", json={}).json()["observation"]["echoed"] == "ready"
            assert client.post("/web/step", json={"action": {"message": "abc"}}).json()["reward"] == 3.0
            assert client.get("/web/state").json()["step_count"] == 1
    finally:
        if entered:
            client.__exit__()


def test_an_environment_that_raises_shows_its_exception_to_starlettes_test_client() -> None:
    class Broken(EchoEnvironment):
        def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
            raise KeyError("broken")

    app = create_app(Broken, EchoAction, EchoObservation)
    with pytest.raises(KeyError, match="broken"):
        TestClient(app).post("/step", json={"action": {"message": "x"}})
    response = TestClient(app, raise_server_exceptions=False).post("/step", json={"action": {"message": "x"}})
    assert (response.status_code, response.text) == (500, "Internal Server Error")
