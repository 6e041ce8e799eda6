"""The endpoint of a policy: chat completions with token IDs and log-probabilities, as vLLM answers them.

    POST /v1/chat/completions      messages; the answer has `prompt_token_ids`, `token_ids` and `logprobs`
    POST /v1/completions           token IDs instead of messages (`prompt`)
    POST /tokenize                 the token IDs of messages
    GET  /v1/models, /health

So the capture proxy can use it with `Model(engine="vllm")`: token-in, token-out. Knows requests and chat templates.
Samples with temperature 1 or 0 only, because all other parameters change the distribution that is trained.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openenv.rollout.capture.token_in import AnswerStyle
from openenv.rollout.tasks.task import Model, Sampling
from openenv.server.thread_server import ThreadServer

from .policy import Policy
from .sampler import SampledTokens, Sampler, TokenPrompt

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None), "top_k": (-1, 0, None), "min_p": (0, None), "frequency_penalty": (0, None), "n": (1, None),
    "presence_penalty": (0, None), "repetition_penalty": (1, None), "stop": (None, []), "stream": (False, None),
}  # fmt: skip
"""Parameters that may be sent with these values only."""


class BadRequest(Exception):
    """The request cannot be answered; the text is the reason."""


class ChatTokens:
    """Conversations as token IDs, and answers as text."""

    def __init__(self, policy: Policy) -> None:
        self._tokenizer = policy.tokenizer
        self._ends = policy.end_ids
        self._pieces: dict[int, str] = {}

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Return the token IDs of a conversation with the beginning of the answer.

        Raises:
            BadRequest: the chat template refuses the messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [_plain(message) for message in messages],
                tools=tools or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as exc:  # a template may raise anything
            raise BadRequest(f"the chat template refuses the messages: {exc}") from exc
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: list[int]) -> str:
        """Return the text of an answer, without the token that ended it."""
        ids = ids[:-1] if ids and ids[-1] in self._ends else ids
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """Return the text of one token."""
        if token not in self._pieces:
            self._pieces[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return self._pieces[token]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content as text, and the arguments of tool calls as objects, as templates read them."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    plain = {**message, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return plain


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            function["arguments"] = {}
    return {**call, "function": function}


@dataclass(frozen=True, slots=True)
class PolicyEndpoint:
    """A policy's sampler, served by a thread. A context manager."""

    server: ThreadServer
    name: str

    @classmethod
    def of(cls, sampler: Sampler, name: str = "policy", port: int = 0) -> PolicyEndpoint:
        """Make the endpoint of a sampler."""
        return cls(ThreadServer(application(sampler, name), port=port, log_level="warning"), name)

    def model(self, **fields: Any) -> Model:
        """Return the model for `play`, `rollouts` and the capture proxy."""
        arguments = {"engine": "vllm", "top_logprobs": 0, "sampling": Sampling(), **fields}
        return Model(base_url=f"{self.server.url}/v1", name=self.name, **arguments)

    def __enter__(self) -> PolicyEndpoint:
        self.server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.server.close()


def application(sampler: Sampler, name: str) -> Starlette:
    """Return the ASGI application."""
    answers = _Answers(sampler, name)

    def post(path: str, handle: Callable[[dict[str, Any]], Awaitable[_Reply]]) -> Route:
        async def respond(request: Request) -> Response:
            try:
                body, version = await handle(await request.json())
            except (BadRequest, KeyError, TypeError, ValueError) as exc:
                return JSONResponse({"error": {"message": str(exc), "type": "invalid_request_error"}}, 400)
            except RuntimeError as exc:  # the sampler is closed, or torch failed
                return JSONResponse({"error": {"message": str(exc), "type": "unavailable"}}, 503)
            return JSONResponse(body, headers={"x-policy-version": str(version)})

        return Route(path, respond, methods=["POST"])

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            post("/v1/chat/completions", answers.chat),
            post("/v1/completions", answers.complete),
            post("/tokenize", answers.tokenize),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


_Reply = tuple[dict[str, Any], int]
"""The body of a response, and the version of the policy."""


class _Answers:
    """The answers of the routes."""

    def __init__(self, sampler: Sampler, name: str) -> None:
        self._sampler, self._name = sampler, name
        self._tokens = ChatTokens(sampler.policy)
        self._style = AnswerStyle(reads_calls=True)

    async def chat(self, body: dict[str, Any]) -> _Reply:
        """Answer messages."""
        ids = self._tokens.render(body["messages"], body.get("tools"))
        sampled = await self._sample(body, ids)
        text = self._tokens.text(sampled.ids)
        message, calls_tools = {"role": "assistant", "content": text}, False
        if body.get("tools") and sampled.ended:
            message, calls_tools = self._style.read(text)
        entries: list[dict[str, Any]] = [
            {"token": self._tokens.piece(token), "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(sampled.ids, sampled.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if calls_tools else _finish(sampled),
            "logprobs": {"content": entries},
            "token_ids": sampled.ids,
        }
        about = {"prompt_token_ids": ids, "usage": _usage(ids, sampled)}
        return {**_head("chat.completion", self._name), "choices": [choice], **about}, sampled.version

    async def complete(self, body: dict[str, Any]) -> _Reply:
        """Continue token IDs."""
        ids = body.get("prompt")
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise BadRequest("`prompt` must be a list of token IDs")
        sampled = await self._sample(body, ids)
        pieces = [self._tokens.piece(token) for token in sampled.ids]
        choice = {
            "index": 0,
            "text": self._tokens.text(sampled.ids),
            "finish_reason": _finish(sampled),
            "logprobs": {"tokens": pieces, "token_logprobs": sampled.logprobs},
            "token_ids": sampled.ids,
        }
        about = {"usage": _usage(ids, sampled)}
        return {**_head("text_completion", self._name), "choices": [choice], **about}, sampled.version

    async def tokenize(self, body: dict[str, Any]) -> _Reply:
        """Return the token IDs of messages."""
        ids = self._tokens.render(body["messages"], body.get("tools"))
        return {"tokens": ids, "count": len(ids), "max_model_len": self._sampler.context}, self._sampler.policy.version

    async def _sample(self, body: dict[str, Any], ids: list[int]) -> SampledTokens:
        for key, allowed in _NEUTRAL.items():
            if body.get(key) not in (*allowed, None):
                raise BadRequest(f"{key}={body[key]!r} is not supported: this endpoint samples from the model itself")
        temperature = body.get("temperature", 1)
        if temperature not in (0, 1, None):
            raise BadRequest(f"temperature={temperature!r} is not supported: choose 1, or 0 for the likeliest token")
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        limit = min(int(asked), self._sampler.context - len(ids))
        if limit < 1:
            raise BadRequest(f"the prompt has {len(ids)} tokens, and the context {self._sampler.context}")
        prompt = TokenPrompt(ids, limit, greedy=temperature == 0, seed=body.get("seed"))
        return await asyncio.wrap_future(self._sampler.submit(prompt))


def _usage(ids: list[int], sampled: SampledTokens) -> dict[str, int]:
    counts = {"prompt_tokens": len(ids), "completion_tokens": len(sampled.ids)}
    return {**counts, "total_tokens": sum(counts.values())}


def _finish(sampled: SampledTokens) -> str:
    return "stop" if sampled.ended else "length"


def _head(kind: str, name: str) -> dict[str, Any]:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}
