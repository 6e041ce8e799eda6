"""Requests made up from the OpenAPI document: none is answered with an undocumented server error, and what is answered
fits the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

import http_calls
from environments import Idle
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.types import Action, Observation, State
from servers import Serve

pytestmark = pytest.mark.slow


class Go(Action):
    """A move on the grid."""

    dx: int = 0
    dy: int = 0
    note: str | None = None


class View(Observation):
    """Where one is."""

    x: int = 0
    y: int = 0
    note: str | None = None


class Place(State):
    """The same, as state."""

    x: int = 0
    y: int = 0


class Grid(Idle):
    """A grid without walls, with two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.y = self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> View:
        self.x = self.y = self.count = 0
        return View()

    def step(self, action: Go, timeout_s: float | None = None, **kwargs: Any) -> View:
        self.x, self.y, self.count = self.x + action.dx, self.y + action.dy, self.count + 1
        return View(x=self.x, y=self.y, note=action.note, reward=-1.0, metadata=action.metadata)

    @property
    def state(self) -> Place:
        return Place(x=self.x, y=self.y, step_count=self.count)

    def list_splits(self) -> list[Any]:
        return ["train", "odd"]

    def list_tasks(self, split: str) -> list[Any]:
        return [{"goal": [1, 2]}, {"goal": [0, 0]}] if split == "train" else []

    def num_tasks(self, split: str) -> int:
        return len(self.list_tasks(split))

    def get_task(self, split: str, index: int) -> Any:
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return self.list_tasks(split)[start:stop]


class Bare(Grid):
    """The same without tasks."""

    list_splits = list_tasks = num_tasks = get_task = get_task_range = None  # type: ignore[assignment]


OPERATIONS = [
    "POST /reset",
    "POST /step",
    "GET /state",
    "DELETE /sessions/{session_id}",
    "GET /metadata",
    "GET /health",
    "GET /schema",
    "POST /mcp",
    "GET /list_environments",
    "GET /{env_name}/splits",
    "POST /{env_name}/tasks",
    "POST /{env_name}/num_tasks",
    "POST /{env_name}/task",
    "POST /{env_name}/task_range",
]


def operations(url: str) -> Iterator[Any]:
    """Every operation in a server's document."""
    import schemathesis  # takes as long as collecting a thousand tests, which need not wait for it

    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        yield found.ok()


@pytest.mark.parametrize("env_cls", [Grid, pytest.param(Bare, marks=pytest.mark.slow)])
def test_made_up_requests_find_no_undocumented_server_error(serve: Serve, env_cls: type[Any]) -> None:
    """W2, W3: valid and invalid requests alike are answered as the document says, and the server lives on."""
    server = serve(create_app(env_cls, Go, View, env_name="grid", max_concurrent_envs=4))
    tried = []
    for operation in operations(server.url):
        tried.append(operation.label)
        try_operation(operation, "positive", server.url)
        if "requestBody" in operation.definition.raw:  # without one there is nothing to get wrong
            try_operation(operation, "negative", server.url)
    assert set(OPERATIONS) <= set(tried)
    server.wait_for(lambda: not server.manager.slots._once)


def try_operation(operation: Any, mode: str, url: str) -> None:
    """Send what the document allows ("positive"), or what it does not ("negative"), to one operation."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance

    documented = {str(status) for status in operation.definition.raw["responses"]}

    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    @settings(max_examples=25)
    def attempt(case: Any) -> None:
        if "env_name" in (case.path_parameters or {}) and case.path_parameters["env_name"] != "":
            case.path_parameters["env_name"] = "grid"
        response = case.call(base_url=url)
        if response.status_code == 201:  # a session: it would take the slot of the next
            http_calls.delete(f"{url}/sessions/{response.json()['session_id']}", trust_env=False)
        if response.status_code >= 500:
            assert str(response.status_code) in documented, (case.as_curl_command(), response.text)
            assert response.status_code == 501, (case.as_curl_command(), response.text)  # this one never fails
        if response.status_code == 200:
            case.validate_response(response, checks=[response_schema_conformance, not_a_server_error])

    attempt()
