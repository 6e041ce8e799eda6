import asyncio

from openenv.rollout import Model, Sampling, Task
from openenv.testing import ScriptedModel
from openenv.testing.scripted.agent_scripts import binary_search
from openenv.train import rollouts

INSTRUCTION = "Write a function binary_search(items, target) into binary_search.py."
CHECK = "python3 -c 'from binary_search import binary_search as b; assert b({items}, 5) == {place}'"
tasks = [
    Task(
        task_id=f"search-{place}",
        instruction=INSTRUCTION,
        setup=("git init -q",),
        verify=(CHECK.format(items=items, place=place),),
    )
    for items, place in (([1, 3, 5], 2), ([4, 5, 6, 7], 1))
]


async def main(model: Model) -> None:
    async with rollouts(tasks, samples=2, concurrency=2, agent="opencode", model=model) as stream:
        async for group in stream:
            batch = group.collate()  # batch.torch("cuda") makes tensors of it
            print(group.name, group.rewards, len(batch), batch.n_tokens)
        print(stream.counts.failed, "failed")


if __name__ == "__main__":
    with ScriptedModel(binary_search()) as scripted:  # or a real one: Model(base_url=..., name=..., api_key=...)
        asyncio.run(main(Model(**scripted.model(), sampling=Sampling(temperature=1.0))))
