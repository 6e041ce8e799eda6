import asyncio

from tasks_env import WordTasks
from word_env import WordAction, WordObservation

from openenv import TaskClient, create_app
from openenv.rollout import Model
from openenv.testing import Script, ScriptedModel, Turn, serve
from openenv.train import play, shuffled


async def main(url: str, model: Model) -> None:
    with TaskClient(url) as tasks:
        print([split["name"] for split in tasks.splits()], tasks.num_tasks("train"))
        starts = shuffled(tasks.split("train"), seed=1, epochs=1)  # pages load lazily
        async with play(url, model, starts, samples=2, concurrency=4, max_turns=3) as stream:
            groups = [group async for group in stream]
    for group in sorted(groups, key=lambda group: group.start["index"]):
        print(group.start, group.rewards)


if __name__ == "__main__":
    script = Script(name="guesser", turns=[Turn(text="brick")], ending="apple")
    app = create_app(WordTasks, WordAction, WordObservation, max_concurrent_envs=8)
    with serve(app) as served, ScriptedModel(script) as scripted:
        asyncio.run(main(served.url, Model(**scripted.model())))
