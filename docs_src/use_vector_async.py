import asyncio

from openenv import AsyncVectorEnv


async def main() -> None:
    async with AsyncVectorEnv("http://localhost:8000", 16) as envs:
        await envs.reset(seed=0)
        result = await envs.step([{"guess": "apple"}] * 16)
        print(len(result))


asyncio.run(main())
