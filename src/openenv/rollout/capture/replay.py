"""Recorded answers for an agent that works again: `Replay` finds the answer that belongs to a request.

A resumed rollout starts in a fresh sandbox, and a branch repeats the beginning of its parent. In both cases the agent
runs from its start, and gets the answers that were sampled before. Nothing is sampled twice, and the agent needs no
support for it. Values only: `model_call` sends the answers, `records` knows which ones exist.

    recorded       A1 -> x     A2 -> y      A3 ->        the rollout was interrupted during the third answer
    agent asks     A1          A2           A3           A4
    it gets        x           y            sampled      sampled

Requests are equal if their digests are, without times and random IDs (`normalise`). Equal requests get their answers in
the recorded order. Requests of sub-agents may come in another order than before: each still finds its answer.

A divergence: the agent asks something that it has not asked before, although recorded answers are left. Tools may have
returned something else, for example random numbers. The request is sampled and begins a branch inside the rollout: the
journal says where, and the answers that nobody asks for do not count as part of the rollout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from .normalise import ACCIDENTAL_FIELDS, RequestDigests, normalised
from .records import Call

_EXCERPT = 300


class Replay:
    """The recorded answers that the agent has not got again yet.

    Args:
        answered: The calls with a whole answer.
        unanswered: The calls that were interrupted or failed; asking them again is no divergence.
    """

    def __init__(self, answered: Iterable[Call], unanswered: Iterable[Call] = ()) -> None:
        self._digests = RequestDigests()
        self._answers: dict[str, deque[Call]] = {}
        self._left: dict[int, Call] = {}
        for call in sorted(answered, key=lambda each: each.number):
            self._answers.setdefault(self._digests.of(call.dialect, call.request), deque()).append(call)
            self._left[call.number] = call
        self._unanswered = {self._digests.of(call.dialect, call.request) for call in unanswered}
        self.count = 0
        """How many answers the agent got again."""
        self.divergence: str | None = None
        """The first difference between a request and the recorded ones; None if the agent repeats its work."""
        self.required = 0
        """The calls before this number must be repeated: the sandbox has the files that they led to."""

    @property
    def left(self) -> int:
        """How many answers the agent has not got again."""
        return len(self._left)

    @property
    def must_match(self) -> bool:
        """Whether the next request must be a recorded one."""
        return any(number < self.required for number in self._left)

    def take(self, dialect: str, request: Mapping[str, Any]) -> Call | None:
        """Return the recorded call with this request; None to sample an answer."""
        if not self._left:
            return None
        digest = self._digests.of(dialect, request)
        if answers := self._answers.get(digest):
            call = answers.popleft()
            del self._left[call.number]
            self.count += 1
            return call
        if digest not in self._unanswered and self.divergence is None:
            self.divergence = _difference(next(iter(self._left.values())), request)
        return None

    def put_back(self, call: Call) -> None:
        """Keep an answer that did not reach the agent."""
        self._answers.setdefault(self._digests.of(call.dialect, call.request), deque()).appendleft(call)
        self._left[call.number] = call
        self.count -= 1

    def forget(self) -> None:
        """Release the memory."""
        self._answers.clear()
        self._left.clear()


# Sample: "call 3 differs in messages 4: recorded '3 failed', now '4 failed'"
def _difference(expected: Call, request: Mapping[str, Any]) -> str:
    """Return the first difference between a recorded request and another one, as a text."""
    recorded = expected.request
    for name in sorted({*recorded, *request} - ACCIDENTAL_FIELDS):
        one, other = (
            value if isinstance(value, list) else [value] for value in (recorded.get(name), request.get(name))
        )
        for index in range(max(len(one), len(other))):
            pair = [repr(normalised(side[index])) if index < len(side) else "nothing" for side in (one, other)]
            if pair[0] != pair[1]:
                start = next((at for at, (left, right) in enumerate(zip(*pair, strict=False)) if left != right), 0)
                start = max(0, start - _EXCERPT // 3)
                excerpts = [text[start : start + _EXCERPT] for text in pair]
                return (
                    f"call {expected.number} differs in {name} {index + 1}: recorded {excerpts[0]}, now {excerpts[1]}"
                )
    return f"call {expected.number} is asked in another dialect or once more"
