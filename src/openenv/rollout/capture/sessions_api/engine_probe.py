"""Probe an endpoint for its capture level: `validate_llm`.

    level      the endpoint sends                                                 good for
    tokens     IDs of prompt and completion, log-probabilities after temperature  training
    logprobs   log-probabilities, or ones from before temperature                 evaluation
    text       nothing                                                            evaluation

Blocking, for code that runs before a server does.
"""

# The requests of `validate_llm`, each a few tokens long:
#
#   GET /models                 is the model served at all?
#   a word, with IDs and        level: tokens, logprobs or text; a parameter that the endpoint refuses is repaired,
#   log-probabilities           as in calls, and later requests use the repair
#   a question for a tool       does the endpoint accept tools, and does the model call them?
#   a word, at two              are log-probabilities those after temperature? If not, the importance ratios of a
#   temperatures                trainer would be wrong, and the level falls to logprobs

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from openenv import settings

from ...tasks.model_parameters import finite_number
from ..dialects.dialect import as_dict, as_list, dicts_in
from ..encoding import Json
from ..outbound import Endpoints
from ..parameter_fixes import ParamFix, behaviour_warnings
from ..upstream_errors import UpstreamError, UpstreamHTTPError
from .capture_checks import check_upstream_response
from .engine_client import (
    PROVIDERS,
    EngineAddress,
    auth_headers,
    complete_with_repairs,
    normalise_engine_base,
    openai_api_base,
    parsed_answer,
)

HINT = (
    "Ids and log-probabilities to train on come from vLLM with --return-tokens-as-token-ids --logprobs-mode"
    " processed_logprobs, and from SGLang (main). Any other OpenAI-compatible endpoint is good for evaluation."
)
_EXPECTED = ("no_prompt_token_ids", "no_completion_token_ids", "no_logprobs", "token_strings")
"""Findings that a level below `tokens` implies."""
_SMALLEST_GAP = 0.5  # below it, rounding hides the effect of temperature
_LOWEST_LOGPROB = 100.0
_TOOL: Json = {
    "name": "bash",
    "description": "Run a shell command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


@dataclass
class LLMReport:
    """The result of a probe."""

    ok: bool
    """Whether training is possible with the endpoint."""
    llm_url: str
    model: str
    findings: list[str] = field(default_factory=list)
    n_prompt_ids: int = 0
    n_completion_ids: int = 0
    served_models: list[str] = field(default_factory=list)
    capture_level: str = ""
    reachable: bool = False
    param_fixes: list[str] = field(default_factory=list)
    """The changes of requests that the endpoint asked for."""
    tool_support: str = ""
    """`ok`, `no-tool-call`, `rejected` or `unknown`."""
    logprobs_mode: str = ""
    """`processed`, `raw` or `unknown`."""

    @property
    def trainable(self) -> bool:
        """Return whether rollouts with it can be trained on."""
        return self.capture_level == "tokens"

    @property
    def rollout_type(self) -> str:
        """Return `train` or `eval`."""
        return "train" if self.trainable else "eval"

    def summary(self) -> str:
        """Return the report as one or two lines."""
        if self.ok:
            return f"engine OK: {self.n_completion_ids} completion ids, {self.n_prompt_ids} prompt ids"
        if self.reachable:
            named = (
                "log-probabilities but no token ids to train on" if self.capture_level == "logprobs" else "text only"
            )
            return f"endpoint is EVAL ONLY: it names {named}"
        return "engine NOT reachable:\n  " + "\n  ".join(self.findings)


@dataclass(frozen=True)
class _Endpoint:
    """The address of the requests."""

    base: str
    api_key: str | None
    auth_header: str
    timeout_s: float

    def ask(self, path: str, body: Json | None = None, **headers: str) -> Json:
        """Send a request, and return the JSON object of the answer.

        Raises:
            UpstreamError: The endpoint did not answer, or with an error or something other than an object.
        """
        return _run(self._ask(path, body, **headers))

    def complete(self, body: Json, fixes: list[ParamFix]) -> Json:
        """Ask for a completion; repair the request as calls do, and add the repairs to `fixes`.

        Raises:
            UpstreamError: As `ask`; the error is about something else than a parameter.
        """
        return _run(complete_with_repairs(functools.partial(self._ask, "/chat/completions"), body, fixes))

    async def _ask(self, path: str, body: Json | None = None, **headers: str) -> Json:
        fields = {"user-agent": "openenv", **headers, **auth_headers(self.api_key, self.auth_header)}
        endpoints = Endpoints()
        try:
            return parsed_answer(*await EngineAddress(self.base, fields, self.timeout_s).send(endpoints, path, body))
        finally:
            endpoints.close()


def _run(request: Coroutine[Any, Any, Json]) -> Json:
    """Run a request in a thread with its own loop: probes block, and callers may run on a loop, as notebooks do."""
    with ThreadPoolExecutor(1, thread_name_prefix="openenv-probe") as thread:
        return thread.submit(asyncio.run, request).result()


def list_models(
    llm_url: str, timeout: float = 30.0, api_key: str | None = None, auth_header: str = "Authorization"
) -> list[str]:
    """Return the names of an endpoint's models; an empty list if it does not answer.

    Args:
        llm_url: Its address.
        timeout: The time limit in seconds.
        api_key: Its key.
        auth_header: The header for the key.
    """
    try:
        answer = _Endpoint(openai_api_base(llm_url), api_key, auth_header, timeout).ask("/models")
    except UpstreamError:
        return []
    return [str(model.get("id") or "") for model in dicts_in(answer.get("data"))]


def only_model(llm_url: str, *, api_key: str | None = None, auth_header: str = "Authorization") -> str:
    """Return the name of an endpoint's model if it serves exactly one; empty otherwise.

    Args:
        llm_url: Its address.
        api_key: Its key.
        auth_header: The header for the key.
    """
    served = list_models(llm_url, api_key=api_key, auth_header=auth_header)
    return served[0] if len(served) == 1 else ""


def probe_tool_support(
    base: str,
    model: str,
    *,
    timeout: float = 60.0,
    api_key: str | None = None,
    auth_header: str = "Authorization",
    fixes: Iterable[ParamFix] | None = None,
) -> tuple[str, list[ParamFix]]:
    """Ask for a tool call; return `ok`, `no-tool-call`, `rejected` or `unknown`, and the repairs of the request.

    Args:
        base: Its address.
        model: The model's name.
        timeout: The time limit in seconds.
        api_key: Its key.
        auth_header: The header for the key.
        fixes: Repairs that the endpoint is known to need.
    """
    endpoint = _Endpoint(openai_api_base(base), api_key, auth_header, timeout)
    earlier_fixes = list(fixes or ())
    applied = list(earlier_fixes)
    question = {"role": "user", "content": "Use the bash tool to list the files in /tmp."}
    body: Json = {"model": model, "messages": [question], "max_tokens": 512, "temperature": 1.0}
    body |= {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "auto"}
    try:
        answer = endpoint.complete(body, applied)
    except UpstreamError as exc:
        refused = isinstance(exc, UpstreamHTTPError)
        return "rejected" if refused else "unknown", applied[len(earlier_fixes) :]
    # Without a call: a model that was cut off while thinking is unknown, one that finished does not call tools.
    choice = _first_choice(answer)
    if as_dict(choice.get("message")).get("tool_calls"):
        support = "ok"
    else:
        support = "unknown" if choice.get("finish_reason") == "length" else "no-tool-call"
    return support, applied[len(earlier_fixes) :]


def probe_logprobs_mode(
    base: str,
    model: str,
    *,
    timeout: float = 60.0,
    api_key: str | None = None,
    auth_header: str = "Authorization",
    fixes: Iterable[ParamFix] | None = None,
) -> str:
    """Find out whether log-probabilities are those after temperature: `processed`, `raw`, or `unknown`.

    Ask for the gap between the two likeliest tokens at two temperatures. After temperature the gap is
    (logit_1 - logit_2) / T, with any normalisation: half as wide at twice the temperature. Before, it stays.

    Args:
        base: The endpoint's address.
        model: The model's name.
        timeout: The time limit in seconds.
        api_key: The endpoint's key.
        auth_header: The header for the key.
        fixes: Repairs that the endpoint is known to need.
    """
    earlier_fixes = list(fixes or ())
    if any(fix.param == "temperature" for fix in earlier_fixes):
        return "unknown"
    endpoint = _Endpoint(openai_api_base(base), api_key, auth_header, timeout)
    #                     T = 1           T = 2
    #   after temperature   -0.1  -2.3      -0.3  -1.4       gaps 2.2 and 1.1: ratio 0.5, `processed`
    #   before temperature  -0.1  -2.3      -0.1  -2.3       gaps 2.2 and 2.2: ratio 1.0, `raw`
    gaps = []
    for temperature in (1.0, 2.0):
        question = {"role": "user", "content": "Reply with exactly: hello"}
        body: Json = {"model": model, "messages": [question], "max_tokens": 1, "temperature": temperature}
        try:
            answer = endpoint.complete({**body, "logprobs": True, "top_logprobs": 5}, list(earlier_fixes))
        except UpstreamError:
            return "unknown"
        entries = dicts_in(as_dict(_first_choice(answer).get("logprobs")).get("content"))
        tops = dicts_in(entries[0].get("top_logprobs")) if entries else []
        values = [value for value in (finite_number(top.get("logprob")) for top in tops) if value is not None]
        values.sort(reverse=True)
        if len(values) < 2 or abs(values[1]) > _LOWEST_LOGPROB:  # engines send -9999 for an impossible token
            return "unknown"
        gaps.append(values[0] - values[1])
    # With a small gap, rounding decides between 1.0 and 0.5. A model that is sure of its word has a wide one.
    if gaps[0] < _SMALLEST_GAP:
        return "unknown"
    ratio = gaps[1] / gaps[0]
    return "raw" if abs(ratio - 1.0) < abs(ratio - 0.5) else "processed"


def _first_choice(answer: Json) -> Json:
    return (dicts_in(answer.get("choices")) or [{}])[0]


def _level_of(payload: Json) -> tuple[str, list[str]]:
    """Return the capture level that a response shows, and findings."""
    report = check_upstream_response(payload)
    if report.ok:
        return "tokens", [str(finding) for finding in report.findings]
    entries = as_list(as_dict(_first_choice(payload).get("logprobs")).get("content"))
    has_logprobs = any(as_dict(entry).get("logprob") is not None for entry in entries)
    findings = [str(finding) for finding in report.findings if finding.code not in _EXPECTED]
    return "logprobs" if has_logprobs else "text", findings


def validate_llm(
    llm_url: str,
    model: str,
    *,
    provider: str = "openai",
    timeout: float = 120.0,
    api_key: str | None = None,
    auth_header: str = "Authorization",
    check_logprobs_mode: bool = True,
    check_tools: bool = True,
) -> LLMReport:
    """Find out the capture level of an endpoint with a few small requests.

    Args:
        llm_url: Its address.
        model: The model's name.
        provider: As in `InferenceClient`.
        timeout: The time limit of one request in seconds.
        api_key: Its key.
        auth_header: The header for the key.
        check_logprobs_mode: Check that log-probabilities are those after temperature.
        check_tools: Check that the model calls tools.

    Raises:
        ValueError: The provider is unknown.
    """
    if provider not in PROVIDERS:
        raise ValueError(f"Unknown upstream provider: {provider}")
    if provider == "anthropic":
        endpoint = _Endpoint(normalise_engine_base(llm_url), api_key, "x-api-key", timeout)
        return _validate_anthropic(endpoint, model, check_tools=check_tools)
    base = openai_api_base(llm_url)
    report = LLMReport(ok=False, llm_url=base, model=model)
    report.served_models = served = list_models(base, min(timeout, 30.0), api_key, auth_header)
    listed = model.rpartition(":")[0] or model if provider == "hf" else model  # "org/model:provider"
    if served and model not in served and listed not in served:
        report.findings.append(f"model {model!r} is not served here; available: {served}")
        return report
    # `top_logprobs: 0`: vLLM sends log-probabilities only with a number here, and others accept it.
    question = {"role": "user", "content": "Reply with the single word: ok"}
    body: Json = {"model": model, "messages": [question], "max_tokens": 8, "temperature": 0.0}
    body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    fixes: list[ParamFix] = []
    try:
        payload = _Endpoint(base, api_key, auth_header, timeout).complete(body, fixes)
    except UpstreamError as exc:
        report.findings.append(f"probe failed: {type(exc).__name__}: {str(exc)[:300]}")
        report.param_fixes = [str(fix) for fix in fixes]
        return report
    report.reachable = True
    report.capture_level, report.findings = _level_of(payload)
    report.n_prompt_ids = len(as_list(payload.get("prompt_token_ids")))
    report.n_completion_ids = len(as_list(_first_choice(payload).get("token_ids")))
    report.param_fixes = [str(fix) for fix in fixes]
    how: dict[str, Any] = {"timeout": min(timeout, 60.0), "api_key": api_key, "auth_header": auth_header}
    if check_tools:
        report.tool_support, more = probe_tool_support(base, model, fixes=fixes, **how)
        fixes += more
        report.param_fixes += [f"{fix} (needed for tool calling)" for fix in more]
        _report_tools(report)
    report.findings += [f"[WARN] behaviour_changed: {warning}" for warning in behaviour_warnings(fixes)]
    if report.trainable and check_logprobs_mode:
        report.logprobs_mode = probe_logprobs_mode(base, model, fixes=fixes, **how)
        _report_mode(report)
    report.ok = report.trainable
    return report


def _report_tools(report: LLMReport) -> None:
    if report.tool_support == "rejected":
        report.findings.append("[FATAL] no_tool_calling: the endpoint refuses tools, which every coding agent sends")
    elif report.tool_support == "no-tool-call":
        text = "the model was asked to call a tool, and answered with text: agents may stop at their first turn"
        report.findings.append(f"[WARN] no_tool_call_emitted: {text}")


def _report_mode(report: LLMReport) -> None:
    if report.logprobs_mode != "unknown":  # the probe is certain; the texts of tokens are a hint only
        report.findings = [finding for finding in report.findings if "token_strings" not in finding]
    if report.logprobs_mode != "raw":
        return
    text = "log-probabilities are those before temperature: importance ratios of a trainer would be wrong"
    if settings.allow_raw_logprobs():
        report.findings.append(f"[WARN] raw_logprobs_forced: {text}; OPENENV_ALLOW_RAW_LOGPROBS allows it")
    else:
        report.capture_level = "logprobs"
        hint = "start vLLM with --logprobs-mode processed_logprobs, or set OPENENV_ALLOW_RAW_LOGPROBS=1"
        report.findings.append(f"[FATAL] raw_logprobs: {text}; {hint}")


def _validate_anthropic(endpoint: _Endpoint, model: str, *, check_tools: bool) -> LLMReport:
    report = LLMReport(ok=False, llm_url=endpoint.base, model=model)
    if not model:
        report.findings.append("an Anthropic endpoint needs the name of a model")
        return report
    content = "Call report_ok with value ok." if check_tools else "Reply with ok."
    body: Json = {"model": model, "max_tokens": 64, "messages": [{"role": "user", "content": content}]}
    if check_tools:
        schema = {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
        body["tools"] = [{"name": "report_ok", "input_schema": schema}]
        body["tool_choice"] = {"type": "tool", "name": "report_ok"}
    try:
        answer = endpoint.ask("/v1/messages", body, **{"anthropic-version": "2023-06-01"})
    except UpstreamHTTPError as exc:
        report.findings.append(f"Native Messages HTTP {exc.status_code}")
        return report
    except UpstreamError as exc:
        report.findings.append(f"Native Messages probe failed: {type(exc).__name__}")
        return report
    blocks = dicts_in(answer.get("content"))
    if answer.get("type") != "message" or not blocks:
        report.findings.append("Native Messages probe failed: the answer is no message with content")
        return report
    report.reachable, report.capture_level = True, "text"
    if check_tools:
        called = any(block.get("type") == "tool_use" and block.get("name") == "report_ok" for block in blocks)
        report.tool_support = "ok" if called else "no-tool-call"
    return report


def require_llm(
    llm_url: str,
    model: str,
    *,
    timeout: float = 120.0,
    api_key: str | None = None,
    auth_header: str = "Authorization",
    require_tokens: bool = False,
) -> LLMReport:
    """Probe an endpoint like `validate_llm`, and raise an error if it is not good enough.

    Args:
        llm_url: Its address.
        model: The model's name.
        timeout: The time limit of one request in seconds.
        api_key: Its key.
        auth_header: The header for the key.
        require_tokens: Require an endpoint that can be trained with.

    Raises:
        RuntimeError: The endpoint does not answer, or sends no token IDs and `require_tokens` is set.
    """
    # The report lists all findings, so that one run shows every problem of the endpoint.
    report = validate_llm(llm_url, model, timeout=timeout, api_key=api_key, auth_header=auth_header)
    if not report.reachable or (require_tokens and not report.trainable):
        raise RuntimeError(f"{report.summary()}\n\n{HINT}")
    return report
