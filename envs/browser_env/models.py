"""What the Browser environment is sent, what it answers and what it keeps."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from openenv import Action, Observation, State

Command = Literal["goto", "click", "type", "select", "press", "scroll", "back", "forward", "wait", "answer"]


class BrowserAction(Action):
    """One thing to do in the browser."""

    action: Command = Field(description="What to do")
    target: str = Field(
        default="",
        max_length=2000,
        description="An element: its ref in the page's text (e12), or a CSS selector; for goto an address",
    )
    text: str = Field(
        default="",
        max_length=20_000,
        description="What to type, the option to select, the key to press (Enter), up or down, or the answer",
    )


class BrowserObservation(Observation):
    """The page after an action."""

    url: str = Field(default="", description="The page's address")
    title: str = Field(default="", description="Its title")
    text: str = Field(default="", description="Its accessibility tree: roles, names, and the refs that actions use")
    screenshot: str | None = Field(default=None, description="A picture of what is visible, as a data URL")
    instruction: str = Field(default="", description="The task of this episode, if it has one")
    error: str | None = Field(default=None, description="Why the last action could not be done")


class BrowserState(State):
    """The running episode."""

    task_id: str | None = Field(default=None, description="The task of this episode")
    seed: int | None = Field(default=None, description="The seed of the pages")
    url: str = Field(default="", description="The page that is open")
    records: list[dict[str, Any]] = Field(default_factory=list, description="What was sent with forms of the site")
