"""Habits of published environments, each as a small application in their style: all of them must keep working.

Applications that inspect `create_app`, take routes out and put their own in, bring routers, middleware and a lifespan;
models that are not quite the usual ones; every way to write `reset`; clients with helper methods; subclassed servers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import httpx2
import pytest
from fastapi import APIRouter, Body, FastAPI, HTTPException, Request, WebSocket
from pydantic import BaseModel, Field, RootModel
from starlette.testclient import TestClient
from websockets.sync.client import connect

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.http_server import HTTPEnvServer, create_app, create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import (
    Action,
    Observation,
    ResetRequest,
    ResetResponse,
    ServerMode,
    State,
    StepRequest,
    StepResponse,
)
from openenv.core.generic_client import GenericEnvClient


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed: str = ""


class EchoEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> EchoObservation:
        self._state = State(episode_id=episode_id, step_count=0)
        return EchoObservation(echoed="ready", metadata=kwargs)

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
        self._state.step_count += 1
        return EchoObservation(echoed=action.message, reward=float(len(action.message)), metadata=kwargs)

    @property
    def state(self) -> State:
        return self._state


class EchoEnv(EnvClient[EchoAction, EchoObservation, State]):
    def _step_payload(self, action: EchoAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[EchoObservation]:
        observation = EchoObservation(echoed=payload["observation"].get("echoed", ""))
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(episode_id=payload.get("episode_id"), step_count=payload.get("step_count", 0))

    async def say(self, *words: str) -> list[str]:
        """A helper as published clients have them."""
        return [(await self.step(EchoAction(message=word))).observation.echoed for word in words]

    async def say_twice(self, word: str) -> str:
        """A helper that uses a helper."""
        return "".join(await self.say(word, word))

    def greeting(self, name: str) -> EchoAction:
        """A helper that talks to nobody."""
        return EchoAction(message=f"hello {name}")


def echo_app(**kwargs: Any) -> FastAPI:
    """The application most environments have."""
    return create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo_env", **kwargs)


def frames(url: str, *sent: Any) -> list[Any]:
    """Exchange frames with a server."""
    with connect("ws" + url.removeprefix("http") + "/ws", proxy=None) as ws:
        replies = []
        for frame in sent:
            ws.send(json.dumps(frame))
            replies.append(json.loads(ws.recv(10)))
        return replies


def played(url: str) -> tuple[str, float]:
    """Play the shortest episode."""
    begun, stepped = frames(url, {"type": "reset"}, {"type": "step", "data": {"message": "hi"}})
    assert begun["data"]["observation"]["echoed"] == "ready"
    return stepped["data"]["observation"]["echoed"], stepped["data"]["reward"]


# -- 1: applications that look at create_app ------------------------------------------------------------------------


@pytest.mark.parametrize("function", [create_app, create_fastapi_app])
def test_an_application_that_reads_the_annotation_passes_the_class(function: Any) -> None:
    first = next(iter(inspect.signature(function).parameters.values()))
    text = str(first.annotation)
    takes_instance = "Environment" in text and "Callable" not in text
    assert not takes_instance
    env = EchoEnvironment() if takes_instance else EchoEnvironment
    assert "/ws" in {getattr(route, "path", None) for route in function(env, EchoAction, EchoObservation).routes}


def test_an_application_that_asks_for_optional_parameters_may_pass_them(serve: Callable[..., Any]) -> None:
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


# -- 2: routes taken out and put in ---------------------------------------------------------------------------------

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
def test_routes_can_be_taken_out_and_put_in_again(
    take_out: Callable[[FastAPI], None], serve: Callable[..., Any]
) -> None:
    app = echo_app()
    take_out(app)
    assert GYM.isdisjoint({route.path for route in app.routes})  # type: ignore[attr-defined]
    register_stateful_routes(app)
    url = serve(app).url
    with httpx2.Client(base_url=url, trust_env=False) as http:
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


def test_taken_out_routes_are_gone(serve: Callable[..., Any]) -> None:
    app = echo_app()
    assign_router_routes(app)
    url = serve(app).url
    assert httpx2.post(url + "/reset", trust_env=False).status_code == 404
    assert GYM.isdisjoint(httpx2.get(url + "/openapi.json", trust_env=False).json()["paths"])


def test_the_socket_route_can_be_replaced_as_well(serve: Callable[..., Any]) -> None:
    app = echo_app()
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) != "/ws"]

    @app.websocket("/ws")
    async def own(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.receive_text()
        await websocket.send_json({"type": "mine", "data": {}})
        await websocket.close()

    assert frames(serve(app).url, {"type": "state"})[0]["type"] == "mine"


def test_routers_middleware_and_an_own_lifespan(serve: Callable[..., Any]) -> None:
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
    assert httpx2.get(url + "/extra/hello", trust_env=False).json() == {"hello": "world"}
    for method, path in (("POST", "/reset"), ("GET", "/health"), ("GET", "/state")):
        response = httpx2.request(method, url + path, trust_env=False)
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
def test_an_application_runs_on_uvicorns_own_settings(ws: str, serve: Callable[..., Any]) -> None:
    url = serve(echo_app(), ws=ws, http="auto", ws_per_message_deflate=True).url
    assert played(url) == ("hi", 2.0)
    assert httpx2.post(url + "/reset", trust_env=False).status_code == 200


def test_an_application_can_be_mounted_in_another(serve: Callable[..., Any]) -> None:
    outer = FastAPI()
    outer.mount("/envs/echo", echo_app())
    url = serve(outer).url + "/envs/echo"
    assert httpx2.post(url + "/reset", trust_env=False).json()["observation"]["echoed"] == "ready"
    assert httpx2.get(url + "/health", trust_env=False).json() == {"status": "healthy"}
    assert played(url) == ("hi", 2.0)


# -- 3 and 4: models that are not quite the usual ones --------------------------------------------------------------


class Move(BaseModel):
    kind: Literal["move"] = "move"
    steps: int


class Say(BaseModel):
    kind: Literal["say"] = "say"
    text: str


class AnyAction(RootModel[Annotated[Move | Say, Field(discriminator="kind")]]):
    """A union of actions, and no subclass of `Action`."""


class PlainObservation(BaseModel):
    """No subclass of `Observation`, and without metadata."""

    did: str
    reward: float | None = None
    done: bool = False


class UnionEnvironment(Environment):
    def reset(self) -> PlainObservation:
        return PlainObservation(did="reset")

    def step(self, action: AnyAction) -> PlainObservation:
        chosen = action.root
        if isinstance(chosen, Move):
            return PlainObservation(did=f"moved {chosen.steps}", reward=0.5)
        return PlainObservation(did=f"said {chosen.text}", done=True)

    @property
    def state(self) -> State:
        return State()


def test_a_union_of_actions_and_a_plain_observation(serve: Callable[..., Any]) -> None:
    server = serve(create_app(UnionEnvironment, AnyAction, PlainObservation))
    begun, moved, said, wrong = frames(
        server.url,
        {"type": "reset", "data": {"seed": 1}},
        {"type": "step", "data": {"kind": "move", "steps": 3}},
        {"type": "step", "data": {"kind": "say", "text": "ok"}},
        {"type": "step", "data": {"kind": "fly"}},
    )
    assert begun["data"] == {"observation": {"did": "reset"}, "reward": None, "done": False}
    assert moved["data"] == {"observation": {"did": "moved 3"}, "reward": 0.5, "done": False}
    assert said["data"] == {"observation": {"did": "said ok"}, "reward": None, "done": True}
    assert wrong["data"]["code"] == "VALIDATION_ERROR"
    with httpx2.Client(base_url=server.url, trust_env=False) as http:
        stepped = http.post("/step", json={"action": {"kind": "move", "steps": 2}}).json()
        assert stepped == {"observation": {"did": "moved 2"}, "reward": 0.5, "done": False, "metadata": None}
        assert http.post("/step", json={"action": {"kind": "fly"}}).status_code == 422
        schema = http.get("/schema").json()
        assert schema["action"]["discriminator"]["propertyName"] == "kind"
        assert schema["observation"]["properties"].keys() == {"did", "reward", "done"}


class OddObservation(Observation):
    observation: str = "inner"
    info: dict[str, Any] = Field(default_factory=dict)
    state: str = "s"
    episode_id: str | None = None


class OddState(State):
    board: list[list[int]] = Field(default_factory=list)
    info: dict[str, Any] = Field(default_factory=dict)


class OddEnvironment(Environment[Action, OddObservation, OddState]):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> OddObservation:
        return OddObservation(info={"a": 1}, episode_id=episode_id)

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> OddObservation:
        return OddObservation(observation="stepped", done=True, reward=1)

    @property
    def state(self) -> OddState:
        return OddState(episode_id="e", board=[[1, 2]], info={"k": "v"}, unlisted=5)


def test_fields_with_the_names_of_the_envelope_and_states_with_more_fields(serve: Callable[..., Any]) -> None:
    url = serve(create_app(OddEnvironment, Action, OddObservation)).url
    begun, stepped, state = frames(
        url, {"type": "reset", "data": {"episode_id": "e"}}, {"type": "step", "data": {}}, {"type": "state"}
    )
    inner = {"metadata": {}, "observation": "inner", "info": {"a": 1}, "state": "s", "episode_id": "e"}
    assert begun["data"] == {"observation": inner, "reward": None, "done": False}
    assert stepped["data"]["observation"]["observation"] == "stepped"
    full = {"episode_id": "e", "step_count": 0, "board": [[1, 2]], "info": {"k": "v"}, "unlisted": 5}
    assert state["data"] == full
    assert httpx2.get(url + "/state", trust_env=False).json() == full
    assert httpx2.get(url + "/schema", trust_env=False).json()["state"]["properties"].keys() >= {"board", "info"}


class ShyEnvironment(Environment):
    """Has no state before its first reset."""

    raises = False

    def __init__(self) -> None:
        super().__init__()
        self._state: State | None = None

    def reset(self, **kwargs: Any) -> Observation:
        self._state = State(episode_id="begun")
        return Observation()

    def step(self, action: Action, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> Any:
        if self._state is None and self.raises:
            raise RuntimeError("reset first")
        return self._state


class RaisingShyEnvironment(ShyEnvironment):
    raises = True


def test_a_state_that_is_none_before_the_first_reset_is_empty(serve: Callable[..., Any]) -> None:
    url = serve(create_app(ShyEnvironment, Action, Observation)).url
    before, _, after = frames(url, {"type": "state"}, {"type": "reset"}, {"type": "state"})
    assert before == {"type": "state", "data": {}}
    assert after["data"]["episode_id"] == "begun"
    assert httpx2.get(url + "/state", trust_env=False).status_code == 200


def test_a_state_that_raises_before_the_first_reset_is_an_error_and_no_more(serve: Callable[..., Any]) -> None:
    url = serve(create_app(RaisingShyEnvironment, Action, Observation)).url
    before, begun, after = frames(url, {"type": "state"}, {"type": "reset"}, {"type": "state"})
    assert before["data"] == {"message": "reset first", "code": "EXECUTION_ERROR"}
    assert begun["type"] == "observation"
    assert after["data"]["episode_id"] == "begun"
    assert httpx2.get(url + "/state", trust_env=False).status_code == 500


# -- 5: every way to write reset ------------------------------------------------------------------------------------


class Base(Environment):
    got: Any = None

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"timeout_s": timeout_s, **kwargs})

    @property
    def state(self) -> State:
        return State()


class NoParameters(Base):
    def reset(self) -> Observation:
        return Observation(metadata={"got": {}})


class OwnParameter(Base):
    def reset(self, task_id: str = "default") -> Observation:
        return Observation(metadata={"got": {"task_id": task_id}})


class Usual(Base):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"got": {"seed": seed, "episode_id": episode_id, **kwargs}})


class SeedOnly(Base):
    def reset(self, *, seed: int | None = None) -> Observation:
        return Observation(metadata={"got": {"seed": seed}})


class Asynchronous(Base):
    def reset(self) -> Observation:
        raise AssertionError("the asynchronous one is meant")

    async def reset_async(self, seed: int | None = None, level: int = 0) -> Observation:
        return Observation(metadata={"got": {"seed": seed, "level": level}})


@pytest.mark.parametrize(
    ("env", "got"),
    [
        (NoParameters, {}),
        (OwnParameter, {"task_id": "t"}),
        (Usual, {"seed": 4, "episode_id": "e", "task_id": "t", "level": 2}),
        (SeedOnly, {"seed": 4}),
        (Asynchronous, {"seed": 4, "level": 2}),
    ],
)
def test_reset_gets_the_keywords_it_takes(
    env: type[Environment], got: dict[str, Any], serve: Callable[..., Any]
) -> None:
    url = serve(create_app(env, Action, Observation)).url
    sent = {"seed": 4, "episode_id": "e", "task_id": "t", "level": 2}
    assert frames(url, {"type": "reset", "data": sent})[0]["data"]["metadata"]["got"] == got
    assert httpx2.post(url + "/reset", json=sent, trust_env=False).json()["metadata"]["got"] == got
    with GenericEnvClient(base_url=url).sync() as client:
        assert client.reset(**sent).metadata == {"got": got}
        assert client.reset().done is False


def test_step_gets_keywords_over_http_and_never_a_second_action(serve: Callable[..., Any]) -> None:
    url = serve(create_app(Usual, Action, Observation)).url
    body = {"action": {}, "timeout_s": 2.5, "request_id": "r", "hint": 1}
    metadata = httpx2.post(url + "/step", json=body, trust_env=False).json()["metadata"]
    assert metadata == {"timeout_s": 2.5, "request_id": "r", "hint": 1}


# -- 6: tool actions by the application's action class --------------------------------------------------------------


class NamesItsAction(Base):
    def reset(self) -> Observation:
        return Observation()

    def step(self, action: Action, **kwargs: Any) -> Observation:
        return Observation(metadata={"action": type(action).__name__})


class OwnCallToolAction(CallToolAction):
    extra: int = 0


@pytest.mark.parametrize("action_cls", [Action, ListToolsAction, CallToolAction])
def test_tool_actions_are_recognised_where_the_class_is_open_to_them(
    action_cls: Any, serve: Callable[..., Any]
) -> None:
    url = serve(create_app(NamesItsAction, action_cls, Observation)).url
    listed, called = frames(
        url,
        {"type": "step", "data": {"type": "list_tools"}},
        {"type": "step", "data": {"type": "call_tool", "tool_name": "t", "arguments": {"a": 1}}},
    )
    assert listed["data"]["metadata"] == {"action": "ListToolsAction"}
    assert called["data"]["metadata"] == {"action": "CallToolAction"}


def test_with_a_subclass_a_tool_action_is_that_subclass_or_refused(serve: Callable[..., Any]) -> None:
    url = serve(create_app(NamesItsAction, OwnCallToolAction, Observation)).url
    called, listed, rpc = frames(
        url,
        {"type": "step", "data": {"type": "call_tool", "tool_name": "t", "extra": 3}},
        {"type": "step", "data": {"type": "list_tools"}},
        {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}},
    )
    assert called["data"]["metadata"] == {"action": "OwnCallToolAction"}
    assert listed["data"]["code"] == "VALIDATION_ERROR"
    assert (rpc["type"], rpc["data"]["id"]) == ("mcp", 1)


# -- 7: clients with helper methods ---------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_clients_own_coroutines_are_awaited(serve: Callable[..., Any]) -> None:
    async with EchoEnv(base_url=serve(echo_app()).url) as client:
        await client.reset()
        assert await client.say("a", "b") == ["a", "b"]
        assert await client.say_twice("c") == "cc"
        assert (await client.step(client.greeting("you"))).observation.echoed == "hello you"
        assert (await client.state()).step_count == 5


def test_a_clients_own_coroutines_block_behind_sync(serve: Callable[..., Any]) -> None:
    with EchoEnv(base_url=serve(echo_app()).url).sync() as client:
        client.reset()
        assert client.say("a", "b") == ["a", "b"]
        assert client.say_twice("c") == "cc"
        assert client.step(client.greeting("you")).observation.echoed == "hello you"
        assert client.state().step_count == 5


def test_a_client_is_a_context_manager_where_no_loop_runs(serve: Callable[..., Any]) -> None:
    with EchoEnv(base_url=serve(echo_app()).url) as client:
        begun: Any = client.reset(episode_id="e")
        assert begun.observation.echoed == "ready"
        stepped: Any = client.step(EchoAction(message="abc"))
        assert (stepped.observation.echoed, stepped.reward) == ("abc", 3.0)
        state: Any = client.state()
        assert state.episode_id == "e"


def test_keywords_of_step_are_accepted_and_stay_at_home(serve: Callable[..., Any]) -> None:
    with EchoEnv(base_url=serve(echo_app()).url).sync() as client:
        client.reset()
        assert client.step(EchoAction(message="abc"), timeout_s=3).observation.echoed == "abc"


class Provider:
    """A container provider as existing code writes them; its container is a server that already runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.calls: list[Any] = []

    def start_container(self, image: str, port: int | None = None, env_vars: Any = None, **kwargs: Any) -> str:
        self.calls.append(("start", image, env_vars, kwargs))
        return self.url

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        self.calls.append(("wait", base_url))

    def stop_container(self) -> None:
        self.calls.append("stop")


STARTED = ("start", "echo:latest", {"A": "b"}, {"memory": "1g"})


def test_a_client_from_an_image_blocks_behind_sync(serve: Callable[..., Any]) -> None:
    provider = Provider(serve(echo_app()).url)
    made = EchoEnv.from_docker_image("echo:latest", provider=provider, env_vars={"A": "b"}, memory="1g")
    client = made.sync()
    try:
        assert client.reset().observation.echoed == "ready"
        assert provider.calls == [STARTED, ("wait", provider.url)]
    finally:
        client.close()
    assert provider.calls[-1] == "stop"


@pytest.mark.anyio
async def test_a_client_from_an_image_is_awaited(serve: Callable[..., Any]) -> None:
    provider = Provider(serve(echo_app()).url)
    client = await EchoEnv.from_docker_image("echo:latest", provider=provider, env_vars={"A": "b"}, memory="1g")
    assert (await client.reset()).observation.echoed == "ready"
    await client.close()
    assert provider.calls == [STARTED, ("wait", provider.url), "stop"]


def test_a_provider_is_stopped_when_its_server_cannot_be_reached() -> None:
    provider = Provider("http://127.0.0.1:9")
    with pytest.raises(ConnectionError):
        EchoEnv.from_docker_image("echo:latest", provider=provider).sync()
    assert provider.calls[-1] == "stop"


# -- 8: subclassed servers ------------------------------------------------------------------------------------------


class CountingServer(HTTPEnvServer):
    """Adds a route that builds an environment from the factory it was given."""

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        super().register_routes(app, mode)

        @app.get("/describe")
        def describe() -> dict[str, Any]:
            env = self._env_factory()
            return {"name": env.get_metadata().name, "limit": self.max_concurrent_envs, "cls": self.action_cls.__name__}


def test_a_server_can_be_subclassed_with_routes_of_its_own(serve: Callable[..., Any]) -> None:
    app = FastAPI(title="mine")
    server = CountingServer(env=EchoEnvironment, action_cls=EchoAction, observation_cls=EchoObservation)
    server.register_routes(app)
    url = serve(app).url
    assert httpx2.get(url + "/describe", trust_env=False).json() == {
        "name": "EchoEnvironment",
        "limit": 1,
        "cls": "EchoAction",
    }
    assert played(url) == ("hi", 2.0)


# -- 9: environments in the same process ----------------------------------------------------------------------------


def test_an_environment_is_stepped_in_process_without_a_server() -> None:
    env = EchoEnvironment()
    assert env.reset(seed=1, episode_id="e").echoed == "ready"
    assert env.step(EchoAction(message="abc")).reward == 3.0
    assert (env.state.episode_id, env.state.step_count) == ("e", 1)
    env.close()


def test_serialised_observations_have_the_shape_of_the_wire() -> None:
    observation = EchoObservation(echoed="x", reward=1.5, done=True, metadata={"k": 1})
    assert serialize_observation(observation) == {
        "observation": {"metadata": {"k": 1}, "echoed": "x"},
        "reward": 1.5,
        "done": True,
        "metadata": {"k": 1},
    }
    assert "metadata" not in serialize_observation(EchoObservation())


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


def test_an_environment_that_raises_shows_its_exception_to_starlettes_test_client() -> None:
    class Broken(EchoEnvironment):
        def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
            raise KeyError("broken")

    app = create_app(Broken, EchoAction, EchoObservation)
    with pytest.raises(KeyError, match="broken"):
        TestClient(app).post("/step", json={"action": {"message": "x"}})
    response = TestClient(app, raise_server_exceptions=False).post("/step", json={"action": {"message": "x"}})
    assert (response.status_code, response.text) == (500, "Internal Server Error")
