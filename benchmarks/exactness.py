"""Are captured tokens exact? Plays episodes of several turns and puts every captured token through the engine again.

    python benchmarks/exactness.py --episodes 1000                    # a scripted model that calls tools
    python benchmarks/exactness.py --episodes 1000 --model smollm2    # SmolLM2-135M by llama.cpp: make .engine/ready
    python benchmarks/exactness.py --episodes 100 --model vllm --turns 24 [--no-token-in]

`vllm` is the double of tests/support/vllm_double.py, not the real engine: its policy samples other tokens than its chat
template writes, with compact tool calls and thoughts. `sampled`, `trained` and `excluded` count tokens.

For each call of each captured sequence the engine is asked once more: for the ids of the prompt, and for the
log-probability of each sampled token after all that came before it. Exit code 1 where an id differs, a log-probability
differs by more than float error, or the loss mask has another token than those that were sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import vllm_double
from openenv import Action, Environment, Observation, State, create_app
from openenv.rollout import Model, RolloutStore, Sampling
from openenv.rollout.capture import Call, read
from openenv.rollout.capture.training_trace import Sequence as TokenSequence
from openenv.testing import Script, ScriptedCall, ScriptedModel, Turn, serve
from openenv.train import EpisodeSample, play

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "tests" / "rollout" / "real_engine" / "engine.py"
NO_TOKEN_IN: dict[str, Any] = {"token_in": False} if "token_in" in Model.model_fields else {}
ENGINES_GAP = "tokens that it did not name"
"""Part of why a sequence is not trained on: llama.cpp does not name tokens of a character that the limit cut off."""
FLOAT_ERROR = 5e-4
"""llama.cpp computes prompts in batches and answers token by token: sums come in another order."""


@dataclass(slots=True)
class Exactness:
    """What came of the comparison."""

    episodes: int = 0
    calls: int = 0
    sequences: int = 0
    tokens: int = 0
    """Sampled ones, all of them replayed."""
    context: int = 0
    """Tokens of prompts and tool results."""
    sampled: int = 0
    """By all calls."""
    trained: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    """Sampled tokens that are not trained on, by reason."""
    excluded_share: float = 0.0
    not_trainable: int = 0
    """Sequences with sampled tokens that may not be trained on."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why not, and how often."""
    other_ids: int = 0
    """Ids that the engine does not have at that place, in sequences to train on, as all that follows."""
    trained_context: int = 0
    """Tokens of prompts and tool results with a loss mask of 1."""
    missed: int = 0
    """Sampled tokens with a loss mask of 0."""
    largest_difference: float = 0.0
    """Of a captured log-probability from the engine's second one."""

    def is_exact(self) -> bool:
        """Return whether all is as the engine has it, and the rest is what the engine itself left out."""
        wrong = self.other_ids + self.trained_context + self.missed
        is_explained = all(ENGINES_GAP in reason for reason in self.reasons)
        return is_explained and wrong == 0 < self.tokens and self.largest_difference <= FLOAT_ERROR

    def add(self, sequence: TokenSequence, replays: Sequence[Replay], known: int = 0) -> None:
        """Compare a sequence with the replays of its calls, oldest first.

        The first `known` of them are in an earlier sequence, too, which branches off after them: there their tokens are
        trained on, and here they are context.
        """
        self.sequences += 1
        self.calls += len(replays) - known
        if not sequence.trainable and any(replay.sampled_ids for replay in replays[known:]):
            self.not_trainable += 1
            for reason in sequence.not_trainable:
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
            return
        sampled: dict[int, float] = {}
        for number, replay in enumerate(replays):
            end = len(replay.prompt_ids)
            whole = [*replay.prompt_ids, *replay.sampled_ids]
            captured = sequence.input_ids[: len(whole)]
            self.other_ids += sum(one != other for one, other in zip(captured, whole, strict=False))
            self.other_ids += len(whole) - len(captured)
            if number >= known:
                sampled.update({end + place: value for place, value in enumerate(replay.logprobs)})
        self.tokens += len(sampled)
        self.context += len(sequence.input_ids) - len(sampled)
        for place, bit in enumerate(sequence.loss_mask):
            self.trained_context += bit == 1 and place not in sampled
            self.missed += bit == 0 and place in sampled
            if bit and place in sampled:
                difference = abs(sequence.logprobs[place] - sampled[place])
                self.largest_difference = max(self.largest_difference, difference)


@dataclass(frozen=True, slots=True)
class Replay:
    """What the engine says of a call when it is asked again."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]


class EngineToCheck(ABC):
    """An engine: a model to play with, and a second answer to each call."""

    system = ""
    max_tokens: int | None = None
    turns = 3
    token_in = True

    @abstractmethod
    def model(self) -> Model:
        """Return how it is called."""

    @abstractmethod
    def app(self) -> Any:
        """Return the environment that it plays."""

    @abstractmethod
    def replay(self, worker: int, call: Call) -> Replay:
        """Put a call through the engine again."""


class ScriptedEngine(EngineToCheck):
    """A scripted model with ids and log-probabilities; calls a tool twice, then answers."""

    def __init__(self, server: ScriptedModel) -> None:
        self._server = server
        self._http = httpx2.Client(trust_env=False, timeout=60)

    def model(self) -> Model:
        return Model(**self._server.model(), sampling=Sampling())

    def app(self) -> Any:
        from echo_env.server.app import app  # not needed with another engine

        return app

    def replay(self, worker: int, call: Call) -> Replay:
        answer = self._http.post(f"{self._server.url}/chat/completions", json=call.sent).raise_for_status().json()
        (choice,) = answer["choices"]
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return Replay(answer["prompt_token_ids"], choice["token_ids"], values)


class DoubleEngine(EngineToCheck):
    """The double of vLLM, with tools."""

    def __init__(self, double: vllm_double.VllmDouble) -> None:
        self._double = double
        self._samples: dict[tuple[int, ...], vllm_double.Sample] = {}

    def model(self) -> Model:
        fields: dict[str, Any] = {} if self.token_in else NO_TOKEN_IN
        return Model(base_url=self._double.url, name="m", engine="vllm", sampling=Sampling(), **fields)

    def app(self) -> Any:
        from echo_env.server.app import app  # not needed with another engine

        return app

    def replay(self, worker: int, call: Call) -> Replay:
        # What the engine got and sampled is in its log. Its log-probabilities are computed again from the IDs.
        prompt = tuple(call.completion.prompt_ids or ())
        if prompt not in self._samples:
            self._samples = {tuple(sample.prompt): sample for sample in list(self._double.samples)}
        ids = self._samples[prompt].ids
        context = [*prompt, *ids]
        values = [vllm_double.logprob(context[: len(prompt) + place], token, 0) for place, token in enumerate(ids)]
        return Replay(list(prompt), ids, values)


class Guess(Action):
    """What the model says."""

    text: str


class Hint(Observation):
    """Where the number is."""

    hint: str = ""


class NumberGame(Environment[Guess, Hint, State]):
    """Some guesses of a number; the answers of a small model are whatever they are."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    turns = 3

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._state, self._number = State(episode_id=episode_id), (seed or 0) % 97
        return Hint(hint=f"Game {seed}: guess a number from 0 to 96.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self._state.step_count += 1
        digits = "".join(filter(str.isdigit, action.text))[:6]
        if not digits:
            return Hint(hint="That is no number. Guess again.", reward=0.0, done=self._state.step_count >= self.turns)
        distance = abs(int(digits) - self._number)
        hint = f"{digits} is {'too high' if int(digits) > self._number else 'too low'}. Guess again."
        return Hint(hint=hint, reward=1 / (1 + distance), done=self._state.step_count >= self.turns)

    @property
    def state(self) -> State:
        return self._state


class LlamaEngine(EngineToCheck):
    """SmolLM2-135M, served by llama.cpp, in one or several processes."""

    system = "You play a game. Answer with a number."
    max_tokens = 4

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._http = httpx2.Client(trust_env=False, timeout=120)

    def model(self) -> Model:
        urls = [f"{url}/v1" for url in self._urls]
        fields: dict[str, Any] = {} if self.token_in else NO_TOKEN_IN
        return Model(base_urls=urls, name="smollm2-135m-instruct", engine="llamacpp", sampling=Sampling(), **fields)

    def app(self) -> Any:
        NumberGame.turns = self.turns
        return create_app(NumberGame, Guess, Hint, max_concurrent_envs=64)

    def replay(self, worker: int, call: Call) -> Replay:
        base = self._urls[worker % len(self._urls)]
        prompt = list(call.completion.prompt_ids or ())
        if not getattr(call, "reused_ids", 0):  # else the tokens were sent, and there is no text to ask for
            text = self._ask(f"{base}/apply-template", call.sent)["prompt"]
            asked = {"content": text, "add_special": True, "parse_special": True}
            prompt = self._ask(f"{base}/tokenize", asked)["tokens"]
        sampled = [token for token in call.completion.sampled.ids if token is not None]
        values = []
        for place, token in enumerate(sampled):
            # The bias makes the engine choose the token; what it reports is computed before any bias or temperature.
            body = {"prompt": prompt + sampled[:place], "n_predict": 1, "n_probs": 1, "logit_bias": [[token, 1000.0]]}
            (entry,) = self._ask(f"{base}/completion", body)["completion_probabilities"]
            values.append(float(entry["logprob"]) if entry["id"] == token else float("inf"))
        return Replay(prompt, sampled, values)

    def _ask(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.post(url, json=body).raise_for_status().json()
        return answer


@contextlib.contextmanager
def scripted() -> Iterator[ScriptedEngine]:
    """Serve the scripted model."""
    calls = [ScriptedCall(name="echo_message", arguments={"message": f"results are no answers {n}"}) for n in (1, 2)]
    turns = [Turn(text="I look.", calls=(calls[0],)), Turn(calls=(calls[1],)), Turn(text="It said so twice.")]
    with ScriptedModel(Script(name="caller", turns=turns)) as server:
        yield ScriptedEngine(server)


@contextlib.contextmanager
def double(turns: int) -> Iterator[DoubleEngine]:
    """Serve the double of vLLM with a policy that calls a tool in each turn but the last."""

    def policy(prompt: str) -> str:
        number = prompt.count("<tool_response>")
        if number >= turns - 1:
            return "That is the end of it."
        # Every fifth call is compact, and every seventh comes after thoughts, which `play` did not send back before.
        compact = (",", ":") if number % 5 == 4 else (", ", ": ")
        arguments = {"message": f"the result is {number * 42} and no answer"}
        call = json.dumps({"name": "echo_message", "arguments": arguments}, separators=compact)
        thoughts = "<think>\nI call it again.\n</think>\n\n" if number % 7 == 6 else ""
        return f"{thoughts}<tool_call>\n{call}\n</tool_call>"

    with vllm_double.VllmDouble(policy, max_model_len=1 << 20, drift=0.1) as server:
        yield DoubleEngine(server)


@contextlib.contextmanager
def smollm2(count: int, python: Path) -> Iterator[LlamaEngine]:
    """Serve SmolLM2 in some processes, which end with their standard input."""
    with contextlib.ExitStack() as stack:
        pipe = subprocess.PIPE
        engines = [
            subprocess.Popen([python, ENGINE], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            for _ in range(count)
        ]
        for engine in engines:
            stack.callback(engine.wait, 20)
            assert engine.stdin is not None
            stack.callback(engine.stdin.close)
        lines = [engine.stdout.readline() for engine in engines if engine.stdout is not None]
        yield LlamaEngine([json.loads(line)["engine"] for line in lines])


def check(engine: EngineToCheck, store: RolloutStore, worker: int, sample: EpisodeSample, result: Exactness) -> None:
    """Compare all sequences of an episode with what the engine says of its calls now."""
    calls = {call.number: call for call in read(store.captures / sample.outcome.rollout_id).calls}
    replays = {number: engine.replay(worker, call) for number, call in calls.items()}
    sampled = sum(len(call.completion.sampled) for call in calls.values())
    trained = sum(sequence.n_trainable for sequence in sample.trainable)
    result.sampled += sampled
    result.trained += trained
    if hasattr(sample, "tokens"):
        for reason, count in sample.tokens().excluded.items():
            result.excluded[reason] = result.excluded.get(reason, 0) + count
    result.excluded_share = round(1 - result.trained / result.sampled, 4)
    seen: set[int] = set()
    for sequence in sample.sequences:
        known = sum(number in seen for number in sequence.node_ids)
        result.add(sequence, [replays[number] for number in sequence.node_ids], known)
        seen.update(sequence.node_ids)
    result.episodes += 1


async def measure(engine: EngineToCheck, episodes: int, at_once: int, minutes: float) -> Exactness:
    """Play episodes, and compare what was captured of each as it ends; begin no further one when the time is over."""
    result = Exactness()
    deadline = time.monotonic() + minutes * 60
    seeds = itertools.takewhile(lambda _: time.monotonic() < deadline, range(episodes))
    options: dict[str, Any] = {"system": engine.system, "max_tokens": engine.max_tokens, "max_turns": engine.turns + 1}
    with tempfile.TemporaryDirectory() as folder, RolloutStore(folder) as store, serve(engine.app()) as served:
        options |= {"samples": 1, "concurrency": at_once, "store": store, "gives_rewards": True}
        async with play(served.url, engine.model(), seeds, **options) as stream:
            async for group in stream:
                await asyncio.to_thread(check, engine, store, result.episodes, group.samples[0], result)
            if stream.counts.failed:
                raise SystemExit(f"{stream.counts.failed} episodes failed")
    return result


def main() -> None:
    """Play, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["scripted", "smollm2", "vllm"], default="scripted")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3, help="of an episode; not of the scripted model")
    parser.add_argument("--no-token-in", action="store_true", help="send messages only, as to an unknown engine")
    parser.add_argument("--engines", type=int, default=1, help="processes of SmolLM2, each with one thread")
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".engine" / "bin" / "python")
    parser.add_argument("--minutes", type=float, default=120, help="begin no further episode after this time")
    arguments = parser.parse_args()
    began = time.monotonic()
    at_once = arguments.engines if arguments.model == "smollm2" else 4
    engines: dict[str, Any] = {
        "scripted": scripted,
        "smollm2": lambda: smollm2(arguments.engines, arguments.engine_python),
        "vllm": lambda: double(arguments.turns),
    }
    with engines[arguments.model]() as engine:
        engine.turns, engine.token_in = arguments.turns, not arguments.no_token_in
        result = asyncio.run(measure(engine, arguments.episodes, at_once, arguments.minutes))
    print(json.dumps({"model": arguments.model, **asdict(result), "seconds": round(time.monotonic() - began)}))
    sys.exit(not result.is_exact())


if __name__ == "__main__":
    main()
