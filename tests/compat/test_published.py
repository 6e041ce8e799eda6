"""Both directions against the published package: its clients on our server, our clients on its server, and what the two
servers say to the same frames and requests.

The differences on purpose: no `url` in validation errors, own wording after `Invalid JSON:` and in schema descriptions,
a session that outlives a frame that is no object, and further routes, tags and documented statuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from websockets.sync.client import connect

import http_calls
from program_interpreters import Interpreter

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

MANY = {"MAX_CONCURRENT_ENVS": "64"}
ONE = {"MAX_CONCURRENT_ENVS": "1"}
BROKEN = {"COUNTER_IS_BROKEN": "1"}


@dataclass(frozen=True)
class Pair:
    """A client of one package and servers of the other."""

    play: Callable[..., list[Any]]
    serve: Callable[..., str]

    def __call__(self, calls: list[list[Any]], settings: dict[str, str] | None = None, **how: str) -> list[Any]:
        return self.play(self.serve(**(MANY if settings is None else settings)), calls, **how)


@pytest.fixture(
    params=[
        "published on ours (serve)",
        "published on ours (uvicorn)",
        pytest.param("ours on published", marks=pytest.mark.slow),
    ]
)
def pair(request: pytest.FixtureRequest, ours: Interpreter, published: Interpreter, server: Any, peer: Any) -> Pair:
    """Each way to put the two packages together."""
    if request.param == "ours on published":
        return Pair(peer(ours).play, lambda **settings: server(published, **settings).url)
    how = "serve" if "serve" in request.param else "uvicorn"
    return Pair(peer(published).play, lambda **settings: server(ours, how, **settings).url)


@pytest.fixture(params=["async", "sync"])
def use(request: pytest.FixtureRequest) -> str:
    """Clients with `await` and with `.sync()`."""
    how: str = request.param
    return how


def error(outcome: Any) -> str:
    """The text of an outcome that must be a RuntimeError."""
    assert "RuntimeError" in outcome["raised"], outcome
    text: str = outcome["text"]
    return text


# -- clients of one, servers of the other ---------------------------------------------------------------------------


def test_a_typed_client_plays_an_episode(pair: Pair, use: str) -> None:
    begun, first, state, second, total = pair(
        [
            ["a", "reset", {"seed": 7, "episode_id": "e-1", "start": 3}],
            ["a", "step", {"amount": 5}],
            ["a", "state", None],
            ["a", "step", {"amount": 2}],
            ["a", "add_all", [1, -4]],
        ],
        use=use,
    )
    assert (begun["observation"]["total"], begun["observation"]["seed"], begun["reward"]) == (3, 7, None)
    assert begun["observation"]["metadata"] == {"extra": ["start"]}
    assert (first["observation"]["total"], first["reward"], first["done"]) == (8, 2.5, False)
    assert state == {"episode_id": "e-1", "step_count": 1, "total": 8, "amounts": [5]}
    assert (second["observation"]["total"], second["reward"], second["done"]) == (10, 1.0, True)
    assert total == 7


def test_a_generic_client_plays_an_episode(pair: Pair, use: str) -> None:
    before, begun, first, state = pair(
        [
            ["a", "state", None],
            ["a", "reset", {"seed": 7, "episode_id": "e-2"}],
            ["a", "step", {"amount": 5, "metadata": {"k": [1]}}],
            ["a", "state", None],
        ],
        client="generic",
        use=use,
    )
    assert before == {"episode_id": None, "step_count": 0, "total": 0, "amounts": []}
    assert begun["metadata"] == {"extra": []}
    assert begun["observation"] == {"metadata": {"extra": []}, "total": 0, "seed": 7, "note": "—"}
    assert first == {
        "observation": {"metadata": {}, "total": 5, "seed": 7, "note": "—"},
        "reward": 2.5,
        "done": False,
        "metadata": None,
    }
    assert state == {"episode_id": "e-2", "step_count": 1, "total": 5, "amounts": [5]}


def test_refused_actions_and_a_failing_environment_leave_the_episode_as_it_is(pair: Pair, use: str) -> None:
    _, too_much, no_number, failed, after = pair(
        [
            ["a", "reset", {}],
            ["a", "step", {"amount": 500}],
            ["a", "step", {"amount": "x"}],
            ["a", "step", {"amount": 1, "fail": "no luck"}],
            ["a", "step", {"amount": 1}],
        ],
        client="generic",
        use=use,
    )
    for refused in (error(too_much), error(no_number)):
        assert refused.startswith("Server error: Invalid message")
        assert refused.endswith("(code: VALIDATION_ERROR)")
    assert error(failed) == "Server error: no luck (code: EXECUTION_ERROR)"
    assert after["observation"]["total"] == 1


def test_a_second_client_meets_a_full_server(pair: Pair, use: str) -> None:
    calls = [
        ["a", "reset", {"seed": 1}],
        ["b", "reset", {}],
        ["a", "step", {"amount": 1}],
        ["a", "close", None],
    ]
    for _ in range(50):  # the slot of an earlier script may still be coming free
        begun, refused, step, _ = pair(calls, ONE, use=use)
        if "raised" not in begun:
            break
    message = error(refused)
    assert message.startswith("Server error: Server at capacity: 1/1 sessions active. Cannot accept new connections.")
    assert message.endswith("(code: CAPACITY_REACHED)")
    assert step["observation"]["total"] == 1


def test_a_factory_that_fails_is_reported_to_the_client(pair: Pair, use: str) -> None:
    _, refused = pair([["a", "connect", None], ["a", "reset", {}]], BROKEN, use=use)
    assert error(refused).startswith(
        "Server error: Environment factory 'CounterEnvironment' failed to create instance."
    )
    assert error(refused).endswith("(code: FACTORY_ERROR)")


def test_a_client_can_be_used_again_after_close_and_after_disconnect(pair: Pair, use: str) -> None:
    outcomes = pair(
        [
            ["a", "reset", {"seed": 1}],
            ["a", "close", None],
            ["a", "reset", {"seed": 2}],
            ["a", "step", {"amount": 2}],
            ["a", "disconnect", None],
            ["a", "connect", None],
            ["a", "reset", {"seed": 3}],
            ["a", "step", {"amount": 4}],
        ],
        use=use,
    )
    assert [outcomes[i]["observation"]["seed"] for i in (0, 2, 3, 6, 7)] == [1, 2, 2, 3, 3]
    assert [outcomes[i]["observation"]["total"] for i in (3, 7)] == [2, 4]


def test_many_clients_of_one_server_do_not_mix(pair: Pair, use: str) -> None:
    names = [f"c{i}" for i in range(6)]
    calls = [[name, "reset", {"start": i}] for i, name in enumerate(names)]
    calls += [[name, "step", {"amount": 10}] for name in names]
    outcomes = pair(calls, use=use)[len(names) :]
    assert [outcome["observation"]["total"] for outcome in outcomes] == [10, 11, 12, 13, 14, 15]


# -- the same frames to both servers --------------------------------------------------------------------------------

FRAMES = [
    {"type": "state"},
    {"type": "reset"},
    {"type": "reset", "data": {"seed": -5, "episode_id": "x", "start": 2, "action": 1}},
    {"type": "reset", "data": None},
    {"type": "reset", "data": []},
    {"type": "step", "data": {"amount": 3}},
    {"type": "step", "data": {"amount": 3, "metadata": {"k": 1}}},
    {"type": "step", "data": {"amount": "7"}},
    {"type": "step", "data": {"amount": 1000}},
    {"type": "step", "data": {"amount": "x"}},
    {"type": "step", "data": {"amount": 1, "extra": 1}},
    {"type": "step", "data": {"amount": 1, "fail": "boo ✓"}},
    {"type": "step", "data": {}},
    {"type": "step", "data": "x"},
    {"type": "step"},
    {"type": "step", "data": {"amount": 1}, "timeout_s": 2},
    {"type": "state", "data": {}},
    {"type": "nope"},
    {"type": 5},
    {},
    "not json",
    "",
    {"type": "mcp", "data": {"jsonrpc": "2.0", "method": "tools/list", "id": 1}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "method": "tools/call", "params": {}, "id": "a"}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "method": "nope"}},
    {"type": "mcp", "data": {"method": "nope", "id": 2}},
    {"type": "mcp"},
    {"type": "reset", "data": {"seed": 1}},
    {"type": "state"},
]
IDENTICAL = {"observation", "state"}


def converse(url: str, frames: list[Any]) -> tuple[list[str], int | None]:
    """Send frames, return the replies and the code of the close that a `close` frame brings about."""
    with connect("ws" + url.removeprefix("http") + "/ws", proxy=None) as ws:
        replies = []
        for frame in frames:
            ws.send(frame if isinstance(frame, str) else json.dumps(frame))
            replies.append(str(ws.recv(20)))
        ws.send('{"type": "close"}')
        for _ in ws:
            raise AssertionError("there is no reply to a close frame")
        return replies, ws.close_code


def comparable(value: Any) -> Any:
    """Take out what differs on purpose."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: comparable(item) for key, item in value.items() if key not in ("url", "description")}
    message = kept.get("message")
    if isinstance(message, str) and message.startswith("Invalid JSON:"):
        kept["message"] = "Invalid JSON:"
    if kept.get("code") in (-32600, -32700):
        kept["message"] = ""
    return kept


@pytest.mark.slow_but_for("serve")
@pytest.mark.parametrize("how", ["uvicorn", "serve"])
def test_both_servers_answer_each_frame_alike(ours: Interpreter, published: Interpreter, server: Any, how: str) -> None:
    expected, expected_code = converse(server(published, **MANY).url, FRAMES)
    got, code = converse(server(ours, how, **MANY).url, FRAMES)
    assert code == expected_code == 1000
    for frame, theirs, mine in zip(FRAMES, expected, got, strict=True):
        assert comparable(json.loads(mine)) == comparable(json.loads(theirs)), frame
        if json.loads(theirs)["type"] in IDENTICAL:
            assert mine == theirs, frame


def refusal(url: str) -> tuple[dict[str, Any], int | None]:
    """Connect and return the error frame that comes unasked, with the code of the close after it."""
    with connect("ws" + url.removeprefix("http") + "/ws", proxy=None) as ws:
        frame = json.loads(ws.recv(20))
        for _ in ws:
            raise AssertionError("only one frame was expected")
        return frame, ws.close_code


@pytest.mark.slow
@pytest.mark.parametrize("how", ["uvicorn", "serve"])
def test_both_servers_refuse_alike_when_the_factory_fails(
    ours: Interpreter, published: Interpreter, server: Any, how: str
) -> None:
    expected, expected_code = refusal(server(published, **BROKEN).url)
    frame, code = refusal(server(ours, how, **BROKEN).url)
    assert code == expected_code == 1000
    assert frame["data"].items() >= expected["data"].items()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["uvicorn", "serve"])
def test_both_servers_refuse_alike_when_they_are_full(
    ours: Interpreter, published: Interpreter, server: Any, how: str
) -> None:
    refusals = []
    for url in (server(published, **ONE).url, server(ours, how, **ONE).url):
        for _ in range(200):  # the slot of an earlier test may still be coming free
            with connect("ws" + url.removeprefix("http") + "/ws", proxy=None) as first:
                first.send('{"type": "reset"}')
                if json.loads(first.recv(20))["type"] == "observation":
                    refusals.append(refusal(url))
                    break
    assert len(refusals) == 2
    assert refusals[0] == refusals[1]


# -- the same requests to both servers ------------------------------------------------------------------------------

REQUESTS = [
    ("POST", "/reset", None),
    ("POST", "/reset", {}),
    ("POST", "/reset", {"seed": 3, "episode_id": "q", "start": 4}),
    ("POST", "/reset", {"seed": None, "action": 1}),
    ("POST", "/reset", {"seed": -1}),
    ("POST", "/reset", {"seed": "x"}),
    ("POST", "/reset", {"seed": "3"}),
    ("POST", "/reset", {"seed": 1.5}),
    ("POST", "/reset", {"episode_id": "x" * 256}),
    ("POST", "/reset", {"episode_id": 7}),
    ("POST", "/step", {"action": {"amount": 2}, "timeout_s": 3, "request_id": "r", "more": [1]}),
    ("POST", "/step", {"action": {"amount": 20}}),
    ("POST", "/step", {"action": {"amount": 1000}}),
    ("POST", "/step", {"action": {}}),
    ("POST", "/step", {"action": {"amount": 1, "fail": "boo"}}),
    ("POST", "/step", {"action": {"amount": 1}, "timeout_s": 0}),
    ("POST", "/step", {"action": {"amount": 1}, "request_id": "x" * 256}),
    ("POST", "/step", {}),
    ("POST", "/step", None),
    ("GET", "/state", None),
    ("GET", "/metadata", None),
    ("GET", "/health", None),
    ("GET", "/schema", None),
    ("GET", "/reset", None),
    ("POST", "/health", None),
    ("GET", "/mcp", None),
    ("POST", "/mcp", {"jsonrpc": "2.0", "method": "tools/list", "id": 1}),
    ("POST", "/mcp", {"jsonrpc": "2.0", "method": "tools/call", "id": 1}),
    ("POST", "/mcp", {"jsonrpc": "2.0", "method": "initialize", "id": 1}),
    ("POST", "/mcp", {"jsonrpc": "2.0", "method": "ping"}),
    ("POST", "/mcp", {"method": "initialize", "id": 1}),
    ("POST", "/mcp", [1]),
    ("GET", "/list_environments", None),
    ("GET", "/Counter_Env/splits", None),
    ("GET", "/nobody/splits", None),
    ("POST", "/counter_env/tasks", {"split": "train"}),
    ("POST", "/counter_env/tasks", {"split": "train", "more": 1}),
    ("POST", "/counter_env/num_tasks", {"split": "train"}),
    ("POST", "/counter_env/task", {"split": "train"}),
    ("POST", "/counter_env/task", {"split": "train", "index": 0}),
    ("POST", "/counter_env/task_range", {"split": "train", "start": 1}),
    ("GET", "/", None),
    ("GET", "/web", None),
    ("GET", "/docs", None),
    ("GET", "/redoc", None),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_both_servers_answer_each_request_alike(
    ours: Interpreter, published: Interpreter, server: Any, method: str, path: str, body: Any
) -> None:
    theirs, mine = (
        http_calls.request(method, server(which, **MANY).url + path, json=body, trust_env=False)
        for which in (published, ours)
    )
    assert mine.status_code == theirs.status_code, mine.text
    assert mine.headers["content-type"] == theirs.headers["content-type"]
    if "json" not in theirs.headers["content-type"]:
        assert mine.text == theirs.text
        return
    if path == "/metadata":  # ours describes a class by its docstring
        assert {**mine.json(), "description": ""} == {**theirs.json(), "description": ""}
        return
    assert comparable(mine.json()) == comparable(theirs.json())
    if path in ("/reset", "/step", "/state", "/health") and mine.status_code == 200:
        assert mine.content == theirs.content


@pytest.mark.parametrize("path", ["/reset", "/step"])
@pytest.mark.parametrize("content", ["[1]", "null", '"x"', "{", '{"action": 3}', '{"seed": {}}'])
def test_both_servers_refuse_other_bodies_with_the_same_shape(
    ours: Interpreter, published: Interpreter, server: Any, path: str, content: str
) -> None:
    theirs, mine = (
        http_calls.post(
            server(which, **MANY).url + path,
            content=content,
            headers={"content-type": "application/json"},
            trust_env=False,
        )
        for which in (published, ours)
    )
    assert mine.status_code == theirs.status_code, mine.text
    if mine.status_code == 422:
        assert [error["loc"][0] for error in mine.json()["detail"]] == ["body"]
        assert set(mine.json()["detail"][0]) >= {"type", "loc", "msg", "input"}


def test_the_api_document_has_the_published_paths_with_their_methods_tags_and_statuses(
    ours: Interpreter, published: Interpreter, server: Any
) -> None:
    theirs, mine = (
        http_calls.get(server(which, **MANY).url + "/openapi.json", trust_env=False).json()
        for which in (published, ours)
    )
    assert mine["info"]["title"] == theirs["info"]["title"]
    assert mine["info"]["version"] == theirs["info"]["version"] == "1.0.0"
    for path, operations in theirs["paths"].items():
        for method, operation in operations.items():
            own = mine["paths"][path][method]
            assert set(operation.get("tags", [])) <= set(own["tags"]), path
            assert set(operation["responses"]) <= set(own["responses"]), path
    assert {tag["name"] for tag in theirs["tags"]} <= {tag["name"] for tag in mine["tags"]}
    assert set(theirs["components"]["schemas"]) <= set(mine["components"]["schemas"])


def test_only_ours_keeps_the_session_after_a_frame_that_is_no_object(ours: Interpreter, server: Any) -> None:
    replies, _ = converse(server(ours, **MANY).url, [{"type": "reset", "data": {"start": 6}}, "[1]", {"type": "state"}])
    assert json.loads(replies[1])["data"]["code"] == "INVALID_JSON"
    assert json.loads(replies[2])["data"]["total"] == 6
