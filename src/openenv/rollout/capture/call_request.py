"""The request of a model call, as the agent sent it and as the endpoint gets it.

Knows parameters and dialects. Knows nothing of connections, retries or answers.
"""

# From the agent's request to the endpoint's:
#
#   agent's body --> allow ------> bridge -------> rewrite -----------------> fixes ---------> endpoint's body
#                    parameters    translates      model, token limit,        changes that
#                    that agents   to the other    sampling, log-probabili-   endpoints asked
#                    may set       dialect         ties, token IDs            for
#
# If the endpoint refuses the result, `repair` changes one thing and the whole chain runs again.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..tasks.model_parameters import allow, steering
from .captured_rollout import CapturedRollout
from .dialects.dialect import STREAM, AgentDialect, Bridge, CallOptions, ModelDialect
from .encoding import Json, dumps
from .parameter_fixes import ParamFix, forced_parameters_named, next_fix
from .upstream_errors import REFUSALS


@dataclass(frozen=True, slots=True)
class CallRequest:
    """An agent's request, its dialect, and the dialect of the endpoint."""

    dialect: AgentDialect
    path: str
    body: Json
    headers: Mapping[str, str]
    endpoint: ModelDialect
    bridge: Bridge | None = None
    """Translates between the two dialects; None if they are the same."""
    query: str = ""

    @property
    def wants_stream(self) -> bool:
        """Return whether the agent asks for a stream."""
        return self.body.get("stream") is True


class PreparedRequest:
    """The request for the endpoint, and its repairs."""

    def __init__(self, request: CallRequest, rollout: CapturedRollout) -> None:
        self._request = request
        self._rollout = rollout
        model = rollout.model
        self._allowed = allow(request.dialect.name, request.body, engine=model.engine, may_set=model.agent_may_set)
        self._fixes: list[ParamFix] = []  # of this call; the rollout gets them once a repaired request succeeded
        self._write(rollout.call_options())

    def _write(self, options: CallOptions) -> None:
        request, body = self._request, self._allowed.body
        if request.bridge is not None:
            body = request.bridge.request(body)
        rewritten = request.endpoint.rewrite(body, options)
        for fix in (*(self._rollout.traits.fixes or ()), *self._fixes):
            fix.apply(rewritten.body)
        self.options = options
        self.body: Json = rewritten.body
        self.forced: frozenset[str] = rewritten.forced
        """The fields that the proxy asks for and the agent did not; the agent must not see them."""
        self.limit: int | None = rewritten.limit
        """The most tokens that the endpoint may sample; None for no limit."""

    @property
    def is_streamed(self) -> bool:
        """Return whether the endpoint is asked for a stream."""
        return self.body.get("stream") is True

    def facts(self) -> Json:
        """Return the facts about the request that are recorded with its two bodies."""
        request = self._request
        facts: Json = {"dialect": request.dialect.name, "to": request.endpoint.name, "path": request.path}
        facts |= {"stream": request.wants_stream, "not_trainable": steering(request.endpoint.name, self.body)}
        return facts | ({"removed": self._allowed.removed} if self._allowed.removed else {})

    def repair(self, status: int, error: Json) -> bool:
        """Change the request after a refusal, if the refusal says how; return whether it changed.

        This ends: each repair removes an option or uses up one of `MAX_FIXES`.
        """
        return self._leave_out_forced(status, error) or self._fix(status, error)

    # Only after success: an agent could provoke refusals, and later calls must not lose parameters for that.
    def accepted(self) -> None:
        """Let the rollout's next calls use the repairs of this one: the endpoint accepted the request."""
        self._rollout.refused = self.options.refused
        shared = self._rollout.traits.fixes
        if shared is not None:
            shared.extend(fix for fix in self._fixes if fix not in shared)

    def _leave_out_forced(self, status: int, error: Json) -> bool:
        """Leave out a forced parameter that the endpoint complains about.

        Only the proxy's own values count. Otherwise an agent could provoke complaints about its values, and so switch
        off the capture of token IDs.
        """
        if status not in REFUSALS:
            return False
        complaint = dumps(error).decode().lower()
        if self.is_streamed and "return_token_ids" in complaint and "stream" in complaint:
            return self._leave_out(STREAM)  # this engine sends IDs with whole answers only
        for parameter in forced_parameters_named(complaint):
            if self._is_ours(parameter) and self._leave_out(parameter):
                return True
        return False

    def _is_ours(self, parameter: str) -> bool:
        if parameter in self.forced:
            return True
        # The proxy writes its own limit into every request.
        is_changed = parameter == "max_tokens" or self.body.get(parameter) != self._request.body.get(parameter)
        return parameter in self.body and is_changed

    def _leave_out(self, parameter: str) -> bool:
        if not self.options.allows(parameter):
            return False
        self._write(self.options.without(parameter))
        return True

    def _fix(self, status: int, error: Json) -> bool:
        """Change the request as the endpoint asks for, in a rollout that allows it."""
        shared = self._rollout.traits.fixes
        if shared is None:
            return False
        fix = next_fix(status, error.get("body") or error.get("message"), self.body, applied=[*shared, *self._fixes])
        if fix is None:
            return False
        self._fixes.append(fix)
        self._write(self.options)
        return True
