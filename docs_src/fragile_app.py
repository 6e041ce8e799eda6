import os

from openenv import Action, Environment, Observation, State, create_app


class Press(Action):
    button: str


class Console(Environment[Press, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Observation:
        self._state = State(episode_id=episode_id)
        return Observation()

    def step(self, action: Press, timeout_s: float | None = None, **kwargs: object) -> Observation:
        if action.button == "red":
            os.abort()  # as a C library does after an internal error
        self._state.step_count += 1
        return Observation(reward=1.0)

    @property
    def state(self) -> State:
        return self._state


app = create_app(Console, Press, Observation, max_concurrent_envs=64, runner="process")
