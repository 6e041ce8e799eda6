import asyncio

from word_client import WordEnv
from word_env import WORDS, WordAction


async def main() -> None:
    async with WordEnv(base_url="http://localhost:8000") as env:
        await env.reset(seed=5)
        forks = await env.fork(len(WORDS))  # or env.sync().fork(6)
        results = [await fork.step(WordAction(guess=word)) for fork, word in zip(forks, WORDS, strict=True)]
        print([result.reward for result in results], (await env.state()).step_count)
        for fork in forks:
            await fork.close()


asyncio.run(main())
