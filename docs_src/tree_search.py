from openenv import Action, Environment, LocalEnv, Observation, State
from openenv.server.local import SyncLocalEnv


class Turn(Action):
    face: int


class Dial(Observation):
    numbers: list[int]


class Lock(Environment[Turn, Dial, State]):
    """Turning a face moves it and the next one; the lock opens when all numbers are the same."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._numbers = [0, 0, 0]
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Dial:
        self._numbers = [(seed or 0) % 4, 2, 3]
        self._state = State(episode_id=episode_id)
        return Dial(numbers=self._numbers)

    def step(self, action: Turn, timeout_s: float | None = None, **kwargs: object) -> Dial:
        for face in (action.face, (action.face + 1) % 3):
            self._numbers[face] = (self._numbers[face] + 1) % 4
        self._state.step_count += 1
        is_open = len(set(self._numbers)) == 1
        return Dial(numbers=self._numbers, reward=float(is_open), done=is_open)

    @property
    def state(self) -> State:
        return self._state


def search(root: SyncLocalEnv[Turn, Dial, State], depth: int) -> list[int] | None:
    """Return the moves that open the lock: each branch runs in a fork of the environment."""
    frontier: list[tuple[list[int], SyncLocalEnv[Turn, Dial, State]]] = [([], root)]
    for _ in range(depth):
        branches = []
        for moves, node in frontier:
            for face, branch in enumerate(node.fork(3)):
                result = branch.step(Turn(face=face))
                branches.append(([*moves, face], branch))
                if result.done:
                    return branches[-1][0]
            if node is not root:
                node.close()  # its branches remain
        frontier = branches
    return None


env: LocalEnv[Turn, Dial, State] = LocalEnv(Lock)
with env.sync() as root:
    root.reset(seed=1)
    print(search(root, depth=4), root.state().step_count)
