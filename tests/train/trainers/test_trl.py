"""TRL as it is on PyPI, with environments and agents of ours; `make test-trainers` sets its environment up.

The trainers are TRL's own. What a model samples is scripted, so no weights are needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import pickle
import queue
import runpy
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trainers")

from accelerate.state import PartialState
from datasets import Dataset
from fastmcp import FastMCP
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from environments import Tools
from opencode_env import OpenCodeConfig, OpenCodeSessionFactory, OpenCodeTask, SandboxHandle
from openenv import create_app
from openenv.core.harness import VerifyResult
from openenv.errors import SandboxUnavailable, SessionCapacityError
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.rollout import Model, Task
from openenv.rollout.agents.served_episode import EpisodeFailed
from openenv.sandboxes import LocalSandboxes
from openenv.testing import Played, ScriptedModel, serve
from openenv.testing.scripted import vocabulary
from openenv.testing.scripted.agent_scripts import write_file
from openenv.train.trainers.trl import RolloutSessionFactory, tool_environment
from openenv.types import Observation
from tiny_policy import END, ScriptedGRPOTrainer, tiny_model, tiny_tokenizer, tool_call, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
INSTRUCTION = "Write hello into hello.txt."


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched from a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


# ---- GRPOTrainer(environment_factory=...) ----


class Till(Tools):
    """One tool: `pay` has the amount as its reward and breaks the environment for more than 100."""

    def __init__(self) -> None:
        server = FastMCP("till")

        @server.tool
        def pay(amount: float) -> str:
            """Pay an amount.

            Args:
                amount: How much.
            """
            return f"paid {amount}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        return Observation(metadata={"seed": seed})

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if isinstance(action, CallToolAction) and action.arguments.get("amount", 0) > 100:
            raise RuntimeError("the till is broken")
        observation = super().step(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            observation.reward = float(action.arguments.get("amount", 0))
        return observation


@pytest.fixture(scope="module")
def till() -> Iterator[str]:
    with serve(create_app(Till, CallToolAction, CallToolObservation, max_concurrent_envs=4)) as served:
        yield served.url


def prompts(text: str = "Pay.", count: int = 4, **columns: Any) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}]] * count, **columns})


def payer(*amounts: float) -> Callable[[str, int], str]:
    """Pay an amount in each conversation, once; the calls of a turn are numbered from 0."""

    def answer(text: str, number: int) -> str:
        if "<tool_response>" in text.split("<|im_start|>user")[-1]:
            return f"Done.{END}"
        return tool_call("pay", amount=amounts[number])

    return answer


def test_a_trainer_gets_the_rewards_of_a_served_environment(till: str, tmp_path: Path) -> None:
    with tool_environment(till) as factory:
        trainer = trained(payer(1.0, 3.0), tmp_path, train_dataset=prompts(), environment_factory=factory)
    logged = trainer.state.log_history[0]
    assert (logged["reward"], logged["rewards/ToolEnvironment/mean"]) == (2.0, 2.0)
    assert (logged["tools/call_frequency"], logged["tools/failure_frequency"]) == (1.0, 0.0)
    assert logged["grad_norm"] > 0


def test_what_tools_return_is_masked(till: str, tmp_path: Path) -> None:
    batches: list[dict[str, Any]] = []

    class Watched(ScriptedGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batches.append(super()._generate_and_score_completions(inputs))
            return batches[-1]

    with tool_environment(till) as factory:
        trained(payer(1.0, 3.0), tmp_path, trainer=Watched, train_dataset=prompts(), environment_factory=factory)
    tokenizer = tiny_tokenizer()
    batch = batches[0]
    for ids, real, mask in zip(batch["completion_ids"], batch["completion_mask"], batch["tool_mask"], strict=True):
        text = tokenizer.decode(ids[real.bool()])
        trained_on = tokenizer.decode(ids[real.bool() & mask.bool()])
        assert "paid" in text
        assert "paid" not in trained_on
        assert trained_on.startswith("<tool_call>")
        assert trained_on.endswith(f"Done.{END}")


def test_an_environment_that_breaks_ends_the_run(till: str, tmp_path: Path) -> None:
    with tool_environment(till) as factory, pytest.raises(EpisodeFailed, match="the till is broken"):
        trained(payer(1.0, 101.0), tmp_path, train_dataset=prompts(), environment_factory=factory)


def test_or_its_sample_is_dropped_from_the_group(till: str, tmp_path: Path) -> None:
    with tool_environment(till, on_failure="drop") as factory:
        trainer = trained(
            payer(1.0, 101.0, 3.0), tmp_path, generations=3, train_dataset=prompts(), environment_factory=factory
        )
    assert trainer.state.log_history[0]["reward"] == 2.0  # of two samples; 4/3 with a reward of 0 for the third


def test_a_full_server_ends_the_run(till: str, tmp_path: Path) -> None:
    with tool_environment(till) as factory, pytest.raises(SessionCapacityError):
        trained(payer(*range(6)), tmp_path, generations=6, train_dataset=prompts(), environment_factory=factory)


def test_a_dead_server_ends_the_run(tmp_path: Path) -> None:
    with serve(create_app(Till, CallToolAction, CallToolObservation, max_concurrent_envs=4)) as served:
        factory = tool_environment(served.url, on_failure="drop", retry_refused_s=0.1)
        factory()  # the tools are known
    with pytest.raises(OSError, match=r"refused|connect"):
        trained(payer(1.0, 2.0), tmp_path, train_dataset=prompts(), environment_factory=factory)


def test_a_run_may_mix_environments(till: str, tmp_path: Path) -> None:
    rows = prompts(count=2, environment=["small", "large"])
    with tool_environment(till) as small, tool_environment(till, reward="last") as large:
        trainer = trained(
            payer(1.0, 3.0),
            tmp_path,
            steps=2,
            train_dataset=rows,
            environment_factory={"small": small, "large": large},
        )
    assert [row["reward"] for row in trainer.state.log_history[:2]] == [2.0, 2.0]


# ---- HarnessRolloutWorker: agents with loops of their own ----


@pytest.fixture
def local_sandboxes() -> LocalSandboxes:
    sandboxes = LocalSandboxes()
    try:
        sandboxes.check()
    except SandboxUnavailable as exc:
        pytest.skip(str(exc))
    return sandboxes


class FakeTokenizer:
    """What the worker's loop asks of a tokenizer where the agent samples: nothing but its special tokens."""

    response_template = None
    response_schema: dict[str, Any] = {}  # noqa: RUF012 - a constant
    pad_token_id = vocabulary.PAD


class HalvingVerifier:
    """Judges by the file that the agent writes; every second rollout gets half of its reward."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
        done = sandbox.exec("cat /home/user/workdir/hello.txt")
        return VerifyResult(env_reward=float(done.stdout == "hello\n") / next(self._numbers), done=True)


def roll_out(factory: Callable[..., Any], name: str, generations: int = 2) -> list[Any]:
    """Run the worker's loop until it has a sample of each generation, and return the samples."""
    PartialState()
    context = multiprocessing.get_context("spawn")
    samples, failures = context.Queue(), context.Queue(1)
    loop = HarnessRolloutWorker._loop_cls(
        harness_session_factory=factory,
        model_name=name,
        dataset=prompts(INSTRUCTION, count=1),
        reward_funcs=[],
        processing_class=FakeTokenizer(),
        eos_token_ids=[vocabulary.END],
        rollout_buffer=samples,
        model_version_value=context.Value("i", 7),
        heartbeat_value=context.Value("d", 0.0),
        failed_event=context.Event(),
        exception_info_queue=failures,
        metrics_queue=context.Queue(),
        num_generations=generations,
        max_inflight_tasks=generations,
        temperature=0.7,
    )
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    taken: list[Any] = []
    deadline = time.monotonic() + 240
    while len(taken) < generations and thread.is_alive() and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            taken.append(samples.get(timeout=1))
    loop._loop.call_soon_threadsafe(loop._stop_event.set)
    thread.join(120)
    assert not thread.is_alive()
    assert failures.empty(), failures.get()
    assert len(taken) == generations
    return taken


def check_tokens(samples: list[Any], played: list[Played]) -> None:
    """Compare the samples with what the engine was asked and sampled."""
    by_ids = {tuple(call.token_ids): call for call in played if call.finished}
    for sample in samples:
        ids, mask = sample.input_ids.tolist(), sample.completion_mask.tolist()
        logprobs = sample.old_log_probs.tolist()
        assert len(ids) == len(mask) == len(logprobs)
        turns = spans(mask)
        assert len(turns) == 2  # a tool call, and the end
        for first, end in turns:
            call = by_ids[tuple(ids[first:end])]
            assert ids[:first] == call.prompt_ids
            assert logprobs[first:end] == pytest.approx(call.logprobs)
        assert {value for value, trained_on in zip(logprobs, mask, strict=True) if not trained_on} == {0.0}
        assert sample.model_version == 7
        assert sample.completion[-1]["role"] == "assistant"


def spans(mask: list[int]) -> list[tuple[int, int]]:
    """Return where the runs of ones in a mask begin and end."""
    edges = [0, *mask, 0]
    marks = [index for index in range(len(mask) + 1) if edges[index] != edges[index + 1]]
    return list(zip(marks[::2], marks[1::2], strict=True))


def test_the_worker_gets_the_tokens_that_the_engine_sampled(local_sandboxes: LocalSandboxes) -> None:
    with ScriptedModel(write_file("opencode", "hello.txt", "hello\n")) as model:
        address = model.model()
        config = OpenCodeConfig(base_url=address["base_url"], model=address["name"], agent_timeout_s=120)
        factory = functools.partial(
            OpenCodeSessionFactory,
            config=config,
            sandbox_backend=local_sandboxes,
            mode="transparent_proxy",
            verifier=HalvingVerifier(),
        )
        samples = roll_out(factory, address["name"])
        check_tokens(samples, model.played())
    assert sorted(sample.metrics["reward"] for sample in samples) == [0.5, 1.0]
    low, high = sorted(float(sample.advantage) for sample in samples)
    assert low < 0 < high


@pytest.mark.parametrize("agent", ["mini-swe-agent", "opencode"])
def test_the_worker_trains_any_agent(agent: str, local_sandboxes: LocalSandboxes) -> None:
    task = Task(instruction=INSTRUCTION, verify=('test "$(cat hello.txt)" = hello',), agent_timeout_s=120)
    with ScriptedModel(write_file(agent, "hello.txt", "hello\n")) as model:
        address = model.model()
        factory = functools.partial(
            RolloutSessionFactory, [task], model=Model(**address), agent=agent, sandbox=local_sandboxes
        )
        samples = roll_out(factory, address["name"])
        check_tokens(samples, model.played())
    assert [sample.metrics["reward"] for sample in samples] == [1.0, 1.0]


# ---- the snippets of the page ----

SNIPPETS = Path(__file__).parents[3] / "docs_src"


def test_the_first_snippet_trains(tmp_path: Path) -> None:
    from gridworld_env.server.app import app

    train = runpy.run_path(str(SNIPPETS / "train_trl.py"))["train"]
    quick = {"output_dir": str(tmp_path), "max_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    tokenizer = tiny_tokenizer()
    tiny = tmp_path / "tiny"
    tiny_model(tokenizer).save_pretrained(tiny)
    tokenizer.save_pretrained(tiny)
    with serve(app) as served:
        trainer = train(served.url, str(tiny), per_device_train_batch_size=8, logging_steps=1, **quick)
    assert trainer.state.log_history[0]["rewards/ToolEnvironment/mean"] == 0.0  # a random model calls no tool


def test_the_second_snippet_makes_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM serves the policy; a worker is refused without it, though making one does not need it.
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
    make = runpy.run_path(str(SNIPPETS / "train_trl_agents.py"))
    model = Model(base_url="http://127.0.0.1:1/v1", name="policy")
    worker = make["worker"](model, dataset=prompts(), reward_funcs=[], processing_class=tiny_tokenizer())
    sessions = pickle.loads(pickle.dumps(worker._loop_kwargs["harness_session_factory"]))
    assert isinstance(sessions(sampling={"temperature": 1.0}), RolloutSessionFactory)
