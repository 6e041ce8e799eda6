"""Prompt ids of llama.cpp, which names them only when asked apart: by its own template and its own tokeniser.

Knows two routes of that engine. Nothing is tokenised here, and ids count only where they are as many as the engine says
that it read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openenv.rollout.capture.encoding import Json, dumps, load_object
from openenv.rollout.capture.outbound import EndpointError, Endpoints

TIMEOUT_S = 5.0
LIMIT = 64 * 1024 * 1024


def tokens_read(value: Json) -> int | None:
    """Return how many tokens llama.cpp read, from a chunk or a response of its; None for other engines."""
    usage = value.get("usage")
    if "timings" not in value or not isinstance(usage, dict):
        return None
    count = usage.get("prompt_tokens")
    return count if isinstance(count, int) else None


async def ask_prompt_ids(
    endpoints: Endpoints, base_url: str, body: Json, headers: Mapping[str, str], *, count: int
) -> list[int] | None:
    """Ask the engine for the ids of a request's prompt; None where it does not say, or says something else."""
    root = base_url.rstrip("/").removesuffix("/v1")
    try:
        rendered = await _post(endpoints, f"{root}/apply-template", body, headers)
        asked = {"content": rendered.get("prompt"), "add_special": True, "parse_special": True}
        ids = (await _post(endpoints, f"{root}/tokenize", asked, headers)).get("tokens")
    except EndpointError:
        return None
    return ids if _fits(ids, count) else None


def _fits(ids: Any, count: int) -> bool:
    return isinstance(ids, list) and len(ids) == count and all(isinstance(token, int) for token in ids)


async def _post(endpoints: Endpoints, url: str, body: Json, headers: Mapping[str, str]) -> Json:
    exchange, head = await endpoints.send("POST", url, dumps(body), headers, timeout_s=TIMEOUT_S)
    try:
        data = await exchange.read(LIMIT)
    finally:
        exchange.cancel()  # does nothing where the answer came whole
    return (load_object(data) or {}) if head.status == 200 else {}
