"""A taskset of verifiers': write words backwards; one tool is no help."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["BackwardsTaskset"]

WORDS = ("tea", "salt", "bread")


class BackwardsData(vf.TaskData):  # type: ignore[misc]
    """The right answer."""

    answer: str


class BackwardsTask(vf.Task[BackwardsData]):  # type: ignore[misc]
    """Right or wrong; the word `crash` breaks the scoring."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Compare the last answer."""
        if trace.last_reply == "crash":
            raise RuntimeError("the scoring is broken")
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Count letters."""
        return float(len(trace.last_reply))


class BackwardsTaskset(vf.Taskset[BackwardsTask, vf.TasksetConfig]):  # type: ignore[misc]
    """A task for each word."""

    def load(self) -> Iterator[BackwardsTask]:
        """Yield the tasks."""
        for word in WORDS:
            data = BackwardsData(name=word, prompt=f"Write {word} backwards.", answer=word[::-1])
            yield BackwardsTask(data, self.config.task)
