"""What TRL's OpenEnv examples import and call, on ours, until they would need weights or data from a hub.

The examples take `textarena_env` and `openspiel_env` from the hub; `packages` has packages of these names with the
same interface. `echo_env` and `opencode_env` are ours.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trainers")

from datasets import Dataset

from openenv import create_app
from openenv.core.sandbox import ExecResult, SandboxHandle
from openenv.testing import serve
from tiny_policy import END, tool_call, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True, scope="module")
def packages() -> Iterator[None]:
    """The packages of the hub can be imported."""
    folder = str(Path(__file__).parent / "packages")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def serve_game(package: str, game: str) -> Any:
    """Serve a game of such a package."""
    games = pytest.importorskip(f"{package}.games")
    interface = pytest.importorskip(package if package == "textarena_env" else f"{package}.models")
    kind = "TextArena" if package == "textarena_env" else "OpenSpiel"
    action, observation = getattr(interface, f"{kind}Action"), getattr(interface, f"{kind}Observation")
    return serve(create_app(getattr(games, game), action, observation, max_concurrent_envs=8))


def turns(*answers: str) -> Callable[[str, int], str]:
    """Say these things in each conversation, one after another."""

    def answer(text: str, number: int) -> str:
        said = text.rpartition("<|im_start|>system")[2].count("<tool_response>")
        return answers[said] if said < len(answers) else f"Done.{END}"

    return answer


def rows(text: str, **columns: list[str]) -> Dataset:
    count = len(next(iter(columns.values()))) if columns else 2
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}]] * count, **columns})


def environment_rewards(environments: list[Any], **kwargs: Any) -> list[float]:
    return [environment.reward for environment in environments]


def test_echo(tmp_path: Path) -> None:
    from echo_env import EchoEnv
    from echo_env.server.app import app

    class EchoToolEnv:
        def __init__(self) -> None:
            self.env = EchoEnv(base_url=url)
            self.reward = 0.0

        def reset(self, **kwargs: Any) -> None:
            self.reward = 0.0

        def echo(self, message: str) -> str:
            """Let the environment repeat a message.

            Args:
                message: The message.
            """
            heard: str = self.env.call_tool("echo_message", message=message)  # type: ignore[assignment]
            self.reward = float(len(heard))
            return heard

    with serve(app) as served:
        url = served.url
        trainer = trained(
            turns(tool_call("echo", message="hello")),
            tmp_path,
            train_dataset=rows("Echo hello."),
            reward_funcs=environment_rewards,
            environment_factory=EchoToolEnv,
        )
    assert trainer.state.log_history[0]["reward"] == 5.0


class CatchToolEnv:
    """The Catch of the examples: the client blocks without `sync()`, as they use it."""

    url = ""

    def __init__(self) -> None:
        from openspiel_env import OpenSpielEnv

        self.client: Any = OpenSpielEnv(base_url=self.url)
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs: Any) -> str:
        result = self.client.reset()
        self.reward, self.done = 0.0, result.observation.done
        return str(result.observation.info_state)

    def _move(self, number: int) -> str:
        from openspiel_env.models import OpenSpielAction

        if self.done:
            raise ValueError("The episode is over.")
        result = self.client.step(OpenSpielAction(action_id=number, game_name="catch"))
        self.reward, self.done = result.reward or 0.0, result.observation.done
        return str(result.observation.info_state)

    def move(self, direction: str) -> str:
        """Move the paddle.

        Args:
            direction: Either "left" or "right".
        """
        return self._move({"left": 0, "right": 2}[direction])

    def stay(self) -> str:
        """Wait for the ball to fall."""
        return self._move(1)


def test_catch(tmp_path: Path) -> None:
    moves = [tool_call("move", direction="left")] * 2 + [tool_call("stay")] * 7
    with serve_game("openspiel_env", "Catch") as served:
        CatchToolEnv.url = served.url
        trainer = trained(
            turns(*moves),
            tmp_path,
            train_dataset=rows("Catch."),
            reward_funcs=environment_rewards,
            environment_factory=CatchToolEnv,
            max_completion_length=8192,
        )
    assert trainer.state.log_history[0]["reward"] == 1.0


class WordleToolEnv:
    """The Wordle of the examples; what the client gets is all that was said, of which the new part is shown."""

    url = ""

    def __init__(self) -> None:
        from textarena_env import TextArenaEnv

        self.client: Any = TextArenaEnv(base_url=self.url).sync()

    def reset(self, **kwargs: Any) -> str:
        self.said = self.client.reset().observation.messages[0].content
        self.reward, self.done = 0.0, False
        return str(self.said)

    def guess(self, guess: str) -> str:
        """Guess the word.

        Args:
            guess: The word, as '[abcde]'.
        """
        from textarena_env import TextArenaAction

        if self.done:
            raise ValueError("Game over.")
        result = self.client.step(TextArenaAction(message=guess))
        said = result.observation.messages[0].content
        shown, self.said = said[len(self.said) :], said
        self.reward, self.done = result.reward, result.done
        return str(shown)


def test_wordle(tmp_path: Path) -> None:
    with serve_game("textarena_env", "Wordle") as served:
        WordleToolEnv.url = served.url
        trainer = trained(
            turns(tool_call("guess", guess="[slate]"), tool_call("guess", guess="[crane]")),
            tmp_path,
            train_dataset=rows("Play Wordle."),
            reward_funcs=environment_rewards,
            environment_factory=WordleToolEnv,
        )
    assert trainer.state.log_history[0]["reward"] == 1.0
    assert trainer.state.log_history[0]["tools/call_frequency"] == 2.0


def test_sudoku(tmp_path: Path) -> None:
    from textarena_env import TextArenaAction, TextArenaEnv

    class SudokuToolEnv:
        def __init__(self) -> None:
            self.client: Any = TextArenaEnv(base_url=url)

        def reset(self, **kwargs: Any) -> str:
            result = self.client.reset()
            self.scores: list[float] = []
            self._done = result.done
            board: str = result.observation.messages[0].content
            assert "R1" in board
            assert "R9" in board
            assert "|" in board
            return board

        def place(self, row: int, col: int, number: int) -> str:
            """Place a number.

            Args:
                row: From 1 to 9.
                col: From 1 to 9.
                number: From 1 to 9.
            """
            if self._done:
                raise ValueError("The game is over.")
            result = self.client.step(TextArenaAction(message=f"[{row} {col} {number}]"))
            self._done = result.done
            self.scores.append(float(result.reward or 0.0))
            return str(result.observation.messages[0].content)[-400:]

    def valid_moves(environments: list[Any], **kwargs: Any) -> list[float]:
        return [sum(env.scores) / max(1, len(env.scores)) for env in environments]

    with serve_game("textarena_env", "Sudoku") as served:
        url = served.url
        trainer = trained(
            turns(tool_call("place", row=1, col=9, number=9), tool_call("place", row=2, col=3, number=9)),
            tmp_path,
            train_dataset=rows("Solve it."),
            reward_funcs=[valid_moves],
            environment_factory=SudokuToolEnv,
        )
    assert trainer.state.log_history[0]["reward"] == 0.5


def test_several_environments_in_one_run(tmp_path: Path) -> None:
    def wordle_reward(environments: list[Any], **kwargs: Any) -> list[float | None]:
        return [env.reward if isinstance(env, WordleToolEnv) else None for env in environments]

    def catch_reward(environments: list[Any], **kwargs: Any) -> list[float | None]:
        return [max(env.reward, 0.0) if isinstance(env, CatchToolEnv) else None for env in environments]

    def answer(text: str, number: int) -> str:
        moves = [tool_call("move", direction="left")] * 2 + [tool_call("stay")] * 7
        game = [tool_call("guess", guess="[crane]")] if "Guess the word." in text else moves
        return turns(*game)(text, number)

    with serve_game("textarena_env", "Wordle") as wordle, serve_game("openspiel_env", "Catch") as catch:
        WordleToolEnv.url, CatchToolEnv.url = wordle.url, catch.url
        trainer = trained(
            answer,
            tmp_path,
            steps=2,
            train_dataset=rows("Play.", environment=["wordle", "catch"]),
            reward_funcs=[wordle_reward, catch_reward],
            environment_factory={"wordle": WordleToolEnv, "catch": CatchToolEnv},
            max_completion_length=8192,
        )
    assert [row["reward"] for row in trainer.state.log_history[:2]] == [1.0, 1.0]


# ---- the example with OpenCode: a sandbox of its own, and a proxy that a subclass starts ----


class FolderSandbox:
    """A folder in place of a sandbox, as the example has it; `/home/user` is that folder."""

    sandbox_id = "folder"

    def __init__(self, root: Path) -> None:
        self.root = root

    def here(self, text: str) -> str:
        return text.replace("/home/user", str(self.root))

    def exec(self, cmd: str, *, envs: Any = None, cwd: str | None = None, timeout: float | None = 60) -> ExecResult:
        done = subprocess.run(
            ["bash", "-c", self.here(cmd)], cwd=self.root, capture_output=True, text=True, check=False
        )
        return ExecResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def write_text(self, path: str, content: str) -> None:
        target = Path(self.here(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)

    def read_text(self, path: str) -> str:
        return Path(self.here(path)).read_text()

    def exists(self, path: str) -> bool:
        return Path(self.here(path)).exists()


def test_opencode_imports_and_starts(tmp_path: Path) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.openenv_harness import (
        HarnessRolloutOutcome,
        HarnessRolloutWorker,
        TraceEntry,
    )

    from opencode_env import harness as oc_harness
    from opencode_env.config import OpenCodeConfig
    from opencode_env.harness import OpenCodeSessionFactory
    from opencode_env.task import OpenCodeTask
    from openenv.core.harness import ResourceSession, ResourceSessionFactory, VerifyResult

    assert all((AsyncGRPOConfig, AsyncGRPOTrainer, HarnessRolloutOutcome, HarnessRolloutWorker, TraceEntry))
    assert issubclass(OpenCodeSessionFactory, ResourceSessionFactory)
    assert issubclass(oc_harness.OpenCodeSession, ResourceSession)

    class OwnProxyFactory(OpenCodeSessionFactory):
        """Starts the proxy as the example does: from its source, in the sandbox."""

        def _start_proxy(self, sandbox: SandboxHandle) -> Any:
            self._exec_with_retry(sandbox, "true", timeout=10, attempts=3, backoff_s=0.1, label="dependencies")
            sandbox.write_text("/home/user/proxy/interception.py", oc_harness._PROXY_SOURCE_PATH.read_text())
            command = [sys.executable, "interception.py", "--upstream-url", self._config.base_url]
            command += ["--trace", oc_harness._PROXY_TRACE_PATH, "--port", "0", "--help"]
            command += ["--top-logprobs", str(self._config.proxy_top_logprobs)]
            line = f"cd /home/user/proxy && {shlex.join(command)} > {oc_harness._PROXY_LOG_PATH} 2>&1"
            return sandbox.exec(line)

    def verifier(sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
        return VerifyResult(env_reward=1.0, done=True)

    config = OpenCodeConfig(
        provider="openai_compatible",
        base_url="http://127.0.0.1:1/v1",
        model="policy",
        sandbox_home="/home/user",
        agent_timeout_s=180.0,
        disabled_tools=["webfetch", "question", "task"],
        run_format="json",
    )
    sandbox = FolderSandbox(tmp_path)
    sandbox.write_text(oc_harness._PROXY_LOG_PATH, "")
    factory = OwnProxyFactory(
        config=config,
        sandbox_backend=object(),  # type: ignore[arg-type]  # `create` would need OpenCode in the folder
        mode="transparent_proxy",
        verifier=verifier,
    )
    done = factory._start_proxy(sandbox)  # type: ignore[arg-type]
    assert done.exit_code == 0, sandbox.read_text(oc_harness._PROXY_LOG_PATH)
    assert "--max-tokens-cap" in sandbox.read_text(oc_harness._PROXY_LOG_PATH)
