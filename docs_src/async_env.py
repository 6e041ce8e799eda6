import asyncio

from openenv import Action, Environment, LocalEnv, Observation, State


class Question(Action):
    text: str


class Oracle(Environment[Question, Observation, State]):
    """Waits for something slow, without holding a thread."""

    async def reset(self, **kwargs):
        return Observation()

    async def step(self, action, **kwargs):
        await asyncio.sleep(0.01)  # a model, a database, a browser
        return Observation(reward=1.0, metadata={"answer": action.text.upper()})


if __name__ == "__main__":
    with LocalEnv(Oracle).sync() as env:
        env.reset()
        print(env.step(Question(text="why?")).metadata, env.state().step_count)
