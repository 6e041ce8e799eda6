"""`openenv collect`: any served environment, every teacher, folders that it goes on with, and the upload."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from environments import Idle, Shelf, Spot, Track, Walk, fresh
from hub_double import TOKEN, USER, HubDouble
from openenv import create_app
from openenv.cli.__main__ import build
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.testing import Script, ScriptedCall, ScriptedModel, StatusFailure, Turn, serve
from openenv.types import Observation


@pytest.fixture(scope="module")
def track() -> Iterator[str]:
    with serve(create_app(Track, Walk, Spot, max_concurrent_envs=4)) as served:
        yield served.url


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "API_KEY"):
        monkeypatch.delenv(name, raising=False)


def collect(*arguments: object) -> Result:
    return CliRunner().invoke(build(["collect"]), ["collect", *map(str, arguments)])


def episodes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def walks(by: int, **turn: Any) -> ScriptedModel:
    call = ScriptedCall(name="act", arguments={"by": by})
    return ScriptedModel(Script(name="walker", turns=[Turn(text="I walk.", calls=[call], **turn)]))


# -- teachers -------------------------------------------------------------------------------------------------------


def test_the_scripted_teacher_needs_no_model(track: str, tmp_path: Path) -> None:
    result = collect(track, "-o", tmp_path, "-n", 2)
    assert result.exit_code == 0, result.output
    assert "tools: act" in result.output
    assert "teacher      scripted" in result.output
    assert "collected=2 skipped=0 dropped=0 failed=0\navg_reward=6.000 success_rate=100%" in result.output
    assert [row["episode_id"] for row in episodes(tmp_path)] == ["ep-000000", "ep-000001"]
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    published = {"env": track, "env_base_url": track, "provider": "scripted", "model": None, "llm_endpoint": None}
    counts = {"llm_port": None, "num_episodes_requested": 2, "temperature": 0.2, "keep_losses": False}
    assert published.items() | counts.items() <= metadata.items()


@pytest.mark.parametrize("provider", ["openai", "anthropic", None])
def test_a_model_is_a_teacher(track: str, tmp_path: Path, provider: str | None) -> None:
    with walks(3) as model:
        chosen = () if provider is None else ("--provider", provider)
        result = collect(
            "track", "--url", track, "-o", tmp_path, "-n", 1, *chosen, "--model", "walker",
            "--llm-url", "http://127.0.0.1", "--llm-port", model.port, "--system-prompt", "Walk.",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        (played,) = model.played()
    (row,) = episodes(tmp_path)
    assert row["reward"] == 3.0
    assert row["messages"][1]["content"] == "I walk."
    assert played.dialect == ("anthropic" if provider == "anthropic" else "openai_chat")
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert metadata["provider"] == ("anthropic" if provider == "anthropic" else "openai-compatible")
    assert (metadata["model"], metadata["system_prompt"]) == ("walker", "Walk.")


def test_a_key_of_the_environment_is_sent_and_never_shown(
    track: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret-key")
    with walks(3) as model:
        address = f"http://127.0.0.1:{model.port}"
        result = collect(track, "-o", tmp_path, "-n", 1, "--model", "m", "--llm-url", address)
    assert result.exit_code == 0, result.output
    assert "secret-key" not in result.output + "".join(path.read_text() for path in tmp_path.iterdir())


# -- environments ---------------------------------------------------------------------------------------------------


def test_tools_of_an_environment_are_the_teachers(tmp_path: Path) -> None:
    with serve(create_app(Shelf, CallToolAction, CallToolObservation)) as served:
        result = collect(served.url, "-o", tmp_path, "-n", 1, "--max-turns", 2)
        assert result.exit_code == 1
        assert "failed ep-000000: ValueError: The rollout did not produce an environment reward" in result.output
        assert "use --unrewarded" in result.output
        assert not (tmp_path / "results.jsonl").exists()
        result = collect(served.url, "-o", tmp_path, "-n", 1, "--max-turns", 2, "--unrewarded")
        assert result.exit_code == 0, result.output
        assert "avg_reward" not in result.output
    (row,) = episodes(tmp_path)
    assert (row["reward"], row["done"]) == (None, False)
    assert [entry["tool_name"] for entry in row["tool_trace"]] == ["put", "drop"]


class Numbered(Idle):
    """Repeats the arguments of its reset; its one step is a loss."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, level: int = 0, **kwargs: Any) -> Any:
        return Observation(metadata={}, reward=None) if seed is None else Spot(at=seed * 10 + level)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return Spot(reward=-1.0, done=True)


def test_seeds_follow_each_other_and_losses_are_dropped_unless_wanted(tmp_path: Path) -> None:
    with serve(create_app(Numbered, Walk, Spot, max_concurrent_envs=4)) as served:
        options = (served.url, "-o", tmp_path, "-n", 3, "--seed", 4, "--dataset-config", '{"level": 2}')
        result = collect(*options)
        assert (result.exit_code, "dropped=3" in result.output) == (0, True), result.output
        result = collect(*options, "--keep-losses", "--concurrency", 3)
        assert "collected=3" in result.output
    rows = sorted(episodes(tmp_path), key=lambda row: str(row["episode_id"]))
    assert [row["task"] for row in rows] == [{"seed": 4}, {"seed": 5}, {"seed": 6}]
    assert [row["messages"][0]["content"] for row in rows] == [
        f'{Numbered.__doc__}\n\n{{"at": {at}}}' for at in (42, 52, 62)
    ]


class Catalogue(Track):
    """Has two tasks to train on."""

    def list_splits(self) -> list[Any]:
        return ["train"]

    def list_tasks(self, split: str) -> list[Any]:
        return self.get_task_range(split)

    def num_tasks(self, split: str) -> int:
        return 2

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return [{"seed": 1}, {"seed": 2}][start:stop]


def test_the_tasks_of_a_split_are_played_in_order(track: str, tmp_path: Path) -> None:
    with serve(create_app(Catalogue, Walk, Spot)) as served:
        result = collect(served.url, "-o", tmp_path, "-n", 3, "--split", "train")
    assert result.exit_code == 0, result.output
    assert [row["task"]["seed"] for row in episodes(tmp_path)] == [1, 2, 1]
    result = collect(track, "-o", tmp_path, "--split", "train")
    assert (result.exit_code, "has no task catalogue" in result.output) == (1, True)


# -- folders --------------------------------------------------------------------------------------------------------


def test_the_same_command_goes_on_and_no_resume_starts_a_new_file(track: str, tmp_path: Path) -> None:
    assert collect(track, "-o", tmp_path, "-n", 1).exit_code == 0
    result = collect(track, "-o", tmp_path, "-n", 3, "--resume")
    assert "collected=2 skipped=1" in result.output
    result = collect(track, "-o", tmp_path, "-n", 1, "--no-resume", "--episode-id-prefix", "x")
    assert "Warning: resume=False moved existing results file to" in result.output
    assert [row["episode_id"] for row in episodes(tmp_path)] == ["x-000000"]
    (aside,) = tmp_path.glob("results.*.bak.jsonl")
    assert len(aside.read_text().splitlines()) == 3
    result = collect("other", "--url", track, "-o", tmp_path, "-n", 1)
    assert f"has episodes with env {track}; new ones have other" in result.output


def test_a_damaged_folder_is_named(track: str, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{oops}\n")
    result = collect(track, "-o", tmp_path, "-n", 1)
    assert result.exit_code == 1
    assert "results.jsonl:1: invalid JSON" in result.output


# -- failures -------------------------------------------------------------------------------------------------------


class Breaks(Idle):
    """Breaks in the first steps."""

    left = 2

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if type(self).left:
            type(self).left -= 1
            raise RuntimeError("a bolt is loose")
        return Observation(reward=1.0, done=True)


def test_what_the_environment_fails_at_is_played_again_and_is_no_episode(tmp_path: Path) -> None:
    with serve(create_app(Breaks, Walk, Observation, max_concurrent_envs=4)) as served:
        result = collect(served.url, "-o", tmp_path, "-n", 1, "--retries", 0)
        assert result.exit_code == 1
        assert "failed ep-000000: ExecutionError" in result.output
        assert "a bolt is loose" in result.output
        assert "run the same command again" in result.output
        result = collect(served.url, "-o", tmp_path, "-n", 1, "--retries", 1)
    assert result.exit_code == 0, result.output
    assert [row["reward"] for row in episodes(tmp_path)] == [1.0]


def test_an_endpoint_that_fails_ends_the_run_soon(track: str, tmp_path: Path) -> None:
    with walks(3, failures=[StatusFailure(status=401, message="no such key", attempts=None)]) as model:
        address = f"http://127.0.0.1:{model.port}"
        result = collect(track, "-o", tmp_path, "-n", 50, "--model", "m", "--llm-url", address)
    assert result.exit_code == 1
    assert "failed=5" in result.output
    assert "no such key" in result.output
    assert "Stopped after too many failures in a row; 45 episodes remain." in result.output
    assert not (tmp_path / "results.jsonl").exists()


class Sticks(Track):
    """Its second episode waits for the gate."""

    gate = threading.Event()
    episodes = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        type(self).episodes += 1
        return super().reset(2, episode_id)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        assert self.episodes == 1 or self.gate.wait(30)
        return super().step(action)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_ended_keeps_what_it_has(
    sign: signal.Signals, code: int, tmp_path: Path, command: Callable[..., Any]
) -> None:
    environment = fresh(Sticks)
    with serve(create_app(environment, Walk, Spot, max_concurrent_envs=4)) as served:
        running = command("collect", served.url, "-o", "episodes", "-n", "3")
        running.wait_for(lambda: environment.episodes == 2)
        assert running.stop(sign) == code
        assert "Traceback" not in running.output
        environment.gate.set()
        result = collect(served.url, "-o", tmp_path / "episodes", "-n", 3)
    assert "collected=2 skipped=1" in result.output


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    result = collect("http://127.0.0.1:9", "-o", tmp_path / "new")
    assert result.exit_code == 1
    assert "Is the server running?" in result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("maze",), "give the server of maze: --url"),
        (("maze:big", "--url", "http://127.0.0.1:9"), "only openspiel:GAME and reasoning_gym:DATASET"),
        (("openspiel", "--url", "http://127.0.0.1:9"), "names no variant"),
        (("http://127.0.0.1:9", "--provider", "opnai"), "'opnai' is not one of scripted, openai, anthropic"),
        (("http://127.0.0.1:9", "--provider", "openai"), "--model NAME"),
        (("http://127.0.0.1:9", "--llm-url", "http://127.0.0.1:9"), "--model NAME"),
        (("http://127.0.0.1:9", "--model", "m"), "needs --provider openai or anthropic, or --llm-url"),
        (("http://127.0.0.1:9", "--llm-port", "80"), "needs --llm-url URL"),
        (("http://127.0.0.1:9", "--provider", "openai", "--model", "m"), "set OPENAI_API_KEY or API_KEY"),
        (("http://127.0.0.1:9", "--provider", "anthropic", "--model", "m"), "set ANTHROPIC_API_KEY or API_KEY"),
        (("http://127.0.0.1:9", "--model", "m", "--llm-url", "http://u:pw@h"), "must not have credentials"),
        (("http://127.0.0.1:9", "--dataset-config", "{"), "is not valid JSON"),
        (("http://127.0.0.1:9", "--dataset-config", "[]"), "must be a JSON object"),
        (("http://127.0.0.1:9", "--seed", "1", "--split", "train"), "cannot be combined with --seed"),
        (("http://127.0.0.1:9", "--private"), "needs --push-to-hub"),
        (("http://127.0.0.1:9", "--push-to-hub", "a b"), "Repo id must"),
    ],
)
def test_options_that_do_not_fit_are_explained(arguments: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    result = collect(*arguments, "-o", tmp_path / "new")
    assert result.exit_code != 0
    assert reason in " ".join(result.output.split())
    assert "pw" not in result.output
    assert not (tmp_path / "new").exists()


# -- the Hub --------------------------------------------------------------------------------------------------------


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    """The Hub, for commands in processes of their own: `huggingface_hub` reads its address when it is imported."""
    with HubDouble() as hub:
        for name, value in (("ENDPOINT", hub.url), ("TOKEN", TOKEN), ("HOME", str(tmp_path / "hf"))):
            monkeypatch.setenv(f"HF_{name}", value)
        yield hub


def test_a_dataset_is_uploaded(track: str, tmp_path: Path, hub: HubDouble, openenv_command: Run) -> None:
    folder = tmp_path / "episodes"
    folder.mkdir()
    (folder / "results.20260101T000000Z.bak.jsonl").write_text("old")
    done = openenv_command("collect", track, "-o", "episodes", "-n", "2", "-H", "walks", "--private")
    assert done.returncode == 0, done.stderr
    assert f"dataset      {hub.url}/datasets/{USER}/walks" in done.stdout
    repository = hub.repositories[f"{USER}/walks"]
    assert (repository.private, repository.commits) == (True, ["Add 2 collected episodes"])
    assert sorted(repository.files) == [".gitattributes", "README.md", "metadata.json", "results.jsonl"]
    assert repository.files["results.jsonl"] == (folder / "results.jsonl").read_bytes()
    assert b"**Episodes:** 2" in repository.files["README.md"]


@pytest.mark.slow
def test_a_dataset_is_updated_and_a_refused_upload_loses_nothing(
    track: str, tmp_path: Path, hub: HubDouble, openenv_command: Run
) -> None:
    common = ("collect", track, "-o", "episodes", "-H", f"{USER}/walks")
    assert openenv_command(*common, "-n", "1").returncode == 0
    refused = openenv_command(*common, "-n", "2", HF_TOKEN="hf_wrong")
    assert refused.returncode == 1
    assert "the upload failed" in refused.stderr
    assert "The episodes are in episodes" in refused.stderr
    assert "hf_wrong" not in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr
    done = openenv_command(*common, "-n", "2", "--commit-message", "One more")
    assert "skipped=2" in done.stdout
    repository = hub.repositories[f"{USER}/walks"]
    assert (repository.private, repository.commits) == (False, ["Add 1 collected episode", "One more"])
    assert repository.files["results.jsonl"].count(b"\n") == 2
