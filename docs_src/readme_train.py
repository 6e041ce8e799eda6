import asyncio

from openenv.rollout import Model
from openenv.testing import Script, ScriptedModel, Turn, serve
from openenv.train import collate, play


# region: train
async def train(url: str, model: Model) -> None:
    async with play(url, model, starts=[1, 2, 3, 4], samples=4, in_order=True) as stream:
        async for group in stream:
            batch = collate([group], "grpo")  # tokens, masks, log-probabilities, advantages
            print(group.name, group.rewards, batch.n_tokens)
            # update(policy, batch.torch("cuda")): your optimizer step


# endregion
if __name__ == "__main__":
    import pathlib
    import sys

    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    from guess import GuessTheNumber

    script = Script(name="guesser", turns=[Turn(text='{"number": 3}')], ending='{"number": 1}')
    with serve(GuessTheNumber) as served, ScriptedModel(script) as scripted:
        asyncio.run(train(served.url, Model(**scripted.model())))
