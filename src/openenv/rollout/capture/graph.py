"""How the calls of a rollout are linked: which continues which, which were discarded, where conversations begin.

A call continues the longest call whose prompt and sampled tokens are, token for token, the beginning of its prompt;
where the engine names no ids, the one whose conversation and reply are the beginning of its conversation.

    call  prompt                sampled
    1     [1 2 3]               [4 5]       root of the agent's conversation
    2     [1 2 3 4 5 6]         [7]         continues 1
    3     [1 2 3 4 5 6]         [8]         the same question again: 2 or 3 is discarded, by which one is continued
    4     [9 9]                 [3]         another root: a sub-agent, a title
    5     [1 2 3 4 5 6 8 7]     [2]         continues 3, so 2 is discarded
    6     [1 2 9]               [5]         a root: the agent has compacted its conversation

        1 --+-- 2 (discarded)       4       6
            +-- 3 -- 5
"""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .dialects.dialect import MALFORMED
from .encoding import dumps
from .records import Call

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class CallNode:
    """A call that has an answer, and its place."""

    call: Call
    parent: CallNode | None = None
    children: list[CallNode] = field(default_factory=list)
    discarded: bool = False
    """Whether the agent went on from another answer to the same question."""

    @property
    def number(self) -> int:
        """Return the call's number."""
        return self.call.number

    @property
    def has_tokens(self) -> bool:
        """Say whether the engine named every token of prompt and completion."""
        return self.call.completion.prompt_ids is not None and self.call.completion.sampled.has_ids

    def path(self) -> list[CallNode]:
        """Return the nodes from the root to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]


@dataclass(slots=True)
class CallGraph:
    """All calls of a rollout that have an answer."""

    nodes: list[CallNode] = field(default_factory=list)

    @property
    def roots(self) -> list[CallNode]:
        """Return where conversations begin: the agent's own, sub-agents, what follows a compaction, retries."""
        return [node for node in self.nodes if node.parent is None]

    @property
    def leaves(self) -> list[CallNode]:
        """Return the calls that none continues."""
        return [node for node in self.nodes if not node.children]

    @property
    def forks(self) -> list[CallNode]:
        """Return the calls that several continue."""
        return [node for node in self.nodes if len(node.children) > 1]


def build(calls: Iterable[Call]) -> CallGraph:
    """Link the calls of one rollout, in any order."""
    nodes = [CallNode(call) for call in calls if call.sampled]
    exact = [node for node in nodes if node.has_tokens]
    rest = [node for node in nodes if not node.has_tokens]
    _link(exact, _token_marks)
    _link(rest, _message_marks)
    for node in nodes:
        if node.parent is not None:
            node.parent.children.append(node)
    _mark_discarded(nodes)
    return CallGraph(nodes)


def _link(nodes: list[CallNode], marks_of: Callable[[CallNode], tuple[bytes, bytes]]) -> None:
    """Find each node's parent by what questions begin with."""
    pieces = [marks_of(node) for node in nodes]
    ends: EndTable[CallNode] = EndTable()
    for node, (question, answer) in zip(nodes, pieces, strict=True):
        if answer:
            ends.add(question + answer, node)
    for node, (question, _) in zip(nodes, pieces, strict=True):
        for candidates in ends.beginnings_of(question):
            earlier = [other for other in candidates if other.number < node.number]
            node.parent = earlier[-1] if earlier else candidates[0]  # the last ones are the longest


class EndTable(Generic[T]):
    """Finds the calls whose question and answer are the beginning of another question.

    Comparing every call with every other would take n * n prompts of up to a million tokens. Instead the ends of all
    calls (question and answer) are in a table by digest, and each question is digested once from its start: at every
    length that some end has, one lookup says whether a call ended exactly there.
    """

    def __init__(self) -> None:
        self._ends: dict[bytes, list[T]] = {}
        self._lengths: list[int] = []

    def add(self, end: bytes, value: T) -> None:
        """Add a call by its question and answer."""
        self._ends.setdefault(digest(end), []).append(value)
        index = bisect.bisect_left(self._lengths, len(end))
        if index == len(self._lengths) or self._lengths[index] != len(end):
            self._lengths.insert(index, len(end))

    def beginnings_of(self, question: bytes) -> Iterator[list[T]]:
        """Yield the calls with which a question begins, those of one length together, the shortest first."""
        running = hashlib.blake2b(digest_size=16)
        view = memoryview(question)
        position = 0
        for length in self._lengths:
            if length > len(view):
                break
            running.update(view[position:length])
            position = length
            candidates = self._ends.get(running.digest())
            if candidates:
                yield candidates


def _token_marks(node: CallNode) -> tuple[bytes, bytes]:
    """Return prompt and completion as bytes: 8 per token, so that a beginning of ids is a beginning of bytes."""
    done = node.call.completion
    sampled = [token if token is not None else -1 for token in done.sampled.ids]
    return token_bytes(done.prompt_ids or ()), token_bytes(sampled)


def _message_marks(node: CallNode) -> tuple[bytes, bytes]:
    """Return conversation and reply as bytes: a digest per item, so that all items have one length."""
    call = node.call
    try:
        question = [digest(dumps(item)) for item in call.reader.items(call.sent)]
        answer = [digest(dumps(item)) for item in call.reader.reply_items(call.response or {})]
    except MALFORMED:  # a conversation that makes no sense is linked to none
        return digest(dumps([call.number])), b""
    return b"".join(question), b"".join(answer)


def token_bytes(ids: Iterable[int]) -> bytes:
    """Return ids as bytes, so that a beginning of ids is a beginning of bytes."""
    return array("q", ids).tobytes()


def setting_of(call: Call) -> bytes:
    """Return what makes two conversations those of one agent, as bytes to compare."""
    try:
        return dumps(call.reader.setting(call.sent))
    except MALFORMED:
        return b""


def digest(data: bytes) -> bytes:
    """Return a short name of bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _question(node: CallNode) -> bytes:
    if node.has_tokens:
        return b"t" + digest(_token_marks(node)[0])
    return b"m" + setting_of(node.call) + digest(_message_marks(node)[0])


def _mark_discarded(nodes: list[CallNode]) -> None:
    """Mark the answers that the agent did not go on from.

    Of several answers to one question, those without a continuation are discarded where another has one; where none
    has, all but the last whole one are. A childless sibling of a continued call is discarded as well.
    """
    groups: dict[bytes, list[CallNode]] = {}
    for node in nodes:
        groups.setdefault(_question(node), []).append(node)
    for group in groups.values():
        if len(group) > 1:
            whole = [node for node in group if node.call.ended == "complete"]
            final = next((node for node in reversed(group) if node.children), (whole or group)[-1])
            for node in group:
                node.discarded = node is not final and not node.children
    for node in nodes:
        siblings = node.parent.children if node.parent is not None else []
        if not node.children and any(other.children for other in siblings):
            node.discarded = True
