from typing import Any

from shelf_app import Shelf

from openenv import Action, Observation, create_app
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation


class TidyShelf(Shelf):
    """The episode ends with `sort`; sorting three items or more is worth 1."""

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation = super().step(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and action.tool_name == "sort":
            observation.done = True
            observation.reward = 1.0 if len(self._items) >= 3 else 0.0
        return observation


app = create_app(TidyShelf, CallToolAction, CallToolObservation, max_concurrent_envs=16)
