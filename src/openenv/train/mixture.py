"""`Mixture`: several streams as one, with groups in the shares of their weights.

    async with play(url, model, seeds, ...) as games, rollouts(tasks, ...) as coding:
        mixture = Mixture({"games": games, "coding": coding}, weights={"games": 3, "coding": 1})
        groups = await mixture.take(16)                # 12 of games, 4 of coding

Shares depend on weights only, never on speed: a slow environment is waited for, like a slow task of one stream.
"""

# Which stream is next: the one whose next group is due first, at (groups taken + 1) / weight.
#
#   games 3    due at 1/3 2/3 1 | 4/3 ...       taken: games games games coding | games ...
#   coding 1   due at 1         | 2 ...         With equal times, the first stream. Each 4 groups have 3 and 1.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from .groups import SampleGroup
from .items import FORMAT
from .stream import GroupStream


class Mixture:
    """Several streams as one. The streams stay open as long as their own `async with` blocks.

    The groups of a mixture name their stream as `group.source`. All streams work at the same time, each with its own
    `concurrency`. The mixture ends with the first stream that ends, because the shares could not be kept without it.

    Args:
        streams: The streams by name.
        weights: The weight of each stream; by default their `groups_per_update`, or equal weights.

    Raises:
        ValueError: A stream has no positive weight, a weight has no stream, or the weights differ from the ratio of
            `groups_per_update`, which would make the streams wait for each other forever.
    """

    def __init__(self, streams: Mapping[str, GroupStream[Any]], weights: Mapping[str, float] | None = None) -> None:
        if not streams:
            raise ValueError("a mixture needs at least one stream")
        self.streams = dict(streams)
        paces = {name: stream.options.groups_per_update for name, stream in streams.items()}
        chosen = weights if weights is not None else {name: pace or 1 for name, pace in paces.items()}
        if set(chosen) != set(streams):
            raise ValueError(f"the weights are for {', '.join(chosen)}, the streams are {', '.join(streams)}")
        if not all(0 < weight < float("inf") for weight in chosen.values()):
            raise ValueError("every weight must be above 0 and finite")
        self.weights = {name: Fraction(weight).limit_denominator(1_000_000) for name, weight in chosen.items()}
        ratios = {self.weights[name] / pace for name, pace in paces.items() if pace is not None}
        if len(ratios) > 1:
            raise ValueError("the weights must have the ratio of groups_per_update; leave weights out, or change one")
        self.taken = dict.fromkeys(streams, 0)
        """The number of groups from each stream."""

    def __aiter__(self) -> Mixture:
        return self

    async def __anext__(self) -> SampleGroup:
        # Every stream works, also those whose groups are not due yet.
        await asyncio.gather(*(stream.start() for stream in self.streams.values()))
        name = min(self.streams, key=lambda each: (self.taken[each] + 1) / self.weights[each])
        group = await anext(self.streams[name])
        self.taken[name] += 1
        return replace(group, source=name)

    async def take(self, count: int) -> list[SampleGroup]:
        """Return the next `count` groups, fewer if a stream ends."""
        groups: list[SampleGroup] = []
        while len(groups) < count and (group := await anext(self, None)) is not None:
            groups.append(group)
        return groups

    @property
    def policy_version(self) -> int:
        """The version that is being trained. Set it after each update of the weights: it is set in all streams."""
        return max(stream.policy_version for stream in self.streams.values())

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        for stream in self.streams.values():
            stream.policy_version = version

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Start no model call in any stream while the block updates the weights; see `GroupStream.paused`."""
        async with contextlib.AsyncExitStack() as stack:
            for stream in self.streams.values():  # all hold their calls before the first one waits
                stream.pause()
                stack.callback(stream.resume)
            await asyncio.gather(*(stream.drain() for stream in self.streams.values()))
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all streams and of their order as JSON values, for `load_state_dict`."""
        states = {name: stream.state_dict() for name, stream in self.streams.items()}
        return {"format": FORMAT, "taken": dict(self.taken), "streams": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, before the first group is taken; see `GroupStream.load_state_dict`.

        Raises:
            RolloutError: A group was already taken.
            ValueError: The state has another format or other streams.
        """
        if state.get("format") != FORMAT:
            raise ValueError(f"the state has the format {state.get('format')!r}; this version reads {FORMAT}")
        if set(state["streams"]) != set(self.streams):
            raise ValueError(f"the state has the streams {', '.join(state['streams'])}, not {', '.join(self.streams)}")
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        self.taken = dict(state["taken"])
