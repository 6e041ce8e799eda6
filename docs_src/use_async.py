import asyncio

from word_client import WordEnv
from word_env import WordAction


async def main() -> None:
    async with WordEnv(base_url="http://localhost:8000") as env:
        await env.reset(seed=5)
        result = await env.step(WordAction(guess="cable"))
        print(result.observation.marks)


asyncio.run(main())
