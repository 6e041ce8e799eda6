"""The model endpoints that a rollout may name: where they are, which key they take, which model they have.

Reads the operator's variables when it is asked, never at import; callers decide which keys leave the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

ENDPOINT_KINDS = ("vllm", "openai", "hf_router")
"""Endpoints that a variable configures."""
SCRIPTED = "scripted"
"""The endpoint that plays a script: no model, no key, the same answers every time."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Where the parts of an endpoint come from."""

    url_variable: str
    key_variable: str
    model_variable: str
    url: str | None
    key: str | None
    model: str
    is_thinking_off: bool = False


_KINDS: dict[str, _Kind] = {
    "vllm": _Kind("VLLM_URL", "VLLM_API_KEY", "VLLM_MODEL", None, "intercepted", "Qwen/Qwen3.5-4B", True),
    "openai": _Kind(
        "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "https://api.openai.com/v1", None, "gpt-4o-mini"
    ),
    "hf_router": _Kind(
        "HF_ROUTER_BASE_URL",
        "HF_ROUTER_API_KEY",
        "HF_ROUTER_MODEL",
        "https://router.huggingface.co/v1",
        None,
        "Qwen/Qwen3-4B-Instruct-2507:nscale",
    ),
}


@dataclass(frozen=True, slots=True)
class ResolvedEndpoint:
    """An endpoint that can be asked."""

    kind: str
    base_url: str
    api_key: str = field(repr=False)
    model: str
    disable_thinking_default: bool


class EndpointError(ValueError):
    """The endpoint is unknown, or a part of it is missing."""


def resolve_endpoint(
    kind: str,
    *,
    base_url: str = "",
    api_key: str = "",
    model: str = "",
    environ: Mapping[str, str] | None = None,
) -> ResolvedEndpoint:
    """Return an endpoint: what is given here, else what a variable says, else the default.

    Raises:
        EndpointError: There is no such kind, or it has no address or no key.
    """
    defaults = _KINDS.get(kind)
    if defaults is None:
        raise EndpointError(f"unknown endpoint kind {kind!r}: choose one of {', '.join((*ENDPOINT_KINDS, SCRIPTED))}")
    variables = os.environ if environ is None else environ
    address = base_url or variables.get(defaults.url_variable, "") or defaults.url
    if not address:
        raise EndpointError(f"no base_url for {kind!r}: pass base_url or set {defaults.url_variable}")
    key = api_key or variables.get(defaults.key_variable, "") or defaults.key
    if not key:
        raise EndpointError(f"no api_key for {kind!r}: pass api_key or set {defaults.key_variable}")
    return ResolvedEndpoint(
        kind=kind,
        base_url=with_version(address),
        api_key=key,
        model=model or variables.get(defaults.model_variable, "") or defaults.model,
        disable_thinking_default=defaults.is_thinking_off,
    )


def resolve_for_caller(
    kind: str,
    *,
    base_url: str = "",
    api_key: str = "",
    model: str = "",
    environ: Mapping[str, str] | None = None,
) -> ResolvedEndpoint:
    """Return an endpoint for a remote caller: the operator's key goes to the operator's address only.

    Raises:
        EndpointError: As for `resolve_endpoint`; or another address is named, and no key for it.
    """
    own = _KINDS.get(kind)
    if own is None or not base_url or api_key:
        return resolve_endpoint(kind, base_url=base_url, api_key=api_key, model=model, environ=environ)
    variables = os.environ if environ is None else environ
    configured = variables.get(own.url_variable, "") or own.url or ""
    has_secret = bool(variables.get(own.key_variable, ""))
    if has_secret and with_version(base_url) != with_version(configured):
        raise EndpointError(f"no api_key for {kind!r} at {base_url}: the server's own key is for its own endpoint")
    return resolve_endpoint(kind, base_url=base_url, model=model, environ=environ)


def with_version(base_url: str) -> str:
    """Return an address that ends in `/v1`."""
    trimmed = base_url.rstrip("/")
    return trimmed if trimmed.endswith("/v1") else f"{trimmed}/v1"


def catalog_summary(environ: Mapping[str, str] | None = None) -> list[dict[str, str | bool]]:
    """Describe the endpoints without their keys: what is configured, and what is missing."""
    described: list[dict[str, str | bool]] = []
    for kind in ENDPOINT_KINDS:
        try:
            endpoint = resolve_endpoint(kind, environ=environ)
        except EndpointError as exc:
            described.append({"kind": kind, "is_ready": False, "reason": str(exc)})
        else:
            described.append({"kind": kind, "is_ready": True, "base_url": endpoint.base_url, "model": endpoint.model})
    described.append({"kind": SCRIPTED, "is_ready": True, "model": SCRIPTED})
    return described
