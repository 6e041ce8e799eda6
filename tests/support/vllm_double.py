"""Doubles of the servers of vLLM and SGLang: the real engines need a GPU and are not available to these tests.

vLLM's follows vLLM's documented routes: chat and text completions with token IDs, `/tokenize`, `/detokenize`, sleep and
wake-up, pause and resume, weights and their version, and routed experts as base64 of an `.npy` file. Calls wait while
the engine is paused; a weight update during an answer changes its next tokens. Everything is computed
from token IDs, so each answer can be checked: the tokenizer merges letters, and the policy samples other splits of the
same text than the tokenizer would write, with compact tool calls, as real models do. The chat template is that of
Hermes and Qwen: spaces in arguments, tool results in one user turn, and thoughts of earlier turns left out.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from openenv.rollout import capture
from openenv.server.thread_server import ThreadServer

Json = dict[str, Any]
Policy = Callable[[str], str]
"""Returns an answer's text, with its markup, for a prompt's text."""

SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
START, END, CALL, END_CALL, THINK, END_THINK = range(256, 256 + len(SPECIAL))
_WORDS = "th he in er an re on at en nd st es or te ti ed is it al ar the ing and ion tool name arguments result"
_MERGES = (*_WORDS.split(), '{"', '": ', '":', '", ', '",', '"}}', "}}", "00", "10", "12", "20", "42")
_FIRST_MERGE = 256 + len(SPECIAL)
_TABLE = {bytes([value]): value for value in range(256)}
_TABLE |= {text.encode(): 256 + number for number, text in enumerate(SPECIAL)}
_TABLE |= {text.encode(): _FIRST_MERGE + number for number, text in enumerate(dict.fromkeys(_MERGES))}
_BYTES = {token: text for text, token in _TABLE.items()}
_PIECES = re.compile(b"|".join(map(re.escape, sorted(_TABLE, key=len, reverse=True))), re.DOTALL)
LAYERS, TOP, EXPERTS = 3, 2, 16


def encode(text: str) -> list[int]:
    """Return the tokenizer's IDs of a text; special tokens in it become themselves, as in vLLM's templates."""
    return [_TABLE[piece] for piece in _PIECES.findall(text.encode())]


def decode(ids: Iterable[int], *, skip_special: bool = False) -> str:
    """Return the text of IDs."""
    kept = (token for token in ids if not (skip_special and token in (START, END)))
    return b"".join(_BYTES[token] for token in kept).decode("utf-8", "replace")


def sampled_ids(text: str, *, seed: int) -> list[int]:
    """Return a text in other tokens than the tokenizer's: some merges are split."""
    ids: list[int] = []
    for place, token in enumerate(encode(text)):
        piece = _BYTES[token]
        is_split = token >= _FIRST_MERGE and _number(array("q", [seed, place]).tobytes()) % 3 == 0
        ids += [_TABLE[bytes([value])] for value in piece] if is_split else [token]
    return ids


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big")


def logprob(context: Sequence[int], token: int, version: int) -> float:
    """Return the model's log-probability of a token after a context."""
    return -0.01 - _number(array("q", [*context, token, version]).tobytes()) % 1000 / 500


def check_tokens(sequence: capture.Sequence, weights: Mapping[str, int]) -> set[str]:
    """Check each log-probability against the weights that the token's version names; return the versions."""
    versions = sequence.token_versions()
    named = {place: versions[place] for place, bit in enumerate(sequence.loss_mask) if bit}
    for place, name in named.items():
        assert name is not None
        expected = logprob(sequence.input_ids[:place], sequence.input_ids[place], weights[name])
        assert abs(sequence.logprobs[place] - expected) < 1e-9
    return {name for name in named.values() if name is not None}


def spans_of(versions: Sequence[str]) -> list[Json]:
    """Return the versions of tokens as engines report them."""
    spans: list[Json] = []
    for place, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": version, "start": place, "end": place + 1})
    return spans


def experts(ids: Sequence[int], version: int) -> numpy.ndarray[Any, Any]:
    """Return the experts of each token that was passed through the model: all but the last one."""
    rows = [
        [
            [_number(array("q", [*ids[: place + 1], layer, slot, version]).tobytes()) % EXPERTS for slot in range(TOP)]
            for layer in range(LAYERS)
        ]
        for place in range(len(ids) - 1)
    ]
    return numpy.array(rows, dtype=numpy.uint8).reshape(-1, LAYERS, TOP)


def echo_policy(turns: int) -> Policy:
    """Return a policy for echo_env: it thinks, calls the tool in all turns but the last, and then ends."""

    def policy(prompt: str) -> str:
        number = prompt.count("<tool_response>")
        if number == turns - 1:
            return "The end."
        arguments = {"message": f"the {number}"}
        call = json.dumps({"name": "echo_message", "arguments": arguments}, separators=(",", ":"))
        return f"<think>\nanother one, {number}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"

    return policy


# -- the chat template


class TemplateError(ValueError):
    """The template, or the engine before it, cannot render the messages."""


def render(messages: Sequence[Json], tools: Sequence[Json] | None, *, prompt: bool = True) -> str:
    """Return a conversation as the chat template writes it.

    Raises:
        TemplateError: the arguments of a tool call are no JSON, which vLLM parses before the template.
    """
    rest = list(messages)
    system = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else "You are a helpful assistant."
    if tools:
        listed = "\n".join(json.dumps(tool) for tool in tools)
        system += f"\n\n# Tools\n<tools>\n{listed}\n</tools>"
    text = f"<|im_start|>system\n{system}<|im_end|>\n"
    last_user = max((place for place, message in enumerate(rest) if message["role"] == "user"), default=-1)
    for place, message in enumerate(rest):
        if message["role"] == "tool":
            is_first = place == 0 or rest[place - 1]["role"] != "tool"
            is_last = place + 1 == len(rest) or rest[place + 1]["role"] != "tool"
            text += "<|im_start|>user" if is_first else ""
            text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
            text += "<|im_end|>\n" if is_last else ""
            continue
        text += f"<|im_start|>{message['role']}\n"
        thoughts = message.get("reasoning")
        if thoughts and place > last_user:
            text += f"<think>\n{thoughts}\n</think>\n\n"
        text += message.get("content") or ""
        for number, call in enumerate(message.get("tool_calls") or ()):
            text += "\n" if number or message.get("content") else ""
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError as exc:
                raise TemplateError(f"the arguments of a tool call are no JSON: {exc}") from None
            text += f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {json.dumps(arguments)}}}\n'
            text += "</tool_call>"
        text += "<|im_end|>\n"
    return text + "<|im_start|>assistant\n" if prompt else text


def parsed(text: str, *, wants_tools: bool) -> Json:
    """Return the message in an answer's text, by the parsers `qwen3` for thoughts and `hermes` for tool calls."""
    message: Json = {"role": "assistant", "content": None}
    if "</think>" in text:
        thoughts, _, text = text.partition("</think>")
        message["reasoning"] = thoughts.replace("<think>", "").strip("\n")
        text = text.lstrip("\n")
    found = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL) if wants_tools else []
    try:
        calls = [json.loads(each) for each in found]
    except ValueError:
        calls = []
    if calls:
        message["tool_calls"] = [
            {
                "id": f"chatcmpl-tool-{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for number, call in enumerate(calls)
        ]
        text = text[: text.find("<tool_call>")]
    message["content"] = text.strip() or None
    return message


# -- the server


@dataclass(slots=True)
class Sample:
    """One request that was sampled: the ground truth."""

    path: str
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str
    version: int
    """The weights of the first token."""
    labels: list[str]
    """The name of the weights of each token."""


@dataclass
class VllmDouble:
    """The server. Use it as a context manager."""

    policy: Policy
    max_model_len: int = 32768
    drift: float = 1.0
    """The share of answers that are sampled in other tokens than the tokenizer's."""
    routed_experts: bool = False
    """As with `--enable-return-routed-experts`."""
    token_routes: bool = True
    """Whether `/tokenize` exists; without it, as behind a gateway that hides it."""
    samples: list[Sample] = field(default_factory=list)
    refused: int = 0
    version: int = 0
    label: str = "default"
    """The name of the weights, which the trainer sets."""
    update_at: int | None = None
    """After this many tokens, the first answer waits for an update of the weights."""
    is_raw: bool = False
    """Whether log-probabilities are those before temperature: `--logprobs-mode raw_logprobs`, the default of vLLM."""
    fails: dict[str, int] = field(default_factory=dict)
    """Routes that answer with an error, and how often they still do."""
    posts: list[tuple[str, Json, dict[str, str]]] = field(default_factory=list)
    """The requests to control routes: path, body and query."""
    is_asleep: bool = False
    is_paused: bool = False

    def __post_init__(self) -> None:
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in self._posts()]
        routes += [Route("/is_sleeping", self._is_sleeping), Route("/version_of_the_trainer", self._version)]
        routes += [Route(path, self._label) for path in self._infos]
        self._changed = asyncio.Event()
        self._server = ThreadServer(Starlette(routes=routes), host="127.0.0.1", port=0, lifespan="off", ws="none")

    @property
    def url(self) -> str:
        """The address of the API."""
        return f"{self._server.url}/v1"

    @property
    def root(self) -> str:
        """The address of the server."""
        return self._server.url

    def __enter__(self) -> VllmDouble:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.close()

    _infos: ClassVar[tuple[str, ...]] = ("/weight_info",)
    """The routes that name the version of the weights."""

    def _posts(self) -> list[tuple[str, Any]]:
        tokens = [("/tokenize", self._tokenize), ("/detokenize", self._detokenize)] if self.token_routes else []
        return [
            ("/v1/chat/completions", self._chat),
            ("/v1/completions", self._completions),
            ("/sleep", self._sleep),
            ("/wake_up", self._wake_up),
            ("/pause", self._pause),
            ("/resume", self._resume),
            ("/update_weights", self._update_weights),
            ("/collective_rpc", self._update_weights),
            ("/update_weight_version", self._set_label),
            ("/reset_prefix_cache", self._nothing),
            *tokens,
        ]

    async def _control(self, request: Request) -> Json | Response:
        """Note a request to a control route; return its body, or an error if the route shall fail."""
        path, raw = request.url.path, await request.body()
        body = json.loads(raw) if raw else {}
        self.posts.append((path, body, dict(request.query_params)))
        if self.fails.get(path, 0) > 0:
            self.fails[path] -= 1
            return JSONResponse({"error": {"message": "out of memory"}}, 500)
        return body

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _error(self, message: str, status: int = 400) -> Response:
        self.refused += 1
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        return JSONResponse({"error": error}, status)

    async def _sample(self, path: str, body: Json, prompt: list[int]) -> Sample | Response:
        if self.is_asleep:
            return self._error("the engine is asleep", 500)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if len(prompt) + limit > self.max_model_len:
            return self._error(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{len(prompt) + limit} tokens. Please reduce the length of the messages."
            )
        text = self.policy(decode(prompt))
        drifts = _number(array("q", [len(prompt), 7]).tobytes()) % 100 < 100 * self.drift
        ids = [*(sampled_ids(text, seed=len(prompt)) if drifts else encode(text)), END]
        finish = "stop" if len(ids) <= limit else "length"
        ids = ids[:limit]
        sample = Sample(path, prompt, ids, [], finish, self.version, [])
        for place, token in enumerate(ids):
            if place == self.update_at:
                before, self.update_at = self.version, None
                while self.version == before:
                    await self._changed.wait()
            while self.is_paused:
                await self._changed.wait()
            if place == 0:
                sample.version = self.version
            value = logprob([*prompt, *ids[:place]], token, self.version)
            sample.logprobs.append(value if self.is_raw else value / (body.get("temperature") or 1.0))
            sample.labels.append(self.label)
        self.samples.append(sample)
        return sample

    def _experts(self, sample: Sample) -> Json:
        if not self.routed_experts:
            return {}
        file = io.BytesIO()
        numpy.save(file, experts([*sample.prompt, *sample.ids], sample.version))
        return {"routed_experts": base64.b64encode(file.getvalue()).decode()}

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        try:
            prompt = encode(render(body["messages"], body.get("tools")))
        except TemplateError as exc:
            return self._error(str(exc))
        sample = await self._sample("chat", body, prompt)
        if isinstance(sample, Response):
            return sample
        text = decode(sample.ids, skip_special=True)
        message = parsed(text, wants_tools=bool(body.get("tools")))
        finish = "tool_calls" if message.get("tool_calls") and sample.finish == "stop" else sample.finish
        pairs = zip(sample.ids, sample.logprobs, strict=True)
        gap = 3.0 if self.is_raw else 3.0 / (body.get("temperature") or 1.0)

        def tops(value: float) -> list[Json]:
            both = [{"token": "a", "logprob": value}, {"token": "b", "logprob": value - gap}]
            return both[: body.get("top_logprobs") or 0]

        content = [
            {"token": _text(token), "logprob": value, "bytes": list(_BYTES[token]), "top_logprobs": tops(value)}
            for token, value in pairs
        ]
        choice: Json = {"index": 0, "message": message, "finish_reason": finish, **self._experts(sample)}
        whole: Json = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        if body.get("return_token_ids"):
            choice["token_ids"], whole["prompt_token_ids"] = sample.ids, sample.prompt
        if body.get("logprobs"):
            choice["logprobs"] = {"content": content}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sample.ids)}
        if not body.get("stream"):
            return JSONResponse({**whole, "choices": [choice], "usage": usage})
        # One chunk with the whole answer: chunking is the subject of other tests.
        choice["delta"] = choice.pop("message")
        choice["delta"]["tool_calls"] = [
            {"index": number, **call} for number, call in enumerate(choice["delta"].get("tool_calls") or ())
        ]
        choice.pop("routed_experts", None)
        events = [
            {**whole, "object": "chat.completion.chunk", "choices": [choice]},
            {**whole, "choices": [], "usage": usage},
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = encode(prompt)
        if not all(isinstance(token, int) and token in _BYTES for token in prompt):
            return self._error("the prompt has a token that the vocabulary does not have")
        sample = await self._sample("completions", body, prompt)
        if isinstance(sample, Response):
            return sample
        shown = sample.ids[:-1] if sample.finish == "stop" else sample.ids
        choice: Json = {
            "index": 0,
            "text": decode(shown, skip_special=body.get("skip_special_tokens", True)),
            "finish_reason": sample.finish,
            "stop_reason": None,
            **self._experts(sample),
        }
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": list(map(_text, sample.ids)), "token_logprobs": sample.logprobs}
        if body.get("return_token_ids"):
            choice["token_ids"], choice["prompt_token_ids"] = sample.ids, prompt
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sample.ids)}
        return JSONResponse(
            {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}
        )

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        if "messages" in body:
            try:
                text = render(body["messages"], body.get("tools"), prompt=body.get("add_generation_prompt", True))
            except TemplateError as exc:
                return self._error(str(exc))
        else:
            text = body["prompt"]
        ids = encode(text)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    async def _detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": decode((await request.json())["tokens"])})

    async def _sleep(self, request: Request) -> Response:
        body = await self._control(request)
        self.is_asleep = True
        return body if isinstance(body, Response) else Response()

    async def _wake_up(self, request: Request) -> Response:
        body = await self._control(request)
        self.is_asleep = False
        return body if isinstance(body, Response) else Response()

    async def _pause(self, request: Request) -> Response:
        body = await self._control(request)
        if isinstance(body, Response):
            return body
        self.is_paused = True
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        body = await self._control(request)
        if isinstance(body, Response):
            return body
        self.is_paused = False
        self._wake()
        return JSONResponse({"status": "resumed"})

    async def _nothing(self, request: Request) -> Response:
        body = await self._control(request)
        return body if isinstance(body, Response) else Response()

    async def _set_label(self, request: Request) -> Response:
        body = await self._control(request)
        if isinstance(body, Response):
            return body
        self.label = body["new_version"]
        return JSONResponse({"success": True, "new_version": self.label})

    async def _label(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label})

    async def _is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self.is_asleep})

    async def _version(self, request: Request) -> Response:
        # Not a route of vLLM: what a trainer serves beside it, for `Model.policy_url`.
        return JSONResponse({"policy_version": str(self.version)})

    async def _update_weights(self, request: Request) -> Response:
        body = await self._control(request)
        if isinstance(body, Response):
            return body
        self.version += 1
        self._wake()
        return JSONResponse({"message": "Weights updated"})


class SglangDouble(VllmDouble):
    """SGLang: `/generate` with `input_ids`, no route that renders messages, and token IDs in whole answers only."""

    _infos = ("/model_info",)

    def _posts(self) -> list[tuple[str, Any]]:
        return [
            ("/v1/chat/completions", self._chat),
            ("/generate", self._generate),
            ("/pause_generation", self._pause),
            ("/continue_generation", self._resume),
            ("/release_memory_occupation", self._sleep),
            ("/resume_memory_occupation", self._wake_up),
            ("/update_weights_from_disk", self._update_from_disk),
            ("/update_weight_version", self._set_label),
            ("/flush_cache", self._nothing),
        ]

    async def _update_from_disk(self, request: Request) -> Response:
        answer = await self._update_weights(request)
        if answer.status_code != 200:  # as SGLang reports it
            return JSONResponse({"success": False, "message": "Failed to update weights", "num_paused_requests": 0})
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if body.get("stream") and body.get("return_token_ids"):
            return self._error("return_token_ids is not supported with stream")
        answer = await super()._chat(request)
        if answer.status_code != 200 or body.get("stream"):
            return answer
        value = json.loads(bytes(answer.body))
        (choice,) = value["choices"]
        if "reasoning" in choice["message"]:
            choice["message"]["reasoning_content"] = choice["message"].pop("reasoning")
        value["metadata"] = self._versions(self.samples[-1])
        experts_of_tokens = choice.pop("routed_experts", None)
        if body.get("return_routed_experts") and experts_of_tokens:
            value["sglext"] = {"routed_experts": self._integers(self.samples[-1])}
        return JSONResponse(value)

    def _versions(self, sample: Sample) -> Json:
        return {"weight_version": sample.labels[-1], "weight_versions": spans_of(sample.labels)}

    def _integers(self, sample: Sample) -> str:
        return base64.b64encode(experts([*sample.prompt, *sample.ids], sample.version).astype("<i4").tobytes()).decode()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        wanted = body["sampling_params"]
        unknown = set(wanted) - _SGLANG_PARAMETERS
        if unknown:
            return self._error(f"unexpected keyword argument {unknown.pop()!r}")
        asked = {"max_tokens": wanted.get("max_new_tokens", 128), "temperature": wanted.get("temperature")}
        sample = await self._sample("generate", asked, body["input_ids"])
        if isinstance(sample, Response):
            return sample
        shown = sample.ids[:-1] if sample.finish == "stop" else sample.ids
        finish = (
            {"type": "stop", "matched": END} if sample.finish == "stop" else {"type": "length", "length": len(shown)}
        )
        about: Json = {
            "id": "1",
            "finish_reason": finish,
            "prompt_tokens": len(sample.prompt),
            "completion_tokens": len(sample.ids),
            **self._versions(sample),
        }
        if body.get("return_logprob"):
            about["output_token_logprobs"] = [[*pair, None] for pair in zip(sample.logprobs, sample.ids, strict=True)]
        if body.get("return_routed_experts") and self.routed_experts:
            about["routed_experts"] = self._integers(sample)
        text = decode(shown, skip_special=wanted.get("skip_special_tokens", True))
        return JSONResponse({"text": text, "output_ids": sample.ids, "meta_info": about})


_SGLANG_PARAMETERS = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
}
_SGLANG_PARAMETERS |= {"repetition_penalty", "sampling_seed", "skip_special_tokens"}


def _text(token: int) -> str:
    return _BYTES[token].decode("utf-8", "replace")
