"""The action, the observation and the state of the Coding environment."""

from __future__ import annotations

from pydantic import Field

from openenv import Action, Observation, State


class CodeAction(Action):
    """Python code to run, or the solution of an exercise."""

    code: str = Field(max_length=200_000, description="Python code; names stay defined for the next step")
    submit: bool = Field(
        default=False, description="Whether this is the solution: it is scored by itself, and the episode ends"
    )


class CodeObservation(Observation):
    """Output and exit code of the code, and the exercise."""

    stdout: str = Field(default="", description="What it printed, and the value of a last line that is an expression")
    stderr: str = Field(default="", description="What it wrote to standard error, and the traceback of its exception")
    exit_code: int = Field(default=0, description="0 if it ran to its end, 124 if its time was over")
    instruction: str = Field(default="", description="The exercise of this episode, if it has one")
    score: float | None = Field(default=None, description="The share of hidden calls that a submitted solution answers")


class CodeState(State):
    """The running episode."""

    last_exit_code: int = Field(default=0, description="How the last code ended")
    task_id: str | None = Field(default=None, description="The exercise of this episode")
