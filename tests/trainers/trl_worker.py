"""Drives the rollout loop of TRL's `HarnessRolloutWorker` with OpenCode in our local sandbox and a scripted model.

Not a test: `test_trl.py` runs it with the Python of an environment that has TRL. Prints one JSON object: the samples
that a trainer would get, and what the model was asked and sampled.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import sys
import threading
from typing import Any

from accelerate.state import PartialState
from datasets import Dataset
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from opencode_env import OpenCodeConfig, OpenCodeSessionFactory, OpenCodeTask, SandboxHandle
from openenv.core.harness import VerifyResult
from openenv.sandboxes import LocalSandboxes
from openenv.testing import ScriptedModel
from openenv.testing.scripted import vocabulary
from openenv.testing.scripted.agent_scripts import write_file

GENERATIONS = 2
TEMPERATURE = 0.7


class FakeTokenizer:
    """What the loop asks of a tokenizer where the agent samples: nothing but its special tokens."""

    response_template = None
    response_schema: dict[str, Any] = {}  # noqa: RUF012 - a constant
    pad_token_id = vocabulary.PAD


class Verifier:
    """Judges by the file that the agent writes; every second rollout gets half of its reward."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
        done = sandbox.exec("cat /home/user/workdir/hello.txt")
        return VerifyResult(env_reward=float(done.stdout == "hello\n") / next(self._numbers), done=True)


def main() -> None:
    """Roll one group out."""
    PartialState()
    with ScriptedModel(write_file("opencode", "hello.txt", "hello\n")) as model:
        address = model.model()
        config = OpenCodeConfig(base_url=address["base_url"], model=address["name"], agent_timeout_s=120)
        context = multiprocessing.get_context("spawn")
        samples, failures = context.Queue(), context.Queue(1)
        loop = HarnessRolloutWorker._loop_cls(
            harness_session_factory=functools.partial(
                OpenCodeSessionFactory,
                config=config,
                sandbox_backend=LocalSandboxes(),
                mode="transparent_proxy",
                verifier=Verifier(),
            ),
            model_name=address["name"],
            dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Write hello into hello.txt."}]}]),
            reward_funcs=[],
            processing_class=FakeTokenizer(),
            eos_token_ids=[vocabulary.END],
            rollout_buffer=samples,
            model_version_value=context.Value("i", 7),
            heartbeat_value=context.Value("d", 0.0),
            failed_event=context.Event(),
            exception_info_queue=failures,
            metrics_queue=context.Queue(),
            num_generations=GENERATIONS,
            max_inflight_tasks=GENERATIONS,
            temperature=TEMPERATURE,
        )
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        taken = [samples.get(timeout=240) for _ in range(GENERATIONS)]
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        thread.join(120)
        played = model.played()
    failure = None if failures.empty() else failures.get()
    json.dump(
        {
            "samples": [
                {
                    "input_ids": sample.input_ids.tolist(),
                    "completion_mask": sample.completion_mask.tolist(),
                    "old_log_probs": sample.old_log_probs.tolist(),
                    "advantage": float(sample.advantage),
                    "reward": sample.metrics["reward"],
                    "version": sample.model_version,
                    "last": sample.completion[-1],
                }
                for sample in taken
            ],
            "played": [[call.prompt_ids, call.token_ids, call.logprobs] for call in played if call.finished],
            "ended": not thread.is_alive(),
            "failure": failure,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
