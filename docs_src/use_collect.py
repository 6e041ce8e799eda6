import json
import tempfile
from pathlib import Path

from guess import GuessTheNumber

from openenv.client.llm_client import OpenAIClient
from openenv.rollout.run.agent_sessions import HarnessRunLimits, MCPHarnessAdapter
from openenv.rollout.run.collect import CollectRunner, RolloutSerializer, build_model_step
from openenv.testing import Script, ScriptedCall, ScriptedModel, Turn, serve
from openenv.train import ServedSessionFactory


def main(url: str, endpoint: str, folder: Path) -> None:
    runner = CollectRunner(
        session_factory=ServedSessionFactory(url),
        harness_adapter=MCPHarnessAdapter(),
        serializer=RolloutSerializer(folder),
        tasks=[{"seed": seed} for seed in range(3)],  # arguments of reset, per episode
        limits=HarnessRunLimits(max_turns=5),
    )
    teacher = build_model_step(OpenAIClient(endpoint, None, "teacher"), system_prompt="Guess a number from 0 to 9.")
    result = runner.run(model_step=teacher, num_episodes=3, should_keep=lambda episode: episode.reward == 1.0)
    print(result.num_collected, "collected,", result.num_dropped, "dropped,", result.num_failed, "failed")
    for line in (folder / "results.jsonl").read_text().splitlines():
        episode = json.loads(line)
        print(episode["episode_id"], episode["task"], [call["arguments"]["number"] for call in episode["tool_trace"]])


if __name__ == "__main__":
    guesses = [Turn(calls=[ScriptedCall(name="act", arguments={"number": number})]) for number in range(10)]
    with (
        serve(GuessTheNumber) as served,
        ScriptedModel(Script(name="teacher", turns=guesses)) as model,  # or any chat completions endpoint
        tempfile.TemporaryDirectory() as folder,
    ):
        main(served.url, f"http://127.0.0.1:{model.port}", Path(folder))
