"""The Coding environment: episodes of Python code, with or without an exercise. Other modules run and score code."""

from __future__ import annotations

import html
from typing import Any

from coding_env.models import CodeAction, CodeObservation, CodeState
from coding_env.server import exercises
from coding_env.server.exercises import Exercise, Task
from coding_env.server.interpreter import CodeResult, InterpreterLimits, PythonInterpreter
from openenv import Environment
from openenv.core.env_server.interfaces import Transform
from openenv.core.env_server.types import EnvironmentMetadata
from openenv.core.rubrics import Rubric
from openenv.env.tasks import TaskCatalogue
from openenv.sandboxes import Sandboxes, backend

_EXAMPLES = ("import sys; sys.version", "[n * n for n in range(10)]", "1 / 0")


class SolvedShare(Rubric):
    """The score of a submitted solution; 0 for code that is only tried."""

    def forward(self, action: CodeAction, observation: CodeObservation) -> float:
        """Look at the score."""
        return observation.score or 0.0


class PythonCodeActEnv(TaskCatalogue[Task], Environment[CodeAction, CodeObservation, CodeState]):
    """Run Python in a sandbox, a new one for each episode, and solve an exercise if it has one.

    Names and files stay from step to step, and are gone with the episode.

    Args:
        transform: Changes observations on their way out, for example to add a reward.
        rubric: Scores each step; by default the share of hidden calls that a submitted solution answers.
        sandbox: The name of a sandbox backend, or a backend.
        limits: Resources for the code of an episode.
    """

    SPLITS = exercises.SPLITS

    SUPPORTS_CONCURRENT_SESSIONS = True
    HAS_EXTERNAL_STATE = True  # names and files are in the sandbox

    def __init__(
        self,
        transform: Transform[CodeObservation] | None = None,
        rubric: Rubric | None = None,
        *,
        sandbox: str | Sandboxes = "local",
        limits: InterpreterLimits | None = None,
    ) -> None:
        super().__init__(transform=transform, rubric=rubric or SolvedShare())
        self._backend = _find_backend(sandbox)
        self._limits = limits or InterpreterLimits()
        self._is_checked = False
        self._interpreter: PythonInterpreter | None = None
        self._exercise: Exercise | None = None
        self._seed = 0

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task_id: str | None = None,
        split: str | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> CodeObservation:
        """Begin an episode in a fresh sandbox, with an exercise (`task_id`, or `split` and `index`) or without one.

        Raises:
            ValueError: There is no such task.
            IndexError: The split has no such task.
            SandboxUnavailable: Sandboxes cannot start here; the text names the packages to install.
        """
        if split is not None:
            task_id = exercises.task(split, index)["task_id"]
        exercise = None if task_id is None else exercises.find_exercise(task_id)
        self.close()
        if not self._is_checked:
            self._backend.check()
            self._is_checked = True
        self._interpreter = PythonInterpreter(self._backend, self._limits)
        self._exercise, self._seed = exercise, seed or 0
        self.state.last_exit_code, self.state.task_id = 0, task_id
        self._reset_rubric()
        instruction = "" if exercise is None else exercise.instruction
        return self._apply_transform(CodeObservation(instruction=instruction, reward=0.0))

    def step(self, action: CodeAction, timeout_s: float | None = None, **kwargs: Any) -> CodeObservation:
        """Run code. Submitted code is also scored, and ends the episode.

        Raises:
            RuntimeError: No episode is running.
            SandboxError: The sandbox failed or has expired.
        """
        if self._interpreter is None:
            raise RuntimeError("no episode is running: call reset first")
        result = self._interpreter.run(action.code, timeout_s)
        self.state.last_exit_code = result.exit_code
        observation = self._observe(action, result)
        if action.submit:
            self.close()
        observation.reward = self.rubric_reward(action, observation)
        return self._apply_transform(observation)

    def _observe(self, action: CodeAction, result: CodeResult) -> CodeObservation:
        exercise, points = self._exercise, None
        if action.submit and exercise is not None:
            points = exercises.score(action.code, exercise, backend=self._backend, limits=self._limits, seed=self._seed)
        return CodeObservation(
            stdout=result.stdout,
            stderr=result.stderr,
            exit_code=result.exit_code,
            instruction="" if exercise is None else exercise.instruction,
            score=points,
            done=action.submit,
            terminated=action.submit,
            metadata={"last_code": action.code},
        )

    def close(self) -> None:
        """End the episode's sandbox."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            interpreter.close()

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="coding_env", description="Run Python in a sandbox, one piece after another.", version="0.11.0"
        )

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """Show code and output as a terminal would."""
        code = (observation.get("metadata") or {}).get("last_code")
        parts = [_block(observation.get("instruction"), "task"), _block(code, "code")]
        parts += [_block(observation.get("stdout"), "out"), _block(observation.get("stderr"), "err")]
        if code is not None:
            parts.append(_block(_ending(observation), "end"))
        shown = "".join(parts)
        return f"{_STYLE}{shown}" if shown else f"{_STYLE}{_block('Python is ready.', 'end')}"

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Offer a few lines to try."""
        return [(code, {"code": code}) for code in _EXAMPLES]

    # -- tasks ----------------------------------------------------------------------------------------------------

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        return len(exercises.exercises(split))

    def get_task(self, split: str, index: int) -> Task:
        """Return one task."""
        return exercises.task(split, index)


def _find_backend(sandbox: str | Sandboxes) -> Sandboxes:
    if isinstance(sandbox, Sandboxes):
        return sandbox
    # An operator who names this backend knows that it isolates nothing.
    options = {"i_know_there_is_no_isolation": True} if sandbox == "process" else {}
    return backend(sandbox, **options)


def _block(text: str | None, kind: str) -> str:
    return f"<pre class={kind}>{html.escape(text)}</pre>" if text else ""


def _ending(observation: dict[str, Any]) -> str:
    points = observation.get("score")
    ending = f"exit code {observation.get('exit_code', 0)}"
    return ending if points is None else f"{ending} · score {points:.0%}"


_STYLE = """<style>
:root { color-scheme: light dark }
body { margin: 0; font: 13px/1.5 ui-monospace, monospace }
pre { margin: 0 0 6px; padding: 8px 12px; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere }
.task { font-family: system-ui, sans-serif; background: light-dark(#eef4ff, #1d2a44) }
.code { background: light-dark(#f4f1ea, #2c2f33) }
.code::before { content: ">>> "; opacity: .5 }
.err { color: light-dark(#b42318, #ff8a80) }
.end { opacity: .6; padding-block: 0 }
</style>"""
