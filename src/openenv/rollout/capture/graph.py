"""The token graph of a rollout: links between calls that continue each other, roots and discarded answers.

A call continues another call if its prompt begins with the other's prompt and sampled tokens. If several calls fit, the
longest is the parent. Without token IDs, the messages are compared in the same way.

    call  prompt                sampled
    1     [1 2 3]               [4 5]       root: the agent's conversation
    2     [1 2 3 4 5 6]         [7]         continues 1
    3     [1 2 3 4 5 6]         [8]         the same question again: a later call decides whether 2 or 3 is discarded
    4     [9 9]                 [3]         root: a sub-agent, or a title
    5     [1 2 3 4 5 6 8 7]     [2]         continues 3, so 2 is discarded
    6     [1 2 9]               [5]         root: the agent has compacted its conversation
    7     [1 2 3 4 5 6 8 7 22]  [6]         continues 3: the template writes the answer [2] as [22]

        1 --+-- 2 (discarded)       4       6
            +-- 3 --+-- 5
                    +-- 7

Tokens link calls, but messages decide whether an answer was used. Call 7 has the answer of call 5 in its messages, so
call 5 is the end of its own sequence, and not discarded.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .dialects.dialect import MALFORMED
from .encoding import dumps
from .records import Call, PromptIds

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class CallNode:
    """A call with an answer, and its links."""

    call: Call
    parent: CallNode | None = None
    children: list[CallNode] = field(default_factory=list)
    discarded: bool = False
    """Whether the agent used another answer instead."""

    @property
    def number(self) -> int:
        """Return the call's number."""
        return self.call.number

    @property
    def has_tokens(self) -> bool:
        """Return whether the engine gave the IDs of all tokens, in prompt and completion."""
        return self.call.completion.prompt_ids is not None and self.call.completion.sampled.has_ids

    def path(self) -> list[CallNode]:
        """Return the nodes from the root to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]


@dataclass(slots=True)
class CallGraph:
    """The calls of a rollout that have an answer."""

    nodes: list[CallNode] = field(default_factory=list)

    @property
    def roots(self) -> list[CallNode]:
        """Return the first calls of conversations: the agent's, a sub-agent's, one after a compaction, a retry."""
        return [node for node in self.nodes if node.parent is None]

    @property
    def leaves(self) -> list[CallNode]:
        """Return the calls without a continuation."""
        return [node for node in self.nodes if not node.children]

    @property
    def forks(self) -> list[CallNode]:
        """Return the calls with several continuations."""
        return [node for node in self.nodes if len(node.children) > 1]

    def stats(self) -> dict[str, int]:
        """Return the numbers of calls, roots, leaves, forks and discarded answers."""
        discarded = sum(node.discarded for node in self.nodes)
        return graph_stats(self.nodes, self.roots, self.leaves, self.forks, discarded)


def graph_stats(nodes: Sized, roots: Sized, leaves: Sized, forks: Sized, discarded: int) -> dict[str, int]:
    """Return the figures of a graph by their names in documents."""
    return {
        "n_turns": len(nodes),
        "n_roots": len(roots),
        "n_leaves": len(leaves),
        "n_forks": len(forks),
        "n_discarded": discarded,
    }


def build(calls: Iterable[Call]) -> CallGraph:
    """Link the calls of one rollout, in any order."""
    nodes = [CallNode(call) for call in calls if call.sampled]
    if _is_chain(nodes):
        for parent, node in itertools.pairwise(nodes):
            node.parent = parent
            parent.children.append(node)
        return CallGraph(nodes)
    # Tokens are compared with tokens only, messages with messages: an engine may omit the IDs of single calls.
    _link([node for node in nodes if node.has_tokens], _token_marks)
    _link([node for node in nodes if not node.has_tokens], _message_marks)
    for node in nodes:
        if node.parent is not None:
            node.parent.children.append(node)
    _mark_discarded(nodes)
    return CallGraph(nodes)


# Every call continues the one before: then the ends of calls grow, and the end of the call before is the longest at the
# beginning of a prompt. No question is asked twice, so no answer is discarded. The usual conversation is found at a
# cost that grows with its tokens, not with calls times tokens.
def _is_chain(nodes: list[CallNode]) -> bool:
    """Return whether each call continues the call before it, by their recorded tokens. False if that is unknown."""
    if not all(node.has_tokens for node in nodes):
        return False
    for before, node in itertools.pairwise(nodes):
        done, prompt = before.call.completion, node.call.completion.prompt_ids
        if node.number < before.number or not isinstance(prompt, PromptIds) or done.prompt_ids is None:
            return False
        if not prompt.continues(done.prompt_ids, [token for token in done.sampled.ids if token is not None]):
            return False
    return True


# Two passes, because the calls come in any order. The marks are made twice: kept, those of n calls that continue each
# other would take memory for n * n prompts.
def _link(nodes: list[CallNode], marks_of: Callable[[CallNode], tuple[bytes, bytes]]) -> None:
    """Set the parents of nodes, as `Linker` finds them."""
    by_number = {node.number: node for node in nodes}
    ends: EndTable[_LinkedCall] = EndTable()
    for node in nodes:
        question, answer = marks_of(node)
        if question or answer:
            ends.add(question + answer, _LinkedCall(node.number, len(question)))
    for node in nodes:
        parent = _parent_in(ends, node.number, marks_of(node)[0])
        node.parent = None if parent is None else by_number[parent.number]


@dataclass(slots=True, eq=False)
class _LinkedCall:
    number: int
    size: int
    """The size of the question."""
    question: bytes = b""
    parent: _LinkedCall | None = None


class Linker:
    """Finds the parent of each call: the longest call at the beginning of its question. Calls come in any order.

        number   question         answer     end = question + answer
        1        [1 2 3]          [4 5]      [1 2 3 4 5]
        2        [1 2 3 4 5 6]    [7]        begins with the end of 1, so 1 is its parent

    Agents make calls at the same time, so a parent may come after its child. It adopts the child then, unless the child
    has a longer parent.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _LinkedCall] = {}
        # Tokens are compared with tokens only, messages with messages: an engine may omit the IDs of single calls.
        self._tokens: tuple[EndTable[_LinkedCall], list[_LinkedCall]] = (EndTable(), [])
        self._messages: tuple[EndTable[_LinkedCall], list[_LinkedCall]] = (EndTable(), [])

    def add(self, number: int, question: bytes, answer: bytes, *, is_exact: bool) -> list[int]:
        """Add a call; return the numbers of the earlier calls that get it as their parent.

        Args:
            number: Identifies the call; numbers grow with time.
            question: The prompt, or the messages.
            answer: The sampled tokens, or the reply.
            is_exact: Whether both are tokens.
        """
        call = self._calls[number] = _LinkedCall(number, len(question), question)
        ends, others = self._tokens if is_exact else self._messages
        call.parent = _parent_in(ends, number, question)
        end = question + answer
        if end:
            ends.add(end, call)
        # Prompts grow, so `startswith` compares the bytes of late calls only.
        children = [other for other in others if other.size > len(question) and end]
        adopted = []
        for other in children:
            if other.question.startswith(end):
                parent = _parent_in(ends, other.number, other.question)
                if parent is not other.parent:
                    other.parent = parent
                    adopted.append(other.number)
        others.append(call)
        return adopted

    def parent_of(self, number: int) -> int | None:
        """Return the number of a call's parent; None for the first call of a conversation."""
        parent = self._calls[number].parent
        return None if parent is None else parent.number


def _parent_in(ends: EndTable[_LinkedCall], number: int, question: bytes) -> _LinkedCall | None:
    parent: _LinkedCall | None = None
    for candidates in ends.beginnings_of(question):
        # The question must have grown: otherwise a repeated question would continue a call with an empty answer.
        shorter = [other for other in candidates if other.size < len(question)]
        if shorter:
            # The last candidates are the longest. Among calls of equal text, take the latest before this one.
            earlier = [other for other in shorter if other.number < number]
            parent = earlier[-1] if earlier else shorter[0]
    return parent


class EndTable(Generic[T]):
    """Finds the calls that a question begins with.

    Comparing all pairs of calls would read n * n prompts of up to a million tokens. This table reads each prompt once:

        ends        digest([1 2 3 4 5]) -> call 1,  digest([1 2 3 4 5 6 8]) -> call 3      lengths 5, 7
        question    [1 2 3 4 5 6 8 7]
                              ^   ^     the running digest is looked up at lengths 5 and 7: calls 1 and 3
    """

    def __init__(self) -> None:
        self._ends: dict[bytes, list[T]] = {}
        self._lengths: list[int] = []

    def add(self, end: bytes, value: T) -> None:
        """Add a call; `end` is its question and answer."""
        self._ends.setdefault(digest(end), []).append(value)
        index = bisect.bisect_left(self._lengths, len(end))
        if index == len(self._lengths) or self._lengths[index] != len(end):
            self._lengths.insert(index, len(end))

    def beginnings_of(self, question: bytes) -> Iterator[list[T]]:
        """Yield the calls at the beginning of a question, shortest first; calls of equal length come together."""
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
    """Return prompt and completion as bytes."""
    done = node.call.completion
    sampled = [token if token is not None else -1 for token in done.sampled.ids]
    return token_bytes(done.prompt_ids or ()), token_bytes(sampled)


def _message_marks(node: CallNode) -> tuple[bytes, bytes]:
    """Return conversation and reply as bytes: one digest per message, so that all messages have equal lengths."""
    call = node.call
    try:
        question = [digest(dumps(item)) for item in call.reader.items(call.sent)]
        answer = [digest(dumps(item)) for item in call.reader.reply_items(call.answer or {})]
    except MALFORMED:  # an unreadable conversation gets no links
        return digest(dumps([call.number])), b""
    return b"".join(question), b"".join(answer)


def token_bytes(ids: Iterable[int]) -> bytes:
    """Return IDs as bytes, 8 per token: a prefix of the IDs is then a prefix of the bytes."""
    if isinstance(ids, PromptIds):
        return ids.tobytes()
    return array("q", ids).tobytes()


def setting_of(call: Call) -> bytes:
    """Return the system texts and tool names of a call, as bytes: the identity of its agent."""
    try:
        return dumps(call.reader.setting(call.sent))
    except MALFORMED:
        return b""


def digest(data: bytes) -> bytes:
    """Return the digest of bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _question(node: CallNode) -> bytes:
    # The prefixes keep the two kinds of digests apart.
    if node.has_tokens:
        return b"t" + digest(_token_marks(node)[0])
    return b"m" + setting_of(node.call) + digest(_message_marks(node)[0])


def _mark_discarded(nodes: list[CallNode]) -> None:
    """Mark the answers that the agent did not use.

    Of several answers to one question, one is final: the last that was used, or else the last complete one. The other
    unused answers are discarded.
    """
    groups: dict[bytes, list[CallNode]] = {}
    for node in nodes:
        groups.setdefault(_question(node), []).append(node)
    repeated = [group for group in groups.values() if len(group) > 1]
    forks = [node.children for node in nodes if len(node.children) > 1]
    if not any(not node.children for group in (*repeated, *forks) for node in group):
        return  # the usual case: each call continues the one before
    later = {node.number: [child.number for child in node.children] for node in nodes}
    for number, user in used_answers(talk for talk in map(_talk, nodes) if talk is not None):
        later[number].append(user)
    for group in repeated:
        whole = [node for node in group if node.call.ended == "complete"]
        final = next((node for node in reversed(group) if later[node.number]), (whole or group)[-1])
        for node in group:
            node.discarded = node is not final and not later[node.number]
    # A retry may change the question, for example by a hint. Then only the common parent shows that it is one. The
    # last answer of a conversation is not discarded: no call comes after it.
    ends: dict[int, int] = {}
    for node in sorted(nodes, key=lambda each: -each.number):
        ends[node.number] = max((ends.get(number, number) for number in later[node.number]), default=node.number)
    for siblings in forks:
        latest = max((ends[node.number] for node in siblings if later[node.number]), default=0)
        for node in siblings:
            if not later[node.number] and latest > node.number:
                node.discarded = True


@dataclass(slots=True)
class Talk:
    """The messages of a call and of its answer, as `ModelDialect.items` returns them."""

    number: int
    question: Sequence[Any]
    answer: Sequence[Any]
    is_linked: bool
    """Whether the tokens of a later prompt continue it."""


@dataclass(slots=True)
class _NumberedTalk:
    """A talk whose messages are numbers."""

    number: int
    is_linked: bool
    question: array[int]
    answer: array[int]


def used_answers(talks: Iterable[Talk]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of a call and of a later call that has its answer in its messages.

    The tokens of an answer may differ in the next prompt: the template writes the arguments of a tool call in another
    way, or leaves out the thoughts. Agents may also shorten an answer. So an answer counts as used if the next message
    is the assistant's and equals no other answer to the question.

        call 1   [user]                        answer A
        call 2   [user]                        answer B
        call 3   [user, A, tool]               uses call 1
        call 4   [user, C, tool]               C is no answer: it uses call 2, the latest, in another form
        call 5   [user, user]                  uses none
    """
    messages = _MessageNumbers()
    listed = [
        _NumberedTalk(talk.number, talk.is_linked, messages.of(talk.question), messages.of(talk.answer))
        for talk in talks
    ]
    questions: EndTable[_NumberedTalk] = EndTable()
    for talk in listed:
        questions.add(talk.question.tobytes(), talk)
    for talk in listed:
        for candidates in questions.beginnings_of(talk.question.tobytes()):
            place = len(candidates[0].question)
            asked = [other for other in candidates if other.number < talk.number and other.answer]
            if not asked or place == len(talk.question):
                continue
            same = [other for other in asked if talk.question[place : place + len(other.answer)] == other.answer]
            role = messages.roles[talk.question[place]]
            edited = [other for other in asked if other.answer and role == messages.roles[other.answer[0]]]
            # Of equal answers, the one with the tokens of a later prompt was used, or else the latest.
            linked = [other for other in same if other.is_linked]
            if linked or same or edited:
                yield (linked or same or edited)[-1].number, talk.number


class _MessageNumbers:
    """Numbers the messages of a rollout: 4 bytes per message and call, because each call repeats all messages."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.roles: list[Any] = []
        """The role of each message."""

    def of(self, items: Iterable[Any]) -> array[int]:
        """Return the numbers of messages; equal messages have one number."""
        numbers = array("I")
        for item in items:
            number = self._numbers.setdefault(digest(dumps(item)), len(self._numbers))
            if number == len(self.roles):
                self.roles.append(item[0] if isinstance(item, list) and item else None)
            numbers.append(number)
        return numbers


def _talk(node: CallNode) -> Talk | None:
    call = node.call
    try:
        question, answer = call.reader.items(call.sent), call.reader.reply_items(call.answer or {})
    except MALFORMED:
        return None
    return Talk(node.number, question, answer, is_linked=bool(node.children))
