"""Steps of a batch run together while calls are timed too, and each of them is counted with its own times."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest
from websockets.sync.client import connect

from environments import Idle
from openenv.server.app import create_fastapi_app
from openenv.server.sessions.group import StepGroup
from openenv.types import Action, Observation
from servers import Serve

SESSIONS, BATCHES = 5, 3


class Wait(Action):
    """Do nothing."""


class Still(Idle):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True

    def step(self, action: Wait, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(reward=1.0)


def counted(url: str) -> dict[str, int]:
    """How many steps have been timed, by phase."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    pattern = r'openenv_call_seconds_count\{operation="step",phase="(\w+)"\} (\d+)'
    return {phase: int(count) for phase, count in re.findall(pattern, text)}


@pytest.mark.parametrize("runner", ["thread", "inline"])
def test_each_step_of_a_batch_is_timed(serve: Serve, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    sizes: list[int] = []
    run = StepGroup.run

    def noting(group: StepGroup) -> None:
        sizes.append(group.count)
        run(group)

    monkeypatch.setattr(StepGroup, "run", noting)
    url = serve(create_fastapi_app(Still, Wait, Observation, max_concurrent_envs=8, runner=runner)).url
    assert not any(counted(url).values())
    socket_url = url.replace("http", "ws", 1) + "/ws"
    with connect(socket_url, subprotocols=["openenv.v2.json"], proxy=None) as socket:  # type: ignore[list-item]

        def ask(message: dict[str, Any]) -> dict[str, Any]:
            socket.send(json.dumps(message))
            return dict(json.loads(socket.recv(timeout=20)))

        names = [ask({"type": "open", "id": number + 1})["session"] for number in range(SESSIONS)]
        for number in range(1, BATCHES + 1):
            steps = [{"type": "step", "id": number, "session": name, "data": {}} for name in names]
            assert len(ask({"type": "batch", "id": number, "requests": steps})["replies"]) == SESSIONS
    assert sizes == [SESSIONS] * BATCHES
    assert counted(url) == dict.fromkeys(("wait", "run", "reply"), SESSIONS * BATCHES)
