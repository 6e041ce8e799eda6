"""The send of a model call: `EndpointSender` gets an answer from the endpoint, with retries and repairs.

Knows addresses, headers and errors of endpoints. Knows nothing of the agent: the answer's body is `answer_relay`'s.
"""

# The attempts of one call:
#
#   send ---- 2xx ------------------------------------------> the response; its body was not read yet
#     ^  \
#     |   +-- an error that names a parameter ----> repair the request ----+
#     |   +-- 429, 5xx, connection refused -------> pause, at most 3 times +---> send again
#     |   +-- any other error ------------------------------> ProxiedCallFailed
#     |                                                                    |
#     +--------------------------------------------------------------------+
#
# Nothing is sent again after the first byte of an answer: the agent may have seen it.

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

from ..tasks.task import Model
from .call_parts import CallParts
from .encoding import Json, dumps, load_object
from .outbound import EndpointError, EndpointResponse, Endpoints
from .token_in import continue_with_tokens
from .upstream_errors import REFUSALS, ProxiedCallFailed, error_message

log = logging.getLogger("openenv.rollout.capture")

POLICY_S = 2.0
PROMPT_IDS_S = 5.0
RENDER_S = 60.0
PROMPT_IDS_LIMIT = 64 * 1024 * 1024
ERROR_LIMIT = 256 * 1024
SENT_HEADERS = frozenset({"accept", "anthropic-version", "anthropic-beta", "openai-beta"})
"""The agent's headers that the endpoint may see."""
SENT_QUERY = frozenset({"beta", "api-version"})
"""The query parameters that the endpoint may see."""
_NO_ROUTE = frozenset({404, 405, 501})
"""Statuses of an engine that lacks a route."""
_VERSION = re.compile(r"v\d+\w*")


class EndpointSender:
    """Sends one call until the endpoint answers without an error."""

    def __init__(self, call: CallParts) -> None:
        self._call = call
        self._response: EndpointResponse | None = None
        self._base_url = ""  # of the last attempt

    async def answer(self) -> EndpointResponse:
        """Return the first response without an error.

        Raises:
            ProxiedCallFailed: No attempt succeeded.
        """
        call, ledger, prepared = self._call, self._call.ledger, self._call.prepared
        if call.rollout.tokens is not None:
            prepared.token_call = await continue_with_tokens(call.rollout.tokens, prepared.body, self._ask)
        while True:
            ledger.attempts += 1
            status: int | None = None
            try:
                response = self._response = await self._send()
            except EndpointError as exc:
                failure = self._no_response(exc)
                # After a timeout the endpoint may still be sampling: another request would double its load.
                if exc.kind != "connect":
                    raise failure from None
                retry_after = ""
            else:
                status = response.status
                if 200 <= status < 300:
                    prepared.accepted()
                    return response
                failure = await self._error_of(response)
                if prepared.token_call is not None and status in _NO_ROUTE | REFUSALS:
                    # The chat route decides about the request. Its conversation may be shorter, without thoughts.
                    prepared.token_call.memory.is_off = status in _NO_ROUTE
                    prepared.token_call = None
                    ledger.attempts -= 1
                    ledger.recorder.tried(status, failure.error)
                    continue
                if prepared.repair(status, failure.error):
                    ledger.attempts -= 1  # the endpoint works, so this attempt does not count
                    ledger.recorder.resent(call.request.body, prepared.body)
                    ledger.recorder.tried(status, failure.error)
                    continue
                retry_after = response.headers.get("retry-after", "")
            pause_s = call.services.retries.pause_s(ledger.attempts, status=status, retry_after=retry_after)
            if pause_s is None:
                raise failure
            ledger.recorder.tried(status, failure.error)
            await asyncio.sleep(pause_s)

    async def look_for_outage(self, failure: ProxiedCallFailed) -> None:
        """Note that nothing listens at the endpoint, before the agent ends: it may be back when the rollout is judged.

        A refused connection answers no request, so no agent can have caused it.
        """
        if failure.how not in ("unreachable", "broken") or not self._base_url:
            return
        if await self._call.services.endpoints.is_gone(self._base_url):
            self._call.rollout.outage = f"nothing listened there when a call failed: {failure}"

    async def prompt_ids(self, count: int) -> list[int] | None:
        """Ask llama.cpp for the `count` IDs of the prompt; None if it has no such routes."""
        call = self._call
        return await ask_prompt_ids(
            call.services.endpoints, call.rollout.base_url, call.prepared.body, self._headers(), count=count
        )

    async def policy_version(self, url: str) -> str | None:
        """Ask an address for the version of the policy; None if it does not answer."""
        try:
            headers = {"accept-encoding": "identity"}
            response = await self._call.services.endpoints.send("GET", url, b"", headers, timeout_s=POLICY_S)
            body = await response.read(64 * 1024)
        except EndpointError as exc:
            log.warning("the policy's version is not available: %s", self._call.redacted(str(exc)))
            return None
        if response.status != 200:
            return None
        parsed = load_object(body)
        if parsed is None:
            return body.decode("utf-8", "replace").strip()[:200] or None
        values = (parsed.get(name) for name in ("policy_version", "weight_version", "version"))
        return next((str(value) for value in values if value is not None), None)

    def close(self) -> None:
        """Return the connection, or close it if the response was not read to its end."""
        if self._response is not None:
            self._response.close()

    def _headers(self) -> dict[str, str]:
        """Return the headers for the endpoint, with the real key."""
        agents = self._call.request.headers.items()
        return endpoint_headers(
            self._call.rollout.model, {name: value for name, value in agents if name in SENT_HEADERS}
        )

    async def _send(self) -> EndpointResponse:
        rollout, request = self._call.rollout, self._call.request
        base_url = self._base_url = rollout.base_url
        token_call = self._call.prepared.token_call
        url = endpoint_url(base_url, request.endpoint.path)
        if token_call is not None:
            url = server_root(base_url) + token_call.path
        # A query has a meaning in the agent's dialect only.
        is_native = request.bridge is None and token_call is None
        query = [pair for pair in parse_qsl(request.query) if pair[0] in SENT_QUERY and is_native]
        if query:
            url += f"?{urlencode(query)}"
        body = dumps(self._call.prepared.body if token_call is None else token_call.body)
        timeout_s = rollout.model.request_timeout_s
        try:
            return await self._call.services.endpoints.send("POST", url, body, self._headers(), timeout_s=timeout_s)
        except EndpointError as exc:
            if exc.kind == "connect":
                rollout.leave_replica(base_url)  # the next attempt goes to the next replica
            raise

    async def _ask(self, path: str, body: Json) -> Json | None:
        """Post to a route of the engine that samples nothing for the agent; None for an error."""
        url = server_root(self._call.rollout.base_url) + path
        endpoints = self._call.services.endpoints
        try:
            response = await endpoints.send("POST", url, dumps(body), self._headers(), timeout_s=RENDER_S)
            data = await response.read(PROMPT_IDS_LIMIT)
        except EndpointError:
            return None
        if response.status in _NO_ROUTE and self._call.rollout.tokens is not None:
            self._call.rollout.tokens.is_off = True
        return load_object(data) if response.status == 200 else None

    def _no_response(self, exc: EndpointError) -> ProxiedCallFailed:
        how = "timeout" if exc.kind == "timeout" else "unreachable"
        message = self._call.redacted(str(exc))
        self._call.rollout.endpoint_failed(status=None, kind=how, message=message)
        error = {"message": message, "kind": exc.kind, "status": None}
        return ProxiedCallFailed(how, 504 if how == "timeout" else 502, message, error=error)

    async def _error_of(self, response: EndpointResponse) -> ProxiedCallFailed:
        """Read an error that the endpoint answered with."""
        call, status = self._call, response.status
        try:
            body = await response.read(ERROR_LIMIT)
        except EndpointError as exc:
            body = str(exc).encode()
        text = call.redacted(body.decode("utf-8", "replace"))
        parsed = load_object(text)
        parsed = None if parsed is None else call.rollout.redactor.value(parsed)
        message = error_message(parsed) or text[:2000] or f"status {status}"
        kind = "refused" if status in REFUSALS else "failed"
        call.rollout.endpoint_failed(status=status, kind=kind, message=message)
        error: Json = {"message": message, "status": status, "kind": "failed"}
        if parsed is not None:
            error["body"] = parsed
        if status in (401, 403):  # about the real key: the agent must learn nothing about it
            message = "the endpoint does not accept the key of the capture proxy"
            return ProxiedCallFailed("failed", status, message, error=error)
        failure = ProxiedCallFailed("failed", status if 400 <= status < 600 else 502, message, error=error)
        failure.headers = call.passed_headers(response)
        if parsed is not None and call.request.bridge is None:
            failure.native_body = dumps(parsed)
        return failure


# `http://host:8000` and `http://host:8000/v1` are the same endpoint; `https://host/api/v4` has its own version.
def endpoint_url(base_url: str, path: str) -> str:
    """Return the address of a call: the base, with `/v1` if it has no version, and the dialect's path."""
    base = base_url.rstrip("/")
    return f"{base}{path}" if _VERSION.fullmatch(base.rpartition("/")[2]) else f"{base}/v1{path}"


def server_root(base_url: str) -> str:
    """Return the address of an engine's own routes, which have no version."""
    return base_url.rstrip("/").removesuffix("/v1")


def endpoint_headers(model: Model, passed_on: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request to a model's endpoint: the real key, and headers of the agent."""
    # `identity`: compressed events would come in blocks, later than they were sampled.
    headers = {"content-type": "application/json", "accept-encoding": "identity", **passed_on}
    key = model.api_key.get_secret_value()
    if model.dialect == "anthropic":
        headers["x-api-key"] = key
        headers.setdefault("anthropic-version", "2023-06-01")
    elif key:  # without one, the key is in `extra_headers`, or the endpoint needs none
        headers["authorization"] = f"Bearer {key}"
    headers.update({name.lower(): value for name, value in model.extra_headers.items()})
    return headers


async def ask_prompt_ids(
    endpoints: Endpoints, base_url: str, body: Json, headers: Mapping[str, str], *, count: int
) -> list[int] | None:
    """Ask llama.cpp for the IDs of a request's prompt; None if it has no such routes, or reports other IDs."""
    # llama.cpp has the IDs of a prompt on separate routes only: its template, then its tokeniser. The proxy never
    # tokenises, and accepts the IDs only if they are as many as the engine reported with the answer.
    root = server_root(base_url)

    async def post(path: str, value: Json) -> Json:
        response = await endpoints.send("POST", f"{root}{path}", dumps(value), headers, timeout_s=PROMPT_IDS_S)
        data = await response.read(PROMPT_IDS_LIMIT)
        return (load_object(data) or {}) if response.status == 200 else {}

    try:
        prompt = (await post("/apply-template", body)).get("prompt")
        ids = (await post("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})).get("tokens")
    except EndpointError:
        return None
    fits = isinstance(ids, list) and len(ids) == count and all(isinstance(token, int) for token in ids)
    return ids if fits else None
