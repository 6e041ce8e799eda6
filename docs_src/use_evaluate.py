import asyncio
import json
import tempfile
from pathlib import Path

from tasks_env import WordTasks
from word_env import WordAction, WordObservation

from openenv import TaskClient, create_app
from openenv.rollout import Model
from openenv.testing import Script, ScriptedModel, Turn, serve
from openenv.train import TrackedRun, evaluate, group_metrics, open_tracker, play


async def main(url: str, model: Model, folder: Path) -> None:
    run = TrackedRun(name="words-1", config={"samples": 2}, folder=folder)
    with TaskClient(url) as tasks, open_tracker(["jsonl"], run) as tracker:  # or ["wandb", "jsonl"]
        async with play(url, model, tasks.split("train"), samples=2, concurrency=4, max_turns=3) as stream:
            groups = await stream.take(4)
        tracker.log(group_metrics(groups), step=1)
        tracker.log_samples(groups, step=1)

        async with play(url, model, tasks.split("test"), samples=4, concurrency=4, max_turns=3) as held_out:
            report = await evaluate(held_out, k=(1, 4))
        tracker.log(report.metrics(), step=1)
    print("reward", report.reward, "pass@4", report.pass_at[4], "of", report.tasks, "tasks")
    for line in (folder / "words-1" / "metrics.jsonl").read_text().splitlines():
        print(len(json.loads(line)), "values at step", json.loads(line)["step"])


if __name__ == "__main__":
    script = Script(name="guesser", turns=[Turn(text="brick")], ending="eagle")
    app = create_app(WordTasks, WordAction, WordObservation, max_concurrent_envs=8)
    with serve(app) as served, ScriptedModel(script) as scripted, tempfile.TemporaryDirectory() as runs:
        asyncio.run(main(served.url, Model(**scripted.model()), Path(runs)))
