"""An environment of the Open Reward Standard: sums, with a tool that needs what setup opened."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from ors import Environment, ImageBlock, Split, TextBlock, ToolOutput, tool
from ors.types import ListToolsOutput, ToolSpec
from pydantic import BaseModel

TASKS = {"train": [(1, 2), (3, 4), (5, 6)], "test": [(7, 8)]}


class Answer(BaseModel):
    """What the agent answers."""

    answer: int


class Sums(Environment):  # type: ignore[misc]
    """Add two numbers."""

    ended: ClassVar[list[str]] = []

    @classmethod
    def list_splits(cls) -> list[Any]:
        return ["train", Split(name="test", type="test")]

    @classmethod
    async def list_tasks(cls, split: str) -> list[dict[str, int]]:
        await asyncio.sleep(0)
        return [{"one": one, "other": other} for one, other in TASKS[split]]

    async def setup(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tries = 0

    async def teardown(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.ended.append(str(self.task_spec))

    async def get_prompt(self) -> list[Any]:
        text = f"What is {self.task_spec['one']} + {self.task_spec['other']}?"
        return [TextBlock(text=text), ImageBlock(data="AAAA", mimeType="image/png")]

    def list_task_tools(self) -> Any:
        extra = [ToolSpec(name="peek", description="Look.", input_schema=None)] if self.task_spec["one"] == 3 else []
        return ListToolsOutput(tools=extra)

    @tool(shared=False)
    def peek(self) -> ToolOutput:
        """Look."""
        return ToolOutput(blocks=[TextBlock(text=str(self.task_spec["one"]))], reward=-0.5)

    @tool
    async def submit(self, params: Answer) -> ToolOutput:
        """Answer; the second try is the last."""
        assert asyncio.get_running_loop() is self.loop
        self.tries += 1
        right = params.answer == self.task_spec["one"] + self.task_spec["other"]
        text = "right" if right else "wrong"
        return ToolOutput(
            blocks=[TextBlock(text=text)],
            metadata={"tries": self.tries},
            reward=float(right),
            finished=right or self.tries > 1,
        )

    @tool
    def crash(self) -> ToolOutput:
        """Break."""
        raise RuntimeError("the disk is full")
