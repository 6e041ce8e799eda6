import tempfile
from pathlib import Path

from openenv import Action, Environment, LocalEnv, Observation, State


class Order(Action):
    item: str


class Receipt(Observation):
    orders: list[str]


class Shop(Environment[Order, Receipt, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    HAS_EXTERNAL_STATE = True  # the file

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name, "orders")
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Receipt:
        self._file.write_text("")
        self._state = State(episode_id=episode_id)
        return Receipt(orders=[])

    def step(self, action: Order, timeout_s: float | None = None, **kwargs: object) -> Receipt:
        self._file.write_text(f"{self._file.read_text()}{action.item}\n")
        self._state.step_count += 1
        return Receipt(orders=self._file.read_text().split())

    def snapshot(self) -> tuple[str, State]:
        return self._file.read_text(), self._state.model_copy()

    def restore(self, snapshot: tuple[str, State]) -> None:  # in another instance, or again in this one
        orders, state = snapshot
        self._file.write_text(orders)
        self._state = state.model_copy()

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        self._folder.cleanup()


env: LocalEnv[Order, Receipt, State] = LocalEnv(Shop)
with env.sync() as shop:
    shop.reset()
    shop.step(Order(item="tea"))
    (fork,) = shop.fork(1)
    print(fork.step(Order(item="cup")).observation.orders, shop.step(Order(item="pot")).observation.orders)
    fork.close()
