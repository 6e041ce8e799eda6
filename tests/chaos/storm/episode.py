"""One episode: what is asked is decided by its seed, what comes back is written down, whichever client asks."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass, field
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient

from .environment import Deed, Move, Seen, hashed

PING_S = 0.4
MARK = "session_lost"  # what a client that starts a new episode by itself has to write into the result's metadata
AFTERWARDS = "afterwards"


@dataclass(frozen=True)
class Ask:
    """A request: its kind, its number, and what it carries."""

    kind: str
    number: int
    word: str = ""
    pause_s: float = 0.0


@dataclass
class Trace:
    """The replies of an episode, the error that ended it, and what came when one went on regardless.

    `renewed` is what a new episode did that was announced as such.
    """

    replies: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None
    afterwards: dict[str, Any] | Exception | None = None
    after_number: int = -1
    renewed: list[Deed] = field(default_factory=list)

    @property
    def last_reset(self) -> int | None:
        """The number of the reset that the episode began with, if it has begun."""
        return next((reply["number"] for reply in reversed(self.replies) if reply["kind"] == "reset"), None)


class Renewed(Exception):
    """The client said that the episode is lost, and that what it returns is the beginning of another one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Player(EnvClient[Move, dict[str, Any], dict[str, Any]]):
    """A client of the counting environment."""

    def _step_payload(self, action: Move) -> dict[str, Any]:
        return action.model_dump(exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[dict[str, Any]]:
        seen = {**payload["observation"], "reward": payload.get("reward")}
        return StepResult(observation=seen, reward=payload.get("reward"), done=bool(payload.get("done")))

    def _parse_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload


def client_of(url: str, **more: Any) -> Player:
    """Return a client that finds out quickly when no server is there."""
    options: dict[str, Any] = {
        "base_url": url,
        "connect_timeout_s": 2.0,
        "message_timeout_s": 10.0,
        "websocket_ping_interval_s": PING_S,
        "websocket_ping_timeout_s": PING_S,
    }
    known = inspect.signature(EnvClient.__init__).parameters
    if "protocol" in known:
        options |= {"protocol": "auto"}
    return Player(**{**options, **more})


def script_of(seed: int) -> list[Ask]:
    """Decide what is asked: a reset, then steps, now and then a state or another reset."""
    dice = random.Random(f"script {seed}")
    asks = [Ask("reset", 0)]
    for number in range(1, dice.randint(7, 11)):
        kind = dice.choices(("step", "state", "reset"), (12, 1, 1))[0]
        size = dice.choice((1, 20, 20, 200, 3_000)) if dice.random() < 0.98 else 200_000
        word = dice.choice("abcdefgh") * size if kind == "step" else ""
        asks.append(Ask(kind, number, word, dice.choice((0.0, 0.0, 0.0, 0.01, 0.05))))
    return asks


async def play(client: Any, seed: int, script: list[Ask], *, owner: int, unsent_is_harmless: bool = False) -> Trace:
    """Play a script with a client of either kind, awaiting what has to be awaited.

    Args:
        client: The client.
        seed: Of the episode.
        script: What is asked.
        owner: Who asks.
        unsent_is_harmless: Whether an episode may go on after a request that could not be sent: nothing is lost.
    """
    trace = Trace()
    for ask in script:
        try:
            reply = await _ask(client, seed, ask, owner)
        except Exception as exc:
            trace.error = exc
            break
        if _is_announced(reply, seed, trace, owner):
            trace.error = Renewed(reply[MARK])
            break
        trace.replies.append(reply)
    is_over = not (unsent_is_harmless and type(trace.error).__name__ == "ConnectFailed")
    if trace.error is not None and is_over and trace.last_reset is not None:
        # A loop that logs the error and goes on must not get an observation of another episode.
        await _go_on(client, seed, trace, Ask("step", len(script), AFTERWARDS), owner)
    return trace


async def _go_on(client: Any, seed: int, trace: Trace, after: Ask, owner: int) -> None:
    trace.after_number = after.number
    try:
        reply = await _ask(client, seed, after, owner)
    except Exception as exc:
        trace.afterwards = exc
        return
    number = trace.last_reset
    assert number is not None
    trace.renewed = [Deed("reset", number)]
    if _is_announced(reply, seed, trace, owner):
        trace.afterwards = Renewed(reply[MARK])
    elif isinstance(trace.error, Renewed) and is_first_step(reply, after, owner, hashed("reset", seed, number)):
        trace.afterwards = trace.error
        trace.renewed.append(Deed("step", after.number))
    else:
        trace.afterwards = reply


def _is_announced(reply: dict[str, Any], seed: int, trace: Trace, owner: int) -> bool:
    """Say whether a reply to a step is marked as the beginning of a new episode, and is just that."""
    number = trace.last_reset
    wanted = {"owner": owner, "number": number, "count": 0, "digest": hashed("reset", seed, number)}
    return MARK in reply and number is not None and all(reply[key] == value for key, value in wanted.items())


def is_first_step(reply: dict[str, Any], ask: Ask, owner: int, before: str) -> bool:
    """Say whether a reply is that to the first step of an episode."""
    wanted = {"owner": owner, "number": ask.number, "count": 1, "digest": hashed(before, ask.number, ask.word)}
    return all(reply.get(key) == value for key, value in wanted.items())


async def _ask(client: Any, seed: int, ask: Ask, owner: int) -> dict[str, Any]:
    if ask.kind == "reset":
        reply = client.reset(seed=seed, episode_id=f"episode {seed}", owner=owner, number=ask.number)
    elif ask.kind == "step":
        reply = client.step(Move(owner=owner, number=ask.number, word=ask.word, pause_s=ask.pause_s))
    else:
        reply = client.state()
    result = await reply if inspect.isawaitable(reply) else reply
    content = result if ask.kind == "state" else result.observation
    mark = (getattr(result, "metadata", None) or {}).get(MARK)
    seen = {"kind": ask.kind, **{key: content.get(key) for key in (*Seen.model_fields, "step_count", "episode_id")}}
    return seen if mark is None else {**seen, MARK: mark}
