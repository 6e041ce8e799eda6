from __future__ import annotations

import asyncio
from typing import Any

from openenv.core.rubrics import LLMJudge


class CannedModel:
    """Stands for a model; a client needs this one method."""

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        return "The answer is polite and correct. Score: 8/10"


judge = LLMJudge("Rate this answer.\nAnswer: {action}", client=CannedModel())


async def main() -> None:
    print(await judge.acall("You are welcome.", None))


asyncio.run(main())
