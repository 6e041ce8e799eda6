"""The first release's habits: one shared environment behind plain HTTP, and clients that keep an episode over HTTP.

`openenv_core` serves an instance statefully; `HTTPEnvClient`, cookie-keeping clients and the oldest clients of all play
whole episodes against a current server.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from pydantic import Field
from starlette.testclient import TestClient

import http_calls
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.http_env_client import HTTPEnvClient, StepResult
from openenv.errors import (
    EnvironmentFactoryError,
    ExecutionError,
    RequestValidationError,
    ServerError,
    SessionCapacityError,
    SessionLost,
)
from openenv.server.app import create_app
from servers import Serve

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import openenv_core
    from openenv_core.env_server import HTTPEnvServer as LegacyServer
    from openenv_core.env_server import create_app as legacy_create_app
    from openenv_core.env_server import create_fastapi_app as legacy_create_fastapi_app


class CountAction(Action):
    amount: int = 1
    fail: bool = False


class CountObservation(Observation):
    total: int
    seed: int | None = None
    seen: dict[str, Any] = Field(default_factory=dict)


class CountState(State):
    total: int = 0


class CountEnvironment(Environment[CountAction, CountObservation, CountState]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = CountState()
        self._seed: int | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> CountObservation:
        self._seed = seed
        self._state = CountState(episode_id=episode_id)
        return CountObservation(total=0, seed=seed, seen=kwargs)

    def step(self, action: CountAction, timeout_s: float | None = None, **kwargs: Any) -> CountObservation:
        if action.fail:
            raise ValueError("cannot count that")
        self._state.step_count += 1
        self._state.total += action.amount
        seen = {"timeout_s": timeout_s, **kwargs}
        return CountObservation(total=self._state.total, seed=self._seed, reward=1.0, seen=seen)

    @property
    def state(self) -> CountState:
        return self._state


class CountEnv(HTTPEnvClient[CountAction, CountObservation, CountState]):
    def _step_payload(self, action: CountAction) -> dict[str, Any]:
        return action.model_dump(exclude_defaults=True)

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[CountObservation]:
        observation = CountObservation(**payload["observation"], reward=payload.get("reward"))
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> CountState:
        return CountState(**payload)


def count_app(**kwargs: Any) -> Any:
    """A current application."""
    return create_app(CountEnvironment, CountAction, CountObservation, **kwargs)


def call(method: str, url: str, body: Any = None) -> Any:
    """Make one request on a connection of its own, without cookies."""
    response = http_calls.request(method, url, json=body, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


# -- one shared environment -----------------------------------------------------------------------------------------


@pytest.fixture(params=["create_app", "create_fastapi_app", "HTTPEnvServer", "openenv_core.create_app"])
def shared(request: pytest.FixtureRequest, serve: Serve) -> Any:
    """A server of an instance, made in each of the old ways."""
    env = CountEnvironment()
    if request.param == "HTTPEnvServer":
        app = legacy_create_fastapi_app(CountEnvironment(), CountAction, CountObservation)
        app.router.routes = [route for route in app.router.routes if getattr(route, "path", "").startswith("/openapi")]
        LegacyServer(env=env, action_cls=CountAction, observation_cls=CountObservation).register_routes(app)
        return serve(app)
    make = {
        "create_app": legacy_create_app,
        "create_fastapi_app": legacy_create_fastapi_app,
        "openenv_core.create_app": openenv_core.create_app,
    }[request.param]
    return serve(make(env, CountAction, CountObservation))


def test_an_instance_is_one_environment_for_everybody(shared: Any) -> None:
    url = shared.url
    assert call("POST", url + "/reset", {})["observation"]["total"] == 0
    for total in (2, 4, 6):
        stepped = call("POST", url + "/step", {"action": {"amount": 2}, "timeout_s": 15})
        assert (stepped["observation"]["total"], stepped["reward"], stepped["done"]) == (total, 1.0, False)
        assert call("GET", url + "/state") == {"episode_id": None, "step_count": total // 2, "total": total}
    call("POST", url + "/reset", {"episode_id": "again"})
    assert call("GET", url + "/state") == {"episode_id": "again", "step_count": 0, "total": 0}
    assert call("GET", url + "/health") == {"status": "healthy"}


def test_a_shared_environment_survives_errors_and_sets_no_cookie(shared: Any) -> None:
    url = shared.url
    assert "set-cookie" not in http_calls.post(url + "/reset", json={}, trust_env=False).headers
    call("POST", url + "/step", {"action": {"amount": 3}})
    assert http_calls.post(url + "/step", json={"action": {"amount": "x"}}, trust_env=False).status_code == 422
    assert http_calls.post(url + "/step", json={"action": {"fail": True}}, trust_env=False).status_code == 500
    assert call("POST", url + "/step", {"action": {"amount": 3}})["observation"]["total"] == 6


def test_a_shared_environment_tells_its_metadata_and_schema(shared: Any) -> None:
    assert call("GET", shared.url + "/metadata")["name"] == "CountEnvironment"
    assert call("GET", shared.url + "/schema")["state"]["properties"].keys() >= {"total"}


def test_a_legacy_client_plays_on_a_shared_environment(shared: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with CountEnv(base_url=shared.url) as client:
            client.reset()
            assert [client.step(CountAction(amount=2)).observation.total for _ in range(3)] == [2, 4, 6]
            assert client.state().total == 6


def test_all_kinds_of_clients_share_the_one_environment(shared: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with CountEnv(base_url=shared.url) as named, http_calls.Client(base_url=shared.url, trust_env=False) as keeping:
            call("POST", shared.url + "/reset", {})
            named.reset()
            keeping.post("/reset", json={})
            assert call("POST", shared.url + "/step", {"action": {"amount": 1}})["observation"]["total"] == 1
            assert named.step(CountAction(amount=1)).observation.total == 2
            assert keeping.post("/step", json={"action": {"amount": 1}}).json()["observation"]["total"] == 3
    assert call("GET", shared.url + "/state")["total"] == 3


def test_first_requests_that_come_at_once_all_find_the_environment(shared: Any) -> None:
    def step(_: int) -> int:
        total: int = call("POST", shared.url + "/step", {"action": {"amount": 1}})["observation"]["total"]
        return total

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(step, range(8))) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_shared_environment_is_closed_once_and_only_at_the_end() -> None:
    closed: list[str] = []

    class Noted(CountEnvironment):
        def close(self) -> None:
            closed.append("closed")

    with TestClient(legacy_create_app(Noted(), CountAction, CountObservation)) as http:
        http.post("/reset", json={})
        assert http.get("/metadata").json()["name"] == "Noted"
        assert http.get("/schema").status_code == 200
        assert http.get("/list_environments").json() == ["Noted"]
        http.post("/step", json={"action": {"amount": 2}})
        assert http.get("/state").json()["total"] == 2
        assert closed == []
    assert closed == ["closed"]


def test_a_shared_environment_keeps_its_episode_in_a_test_client_that_is_not_entered() -> None:
    http = TestClient(legacy_create_app(CountEnvironment(), CountAction, CountObservation))
    http.post("/reset", json={})
    assert [http.post("/step", json={"action": {}}).json()["observation"]["total"] for _ in range(2)] == [1, 2]


def test_the_legacy_factories_take_a_class_as_the_current_ones_do(serve: Serve) -> None:
    for make in (legacy_create_app, legacy_create_fastapi_app):
        app = make(CountEnvironment, CountAction, CountObservation)
        assert "/ws" in {getattr(route, "path", None) for route in app.routes}
        url = serve(app).url
        call("POST", url + "/reset", {})
        assert call("POST", url + "/step", {"action": {"amount": 2}})["observation"]["total"] == 2
        assert call("POST", url + "/step", {"action": {"amount": 2}})["observation"]["total"] == 2


# -- the HTTP client ------------------------------------------------------------------------------------------------


@pytest.fixture
def client(serve: Serve) -> Iterator[CountEnv]:
    """A client of a current server."""
    with CountEnv(base_url=serve(count_app(max_concurrent_envs=2)).url) as client:
        yield client


def test_an_http_client_keeps_its_episode(client: CountEnv) -> None:
    begun = client.reset(seed=5, episode_id="e-1", level=3)
    assert (begun.observation.total, begun.observation.seed, begun.observation.seen) == (0, 5, {"level": 3})
    assert [client.step(CountAction(amount=2)).observation.total for _ in range(3)] == [2, 4, 6]
    assert client.state() == CountState(episode_id="e-1", step_count=3, total=6)
    assert client.reset().observation.total == 0
    assert client.state().step_count == 0


def test_an_http_client_passes_keywords_to_the_environments_step(client: CountEnv) -> None:
    client.reset()
    seen = client.step(CountAction(), timeout_s=2.5, request_id="r-1", hint="x").observation.seen
    assert seen == {"timeout_s": 2.5, "request_id": "r-1", "hint": "x"}


def test_two_http_clients_do_not_mix(serve: Serve) -> None:
    url = serve(count_app(max_concurrent_envs=2)).url
    with CountEnv(base_url=url) as one, CountEnv(base_url=url) as two:
        one.reset(seed=1)
        two.reset(seed=2)
        for _ in range(3):
            one.step(CountAction(amount=1))
            two.step(CountAction(amount=10))
        assert (one.state().total, two.state().total) == (3, 30)


def test_an_http_client_raises_typed_errors_and_goes_on(client: CountEnv) -> None:
    client.reset()
    client.step(CountAction(amount=4))
    with pytest.raises(RequestValidationError, match="VALIDATION_ERROR") as invalid:
        client._call("POST", "/step", {"action": {"amount": "x"}}, session=client.session_id)
    assert invalid.value.details["errors"][0]["loc"] == ["amount"]
    with pytest.raises(ExecutionError, match="cannot count that"):
        client.step(CountAction(fail=True))
    with pytest.raises(RuntimeError):  # what old code catches
        client.step(CountAction(fail=True))
    assert client.step(CountAction(amount=4)).observation.total == 8


def test_an_http_client_meets_a_full_server(serve: Serve) -> None:
    url = serve(count_app()).url
    with CountEnv(base_url=url) as one, CountEnv(base_url=url) as two:
        one.reset()
        with pytest.raises(SessionCapacityError) as full:
            two.reset()
        assert (full.value.active_sessions, full.value.max_sessions) == (1, 1)
        assert one.step(CountAction(amount=4)).observation.total == 4


def test_an_http_client_learns_that_the_factory_failed(serve: Serve) -> None:
    class Broken(CountEnvironment):
        def __init__(self) -> None:
            raise OSError("no power")

    with CountEnv(base_url=serve(create_app(Broken, CountAction, CountObservation)).url) as client:
        with pytest.raises(EnvironmentFactoryError) as failed:
            client.reset()
        assert failed.value.factory_name == "Broken"


def test_a_lost_session_is_an_error_until_reset(serve: Serve) -> None:
    server = serve(count_app())
    with CountEnv(base_url=server.url) as client:
        client.reset()
        client.step(CountAction(amount=4))
        server.manager.find(client.session_id).close("taken away")
        for _ in range(2):
            with pytest.raises(SessionLost) as lost:
                client.step(CountAction(amount=4))
            assert isinstance(lost.value, ConnectionError)
        assert client.reset().observation.total == 0
        assert client.step(CountAction(amount=4)).observation.total == 4


def test_an_http_client_sends_its_headers_with_every_request(serve: Serve) -> None:
    app = count_app()
    seen: list[tuple[str, str | None]] = []

    @app.middleware("http")
    async def note(request: Any, call_next: Any) -> Any:
        seen.append((request.url.path, request.headers.get("authorization")))
        return await call_next(request)

    with CountEnv(serve(app).url, 5.0, {"Authorization": "Bearer t"}) as client:
        client.reset()
        client.step(CountAction())
        client.state()
    assert seen[:3] == [("/reset", "Bearer t"), ("/step", "Bearer t"), ("/state", "Bearer t")]
    assert {header for _, header in seen} == {"Bearer t"}


def test_an_http_client_from_an_image_stops_its_container_when_closed(serve: Serve) -> None:
    class Provider:
        calls: ClassVar[list[Any]] = []

        def start_container(self, image: str, **kwargs: Any) -> str:
            self.calls.append((image, kwargs))
            return url

        def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
            self.calls.append(base_url)

        def stop_container(self) -> None:
            self.calls.append("stop")

    url = serve(count_app()).url
    with CountEnv.from_docker_image("count:latest", provider=Provider(), port=1) as client:
        client.reset()
    assert Provider.calls == [("count:latest", {"port": 1}), url, "stop"]


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with CountEnv(base_url="http://127.0.0.1:9", request_timeout_s=5) as client, pytest.raises(ConnectionError):
        client.reset()


def test_an_answer_without_a_code_is_a_server_error(serve: Serve) -> None:
    with CountEnv(base_url=serve(count_app(mode="production")).url) as client, pytest.raises(ServerError, match="404"):
        client.reset()


# -- clients that know nothing of sessions --------------------------------------------------------------------------


def test_a_cookie_keeping_client_continues_its_episode(serve: Serve) -> None:
    with http_calls.Client(base_url=serve(count_app()).url, trust_env=False) as http:
        assert http.post("/reset", json={}).json()["observation"]["total"] == 0
        for total in (2, 4, 6):
            body = {"action": {"amount": 2}, "timeout_s": 15}
            assert http.post("/step", json=body).json()["observation"]["total"] == total
        assert http.get("/state").json() == {"episode_id": None, "step_count": 3, "total": 6}
        assert http.post("/reset", json={}).json()["observation"]["total"] == 0
        assert http.get("/state").json()["step_count"] == 0


def test_two_cookie_keeping_clients_do_not_mix(serve: Serve) -> None:
    url = serve(count_app(max_concurrent_envs=2)).url
    with (
        http_calls.Client(base_url=url, trust_env=False) as one,
        http_calls.Client(base_url=url, trust_env=False) as two,
    ):
        for http in (one, two):
            http.post("/reset", json={})
        for http, amount in ((one, 1), (two, 10), (one, 1), (two, 10)):
            http.post("/step", json={"action": {"amount": amount}})
        assert [http.get("/state").json()["total"] for http in (one, two)] == [2, 20]


def test_a_cookie_never_keeps_another_client_out(serve: Serve) -> None:
    url = serve(count_app()).url
    with http_calls.Client(base_url=url, trust_env=False) as http, CountEnv(base_url=url) as client:
        http.post("/reset", json={})
        client.reset()  # takes the only slot
        assert client.step(CountAction(amount=2)).observation.total == 2
        lost = http.post("/step", json={"action": {"amount": 1}})
        assert (lost.status_code, lost.json()["code"]) == (410, "SESSION_LOST")
        assert http.post("/reset", json={}).status_code == 200


def test_a_client_without_cookies_gets_a_fresh_environment_for_each_call(serve: Serve) -> None:
    url = serve(count_app()).url
    call("POST", url + "/reset", {})
    for _ in range(2):
        body = {"action": {"amount": 2}, "timeout_s": 15}
        assert call("POST", url + "/step", body)["observation"]["total"] == 2
    assert call("GET", url + "/state")["step_count"] == 0
