import asyncio

from opencode_env import OpenCodeEnv

NEVER = {"turns": [{"failures": [{"kind": "hang", "attempts": None}]}]}


async def main() -> None:
    async with OpenCodeEnv(base_url="http://localhost:8000") as env:
        rollout = env.run_rollout(endpoint="scripted", script=NEVER, instruction="Wait.")
        try:
            await asyncio.wait_for(rollout, timeout=5)
        except asyncio.TimeoutError:
            print("ended, and its sandbox with it")


asyncio.run(main())
