"""`Sampler`: answers many prompts at once, token by token, in the thread that owns the policy.

    submit ──> queue ──> prefill: keys and values of the prompt into a free slot ──┐
                                                                                  ▼
    answer <── end token or limit <── one token for every slot <── decode <── slots in use
                                                                     └───────────▲
    alone ───> queue ──> runs when no slot is in use, such as an update of the weights

Prompts join while others are being answered. On a GPU, the decoding of one token is recorded once as a CUDA graph.
"""

# Memory: `keys` and `values` have a place per layer, slot and position. A slot that is not in use computes nonsense in
# its own places, which the next prefill overwrites; so the shapes never change, as a CUDA graph requires.
#
# Sampling: a token is where the cumulated probabilities reach a number from 0 to 1. The numbers of a prompt come from
# its seed, so its answer does not depend on the prompts beside it, except for rounding.

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from .policy import Policy

logger = logging.getLogger(__name__)

_STEPS = 8
"""Tokens that are decoded between two looks at the queue."""
_GATHER_S = 0.004
"""How long the first prompt waits for others."""
_WIDTH = 64
"""Prompts are padded to multiples of this width, so that the allocator sees few shapes."""
_PREFILL_TOKENS = 32_768


@dataclass(slots=True)
class TokenPrompt:
    """A conversation as token IDs, and how to continue it."""

    ids: list[int]
    max_tokens: int
    greedy: bool = False
    seed: int | None = None
    answer: Future[SampledTokens] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens after a prompt."""

    ids: list[int]
    logprobs: list[float]
    ended: bool
    """Whether it ended by itself, not by its limit."""
    version: int


@dataclass(slots=True)
class SamplerFigures:
    """What the sampler has done so far."""

    seconds: float = 0.0
    """Time in which it computed answers."""
    tokens: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Work:
    """Work that needs the policy for itself."""

    run: Callable[[], Any]
    done: Future[Any]


class _Cache:
    """Keys and values in the form that models of transformers call: `update` per layer."""

    is_compileable = False

    def __init__(self, slots: int, context: int, layers: int, device: Any, dtype: Any) -> None:
        self._shape, self._device, self._dtype = (slots, context), device, dtype
        self.keys: list[Any] = [None] * layers
        self.values: list[Any] = [None] * layers
        self.all_rows = torch.arange(slots, device=device)
        self.rows: Any = None
        """The slots that a prefill fills; None while decoding."""
        self.active: Any = None
        """The slots that a decoding step computes; None for all."""
        self.positions: Any = None
        self.limit = context
        """The number of positions that a decoding step reads."""

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store keys and values of a layer, and return those that its queries see."""
        if self.keys[layer] is None:
            (slots, context), (_, heads, _, size) = self._shape, keys.shape
            for stored, given in ((self.keys, keys), (self.values, values)):
                shape = (slots, heads, context, given.shape[-1] if given is values else size)
                stored[layer] = torch.zeros(shape, device=self._device, dtype=self._dtype)
        mine, theirs = self.keys[layer], self.values[layer]
        if self.rows is not None:
            width = keys.shape[2]
            mine[self.rows, :, :width] = keys.to(self._dtype)
            theirs[self.rows, :, :width] = values.to(self._dtype)
            return keys, values
        rows = self.all_rows if self.active is None else self.active
        mine[rows, :, self.positions] = keys[:, :, 0].to(self._dtype)
        theirs[rows, :, self.positions] = values[:, :, 0].to(self._dtype)
        seen = slice(None) if self.active is None else self.active  # a slice copies nothing
        return mine[seen, :, : self.limit], theirs[seen, :, : self.limit]

    def get_seq_length(self, layer: int = 0) -> int:
        """Return 0: positions and masks are passed explicitly."""
        return 0


@dataclass(slots=True)
class _Row:
    """A slot in use."""

    prompt: TokenPrompt
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Sampler:
    """Answers prompts in a thread of its own, from entering on.

    Args:
        policy: The policy; while the sampler runs, only its thread may use it.
        slots: The number of answers at once.
        context: The largest number of tokens in prompt and answer.
    """

    def __init__(self, policy: Policy, *, slots: int = 64, context: int = 1024) -> None:
        if slots < 1 or context < 2:
            raise ValueError("slots must be at least 1, context at least 2")
        self.policy = policy
        self.slots, self.context = slots, context
        self.figures = SamplerFigures()
        device = policy.device
        self._is_cuda = device.type == "cuda"
        dtype = torch.bfloat16 if self._is_cuda else torch.float32
        config = policy.model.config.get_text_config()
        self._cache = _Cache(slots, context, config.num_hidden_layers, device, dtype)
        self._tokens = torch.zeros(slots, dtype=torch.long, device=device)
        self._positions = torch.zeros(slots, dtype=torch.long, device=device)
        self._counts = torch.zeros(slots, dtype=torch.long, device=device)
        self._greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        self._numbers = torch.ones((slots, context), device=device)  # that decide the tokens of each slot
        self._logprobs = torch.zeros(slots, device=device)
        self._range = torch.arange(context, device=device)
        self._graph: Any = None
        self._rows: dict[int, _Row] = {}
        self._waiting: list[TokenPrompt] = []
        self._work: list[_Work] = []
        self._queue: queue.Queue[TokenPrompt | _Work | None] = queue.Queue()
        self._seeds = torch.Generator().manual_seed(policy.options.seed)
        self._thread = threading.Thread(target=self._run, name="openenv-sampler", daemon=True)
        self._closed = False

    @property
    def uses_graph(self) -> bool:
        """Whether decoding is a recorded CUDA graph."""
        return self._graph is not None

    def submit(self, prompt: TokenPrompt) -> Future[SampledTokens]:
        """Answer a prompt.

        Raises:
            ValueError: prompt and answer are longer than `context`.
        """
        if not prompt.ids or prompt.max_tokens < 1:
            raise ValueError("the prompt is empty, or max_tokens is below 1")
        if len(prompt.ids) + prompt.max_tokens > self.context:
            raise ValueError(
                f"the context has {self.context} tokens, but the prompt has {len(prompt.ids)} and the answer may have "
                f"{prompt.max_tokens}"
            )
        self._put(prompt)
        return prompt.answer

    def alone(self, work: Callable[[], Any]) -> Future[Any]:
        """Run work when no prompt is being answered; prompts that come later wait for it."""
        done: Future[Any] = Future()
        self._put(_Work(work, done))
        return done

    def _put(self, item: TokenPrompt | _Work) -> None:
        if self._closed:
            raise RuntimeError("the sampler is closed")
        self._queue.put(item)

    def __enter__(self) -> Sampler:
        self._thread.start()
        if self._is_cuda:
            self.alone(self._try_to_record).result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._receive():
                if self._work and not self._rows:
                    self._run_work()
                    continue
                began = time.perf_counter()
                try:
                    with torch.no_grad():
                        if not self._work:
                            self._admit()
                        for _ in range(_STEPS):
                            if not self._rows:
                                break
                            self._decode()
                except Exception as exc:  # the boundary of a batch: its prompts fail, later ones are tried
                    logger.exception("a batch of prompts failed")
                    self._fail(exc)
                self.figures.seconds += time.perf_counter() - began
        finally:
            self._fail(RuntimeError("the sampler is closed"), everything=True)

    def _receive(self) -> bool:
        """Take all items from the queue, and wait for one if there is nothing to do; return whether to continue."""
        if not (self._rows or self._waiting or self._work):
            if not self._take(self._queue.get()):
                return False
            time.sleep(_GATHER_S)
        while True:
            try:
                if not self._take(self._queue.get_nowait()):
                    return False
            except queue.Empty:
                return True

    def _take(self, item: TokenPrompt | _Work | None) -> bool:
        if isinstance(item, TokenPrompt):
            self._waiting.append(item)
        elif item is not None:
            self._work.append(item)
        return item is not None

    def _run_work(self) -> None:
        work = self._work.pop(0)
        try:
            work.done.set_result(work.run())
        except Exception as exc:  # raised where the work was given
            work.done.set_exception(exc)

    def _fail(self, exc: Exception, *, everything: bool = False) -> None:
        prompts = [row.prompt for row in self._rows.values()]
        self._rows.clear()
        if everything:
            prompts += self._waiting
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._queue.get_nowait()
                    if isinstance(item, TokenPrompt):
                        prompts.append(item)
                    elif item is not None:
                        item.done.set_exception(exc)
            for work in self._work:
                work.done.set_exception(exc)
        for prompt in prompts:
            if not prompt.answer.done():
                prompt.answer.set_exception(exc)

    # ---- computing ----

    def _admit(self) -> None:
        """Fill free slots with waiting prompts."""
        free = [slot for slot in range(self.slots) if slot not in self._rows]
        while self._waiting and free:
            chosen: list[TokenPrompt] = []
            width = 0
            while self._waiting and len(chosen) < len(free):
                wider = max(width, -(-len(self._waiting[0].ids) // _WIDTH) * _WIDTH)
                if chosen and wider * (len(chosen) + 1) > _PREFILL_TOKENS:
                    break
                chosen.append(self._waiting.pop(0))
                width = wider
            slots, free = free[: len(chosen)], free[len(chosen) :]
            for slot, prompt in zip(slots, chosen, strict=True):
                self._rows[slot] = _Row(prompt)
            self._prefill(slots, chosen, min(width, self.context))

    def _prefill(self, slots: list[int], prompts: list[TokenPrompt], width: int) -> None:
        device = self.policy.device
        # The first decoding step computes the last token of each prompt again, and with it the first answer.
        ids = torch.tensor([prompt.ids + [0] * (width - len(prompt.ids)) for prompt in prompts], device=device)
        rows = torch.tensor(slots, device=device)
        self._cache.rows = rows
        mask = torch.ones((width, width), dtype=torch.bool, device=device).tril()[None, None]
        with self.policy.arithmetic():
            self.policy.model(
                input_ids=ids,
                position_ids=self._range[:width].expand(len(prompts), -1),
                attention_mask=mask.expand(len(prompts), -1, -1, -1),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self._cache.rows = None
        last = torch.tensor([len(prompt.ids) - 1 for prompt in prompts], device=device)
        self._tokens[rows] = torch.tensor([prompt.ids[-1] for prompt in prompts], device=device)
        self._positions[rows] = last
        self._counts[rows] = 0
        self._greedy[rows] = torch.tensor([prompt.greedy for prompt in prompts], device=device)
        most = max(prompt.max_tokens for prompt in prompts)
        self._numbers[rows, :most] = torch.stack([self._draws(prompt, most) for prompt in prompts]).to(device)
        self.figures.prompts += len(prompts)
        self.figures.prompt_tokens += sum(len(prompt.ids) for prompt in prompts)

    def _draws(self, prompt: TokenPrompt, count: int) -> Any:
        """Return numbers above 0 and at most 1."""
        draws = self._seeds if prompt.seed is None else torch.Generator().manual_seed(prompt.seed)
        return 1.0 - torch.rand(count, generator=draws)

    def _decode(self) -> None:
        """Sample one token for every slot in use."""
        if self._graph is not None:
            self._graph.replay()
        else:
            if not self._is_cuda:  # a processor saves time if it computes only the slots and positions in use
                longest = max(len(row.prompt.ids) + len(row.ids) for row in self._rows.values())
                self._cache.limit = min(self.context, longest)
                self._cache.active = torch.tensor(list(self._rows))
            self._step()
        tokens, logprobs = self._tokens.tolist(), self._logprobs.tolist()
        self.figures.steps += 1
        for slot, row in list(self._rows.items()):
            row.ids.append(tokens[slot])
            row.logprobs.append(min(0.0, logprobs[slot]))
            ended = tokens[slot] in self.policy.end_ids
            if ended or len(row.ids) == row.prompt.max_tokens:
                del self._rows[slot]
                self.figures.tokens += len(row.ids)
                answer = row.prompt.answer
                if not answer.done():  # its request may have been cancelled
                    answer.set_result(SampledTokens(row.ids, row.logprobs, ended, self.policy.version))

    def _step(self) -> None:
        """Compute the next token of each slot, in place."""
        limit, active = self._cache.limit, self._cache.active
        rows = self._cache.all_rows if active is None else active
        positions, counts = self._positions[rows], self._counts[rows]
        self._cache.positions = positions
        mask = (self._range[:limit] <= positions[:, None])[:, None, None]
        with self.policy.arithmetic():
            logits = self.policy.model(
                input_ids=self._tokens[rows][:, None],
                position_ids=positions[:, None],
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        logprobs = torch.log_softmax(logits.float(), -1)
        reached = logprobs.exp().cumsum(-1)
        wanted = self._numbers[rows, counts][:, None] * reached[:, -1:]
        drawn = (reached < wanted).sum(-1).clamp(max=logits.shape[-1] - 1)
        tokens = torch.where(self._greedy[rows], logprobs.argmax(-1), drawn)
        self._tokens[rows] = tokens
        self._logprobs[rows] = logprobs.gather(-1, tokens[:, None])[:, 0]
        # Slots that are not in use stay within the context.
        self._positions[rows] = (positions + 1).clamp(max=self.context - 1)
        self._counts[rows] = (counts + 1).clamp(max=self.context - 1)

    def _try_to_record(self) -> None:
        """Record a decoding step as a CUDA graph; without one, each step takes several times longer."""
        try:
            with torch.no_grad():
                self._graph = self._record()
        except RuntimeError as exc:
            logger.warning("decoding is not recorded as a CUDA graph, and slower: %s", exc)

    def _record(self) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        return graph
