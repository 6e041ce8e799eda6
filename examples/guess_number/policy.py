"""A small language model that is sampled and trained in one process: an OpenAI-compatible endpoint with token ids and
log-probabilities, and `POST /update`, one step of clipped policy gradient on a batch of captured sequences.

    requests ──> queue ──> the GPU's thread takes all that wait: one batch, sampled token by token ──> answers
    a batch to train on ──> the same queue: nothing is sampled while weights change

python examples/guess_number/policy.py FOLDER_WITH_THE_GGUF --port 8100
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import queue
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_BATCH = 1024
CLIP = 0.2


@dataclass(slots=True)
class Prompt:
    """A request: the ids of the conversation, and what is to be sampled after them."""

    ids: list[int]
    max_tokens: int
    answer: Future[Sampled]


@dataclass(slots=True)
class Sampled:
    """What was sampled after a prompt."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int


class ChatTokens:
    """Conversations as ids. What was sampled keeps its ids, so that each prompt begins with the last one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._begin = {
            role: tokenizer.encode(f"<|im_start|>{role}\n", add_special_tokens=False)
            for role in ("system", "user", "assistant")
        }
        self._line = tokenizer.encode("\n", add_special_tokens=False)
        self._texts: dict[str, list[int]] = {}
        self._answers: dict[bytes, list[int]] = {}

    def ids_of(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids of a conversation up to the beginning of the next answer."""
        ids: list[int] = []
        for message in messages:
            ids += self._begin[message["role"]]
            text = message.get("content") or ""
            sampled = self._answers.get(self._key(ids, text)) if message["role"] == "assistant" else None
            if sampled is not None:
                ids += sampled if sampled[-1:] == [self.end] else [*sampled, self.end]
            else:
                ids += [*self._encoded(text), self.end]
            ids += self._line
        return ids + self._begin["assistant"]

    def text_of(self, prompt: list[int], sampled: list[int]) -> str:
        """Return a sampled answer as text, and remember its ids."""
        text: str = self.tokenizer.decode(sampled, skip_special_tokens=True)
        self._answers[self._key(prompt, text)] = sampled
        return text

    def forget(self) -> None:
        """Forget sampled answers: a new round of episodes begins."""
        self._answers.clear()

    def _encoded(self, text: str) -> list[int]:
        if text not in self._texts:
            self._texts[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._texts[text]

    @staticmethod
    def _key(ids: list[int], text: str) -> bytes:
        return hashlib.blake2b(array("i", ids).tobytes() + text.encode(), digest_size=16).digest()


class Policy:
    """The model on the device; `sample` and `update` run in its thread only."""

    def __init__(self, folder: Path, device: str, learning_rate: float) -> None:
        (file,) = folder.glob("*.gguf")
        self.tokens = ChatTokens(AutoTokenizer.from_pretrained(folder, gguf_file=file.name))
        # In 32 bits: what is sampled and what is trained on agree to the fifth digit, and 135M parameters cost little.
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
        self.model.to(device)
        self.device = device
        self.version = 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
        self.sampled_s = self.updated_s = 0.0
        self.sampled_tokens = 0
        self.batches = 0

    @torch.inference_mode()
    def sample(self, prompts: list[Prompt]) -> list[Sampled]:
        """Sample all prompts at temperature 1, the model's own distribution."""
        began = time.perf_counter()
        width = max(len(prompt.ids) for prompt in prompts)
        pad = self.tokens.end
        ids = torch.tensor([[pad] * (width - len(one.ids)) + one.ids for one in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in prompts], device=self.device)
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        cache, chosen, values = None, [], []
        alive = torch.ones(len(prompts), dtype=torch.bool, device=self.device)
        limits = torch.tensor([prompt.max_tokens for prompt in prompts], device=self.device)
        for step in range(max(prompt.max_tokens for prompt in prompts)):
            out = self.model(
                input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            cache = out.past_key_values
            logprobs = torch.log_softmax(out.logits[:, -1].float(), -1)
            token = torch.multinomial(logprobs.exp(), 1)
            chosen.append(torch.where(alive[:, None], token, -1))
            values.append(logprobs.gather(-1, token))
            alive = alive & (token[:, 0] != self.tokens.end) & (limits > step + 1)
            if not bool(alive.any()):
                break
            ids, places = token, places[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(token)], -1)
        rows, columns = torch.cat(chosen, -1).tolist(), torch.cat(values, -1).tolist()
        answers = []
        for row, column in zip(rows, columns, strict=True):
            kept = [token for token in row if token >= 0]
            reason = "stop" if kept[-1] == self.tokens.end else "length"
            answers.append(Sampled(kept, column[: len(kept)], reason, self.version))
        self.sampled_s += time.perf_counter() - began
        self.sampled_tokens += sum(len(answer.ids) for answer in answers)
        self.batches += 1
        return answers

    def update(self, batch: dict[str, Any], rows_at_once: int = 64) -> dict[str, float]:
        """Take one step of clipped policy gradient, and say how far sampling and training disagree."""
        began = time.perf_counter()
        names = {"input_ids": torch.long, "attention_mask": torch.long, "loss_mask": torch.float32}
        names |= {"old_logprobs": torch.float32, "advantages": torch.float32}
        data = {name: torch.tensor(batch[name], dtype=kind, device=self.device) for name, kind in names.items()}
        count = data["loss_mask"].sum()
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, gap_sum, gap_max = 0.0, 0.0, 0.0
        for start in range(0, len(data["input_ids"]), rows_at_once):
            part = {name: value[start : start + rows_at_once] for name, value in data.items()}
            hidden = self.model.model(input_ids=part["input_ids"], attention_mask=part["attention_mask"])
            sampled = part["loss_mask"][:, 1:].bool()
            # The head only where something was sampled: a fifth of all places, and it is the largest matrix.
            logits = self.model.lm_head(hidden.last_hidden_state[:, :-1][sampled])
            new = torch.log_softmax(logits.float(), -1).gather(-1, part["input_ids"][:, 1:][sampled][:, None])[:, 0]
            old, gain = part["old_logprobs"][:, 1:][sampled], part["advantages"][:, 1:][sampled]
            ratio = (new - old).exp()
            loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).sum() / count
            loss.backward()
            gap = (new - old).abs().detach()
            loss_sum += float(loss.detach())
            gap_sum += float(gap.sum())
            gap_max = max(gap_max, float(gap.max()))
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.model.eval()
        self.version += 1
        self.tokens.forget()
        seconds = time.perf_counter() - began
        self.updated_s += seconds
        return {
            "version": self.version, "loss": loss_sum, "grad_norm": norm, "tokens": float(count),
            "mean_gap": gap_sum / float(count), "max_gap": gap_max, "seconds": seconds,
        }  # fmt: skip


class Device:
    """The thread that owns the model: batches of prompts, and work that has it alone."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._queue: queue.Queue[Prompt | tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        threading.Thread(target=self._run, name="device", daemon=True).start()

    async def sample(self, ids: list[int], max_tokens: int) -> Sampled:
        """Sample after a prompt, together with all others that wait."""
        prompt = Prompt(ids, max_tokens, Future())
        self._queue.put(prompt)
        return await asyncio.wrap_future(prompt.answer)

    async def alone(self, work: Callable[[], Any]) -> Any:
        """Run work between two batches."""
        done: Future[Any] = Future()
        self._queue.put((work, done))
        return await asyncio.wrap_future(done)

    def _run(self) -> None:
        while True:
            items = [self._queue.get()]
            # A step costs the same for 1 and for 500 rows: wait for those that are about to come back.
            with contextlib.suppress(queue.Empty):
                while len(items) < MAX_BATCH:
                    items.append(self._queue.get(timeout=0.03))
            prompts = [item for item in items if isinstance(item, Prompt)]
            if prompts:
                try:
                    for prompt, sampled in zip(prompts, self.policy.sample(prompts), strict=True):
                        prompt.answer.set_result(sampled)
                except Exception as exc:
                    for prompt in prompts:
                        if not prompt.answer.done():
                            prompt.answer.set_exception(exc)
            for item in items:
                if not isinstance(item, Prompt):
                    work, done = item
                    try:
                        done.set_result(work())
                    except Exception as exc:
                        done.set_exception(exc)


def application(policy: Policy, name: str) -> Starlette:
    """Return the endpoint."""
    device = Device(policy)

    async def complete(request: Request) -> Response:
        body = await request.json()
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        if body.get("temperature", 1.0) != 1.0 or body.get("stream"):
            return JSONResponse({"error": {"message": "temperature 1 and no stream, please"}}, 400)
        prompt = policy.tokens.ids_of(body["messages"])
        sampled = await device.sample(prompt, int(asked))
        text = policy.tokens.text_of(prompt, sampled.ids)
        entries = [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(sampled.ids, sampled.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": sampled.finish_reason,
            "logprobs": {"content": entries},
            "token_ids": sampled.ids,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled.ids)}
        usage["total_tokens"] = sum(usage.values())
        answer = {
            "id": f"chatcmpl-{time.time_ns()}", "object": "chat.completion", "created": int(time.time()),
            "model": name, "choices": [choice], "usage": usage, "prompt_token_ids": prompt,
        }  # fmt: skip
        return JSONResponse(answer, headers={"x-policy-version": str(sampled.version)})

    async def update(request: Request) -> Response:
        batch = msgpack.unpackb(await request.body())
        return JSONResponse(await device.alone(lambda: policy.update(batch)))

    async def stats(request: Request) -> Response:
        figures = ("version", "sampled_s", "updated_s", "sampled_tokens", "batches")
        return JSONResponse({figure: getattr(policy, figure) for figure in figures})

    routes = [
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [{"id": name}]})),
        Route("/update", update, methods=["POST"]),
        Route("/stats", stats),
    ]
    return Starlette(routes=routes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds one .gguf file")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    policy = Policy(arguments.folder, arguments.device, arguments.learning_rate)
    uvicorn.run(application(policy, "smollm2"), host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
