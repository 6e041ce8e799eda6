"""The calls of one rollout as nodes that are added in any order, and linked by the beginnings of their prompts.

The published graph of `CaptureSession.graph`. `graph.py` finds the parents and the used answers; only the published
rule for discarded answers is here.
"""

# A call continues an earlier one if its prompt begins with that one's prompt and answer, token for token:
#
#   call 1     prompt [1 2 3]            answer [11 12]
#   call 2     prompt [1 2 3 11 12 7]    answer [13]          child of call 1; new context: [7]
#   call 3     prompt [1 2 3 11 12 7]    answer [14]          child of call 1: call 1 is a fork
#   call 4     prompt [1 2 3 11 12 7 14 8]                    child of call 3, so call 2 is discarded
#   call 5     prompt [9 9]                                   a root: another conversation
#
# Of several possible parents the longest counts. Calls without token IDs are linked in the same way by the digests of
# their messages.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dialects.dialect import MALFORMED
from ..dialects.openai_chat import OpenAIChat
from ..encoding import Json, dumps
from ..graph import Linker, Talk, digest, graph_stats, token_bytes, used_answers

_CHAT = OpenAIChat()


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two lists share."""
    for position, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return position
    return min(len(a), len(b))


@dataclass
class TurnNode:
    """One model call."""

    node_id: str
    prompt_ids: list[int]
    sampled_ids: list[int]
    sampled_logprobs: list[float] | None = None
    """One per sampled token; None if the call cannot be trained on."""
    parent_id: str | None = None
    index: int = 0
    """Its position in the order of additions."""
    model: str | None = None
    finish_reason: str | None = None
    harness_session_id: str | None = None
    """The agent's name for the conversation, if it sends one."""
    system_digest: str | None = None
    n_tools: int = 0
    request_messages: list[Json] = field(default_factory=list)
    request_tools: list[Json] | None = None
    sampling_params: Json = field(default_factory=dict)
    """The parameters that the endpoint got."""
    requested_sampling_params: Json = field(default_factory=dict)
    """The parameters that the agent asked for."""
    response_message: Json = field(default_factory=dict)
    trainable: bool = True
    """Whether the policy chose the answer freely; a forced tool call, for example, is not free."""

    @property
    def end_ids(self) -> list[int]:
        """Return prompt and sampled tokens."""
        return self.prompt_ids + self.sampled_ids

    def context_ids(self, parent: TurnNode | None) -> list[int]:
        """Return the prompt tokens after the end of a parent."""
        skipped = 0 if parent is None else len(parent.prompt_ids) + len(parent.sampled_ids)
        return self.prompt_ids[skipped:]

    @property
    def is_target(self) -> bool:
        """Return whether its sampled tokens may be trained on."""
        return (
            self.trainable and self.sampled_logprobs is not None and len(self.sampled_logprobs) == len(self.sampled_ids)
        )


@dataclass
class TrainingSequence:
    """A path from a root to a leaf as a training example: three lists of one length."""

    input_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    node_ids: list[str]
    prompt_len: int
    root_id: str
    n_turns: int

    @property
    def n_trainable(self) -> int:
        """Return the number of tokens to train on."""
        return sum(self.loss_mask)

    def turn_lengths(self) -> list[int]:
        """Return the lengths of the runs of tokens to train on."""
        edges = [0, *self.loss_mask, 0]
        starts = [place for place in range(1, len(edges)) if edges[place] and not edges[place - 1]]
        ends = [place for place in range(1, len(edges)) if edges[place - 1] and not edges[place]]
        return [end - start for start, end in zip(starts, ends, strict=True)]


class RolloutGraph:
    """The calls of one rollout, linked as they are added. One thread may add while others read."""

    def __init__(self) -> None:
        self._nodes: dict[str, TurnNode] = {}
        self._children: dict[str, list[str]] = {}
        self._links = Linker()

    def add_turn(self, node: TurnNode) -> TurnNode:
        """Add a call, set its `index` and `parent_id`, and link earlier calls that continue it."""
        node.index = len(self._nodes)
        is_exact = bool(node.prompt_ids)
        marks = _token_marks(node) if is_exact else _message_marks(node)
        adopted = self._links.add(node.index, *marks, is_exact=is_exact)
        names = [*self._nodes, node.node_id]
        parent = self._links.parent_of(node.index)
        node.parent_id = None if parent is None else names[parent]
        self._children[node.node_id] = []  # before the node: readers may see it at once
        self._nodes[node.node_id] = node
        if node.parent_id is not None:
            self._children[node.parent_id].append(node.node_id)
        for number in adopted:
            child = self._nodes[names[number]]
            if child.parent_id is not None:
                self._children[child.parent_id].remove(child.node_id)
            child.parent_id = node.node_id
            self._children[node.node_id].append(child.node_id)
        return node

    def nodes(self) -> list[TurnNode]:
        """Return all calls in the order of additions."""
        return list(self._nodes.values())

    def get(self, node_id: str) -> TurnNode:
        """Return a call.

        Raises:
            KeyError: there is none of this id.
        """
        return self._nodes[node_id]

    def children(self, node_id: str) -> list[TurnNode]:
        """Return the calls that continue a call."""
        return [self._nodes[child] for child in self._children.get(node_id, ())]

    def roots(self) -> list[TurnNode]:
        """Return the first calls of conversations."""
        return [node for node in self.nodes() if node.parent_id is None]

    def leaves(self) -> list[TurnNode]:
        """Return the last calls of conversations."""
        return [node for node in self.nodes() if not self._children[node.node_id]]

    def root_of(self, node_id: str) -> str:
        """Return the ID of the first call of a call's conversation."""
        return self.path_to(node_id)[0].node_id

    def path_to(self, leaf_id: str) -> list[TurnNode]:
        """Return the calls from the root to a call."""
        path = [self._nodes[leaf_id]]
        while path[-1].parent_id is not None:
            path.append(self._nodes[path[-1].parent_id])
        return path[::-1]

    def paths(self) -> Iterator[list[TurnNode]]:
        """Yield the path to each leaf."""
        for leaf in self.leaves():
            yield self.path_to(leaf.node_id)

    def forks(self) -> list[tuple[str, list[str]]]:
        """Return the calls with several continuations, each with their IDs."""
        return [(node_id, children) for node_id, children in list(self._children.items()) if len(children) > 1]

    def discarded_nodes(self) -> list[TurnNode]:
        """Return the answers that the agent dropped in favour of another answer to the same prompt.

        Answers to one question are the children of one call, or roots of one prompt.
        """
        # A group has the answers to one prompt. If the agent continued one of them, it dropped the others. An answer
        # that a later call has in its messages is continued too, even if the template wrote it with other tokens.
        groups = [children for _, children in self.forks()]
        by_prompt: dict[tuple[int, ...], list[str]] = {}
        for root in self.roots():
            if root.prompt_ids:
                by_prompt.setdefault(tuple(root.prompt_ids), []).append(root.node_id)
        groups = [group for group in (*groups, *by_prompt.values()) if len(group) > 1]
        if not groups:
            return []
        nodes = self.nodes()
        continued = {node.node_id for node in nodes if self._children[node.node_id]}
        continued |= {nodes[number].node_id for number, _ in used_answers(map(self._talk, nodes))}
        return [
            self._nodes[node_id]
            for group in groups
            if continued.intersection(group)
            for node_id in group
            if node_id not in continued
        ]

    def _talk(self, node: TurnNode) -> Talk:
        question, answer = _items(node)
        return Talk(node.index, question, answer, is_linked=bool(self._children[node.node_id]))

    def sequence_for(self, leaf_id: str) -> TrainingSequence:
        """Return the path to a call as a training example; calls without valid log-probabilities are context in it."""
        path = self.path_to(leaf_id)
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        parent: TurnNode | None = None
        for node in path:
            context = node.context_ids(parent)
            count = len(node.sampled_ids)
            sampled_logprobs = node.sampled_logprobs if node.is_target else None
            ids += context + node.sampled_ids
            mask += [0] * len(context) + [int(sampled_logprobs is not None)] * count
            logprobs += [0.0] * len(context) + (sampled_logprobs or [0.0] * count)
            parent = node
        return TrainingSequence(
            input_ids=ids,
            loss_mask=mask,
            logprobs=logprobs,
            node_ids=[node.node_id for node in path],
            prompt_len=len(path[0].prompt_ids),
            root_id=path[0].node_id,
            n_turns=len(path),
        )

    def sequences(self) -> list[TrainingSequence]:
        """Return a training example for each leaf."""
        return [self.sequence_for(leaf.node_id) for leaf in self.leaves()]

    def stats(self) -> dict[str, int]:
        """Return the numbers of calls, roots, leaves, forks and discarded answers."""
        return graph_stats(self._nodes, self.roots(), self.leaves(), self.forks(), len(self.discarded_nodes()))


def _token_marks(node: TurnNode) -> tuple[bytes, bytes]:
    """Return prompt and completion as bytes; both empty for invalid IDs."""
    try:
        return token_bytes(node.prompt_ids), token_bytes(node.sampled_ids)
    except (TypeError, OverflowError, ValueError):  # invalid IDs: the call stays alone
        return b"", b""


def _message_marks(node: TurnNode) -> tuple[bytes, bytes]:
    """Return the conversation without its system texts, and the answer, as a digest for each message."""
    question, answer = ([digest(dumps(item)) for item in items] for items in _items(node))
    return b"".join(question), b"".join(answer)


def _items(node: TurnNode) -> tuple[list[Any], list[Any]]:
    """Return the items of the messages and of the answer; none for malformed messages."""
    message = {"role": "assistant", **node.response_message}
    try:
        question = _CHAT.items({"messages": node.request_messages})
        answer = _CHAT.reply_items({"choices": [{"message": message}]}) if node.response_message else []
    except MALFORMED:
        return [], []
    return list(question), list(answer)
