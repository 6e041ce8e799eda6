"""The package of `openenv init maze_env` with imports and methods that the published package has, too."""

from __future__ import annotations

from pathlib import Path

from openenv.cli.init import Names, write_package

RULES_WITH_STATE = '''\
"""The rules of Maze: how an episode begins, what a step does, what it pays."""

from __future__ import annotations

import uuid
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from maze_env.models import MazeAction, MazeObservation


class MazeEnvironment(Environment[MazeAction, MazeObservation, State]):
    """Repeats a message and pays for its length: a place to put rules of your own."""

    SUPPORTS_CONCURRENT_SESSIONS = True  # instances share nothing, so a server may hold many

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> MazeObservation:
        """Begin an episode. Draw all chance from `random.Random(seed)`, so that a seed gives the same episode again."""
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        return MazeObservation(reward=0.0, done=False)

    def step(self, action: MazeAction, timeout_s: float | None = None, **kwargs: Any) -> MazeObservation:
        """Do one step; set `done=True` in what you return when the episode has ended."""
        self._state.step_count += 1
        length = len(action.message)
        return MazeObservation(
            echoed_message=action.message,
            message_length=length,
            reward=min(1.0, length / 10),
            done=False,
        )

    @property
    def state(self) -> State:
        """The episode's name and its number of steps."""
        return self._state
'''
_CLIENT = '''\
"""The typed client: three short methods between your models and JSON."""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import State

from maze_env.models import MazeAction, MazeObservation


class MazeEnv(EnvClient[MazeAction, MazeObservation, State]):
    """Steps a served Maze environment."""

    def _step_payload(self, action: MazeAction) -> dict[str, Any]:
        return action.model_dump(mode="json", exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[MazeObservation]:
        reward, done = payload.get("reward"), bool(payload.get("done", False))
        fields = {**payload["observation"], "reward": reward, "done": done}
        observation = MazeObservation.model_validate(fields)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State.model_validate(payload)
'''
_IMPORTS = {
    "models.py": ("from openenv import Action", "from openenv.core.env_server.types import Action"),
    "server/app.py": ("from openenv import create_app", "from openenv.core.env_server.http_server import create_app"),
}


def write_portable_package(folder: Path) -> None:
    """Write it into a folder of that name."""
    write_package(Names.of("maze_env"), folder)
    (folder / "server" / "maze_env_environment.py").write_text(RULES_WITH_STATE, encoding="utf-8")
    (folder / "client.py").write_text(_CLIENT, encoding="utf-8")
    for name, (ours, portable) in _IMPORTS.items():
        text = (folder / name).read_text(encoding="utf-8")
        assert ours in text
        (folder / name).write_text(text.replace(ours, portable), encoding="utf-8")
