import asyncio

from word_client import WordEnv
from word_env import WORDS, WordAction


async def episode(env: WordEnv, seed: int) -> float:
    await env.reset(seed=seed)
    for word in WORDS:
        result = await env.step(WordAction(guess=word))
        if result.done:
            break
    return float(result.reward or 0.0)


async def main() -> None:
    async with WordEnv(base_url="http://localhost:8000") as first:
        others = [first.new_session() for _ in range(15)]  # they close with the first
        rewards = await asyncio.gather(*(episode(env, seed) for seed, env in enumerate([first, *others])))
        print(f"{len(rewards)} episodes, mean reward {sum(rewards) / len(rewards)}")


asyncio.run(main())
