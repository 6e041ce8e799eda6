import asyncio

from openenv import Action, Environment, Observation, State, create_app
from openenv.rollout import Model
from openenv.testing import Script, ScriptedModel, Turn, serve
from openenv.train import collate, play


class Answer(Action):
    text: str


class Hint(Observation):
    text: str = ""


class Riddle(Environment[Answer, Hint, State]):
    """What has keys and opens no lock?"""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Hint:
        self._state = State(episode_id=episode_id)
        return Hint(text="What has keys and opens no lock?")

    def step(self, action: Answer, timeout_s: float | None = None, **kwargs: object) -> Hint:
        self._state.step_count += 1
        right = "piano" in action.text.lower()
        return Hint(text="No. Try again.", reward=float(right), done=right or self._state.step_count == 3)

    @property
    def state(self) -> State:
        return self._state


async def main(url: str, model: Model) -> None:
    async with play(url, model, starts=[1, 2, 3], samples=4, concurrency=12, system="Answer in one word.") as stream:
        groups = [group async for group in stream]
    batch = collate(groups, "grpo")  # batch.torch("cuda") makes tensors of it
    for group in sorted(groups, key=lambda group: group.name):  # groups arrive as they end
        print(group.name, group.rewards)
    print(len(batch), "sequences,", batch.n_tokens, "tokens to train on")


if __name__ == "__main__":
    script = Script(name="guesser", turns=[Turn(text="A keyring.")], ending="A piano.")
    app = create_app(Riddle, Answer, Hint, max_concurrent_envs=16)
    with serve(app) as served, ScriptedModel(script) as scripted:  # or any chat completions endpoint
        asyncio.run(main(served.url, Model(**scripted.model())))
