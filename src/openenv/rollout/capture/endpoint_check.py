"""Ask an endpoint for a few tokens with a request that no agent wrote: does it work?

A failed request of an agent proves nothing about the endpoint, since a prompt may be made such that the engine fails.
Nothing here is recorded, and nothing costs budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from openenv.errors import CaptureError
from openenv.protocol.backoff import Backoff

from ..tasks.model_parameters import is_neutral
from ..tasks.task import Model
from .answer_relay import RESPONSE_LIMIT
from .call_parts import Services
from .captured_rollout import Redactor
from .dialects import DIALECTS
from .dialects.dialect import LOGPROBS, CallOptions
from .encoding import Json, dumps, load_object
from .endpoint_sender import endpoint_headers, endpoint_url
from .outbound import EndpointError, Endpoints
from .parameter_fixes import forced_parameters_named
from .retries import ATTEMPTS, wanted_pause_s
from .stream_tap import missing_answer
from .upstream_errors import REFUSALS, error_message

PROBE_S = 30.0
PROBE_TOKENS = 16
PROBE_PAUSE_S = 10.0
NEED_TOOLS = frozenset({"tool_choice", "parallel_tool_calls"})
"""Parameters that endpoints refuse in a request without tools."""


# Who asks, and why:
#
#   openenv rollouts run    before sandboxes start: a wrong URL or key should not cost the setup of a task
#   train.play              after a refused request: does it refuse a request that the policy did not write, too?
#   run.phases              after an agent failed: did the endpoint fail, too? Then the rollout says nothing about the
#                           agent. An agent must not get this label by faking failures, so the host asks itself.
#
# The request differs from an agent's in two points: it asks for few tokens, and never for log-probabilities or IDs.


async def ask_endpoint(
    services: Services, model: Model, *, refused: frozenset[str] = frozenset(), tools: Iterable[Json] = ()
) -> str | None:
    """Ask an endpoint for a few tokens; return the reason for its failure, or None if it answers.

    Args:
        services: The connections to use.
        model: The endpoint.
        refused: Parameters that the endpoint is known to refuse.
        tools: Tools of the request, in the endpoint's dialect: some endpoints refuse every request with tools.
    """
    tools = list(tools)
    options = CallOptions(
        model=model.name,
        top_logprobs=0,
        return_token_ids=False,
        max_tokens=PROBE_TOKENS,
        refused=refused | {LOGPROBS},
        # If the endpoint refuses a parameter of the trainer, every call of every agent fails.
        sampling={name: value for name, value in model.sampling.items() if tools or name not in NEED_TOOLS},
    )
    backoff = Backoff(first_pause_s=services.backoff_s)
    refusal = _ProbeRefusal("")
    attempt = -1
    while attempt < ATTEMPTS - 1:
        attempt += 1
        if attempt:
            await asyncio.sleep(_limit_pause_s(services, refusal) or backoff.pause_s(attempt - 1))
        try:
            answer = await asyncio.wait_for(_ask_once(services.endpoints, model, options, tools), PROBE_S)
        except (asyncio.TimeoutError, TimeoutError):  # another request would add to the load of a busy endpoint
            return f"it did not answer within {PROBE_S:g} s"
        if answer is None:
            return None
        refusal = answer
        without = _without_neutral(options, refusal)
        if without is not None:
            options, attempt = without, -1  # this ends: each time there is one parameter less
        elif refusal.status in REFUSALS:  # an engine may know the limit by its other name, or not at all
            allowed = options.allows("max_tokens")
            options = options.without("max_tokens") if allowed else replace(options, max_tokens=None)
    return Redactor(model).text(refusal.message)[:2000]


def _without_neutral(options: CallOptions, refusal: _ProbeRefusal) -> CallOptions | None:
    """Return the options without a sampling parameter that the endpoint does not know; None if it is about another."""
    if refusal.status not in REFUSALS:
        return None
    for name in forced_parameters_named(refusal.message.lower()):
        if name in options.sampling and options.allows(name) and is_neutral(name, options.sampling[name]):
            return options.without(name)
    return None


def check_endpoint(model: Model) -> None:
    """Ask a model's endpoint for a few tokens, before anything is started for it.

    Raises:
        CaptureError: The endpoint does not answer; the text gives the reason.
    """

    async def ask() -> str | None:
        endpoints = Endpoints()
        try:
            return await ask_endpoint(Services(endpoints, ""), model)
        finally:
            endpoints.close()

    problem = asyncio.run(ask())
    if problem is not None:
        raise CaptureError(f"The endpoint {model.base_url} does not answer for the model '{model.name}': {problem}")


@dataclass(frozen=True, slots=True)
class _ProbeRefusal:
    """The reason for an endpoint's failure."""

    message: str
    status: int | None = None
    retry_after: str = ""


def _limit_pause_s(services: Services, refusal: _ProbeRefusal) -> float | None:
    """Return the pause after an exhausted rate limit; None for any other failure.

    An agent can exhaust the limit, so the probe waits even if the endpoint asks for a longer pause than calls accept:
    until it answers, nothing is known about the endpoint.
    """
    if refusal.status != 429:
        return None
    wanted = wanted_pause_s(refusal.retry_after)
    return PROBE_PAUSE_S if wanted is None else min(wanted, services.retries.longest_wait_s)


async def _ask_once(
    endpoints: Endpoints, model: Model, options: CallOptions, tools: list[Json]
) -> _ProbeRefusal | None:
    """Ask an endpoint once; return the reason for its failure, or None."""
    dialect = DIALECTS[model.dialect]
    question: Json = {"messages": [{"role": "user", "content": "Say yes."}]}
    if dialect.name == "openai_responses":
        question = {"input": "Say yes."}
    if tools:
        question["tools"] = tools
    body = dumps(dialect.rewrite(question, options).body)
    url, headers = endpoint_url(model.base_url, dialect.path), endpoint_headers(model, {})
    try:
        response = await endpoints.send("POST", url, body, headers, timeout_s=PROBE_S)
        raw = await response.read(RESPONSE_LIMIT)
    except EndpointError as exc:
        return _ProbeRefusal(str(exc))
    answer = load_object(raw)
    if not 200 <= response.status < 300:
        message = f"status {response.status}: {error_message(answer) or ''}"
        return _ProbeRefusal(message, response.status, response.headers.get("retry-after", ""))
    if answer is None:
        return _ProbeRefusal("the endpoint's answer is not a JSON object")
    problem = missing_answer(dialect.completion(answer), answer)
    return None if problem is None else _ProbeRefusal(problem)
