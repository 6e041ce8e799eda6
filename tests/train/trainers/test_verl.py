"""veRL as it is on PyPI: its agent loop over served environments; `make test-trainers` sets its environment up.

The loop and the merging of tokens are veRL's own. What a model samples is scripted, so no weights are needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="it has an environment of its own: make test-trainers")

import hydra
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

import openenv.train.trainers.verl
from echo_env.server.app import app as echo_app
from guess_environment import Guess, Hint, Word
from openenv import create_app
from openenv.rollout.agents.served_episode import EpisodeFailed
from openenv.testing import serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
END = "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = Path(__file__).parents[3] / "docs" / "howto" / "trainers" / "verl.md"


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with serve(create_app(Guess, Word, Hint, max_concurrent_envs=8)) as served:
        yield served.url


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token=END,
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<tool_call>", "</tool_call>"],
    )
    made.chat_template = TEMPLATE
    return made


class ScriptedServer:
    """Samples what a script says, and remembers what it was asked."""

    def __init__(self, tokenizer: Any, *answers: str) -> None:
        self.tokenizer, self.answers = tokenizer, list(answers)
        self.prompts: list[list[int]] = []
        self.outputs: list[TokenOutput] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **kwargs: Any) -> Any:
        self.prompts.append(list(prompt_ids))
        ids = self.tokenizer.encode(self.answers[len(self.outputs)] + END, add_special_tokens=False)
        self.outputs.append(TokenOutput(token_ids=ids, log_probs=[-0.5 - number / 100 for number in range(len(ids))]))
        return self.outputs[-1]


def run(tokenizer: Any, server: ScriptedServer, url: str, row: dict[str, Any] | None = None, **options: Any) -> Any:
    """Make the loop as veRL's worker does, from a file's entry, and run it."""
    rollout = {"prompt_length": 4096, "response_length": 2048, "multi_turn": {"format": "hermes"}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {**rollout, **options.pop("rollout", {})}}, "data": {}})
    entry = {"name": "openenv", "_target_": "openenv.train.trainers.verl.ServedAgentLoop", "url": url, **options}

    async def play() -> Any:
        loop = hydra.utils.instantiate(
            config=OmegaConf.create(entry),
            trainer_config=DictConfigWrap(config),
            server_manager=server,
            tokenizer=tokenizer,
            processor=None,
            hf_model_type=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            tools=ToolListWrap([]),
        )
        prompt = [{"role": "system", "content": "Guess."}]
        return await loop.run({"temperature": 1.0}, raw_prompt=prompt, extra_info=row or {})

    return asyncio.run(play())


def sampled(output: Any) -> list[tuple[int, float]]:
    parts = zip(output.response_ids, output.response_mask, output.response_logprobs, strict=True)
    return [(token, logprob) for token, mask, logprob in parts if mask]


def test_an_episode_has_exact_tokens_and_the_reward(tokenizer: Any, guess: str) -> None:
    server = ScriptedServer(tokenizer, "no", "maybe", "yes")
    output = run(tokenizer, server, guess, {"reset": {"seed": 3}})
    assert output.reward_score == 0.5
    assert tokenizer.decode(output.prompt_ids).endswith("Begin 3.<|im_end|>\n<|im_start|>assistant\n")
    expected = [pair for one in server.outputs for pair in zip(one.token_ids, one.log_probs, strict=True)]
    assert sampled(output) == expected
    whole = output.prompt_ids + output.response_ids
    for prompt, one in zip(server.prompts, server.outputs, strict=True):
        assert whole[: len(prompt) + len(one.token_ids)] == prompt + one.token_ids  # what the model saw
    assert output.as_dict()["rm_scores"][-1] == 0.5


def test_the_system_message_comes_first_and_only_once(tokenizer: Any, guess: str) -> None:
    output = run(tokenizer, ScriptedServer(tokenizer, "yes"), guess, system="Guess!", max_turns=1)
    prompt = tokenizer.decode(output.prompt_ids)
    assert prompt.startswith("<|im_start|>system\nGuess.<|im_end|>\n<|im_start|>user\n")
    assert prompt.count("<|im_start|>system") == 1


def test_tools_are_called(tokenizer: Any) -> None:
    call = '<tool_call>{"name": "echo_message", "arguments": {"message": "hi"}}</tool_call>'
    with serve(echo_app) as served:
        server = ScriptedServer(tokenizer, call, "Done.")
        output = run(tokenizer, server, served.url)
    assert "echo_message" in tokenizer.decode(output.prompt_ids)
    assert "<|im_start|>tool\nhi<|im_end|>" in tokenizer.decode(output.response_ids)
    assert (output.reward_score, output.num_turns) == (0.0, 4)


def test_turns_and_tokens_are_limited(tokenizer: Any, guess: str) -> None:
    assert run(tokenizer, ScriptedServer(tokenizer, "no", "no"), guess, max_turns=2).reward_score == -0.5
    short = run(tokenizer, ScriptedServer(tokenizer, "no", "no"), guess, rollout={"response_length": 8})
    assert len(short.response_ids) == len(short.response_mask) <= 8


def test_a_failure_is_no_reward(tokenizer: Any, guess: str) -> None:
    with pytest.raises(EpisodeFailed, match="broken"):
        run(tokenizer, ScriptedServer(tokenizer, "no", "crash"), guess)
    with pytest.raises(ValueError, match="url"):
        run(tokenizer, ScriptedServer(tokenizer), "")


def test_the_loop_is_registered_and_the_page_shows_how() -> None:
    assert _agent_loop_registry["openenv"] == {"_target_": "openenv.train.trainers.verl.ServedAgentLoop"}
    block = CONFIG.read_text().partition("```yaml\n")[2].partition("```")[0]
    (entry,) = OmegaConf.create(block)
    assert hydra.utils.get_class(entry["_target_"]) is openenv.train.trainers.verl.ServedAgentLoop
