"""Difficulty of the task sets: the solved tasks of one model, agent and set, as a table; or the sizes of the tasks.

    python benchmarks/task_sets.py --sizes                          # what a model reads and writes; without a model
    make .engine/ready
    python benchmarks/task_sets.py --tasks 20                       # SmolLM2-135M by llama.cpp, on one core
    python benchmarks/task_sets.py --llm-url URL --model MODEL      # any endpoint

Each task is drawn with the same seed in every run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from openenv.rollout import Model, Outcome, Task, run_many, task_set, task_set_names

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "tests" / "rollout" / "real_engine" / "engine.py"
SEED = 1000


@contextlib.contextmanager
def smollm2(python: Path) -> Iterator[Model]:
    """Serve SmolLM2-135M in a process that ends with its standard input."""
    pipe = subprocess.PIPE
    with subprocess.Popen([python, ENGINE], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        url = json.loads(engine.stdout.readline())["engine"]
        try:
            yield Model(base_url=f"{url}/v1", name="smollm2-135m-instruct", engine="llamacpp", max_tokens_cap=160)
        finally:
            engine.stdin.close()


def row(name: str, outcomes: list[Outcome], seconds: float) -> str:
    """Return the line of a set."""
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    solved = sum(reward == 1 for reward in rewards)
    share = f"{solved / len(rewards):.2f}" if rewards else "-"
    tokens = sum(len(turn.completion_tokens) for outcome in outcomes for turn in outcome.turns) / len(outcomes)
    return f"| `{name}` | {solved} of {len(rewards)} | {share} | {tokens:.0f} | {seconds / len(outcomes):.1f} |"


def sizes(name: str, tasks: list[Task]) -> str:
    """Return the line of a set: its levels, and the median characters that a solver reads and writes."""
    fields = {key: [task.metadata[key] for task in tasks] for key in tasks[0].metadata}
    numbers = {key: values for key, values in fields.items() if all(isinstance(value, int) for value in values)}
    levels = ", ".join(f"`{key}` {min(values)} to {max(values)}" for key, values in numbers.items())
    reads = [len(task.instruction) + sum(map(len, task.files.values())) for task in tasks]
    writes = statistics.median(map(written, tasks))
    return f"| `{name}` | {levels or '-'} | {statistics.median(reads):.0f} | {writes:.0f} |"


def written(task: Task) -> int:
    """Return the size of the reference answer: of the file that it is, else of the solution's commands."""
    answer = task.metadata.get("answer")
    if answer is None:
        return sum(map(len, task.solution))
    with tempfile.TemporaryDirectory() as folder:
        for path, content in task.files.items():
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, path).write_bytes(content if isinstance(content, bytes) else content.encode())
        for line in (*task.setup, *task.solution):
            subprocess.run(line, shell=True, cwd=folder, check=True, capture_output=True)
        return Path(folder, str(answer)).stat().st_size


def main() -> None:
    """Run the agent on all sets, and print a row after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=task_set_names())
    parser.add_argument("--tasks", type=int, default=20, help="tasks of each set")
    parser.add_argument("--agent", default="single-turn")
    parser.add_argument("--llm-url", help="the endpoint; by default SmolLM2-135M is served")
    parser.add_argument("--model", default="", help="the model's ID there")
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".engine" / "bin" / "python")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--sizes", action="store_true", help="print the sizes of the tasks instead")
    arguments = parser.parse_args()
    if arguments.sizes:
        print("| set | levels | reads | writes |\n|---|---|---:|---:|")
        for name in arguments.sets:
            print(sizes(name, task_set(name).tasks(arguments.tasks, seed=SEED)), flush=True)
        return
    endpoint: contextlib.AbstractContextManager[Model]
    if arguments.llm_url:
        endpoint = contextlib.nullcontext(Model(base_url=arguments.llm_url, name=arguments.model))
    else:
        endpoint = smollm2(arguments.engine_python)
    with endpoint as model:
        print("| set | solved | share | tokens per answer | seconds per rollout |\n|---|---|---|---|---|", flush=True)
        for name in arguments.sets:
            tasks = task_set(name).tasks(arguments.tasks, seed=SEED)
            start = time.monotonic()
            outcomes = run_many(tasks, agent=arguments.agent, model=model, concurrency=arguments.concurrency)
            print(row(name, outcomes, time.monotonic() - start), flush=True)
            for outcome in outcomes:
                if outcome.reward is None:
                    print(f"{outcome.status}: {outcome.phase}: {outcome.reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
