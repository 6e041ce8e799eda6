"""The data of a Harbor server: references to tasks, and results of rollouts with the tokens of every turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from openenv.types import State


class HarborTaskRef(BaseModel):
    """A task of a dataset, as the Task API lists it."""

    index: int
    task_id: str
    """Where its folder is on the server."""
    task_name: str
    dataset: str = ""
    instruction: str = ""


class HarborTurn(BaseModel):
    """One call of the model: its prompt, its sampled tokens, and whether they may be trained on."""

    turn: int
    role: str = "agent"
    finish_reason: str | None = None
    prompt_token_ids: list[int] = Field(default_factory=list)
    """All that the model read before it sampled, as the engine tokenised it."""
    completion_token_ids: list[int] = Field(default_factory=list)
    per_token_logps: list[float] = Field(default_factory=list)
    loss_mask: list[int] | None = None
    """Of prompt and completion; None in results of before it was recorded."""
    node_id: str = ""
    n_tools: int = 0
    discarded: bool = False
    trainable: bool = True
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    requested_sampling_params: dict[str, Any] = Field(default_factory=dict)
    text: str = ""
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    """As `name` and `arguments` for every API."""
    request_messages: list[dict[str, Any]] = Field(default_factory=list)
    # Tools may change between calls, so every turn has its list.
    request_tools: list[dict[str, Any]] | None = None


class HarborConversation(BaseModel):
    """A conversation of a rollout from its first message to its last; calls beside the agent's have their own."""

    root_id: str = ""
    role: str = "agent"
    n_turns: int = 0
    messages: list[dict[str, Any]] = Field(default_factory=list)


class HarborStepResult(BaseModel):
    """A step of a task that has several."""

    name: str = ""
    rewards: dict[str, float] = Field(default_factory=dict)
    passed: bool = True


class HarborRolloutResult(BaseModel):
    """The result of a rollout. A failed rollout has one too: `ok` is False and `error` explains it."""

    task_id: str = ""
    task_name: str = ""
    dataset: str = ""
    harness: str = ""
    sandbox: str = ""
    trial_name: str = ""
    session_id: str = ""

    reward: float | None = None
    """None without a verdict, which differs from a reward of 0."""
    rewards: dict[str, float] = Field(default_factory=dict)
    # Tasks may return several rewards; this names the one in `reward`.
    reward_key: str = ""
    step_results: list[HarborStepResult] = Field(default_factory=list)

    rollout_type: str = "train"
    """`train` if the endpoint returned every token with its log-probability, else `eval`."""
    capture_level: str = "tokens"
    param_fixes: list[str] = Field(default_factory=list)

    turns: list[HarborTurn] = Field(default_factory=list)
    conversations: list[HarborConversation] = Field(default_factory=list)
    n_turns: int = 0
    n_roots: int = 0
    budget_stop_count: int = 0
    n_trainable_tokens: int = 0
    multi_turn: bool = False
    # Results of published servers fill these; ours have no trajectory files.
    atif: str = "none"
    """Whether the agent's own trajectory agrees: `none`, `match` or `MISMATCH`."""
    trace_source: str = ""
    findings: list[str] = Field(default_factory=list)

    wall_s: float = 0.0
    phase_timings: dict[str, float] = Field(default_factory=dict)
    agent_log_tail: str = ""

    ok: bool = True
    error: str | None = None
    exception_type: str | None = None

    @property
    def trainable(self) -> bool:
        """Whether its tokens may be trained on."""
        return self.rollout_type == "train"

    @property
    def solved(self) -> bool:
        """Whether there is a verdict, and it is more than 0."""
        return self.reward is not None and self.reward > 0


class HarborState(State):
    """The rollouts of a session so far."""

    rollouts_completed: int = 0
    last_reward: float | None = None
    last_task_id: str | None = None
    last_trial_name: str | None = None
    llm_url: str = ""
    intercept_url: str = ""


def conversations_from_document(document: Mapping[str, Any]) -> list[HarborConversation]:
    """Return the conversations in the document of a captured session, one for each root: its longest path.

    The last request of a path has all messages before it, so nothing has to be put together.
    """
    turns = {turn["node_id"]: turn for turn in document.get("turns") or []}
    # By root: a conversation that was forked has several sequences.
    longest: dict[str, HarborConversation] = {}
    for sequence in document.get("sequences") or []:
        nodes = sequence.get("node_ids") or []
        # The last call of a sequence contains the whole conversation so far.
        last = turns.get(nodes[-1], {}) if nodes else {}
        messages = list(last.get("request_messages") or [])
        answer = last.get("response_message") or {}
        if answer:
            messages.append({"role": "assistant", **answer})
        if not messages:
            continue
        root = str(sequence.get("root_id") or nodes[0])
        conversation = HarborConversation(
            root_id=root,
            role=str(sequence.get("role", "agent")),
            n_turns=int(sequence.get("n_turns", len(nodes))),
            messages=messages,
        )
        # Branches of a conversation share their root; the longest one is shown.
        if root not in longest or len(longest[root].messages) < len(messages):
            longest[root] = conversation
    return list(longest.values())


def turns_from_document(document: Mapping[str, Any]) -> list[HarborTurn]:
    """Return the agent's turns in the document of a captured session, each once, although branches share turns.

    Raises:
        ValueError: the tokens or the mask of a turn are not complete, or two branches disagree about it.
    """
    nodes = {turn["node_id"]: turn for turn in document.get("turns") or []}
    spans: dict[str, list[int]] = {}
    turns: list[HarborTurn] = []
    for sequence in document.get("sequences") or []:
        # Auxiliary and discarded sequences are not part of the agent's turns.
        if sequence.get("role") != "agent":
            continue
        for node_id in sequence["node_ids"]:
            span = _mask_of(sequence, nodes.get(node_id, {}), node_id)
            # A forked conversation repeats its common turns. They must agree, or one of the records is wrong.
            if node_id in spans:
                if spans[node_id] != span:
                    raise ValueError(f"inconsistent completion masks for shared node {node_id}")
                continue
            spans[node_id] = span
            turns.append(_turn(sequence, nodes.get(node_id, {}), node_id, span, number=len(turns)))
    return turns


def _mask_of(sequence: Mapping[str, Any], node: Mapping[str, Any], node_id: str) -> list[int]:
    # In tokens: the prompt comes first, the sampled tokens follow.
    begin, count = int(node.get("n_prompt", 0)), int(node.get("n_sampled", 0))
    span = list((sequence.get("loss_mask") or [])[begin : begin + count])
    # A span that leaves the sequence would be filled with other turns' tokens.
    if begin < 0 or count < 0 or begin + count > len(sequence["input_ids"]) or len(span) != count:
        raise ValueError(f"incomplete token or mask span for node {node_id}")
    return span


def _turn(
    sequence: Mapping[str, Any], node: Mapping[str, Any], node_id: str, span: list[int], *, number: int
) -> HarborTurn:
    begin = int(node.get("n_prompt", 0))
    # input_ids: [prompt of this turn | sampled here | later turns ...]
    end = begin + len(span)
    answer = node.get("response_message") or {}
    return HarborTurn(
        turn=number,
        node_id=node_id,
        finish_reason=node.get("finish_reason"),
        prompt_token_ids=sequence["input_ids"][:begin],
        completion_token_ids=sequence["input_ids"][begin:end],
        per_token_logps=sequence["logprobs"][begin:end],
        loss_mask=[0] * begin + span,
        n_tools=int(node.get("n_tools", 0)),
        discarded=bool(node.get("discarded")),
        trainable=any(span),
        sampling_params=dict(node.get("sampling_params") or {}),
        requested_sampling_params=dict(node.get("requested_sampling_params") or {}),
        text=_text_of(answer),
        tool_calls=_calls_of(answer),
        request_messages=list(node.get("request_messages") or []),
        request_tools=node.get("request_tools"),
    )


def _text_of(answer: Mapping[str, Any]) -> str:
    content = answer.get("content")
    # Turns of all APIs are shown as one text.
    if isinstance(content, list):  # Anthropic and the Responses API send blocks
        return " ".join(block["text"] for block in content if isinstance(block, dict) and block.get("text"))
    return content if isinstance(content, str) else ""


def _calls_of(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = []
    for call in answer.get("tool_calls") or []:
        function = call.get("function") or call
        # Streams of some providers leave empty calls behind.
        if function.get("name"):
            calls.append({"name": str(function["name"]), "arguments": function.get("arguments", "")})
    content = answer.get("content")
    for block in content if isinstance(content, list) else []:
        if isinstance(block, dict) and block.get("type") == "tool_use" and block.get("name"):
            calls.append({"name": str(block["name"]), "arguments": block.get("input", "")})
    return calls
