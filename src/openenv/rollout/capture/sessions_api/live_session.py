"""A session with its rollout: the recorded calls become nodes of the graph.

Knows records, graphs and sampling rules. `session_server` opens the rollout; nothing here sends or waits.
"""

# One recorded call, when the session is read:
#
#   RecordingReader.advance --> complete call --> turn_node --> check_turn, check_turn_eval --> graph.add_turn
#                               context limit --> a finding
#                               anything else --> counted in `upstream_errors`
#
# A call is context only, and not trained on, if its tokens fail the checks, or if its sampling was not the trainer's.

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from ...tasks.model_parameters import NEUTRAL_SAMPLING, SAMPLING, unasked_sampling
from ...tasks.task import Model
from ..captured_rollout import CapturedRollout, EndpointTraits
from ..dialects import BRIDGES
from ..dialects.chat_over_anthropic import anthropic_response
from ..dialects.dialect import LOGPROBS, MALFORMED, STREAM, TOKEN_IDS, as_dict, as_list, dicts_in
from ..encoding import Json
from ..records import Call, RecordingReader
from ..training_trace import CaptureReport, check_turn
from .capture_checks import check_turn_eval
from .capture_sessions import CaptureSession, extract_harness_session, is_trainable
from .engine_client import InferenceClient, truncating_params
from .turn_graph import TurnNode

SAMPLING_KEYS = ("temperature", *NEUTRAL_SAMPLING)
FAILURES = ("failed", "unreachable", "timeout", "broken", "record_failed")
_GOOGLES = (
    "temperature topP topK stopSequences seed presencePenalty frequencyPenalty responseMimeType responseSchema"
    " responseJsonSchema responseFormat"
)
_AGENTS = frozenset().union(*SAMPLING.values(), (f"generationConfig.{name}" for name in _GOOGLES.split())) - {
    "tool_choice",
    "parallel_tool_calls",
}
"""The parameters that agents may set in sessions without a trainer's sampling."""


class LiveSession:
    """A session, and the rollout of its calls."""

    def __init__(self, session: CaptureSession, rollout: CapturedRollout, path: Path, level: str) -> None:
        self.session = session
        self.rollout = rollout
        self.path = path
        self.used_at = time.monotonic()
        """When its last call began."""
        self._level = level
        self._assumed = rollout.traits.refused
        self._reader = RecordingReader(path)
        session.attach(self._update)

    # `STREAM` stays out: an engine that sends IDs with whole answers only may stream to sessions without IDs.
    def refused(self) -> frozenset[str]:
        """Return the parameters that the endpoint refused in this session."""
        return self.rollout.refused - self._assumed - {STREAM}

    def detach(self) -> None:
        """Read the records to their end; after that the session no longer needs them."""
        self.session.refresh()
        self.session.attach(lambda: None)

    def _update(self) -> None:
        """Bring the session up to date with the records on disk."""
        session, stats = self.session, self.rollout.stats()
        session.model_calls, session.budget_stop_count = stats.calls, stats.budget_stops
        session.upstream_errors = sum(stats.endings.get(how, 0) for how in FAILURES)
        for call in self._reader.advance():
            if call.ended == "complete":
                self._add(call)
            elif call.ended == "context":
                session.findings.append(f"[WARN] context_budget_exhausted: {as_dict(call.error).get('message')}")
        self._reader.builder.answered.clear()  # needed to resume only, and sessions are not resumed
        failure = stats.record_failure
        if failure is not None and not any("capture_ingest_failed" in finding for finding in session.findings):
            session.findings.append(f"[FATAL] capture_ingest_failed: {failure}")

    def _add(self, call: Call) -> None:
        session, is_exact = self.session, self._level == "tokens"
        node = turn_node(call, is_pinned=bool(session.sampling))
        index, reason = len(session.graph.nodes()), node.finish_reason
        if is_exact:
            report = check_turn(
                node.prompt_ids, node.sampled_ids, node.sampled_logprobs, finish_reason=reason, index=index
            )
        else:
            report = check_turn_eval(node.response_message, finish_reason=reason, index=index)
        # A call with invalid tokens stays in the graph: later calls continue it, and their prompts contain its answer.
        if is_exact and not report.ok:
            node.sampled_logprobs = None  # the tokens are still the context of later turns
        if not node.trainable:
            reasons = ", ".join(call.not_trainable)
            report.add(
                "WARN", "steered_turn", f"turn {index}: not the policy's own choice, so not trained on: {reasons}"
            )
        self._note_sampling(node, report)
        session.findings.extend(str(finding) for finding in report.findings)
        session.graph.add_turn(node)
        session.last_turn_at = call.started_at + call.latency_s
        session.metadata.setdefault("api_type", call.dialect)

    def _note_sampling(self, node: TurnNode, report: CaptureReport) -> None:
        """Add a finding, once, if the agent asked for sampling parameters that the proxy replaced."""
        metadata, changed = self.session.metadata, truncating_params(node.requested_sampling_params)
        if changed and is_trainable(self.session.purpose, self._level) and "sampling_overridden" not in metadata:
            metadata["sampling_overridden"] = changed
            parameters = ", ".join(f"{name}={value}" for name, value in sorted(changed.items()))
            text = f"the agent asked for {parameters}; the endpoint got neutral values, as in sampling_params"
            report.add("WARN", "sampling_neutralised", text)


def turn_node(call: Call, *, is_pinned: bool) -> TurnNode:
    """Return a call as a node.

    Args:
        call: The call, complete.
        is_pinned: A trainer decides how answers are sampled, so a call with other parameters is context.
    """
    done, sent = call.completion, call.sent
    sampled = done.sampled
    logprobs = [value for value in sampled.logprobs if value is not None]
    is_whole = sampled.has_ids and len(logprobs) == len(sampled) and not sampled.problems
    # A trainer's sampling is complete. Without one, the agent's temperature is as intended, and the rest neutral.
    steered = [reason for reason in call.not_trainable if is_pinned or reason not in call.unasked_sampling]
    steered += () if is_pinned else unasked_sampling(_policy(sent), sent)
    response = as_dict(call.response)
    if call.endpoint_dialect == "anthropic":
        response = anthropic_response(response, native_passthrough=True)
    choice = (dicts_in(response.get("choices")) or [{}])[0]
    message = as_dict(choice.get("message"))
    messages = as_list(sent.get("messages"))
    tools = sent.get("tools")
    return TurnNode(
        node_id=f"call-{call.number}",
        prompt_ids=list(done.prompt_ids or ()),
        sampled_ids=[token for token in sampled.ids if token is not None] if sampled.has_ids else [],
        sampled_logprobs=logprobs if is_whole else None,
        model=sent.get("model"),
        finish_reason=choice.get("finish_reason"),
        harness_session_id=extract_harness_session({}, call.request),
        system_digest=_system_digest(messages),
        n_tools=len(as_list(tools)),
        request_messages=messages,
        request_tools=tools if isinstance(tools, list) else None,
        sampling_params={name: sent[name] for name in SAMPLING_KEYS if sent.get(name) is not None},
        requested_sampling_params=_requested(call),
        response_message=message,
        trainable=not steered,
    )


# A parameter that is neither neutral nor intended makes a call context: its tokens come from another distribution.
def _policy(sent: Json) -> Json:
    """Return the intended parameters of a session without a trainer's: the agent's temperature, and neutral values."""
    return {**NEUTRAL_SAMPLING, **({"temperature": sent["temperature"]} if "temperature" in sent else {})}


def _requested(call: Call) -> Json:
    bridge = BRIDGES.get((call.dialect, call.endpoint_dialect))
    try:
        request = call.request if bridge is None else bridge.request(call.request)
    except MALFORMED:
        request = call.request
    return {name: request[name] for name in SAMPLING_KEYS if request.get(name) is not None}


def _system_digest(messages: list[Any]) -> str | None:
    for message in dicts_in(messages):
        content = message.get("content") if message.get("role") == "system" else None
        if isinstance(content, list):
            content = " ".join(str(part.get("text", "")) for part in dicts_in(content))
        if isinstance(content, str) and content:
            return hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()[:16]
    return None


@dataclass(frozen=True, slots=True)
class SessionEndpoint:
    """The endpoint that a session's calls go to, and its capture level."""

    client: InferenceClient
    level: str

    def traits(self, session: CaptureSession) -> EndpointTraits:
        """Return the facts about the endpoint from earlier sessions."""
        client = self.client
        dropped = {fix.param for fix in client.param_fixes if fix.action == "drop"}
        # An endpoint of a lower level refuses or ignores the parameters of the level above.
        not_reported = {"tokens": (), "logprobs": (TOKEN_IDS,), "text": (TOKEN_IDS, LOGPROBS)}
        return EndpointTraits(
            refused=frozenset(dropped.union(not_reported[self.level])),
            fixes=None if is_trainable(session.purpose, self.level) else client.param_fixes,
            ends_at_context_limit=True,
        )

    def model(self, session: CaptureSession, cap: int | None) -> Model:
        """Return the model of a session's rollout.

        Args:
            session: Decides how answers are sampled, and whether the agent may.
            cap: The most tokens that an answer may have.
        """
        client, level = self.client, self.level
        is_training = is_trainable(session.purpose, level)
        sampling: Json = dict(session.sampling or session.eval_sampling or (NEUTRAL_SAMPLING if is_training else {}))
        may_set = () if session.sampling else tuple(sorted(_AGENTS - set(sampling)))
        # `endpoint_headers` puts a key into the usual header of the dialect; any other header is an extra one.
        usual = ("authorization", "x-api-key") if client.provider == "anthropic" else ("authorization",)
        is_usual = client.auth_header.lower() in usual
        key = client.api_key or ""
        return Model(
            base_url=client.base_url,
            name=client.served_model or "",
            api_key=SecretStr(key if is_usual else ""),
            extra_headers={} if is_usual or not key else {client.auth_header: key},
            dialect="anthropic" if client.provider == "anthropic" else "openai_chat",
            top_logprobs=1,
            return_token_ids=level == "tokens",
            max_tokens_cap=cap,
            sampling={},
            agent_may_set=may_set,
        ).model_copy(update={"sampling": sampling})  # not completed: an evaluation keeps the endpoint's defaults
