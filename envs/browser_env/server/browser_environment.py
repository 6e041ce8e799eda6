"""The Browser environment: episodes in a browser, with or without a task. Browser, site and tasks are elsewhere."""

from __future__ import annotations

import html
import re
import secrets
import uuid
from typing import Any

from browser_env.models import BrowserAction, BrowserObservation, BrowserState
from browser_env.server import tasks
from browser_env.server.chromium import ActionNotPossible, BrowserProfile, Chromium
from browser_env.server.site import Site
from browser_env.server.tasks import Goal, Task
from openenv import Environment
from openenv.core.env_server.types import EnvironmentMetadata
from openenv.env.tasks import TaskCatalogue

MAX_STEPS = 30
_CLICKABLE = re.compile(r'- (?:link|button) "([^"]+)"(?: \[[^]]*\])*? \[ref=((?:f\d+)?e\d+)\]')


class BrowserEnvironment(TaskCatalogue[Task], Environment[BrowserAction, BrowserObservation, BrowserState]):
    """Use a real browser on a small site, and do a task there.

    Args:
        chromium: The browser, which environments may share; each has a profile of its own.
    """

    SPLITS = tasks.SPLITS

    SUPPORTS_CONCURRENT_SESSIONS = True
    HAS_EXTERNAL_STATE = True  # pages are in the browser

    def __init__(self, chromium: Chromium | None = None) -> None:
        super().__init__()
        self._chromium = chromium or Chromium()
        self._has_joined = False
        self._profile: BrowserProfile | None = None
        self._site = Site(0)
        self._goal: Goal | None = None
        self._most_steps, self._takes_screenshots = MAX_STEPS, True
        self._is_over = True
        self._state = BrowserState()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task_id: str | None = None,
        screenshot: bool = True,
        max_steps: int = MAX_STEPS,
        split: str | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> BrowserObservation:
        """Begin on the home page, with a task (`task_id`, or `split` and `index`) or without one.

        Args:
            seed: Of the site's products and people, and of the task; drawn if there is none.
            episode_id: A name for the episode.
            task_id: A kind of task: order, cheapest, message, settings, phone or count.
            screenshot: Whether observations have a picture.
            max_steps: After how many steps the episode is cut off.
            split: The tasks: train or test.
            index: Which task of the split.

        Raises:
            ValueError: An argument is not possible.
            IndexError: The split has no such task.
            RuntimeError: There is no browser, or it does not start.
        """
        if split is not None:
            task = tasks.find_task(split, index)
            task_id, seed = task["task_id"], task["seed"]
        if max_steps < 1:
            raise ValueError(f"max_steps must be 1 or more, not {max_steps}")
        seed = secrets.randbelow(2**31) if seed is None else seed
        site = Site(seed)
        goal = None if task_id is None else tasks.make_goal(task_id, site, seed)
        if not self._has_joined:
            self._chromium.join()
            self._has_joined = True
        self._close_profile()
        self._profile = BrowserProfile(self._chromium, site)
        self._site, self._goal, self._is_over = site, goal, False
        self._most_steps, self._takes_screenshots = max_steps, screenshot
        self._state = BrowserState(episode_id=episode_id or str(uuid.uuid4()), task_id=task_id, seed=seed)
        return self._observe(self._profile)

    def step(self, action: BrowserAction, timeout_s: float | None = None, **kwargs: Any) -> BrowserObservation:
        """Do something in the browser, or answer.

        Raises:
            RuntimeError: No episode is running, or the browser has ended.
        """
        if self._profile is None or self._is_over:
            raise RuntimeError("no episode is running: call reset first")
        error = None
        try:
            self._profile.do(action)
        except ActionNotPossible as failure:
            error = str(failure)
        self._state.step_count += 1
        observation = self._observe(self._profile)
        observation.error = error
        answer = action.text if action.action == "answer" else None
        verdict = None if self._goal is None else self._goal.judge(self._site.records, answer)
        observation.terminated = verdict is not None or answer is not None
        observation.truncated = not observation.terminated and self._state.step_count >= self._most_steps
        observation.done = self._is_over = observation.terminated or observation.truncated
        observation.reward = verdict or 0.0
        return observation

    def _observe(self, profile: BrowserProfile) -> BrowserObservation:
        view = profile.look(screenshot=self._takes_screenshots)
        self._state.url = view.url
        self._state.records = [dict(record) for record in self._site.records]
        return BrowserObservation(
            url=view.url,
            title=view.title,
            text=view.text,
            screenshot=view.screenshot,
            instruction="" if self._goal is None else self._goal.instruction,
            reward=0.0,
        )

    @property
    def state(self) -> BrowserState:
        """The running episode."""
        return self._state

    def close(self) -> None:
        """Leave the browser, which ends with the last of its environments."""
        if self._has_joined:
            self._has_joined = False
            try:
                self._close_profile()
            finally:
                self._chromium.leave()

    def _close_profile(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.close()

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="browser_env", description="Use a real browser, and do a task on a small site.", version="0.11.0"
        )

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """Show the address, the picture and what went wrong."""
        picture = observation.get("screenshot")
        if not picture:
            return None
        notes = [observation.get("instruction"), observation.get("url"), observation.get("error")]
        lines = "".join(f"<p>{html.escape(note)}</p>" for note in notes if note)
        return f'{_STYLE}{lines}<img src="{html.escape(picture)}" alt="The page">'

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Offer to click links and buttons."""
        found = _CLICKABLE.findall(observation.get("text") or "")
        return [(name, {"action": "click", "target": ref}) for name, ref in found[:16]]

    # -- tasks ----------------------------------------------------------------------------------------------------

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        return tasks.count_tasks(split)

    def get_task(self, split: str, index: int) -> Task:
        """Return one task."""
        return tasks.find_task(split, index)


_STYLE = """<style>
:root { color-scheme: light dark }
body { margin: 0; font: 13px/1.4 system-ui, sans-serif }
p { margin: 0 0 4px }
img { width: 100%; border: 1px solid light-dark(#ccc, #444); border-radius: 4px }
</style>"""
