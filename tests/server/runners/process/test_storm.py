"""A hundred sessions and workers that are killed at random: each goes on untouched or ends with the typed error."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from openenv.errors import EnvironmentFactoryError, SessionLost
from waiting import wait_until

pytestmark = pytest.mark.slow

SESSIONS = 100
EPISODES = 4
STEPS = 6
KILLS = 6


class Player:
    """Plays episodes in one session after another, and keeps what became of each."""

    def __init__(self, number: int, client: Any) -> None:
        self._number = number
        self._client = client
        self.outcomes: list[str] = []
        self.steps = 0
        self.thread = threading.Thread(target=self._play)

    def _play(self) -> None:
        for _ in range(EPISODES):
            try:
                self.outcomes.append(self._episode())
            except SessionLost as exc:
                self.outcomes.append(exc.reason)
            except EnvironmentFactoryError as exc:  # its process died while it was built in it
                self.outcomes.append("not built" if "died" in (exc.reason or "") else f"not built: {exc.reason}")
            except BaseException as exc:
                self.outcomes.append(repr(exc))

    def _episode(self) -> str:
        pid = self._client.reset().observation["pid"]
        for count in range(1, STEPS + 1):
            seen = self._client.step({"what": "look", "value": self._number}).observation
            if (seen["pid"], seen["count"], seen["value"]) != (pid, count, self._number):
                return f"mixed up: {seen}"
            self.steps += 1
        return "untouched"


def test_every_session_goes_on_untouched_or_is_lost_with_the_typed_error(
    perilous: Callable[..., Any],
    connect: Callable[..., Any],
    eventually: Callable[..., Any],
    kill: Callable[[int], None],
) -> None:
    server = perilous(sessions=SESSIONS, env_processes=4)
    players = [Player(number, connect(server)) for number in range(SESSIONS)]
    chance = random.Random(20)
    for player in players:
        player.thread.start()
    for number in range(1, KILLS + 1):
        enough = number * SESSIONS * EPISODES * STEPS // (KILLS * 3)
        wait_until(
            lambda enough=enough: (
                sum(player.steps for player in players) >= enough or not any(p.thread.is_alive() for p in players)
            ),
            120,
        )
        running = [worker.pid for worker in server.manager.runner.workers if worker.has_answered]
        if running:
            kill(chance.choice(running))
    for player in players:
        player.thread.join(100)
    outcomes = {outcome for player in players for outcome in player.outcomes}
    assert outcomes <= {"untouched", "worker crashed", "not built"}
    assert outcomes >= {"untouched", "worker crashed"}
    for player in players:
        player._client.close()
    eventually(lambda: server.manager.active == 0)
    # All slots are there again, and the workers are those that are kept.
    fresh = [connect(server) for _ in range(SESSIONS)]
    assert all(client.reset().observation["count"] == 0 for client in fresh)
    assert len(server.manager.runner.workers) == 4
