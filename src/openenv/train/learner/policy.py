"""`Policy`: a language model of transformers with its tokenizer and optimizer, in this process.

Knows weights, losses and files. One thread at a time may use it: `Sampler` owns that thread. The model samples and
learns with the same weights and the same arithmetic, so log-probabilities of both differ only by rounding.
"""

# The loss of a batch, over all tokens that the policy sampled:
#
#   ratio = exp(new - old)          old: the log-probability when the token was sampled
#   loss  = -mean(min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage))
#
# A forward pass takes sequences of about the same length as rows, at most `pass_tokens` with the padding. Padding is
# at the end, where no token of a causal model sees it, so no mask is needed, and the fastest kernels can run. The last
# layer runs only at the tokens that were sampled: it is the largest matrix of a small model.

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openenv.adapters import importing

from ..groups import TrainingBatch

with importing("torch>=2.4", needed_by="openenv.train.learner"):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
with importing("transformers>=5.0", needed_by="openenv.train.learner"):
    import transformers
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_STATE = "policy.pt"
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN, which plans anew for every shape, and prompts have many shapes."""
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template of a model that has none."""
TINY = "tiny"
"""The name of a random model that is made on the spot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """How a policy computes and learns.

    Raises:
        ValueError: a value is out of range.
    """

    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU if there is one."""
    learning_rate: float = 1e-5
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    epochs: int = 1
    """How often each batch is used."""
    minibatches: int = 1
    """The number of optimizer steps per epoch."""
    warmup: int = 5
    """The number of optimizer steps in which the learning rate rises to its value."""
    pass_tokens: int | None = None
    """The number of tokens in a forward pass; a longer sequence has a pass of its own. None: 4096 on a GPU, which waits
    for the interpreter otherwise, and 1024 on a CPU. More is faster on a GPU with enough memory."""
    seed: int = 0
    """The seed of the order of the sequences."""

    def __post_init__(self) -> None:
        if (
            min(self.epochs, self.minibatches, 1 if self.pass_tokens is None else self.pass_tokens) < 1
            or self.warmup < 0
        ):
            raise ValueError("epochs, minibatches and pass_tokens must be at least 1, warmup at least 0")
        if not self.learning_rate > 0 or not self.max_grad_norm > 0:
            raise ValueError("learning_rate and max_grad_norm must be above 0")
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError("clip_low must be from 0 to 1, clip_high at least 0")
        if self.device != "auto":
            # Errors of PyTorch: an unknown name, a device without support in this build, no such GPU.
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError, NotImplementedError) as exc:
                reason = str(exc).split("\n", 1)[0]
                raise ValueError(
                    f"the device {self.device!r} cannot be used; choose cpu, cuda or auto ({reason})"
                ) from exc


@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """The figures of an update."""

    loss: float
    grad_norm: float
    gap: float
    """The mean difference of the log-probabilities of sampling and training, before the first step of the update."""
    largest_gap: float
    clipped: float
    """The share of tokens whose ratio was clipped."""
    tokens: int
    steps: int


@dataclass(slots=True)
class _Sums:
    loss: float = 0.0
    gap: float = 0.0
    largest_gap: float = 0.0
    clipped: float = 0.0
    norms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pass:
    """The sequences of a forward pass."""

    input_ids: list[list[int]]
    """A row per sequence, padded at the end."""
    rows: list[int]
    """The row of each sampled token."""
    places: list[int]
    """The position of each sampled token in its row."""
    old_logprobs: list[float]
    advantages: list[float]


class Policy:
    """A language model that samples and learns.

    Args:
        model: The model of transformers, with weights of 32 bits.
        tokenizer: Its tokenizer; without a chat template it gets that of ChatML.
        options: How it computes and learns.
    """

    def __init__(self, model: Any, tokenizer: Any, options: PolicyOptions | None = None) -> None:
        self.options = options or PolicyOptions()
        device = self.options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.model = model.to(self.device).eval()
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            tokenizer.chat_template = _TEMPLATE
        self.end_ids = _end_ids(model, tokenizer)
        self.version = 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._pass_tokens = self.options.pass_tokens or (4096 if self.device.type == "cuda" else 1024)
        self._steps = 0
        self._random = random.Random(self.options.seed)

    @classmethod
    def load(cls, name: str, options: PolicyOptions | None = None) -> Policy:
        """Load a model: a folder, a `.gguf` file, a name on the Hugging Face Hub, or `tiny` (see `tiny_model`).

        Raises:
            OSError: the files are missing.
        """
        if name == TINY:
            return cls(*tiny_model(options.seed if options else 0), options)
        if name.endswith(".gguf"):
            return cls(*_read_gguf(Path(name)), options)
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        return cls(model, tokenizer, options)

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Compute as all forward passes do: with bfloat16 for matrices on a GPU."""
        if self.device.type != "cuda":
            yield
            return
        # Without autocast's cache, because the weights change between passes and a recorded graph must read them.
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False), sdpa_kernel(_KERNELS):
            yield

    # ---- learning ----

    def update(self, batch: TrainingBatch) -> UpdateFigures:
        """Learn from a packed batch.

        Raises:
            ValueError: the batch is padded.
        """
        bounds = batch.cu_seqlens
        if bounds is None:
            raise ValueError("the batch must be packed: collate(groups, layout='packed')")
        options, sums = self.options, _Sums()
        sequences = list(itertools.pairwise(bounds))
        self.model.train()
        for epoch in range(options.epochs):
            self._random.shuffle(sequences)
            for part in range(options.minibatches):
                chosen = sequences[part :: options.minibatches]
                if chosen:
                    self._step(batch, chosen, sums, is_first=epoch == 0 and part == 0)
        self.model.eval()
        self.version += 1
        first = sum(sum(batch.loss_mask[0][a:b]) for a, b in sequences) / options.minibatches
        return UpdateFigures(
            loss=sums.loss / len(sums.norms),
            grad_norm=sum(sums.norms) / len(sums.norms),
            gap=sums.gap / max(1.0, first),
            largest_gap=sums.largest_gap,
            clipped=sums.clipped / max(1, batch.n_tokens * options.epochs),
            tokens=batch.n_tokens,
            steps=len(sums.norms),
        )

    def _step(self, batch: TrainingBatch, sequences: Sequence[tuple[int, int]], sums: _Sums, *, is_first: bool) -> None:
        """Take one step of the optimizer."""
        count = sum(sum(batch.loss_mask[0][start:end]) for start, end in sequences)
        self.optimizer.zero_grad(set_to_none=True)
        for one in _passes(batch, sequences, self._pass_tokens):
            new = self._logprobs(one)
            old = torch.tensor(one.old_logprobs, device=self.device)
            gain = torch.tensor(one.advantages, device=self.device)
            ratio = (new - old).exp()
            low, high = 1 - self.options.clip_low, 1 + self.options.clip_high
            clipped = ratio.clamp(low, high) * gain
            loss = -torch.minimum(ratio * gain, clipped).sum() / count
            loss.backward()
            sums.loss += float(loss.detach())
            sums.clipped += float((clipped < ratio * gain).sum())
            if is_first:
                gap = (new.detach() - old).abs()
                sums.gap += float(gap.sum())
                sums.largest_gap = max(sums.largest_gap, float(gap.max()))
        sums.norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm)))
        self._steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * min(1.0, self._steps / max(1, self.options.warmup))
        self.optimizer.step()

    def _logprobs(self, one: _Pass) -> Any:
        """Return the log-probabilities of the sampled tokens of a pass."""
        ids = torch.tensor(one.input_ids, device=self.device)
        rows, places = (torch.tensor(values, device=self.device) for values in (one.rows, one.places))
        head = self.model.get_output_embeddings()
        # `logits_to_keep` of transformers would keep a position in all rows if one row needs it.
        hook = head.register_forward_pre_hook(lambda module, args: (args[0][rows, places - 1],))
        try:
            with self.arithmetic():
                logits = self.model(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        return torch.log_softmax(logits.float(), -1).gather(-1, ids[rows, places][:, None])[:, 0]

    # ---- checkpoints ----

    def save(self, folder: Path) -> None:
        """Write model and tokenizer as transformers reads them, and the state of the optimizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "steps": self._steps,
            "version": self.version,
            "random": self._random.getstate(),
        }
        torch.save(state, folder / _STATE)

    def restore(self, folder: Path) -> None:
        """Continue from the files of `save`; the model must have been loaded from the same folder.

        Raises:
            OSError: the folder has no such file.
        """
        state = torch.load(folder / _STATE, map_location=self.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self._steps, self.version = state["steps"], state["version"]
        kind, numbers, gauss = state["random"]
        self._random.setstate((kind, tuple(numbers), gauss))


def tiny_model(seed: int = 0) -> tuple[Any, Any]:
    """Return a model of 100,000 random weights, and a tokenizer of ASCII characters.

    It knows no language, so it shows in minutes on a CPU whether an environment can be learned at all: first it writes
    anything, then what pays. Characters beyond ASCII leave no token.
    """
    tokens = [*map(chr, range(32, 127)), "\n", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    characters = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=8192,
        # Larger weights than a large model has: the usual ones would pass hardly anything on in so narrow a model.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config), tokenizer


def _read_gguf(path: Path) -> tuple[Any, Any]:
    """Return model and tokenizer of a `.gguf` file, with plain weights: compressed ones neither learn nor are saved."""
    folder, more = str(path.parent), {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(folder, **more)
    gguf_config = getattr(transformers, "GgufConfig", None)  # older versions always decompress
    if gguf_config is not None:
        more["quantization_config"] = gguf_config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more), tokenizer


def _passes(batch: TrainingBatch, sequences: Iterable[tuple[int, int]], limit: int) -> Iterator[_Pass]:
    """Yield passes of at most `limit` tokens over all sequences with a sampled token."""
    sampled = [bounds for bounds in sequences if any(batch.loss_mask[0][slice(*bounds)])]
    chosen: list[tuple[int, int]] = []
    for start, end in sorted(sampled, key=lambda bounds: bounds[1] - bounds[0]):
        if chosen and (end - start) * (len(chosen) + 1) > limit:
            yield _pass(batch, chosen)
            chosen = []
        chosen.append((start, end))
    if chosen:
        yield _pass(batch, chosen)


def _pass(batch: TrainingBatch, sequences: Sequence[tuple[int, int]]) -> _Pass:
    width = max(end - start for start, end in sequences)
    rows = [batch.input_ids[0][start:end] for start, end in sequences]
    sampled = [
        (row, index - start, index)
        for row, (start, end) in enumerate(sequences)
        for index in range(start, end)
        if batch.loss_mask[0][index]
    ]
    return _Pass(
        input_ids=[row + [0] * (width - len(row)) for row in rows],
        rows=[row for row, _, _ in sampled],
        places=[place for _, place, _ in sampled],
        old_logprobs=[batch.old_logprobs[0][index] for _, _, index in sampled],
        advantages=[batch.advantages[0][index] for _, _, index in sampled],
    )


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: those of the model's configuration and the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if end is not None and end != tokenizer.unk_token_id:
        ends.add(end)
    return frozenset(one for one in ends if isinstance(one, int))
