"""Branches of played episodes: how the episodes of a group reach the state before an answer of their parent.

The parent's model calls come from its journal, its actions from its steps. `episodes` plays the rest.
"""

# A branch at answer 2 of an episode with four answers, and three samples:
#
#   parent     reset ── 1 ── 2 ── 3 ── 4
#
#   sample 1   reset ── 1 ── 2 ──┬── 3 ── 4      the actions again, each result compared with the recorded one
#   sample 2            snapshot ├── 3 ── 4 ── 5     restored: the environment supports forks
#   sample 3                     └── 3
#
# Without forks, each sample repeats the actions. Nothing is sampled again in either case.

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from openenv.client.env_client import GenericEnvClient
from openenv.errors import NotForkable, OpenEnvError, RequestValidationError, RolloutError, StoreError, ToolCallError
from openenv.protocol.json_values import PROMPT_KEY, encode
from openenv.rollout.agents.dialogue import Json
from openenv.rollout.capture.records import Call
from openenv.rollout.run.stored_rollout import PLAYED, StoredRollout
from openenv.rollout.store.store import STEPS_FILE, RolloutStore
from openenv.rollout.tasks.task import BranchPoint
from openenv.server.web.episode_files import read_rows
from openenv.types import StepResult

logger = logging.getLogger(__name__)

Way = Literal["fork", "replay"]
REFUSED_ACTION = (RequestValidationError, ToolCallError)
"""Errors of a step that the model reads: its action is wrong."""
_EXCERPT = 80


class ReplayDiverged(RolloutError):
    """A repeated action has another result than the recorded one, so the state of a branch cannot be reached."""

    code = "REPLAY_DIVERGED"


def step_row(result: StepResult[Any]) -> Json:
    """Return the result of a reset or a step in the form of recorded episodes."""
    seen = result.observation
    if result.metadata and isinstance(seen, dict):  # pictures of Gymnasium are there
        seen = {**seen, "metadata": result.metadata}
    return {"observation": seen, "reward": result.reward, "done": result.done}


def error_row(error: OpenEnvError) -> Json:
    """Return the error of a refused action in the form of recorded episodes."""
    return {"error": {"type": type(error).__name__, "message": str(error)}}


@dataclass(slots=True)
class _Server:
    """The state of a branch on one server."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_reached: bool = False
    snapshot: GenericEnvClient | None = None
    """A session with the state; None if the environment does not support forks."""


class EpisodeBranch:
    """The state before an answer of a stored episode.

    Args:
        store: The store of the episode.
        point: The episode, and the last call that the branch shares with it; 0 for none.

    Raises:
        StoreError: There is no such episode, no answer follows that call, or the steps up to it are not recorded.
    """

    def __init__(self, store: RolloutStore, point: BranchPoint) -> None:
        stored = StoredRollout(store, point.rollout_id)
        recording, answered = stored.answered()
        about = recording.metadata
        if "start" not in about or PLAYED not in about:
            raise StoreError(f"The rollout '{stored.rollout_id}' is not an episode of this version of `play`")
        numbers, call = sorted(answered), point.call
        places = [0, *numbers[:-1]] if numbers else []
        if call is None or call not in places:
            range_text = f"branch at 0 to {places[-1]}" if places else "it has none"
            raise StoreError(f"The episode '{stored.rollout_id}' has no answer after call {call}; {range_text}")
        self.point = BranchPoint(stored.rollout_id, call)
        self.arguments: Json = dict(about["start"])
        """The arguments of `reset`."""
        self.instruction = store.task(stored.rollout_id).instruction
        self.calls: list[Call] = [answered[number] for number in numbers if number <= call]
        """The shared calls."""
        self.messages: list[Json] = list(answered[numbers[len(self.calls)]].request["messages"])
        """The conversation up to the first answer of the branch."""
        self.rows = list(self._rows_until(store, len(self.calls)))
        """The reset and the shared steps, with the environment's pictures."""
        self._servers: dict[str, _Server] = defaultdict(_Server)

    def _rows_until(self, store: RolloutStore, answers: int) -> Iterator[Json]:
        path = store.live_file(self.point.rollout_id, STEPS_FILE)
        if not path.is_file():
            raise StoreError(f"The steps of '{self.point.rollout_id}' are not stored: the episode was interrupted")
        for row in read_rows(path):
            if row["kind"] == "end":
                raise StoreError(f"The steps of '{self.point.rollout_id}' are not all stored: too many bytes")
            if row.get("answer", 0) > answers:
                return
            yield row

    async def enter(self, client: GenericEnvClient, url: str, *, is_shared: bool) -> Way:
        """Bring a session to the state; return how.

        Args:
            client: The session.
            url: Its server.
            is_shared: Whether other samples will need the state, too.

        Raises:
            ReplayDiverged: The environment does not repeat the recorded steps.
            OpenEnvError: The server failed.
        """
        server = self._servers[url]
        async with server.lock:
            if not server.is_reached:
                await self._replay(client)
                if is_shared:
                    server.snapshot = await _snapshot(client)
                server.is_reached = True
                return "replay"
        if server.snapshot is not None:
            try:
                await client.restore(server.snapshot)
                return "fork"
            except NotForkable as exc:  # for example, its server process was replaced
                logger.debug("the snapshot of a branch is gone: %s", exc)
        await self._replay(client)
        return "replay"

    async def _replay(self, client: GenericEnvClient) -> None:
        """Repeat the recorded reset and actions, and compare the results."""
        step = 0
        for row in self.rows:
            if row["kind"] == "picture":
                continue
            step += row["kind"] == "step"
            try:
                result = await (client.reset(**self.arguments) if step == 0 else client.step(row["action"]))
                now = step_row(result)
            except REFUSED_ACTION as exc:
                now = error_row(exc)
            difference = _difference(row, now)
            if difference is not None:
                name = "its reset" if step == 0 else f"step {step}"
                raise ReplayDiverged(
                    f"the episode '{self.point.rollout_id}' cannot be branched: {name} was repeated, and {difference}. "
                    "Branches need an environment whose steps depend only on the arguments of `reset` and the actions"
                )

    async def close(self) -> None:
        """End the sessions of the snapshots, and release the memory."""
        for server in self._servers.values():
            if server.snapshot is not None:
                with contextlib.suppress(OpenEnvError, OSError):
                    await server.snapshot.close()
        self._servers.clear()
        self.rows, self.calls, self.messages = [], [], []


async def _snapshot(client: GenericEnvClient) -> GenericEnvClient | None:
    """Return a copy of a session; None if the environment supports no forks, or the server has no free slot."""
    try:
        return await client.snapshot()
    except (OpenEnvError, OSError) as exc:
        logger.debug("the branches repeat the actions of their parent: %s", exc)
        return None


def _difference(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first difference between a recorded result and a repeated one, as a text.

    Of the metadata, only the prompt counts. Times and random IDs count, too: they may be what the model acts on.
    """
    pair = [_comparable(recorded), _comparable(now)]
    for name in sorted({*pair[0], *pair[1]}):
        one, other = (each.get(name, "nothing") for each in pair)
        if one != other:
            return f"{name} is {other[:_EXCERPT]} instead of {one[:_EXCERPT]}"
    return None


def _comparable(row: Mapping[str, Any]) -> dict[str, str]:
    if "error" in row:
        return {"error": str(row["error"].get("message"))}
    observed, values = row.get("observation"), {"reward": row.get("reward"), "done": bool(row.get("done"))}
    if isinstance(observed, Mapping):
        prompt = (observed.get("metadata") or {}).get(PROMPT_KEY)
        fields = {name: value for name, value in observed.items() if name != "metadata"}
        values |= {f"observation.{name}": value for name, value in {**fields, "prompt": prompt}.items()}
    else:
        values["observation"] = observed
    return {name: encode(value).decode() for name, value in values.items() if value is not None}
