"""Scenarios of the server: requests, frames, values, and where an environment's code runs."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from typing import Any

from fastapi import FastAPI
from websockets.exceptions import InvalidStatus

from openenv.core.env_server.http_server import HTTPEnvServer, create_app
from openenv.core.env_server.types import Action, Observation

from .environment import Move, Seen, Watched
from .stage import PATIENCE_S, Socket, Stage, result, until


def app_of_my_own(factory: Any) -> FastAPI:
    """A user's own application with an environment's routes on it."""
    app = FastAPI()
    HTTPEnvServer(factory, Move, Seen).register_routes(app)
    return app


def http_episode(stage: Stage) -> str:
    """W1: reset, step, step and state over HTTP, by a client that keeps cookies."""
    server = stage.serve(stage.app())
    cookie = server.ask("POST", "/reset", {}).cookie
    counts = [server.ask("POST", "/step", {"action": {}}, Cookie=cookie).json["observation"]["count"] for _ in range(2)]
    state = server.ask("GET", "/state", Cookie=cookie).json
    return f"steps {counts}, state after step {state['step_count']}"


def slow_constructor(stage: Stage) -> str:
    """W2: one client's constructor hangs; does another client's `/health` answer?"""
    server = stage.serve(stage.app())
    stage.watch.hold("construct")
    stage.thread(lambda: server.ask("POST", "/reset", {}))
    assert until(lambda: stage.watch.count("construct") == 1)
    try:
        return f"/health answers {server.ask('GET', '/health', timeout_s=PATIENCE_S).status}"
    except TimeoutError:
        return "/health hangs"


def plain_requests_over_the_limit(stage: Stage) -> str:
    """W2: three plain requests at once to a server that allows one environment."""
    server = stage.serve(stage.app(max_concurrent_envs=1))
    stage.watch.hold("reset")
    for _ in range(3):
        stage.thread(lambda: server.ask("POST", "/reset", {}))
    until(lambda: stage.watch.alive == 3, 1)
    return f"{stage.watch.alive} alive"


def validator_over_websocket(stage: Stage) -> str:
    """W3: an action's own validator refuses."""
    one = stage.socket(stage.serve(stage.app()))
    return f"{result(one.step(word='bad'))}, then {result(one.step())}"


def validator_over_http(stage: Stage) -> str:
    """W3: the same in a request."""
    return str(stage.serve(stage.app()).ask("POST", "/step", {"action": {"word": "bad"}}).status)


def frame_that_is_no_object(stage: Stage) -> str:
    """W10: valid JSON, but an array."""
    one = stage.socket(stage.serve(stage.app()))
    return f"{result(one.ask('[1]'))}, then {result(one.step())}"


def thread_of_state(stage: Stage) -> str:
    """W11: on which thread is a session's state read?"""
    server = stage.serve(stage.app())
    one = stage.socket(server)
    one.step()
    one.ask({"type": "state"})
    if server.thread in stage.watch.threads("state"):
        return "on the event loop"
    return "on the session's thread" if len(stage.watch.threads("step", "state")) == 1 else "on some thread"


def factory_that_fails(stage: Stage) -> str:
    """W15: does the client learn why there is no environment?"""

    def factory() -> Watched:
        raise FileNotFoundError("no level file")

    refused = stage.socket(stage.serve(app_of_my_own(factory))).receive()
    return f"{result(refused)} {'with' if 'no level file' in str(refused) else 'without'} a reason"


def foreign_page(stage: Stage) -> str:
    """W16: a web page of another origin opens a WebSocket to a server on loopback."""
    server = stage.serve(stage.app())
    try:
        one: Socket = stage.socket(server, origin="https://elsewhere.example")
    except InvalidStatus as refused:
        return f"refused with {refused.response.status_code}"
    return f"let in: {result(one.ask({'type': 'reset'}))}"


def endless_body(stage: Stage) -> str:
    """W16: a request body that does not end."""
    server = stage.serve(stage.app())
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as peer:
        peer.sendall(b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n")
        block = bytes(1 << 20)
        try:
            for _ in range(110):
                peer.sendall(block)
            answer = peer.recv(64)
        except (BrokenPipeError, ConnectionResetError):
            return "refused"
        except TimeoutError:
            return "read on after 110 MB"
    return "refused" if b" 413 " in answer else answer.decode()


def observation_with_bytes(stage: Stage) -> str:
    """W22: a step whose observation holds an image's bytes, and the step after it."""

    class Camera(Watched):
        def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
            seen = super().step(action)
            return seen.model_copy(update={"payload": b"\x89PNG\xff"}) if action.number else seen

    one = stage.socket(stage.serve(stage.app(Camera)))
    first = result(one.step(number=1))
    return f"{first}, then step {one.step()['data']['observation']['count']}"


def reward_that_is_no_number(stage: Stage) -> str:
    """W22: a reward of NaN must not look like no reward."""

    class Broken(Watched):
        def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
            return Seen(reward=math.nan)

    reply = stage.socket(stage.serve(stage.app(Broken))).step()
    return f"reward {reply['data']['reward']}, {'reported' if 'nan' in str(reply) else 'nothing said'}"


def state_subclass(stage: Stage) -> str:
    """W23: the state's own field in `/state` and `/schema`, without saying `state_cls`."""
    server = stage.serve(stage.app())
    shown = "secret" in server.ask("GET", "/state").json
    described = "secret" in server.ask("GET", "/schema").json["state"]["properties"]
    return f"/state {'shows' if shown else 'drops'} it, /schema {'has' if described else 'misses'} it"


def factory_function(stage: Stage) -> str:
    """W24: how often is a function that makes environments called before anybody asks for one?"""
    app = create_app(lambda: Watched(stage.watch), Action, Observation, max_concurrent_envs=2)
    stage.serve(app)
    return f"called {stage.watch.count('construct')} times"


def one_thread_for_a_function(stage: Stage) -> str:
    """W24: the option for a single thread, when environments come from a function."""

    class Bound(Watched):
        REQUIRES_SINGLE_THREAD_EXECUTOR = True

    server = stage.serve(create_app(lambda: Bound(stage.watch), Move, Seen, max_concurrent_envs=3))
    for _ in range(3):
        stage.socket(server).step()
    return f"{len(stage.watch.threads('step'))} threads"


PROGRAM = """
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.types import Action, Observation
from pitfalls.environment import Watch, Watched

class Mine(Action):
    amount: int = 0

create_app(lambda: Watched(Watch()), Mine, Observation, env_name="mine")
"""


def action_class_in_main(stage: Stage) -> str:
    """W25: a program with its action class in itself, and the web page on."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "ENABLE_WEB_INTERFACE": "true"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return "starts" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
