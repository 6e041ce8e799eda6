"""The page's session operations: reset, step and state with encoded results, and the environment's rendering.

Results are encoded in the environment's thread or process. Worker processes import this module, so it is light. Must
not know sessions or requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal, NamedTuple

from openenv.env.binding import RemoteEnvironment, class_of
from openenv.env.environment import Environment
from openenv.env.tools.source import EVENTS, ToolEvents
from openenv.protocol.codec import MSGPACK
from openenv.protocol.json_values import decode, encode, encode_state, encode_with_null, split_observation

from ..sessions.operations import Operation, build_operations, interrupt_tools, step_only_blocks

logger = logging.getLogger(__name__)

Theme = Literal["light", "dark"]


class EncodedObservation(NamedTuple):
    """The result of a reset or step for the page; all fields but `done` are JSON text."""

    observation: bytes
    reward: bytes
    metadata: bytes | None
    done: bool

    @property
    def payload(self) -> bytes:
        """The response to a reset or a step: `{"observation", "reward", "done"[, "metadata"]}`."""
        metadata = b"" if self.metadata is None else b',"metadata":' + self.metadata
        return b'{"observation":' + self.observation + self.tail + metadata + b"}"

    @property
    def tail(self) -> bytes:
        """Reward and `done` as JSON text, to append to an observation."""
        return b',"reward":' + self.reward + (b',"done":true' if self.done else b',"done":false')


def encode_observation(observation: Any, *, null_reward: bool = False) -> EncodedObservation:
    """Encode an observation.

    Args:
        observation: The observation.
        null_reward: Whether a reward that is not a finite number becomes null, with a note in the metadata.

    Raises:
        TypeError: The value is not an observation.
        NonFiniteReward: The reward is not a finite number.
    """
    parts = split_observation(observation, null_reward=null_reward)
    reward = b"null" if parts.reward is None else repr(parts.reward).lower().encode()
    return EncodedObservation(parts.fields, reward, parts.metadata, parts.done)


def observation_of(result: Any) -> dict[str, Any]:
    """Return `{"observation", "reward", "done"[, "metadata"]}` from the result of a reset or step on any surface.

    Results are a frame of protocol v1 or v2 (JSON or MessagePack), the body of an HTTP response, the page's result, or
    an unencoded observation.
    """
    if isinstance(result, EncodedObservation):
        return decode_object(result.payload)
    if isinstance(result, dict) and "observation" in result:
        return result
    if isinstance(result, bytes):
        read = decode_object(result) if result[:1] == b"{" else MSGPACK.decode(result, binary=True)
        data = read["data"] if isinstance(read.get("data"), dict) and "observation" in read["data"] else read
        return data if result[:1] == b"{" else decode_object(encode(data))
    inner = getattr(result, "observation", None)
    if inner is not None and hasattr(result, "reward") and hasattr(result, "done") and not hasattr(result, "metadata"):
        # A tool call that was a step: reward and end are stored beside the agent's view.
        parts = decode_object(encode_observation(inner, null_reward=True).payload)
        return {**parts, "reward": result.reward, "done": result.done}
    return decode_object(encode_observation(result, null_reward=True).payload)


def decode_object(raw: bytes) -> dict[str, Any]:
    """Parse JSON text that is an object."""
    value: dict[str, Any] = decode(raw)
    return value


@dataclass(frozen=True, slots=True)
class Move:
    """An action, and the listeners to its progress and log."""

    action: Any
    events: ToolEvents | None = None


@dataclass(frozen=True, slots=True)
class Render:
    """An environment's rendering of an observation.

    Args:
        html: A document that replaces the standard views.
        actions: Buttons, each with label and action.
    """

    html: str | None = None
    actions: list[dict[str, Any]] = field(default_factory=list)

    def json(self) -> bytes:
        """Return the rendering for the page."""
        return encode({"html": self.html, "actions": self.actions})


@dataclass(frozen=True, slots=True)
class Scenery:
    """The observation to draw for a visitor, and the page's colours."""

    outcome: EncodedObservation
    theme: Theme = "light"


def render_of(env: Any, scenery: Scenery) -> Render:
    """Call an environment's `render_web` and `web_actions` in its lane; only log their failures."""
    outcome = scenery.outcome
    observation = decode(outcome.observation)
    if not isinstance(observation, dict):
        return Render()
    observation |= {"reward": decode(outcome.reward), "done": outcome.done}
    html, actions = _picture(env, observation, scenery.theme), []
    try:
        offer = None if outcome.done else getattr(env, "web_actions", None)
        offered = [] if offer is None else offer(dict(observation))
        actions = [_button(label, action) for label, action in offered]
        encode(actions)
    except Exception:
        logger.exception("%s.web_actions failed", type(env).__name__)
        actions = []
    return Render(html, actions)


def draws(env: Any) -> bool:
    """Return whether an environment's class has a `render_web`; False while the environment is not built."""
    if env is None:
        return False
    hook = getattr(class_of(env), "render_web", None)
    return hook is not None and hook is not Environment.render_web


def draw(env: Any, result: Any) -> Render:
    """Call an environment's `render_web` in its lane, for the result of a reset or step on any surface."""
    outcome = observation_of(result)
    observation = outcome["observation"]
    if not isinstance(observation, dict):
        return Render()
    return Render(_picture(env, {**observation, "reward": outcome.get("reward"), "done": outcome.get("done")}))


def _picture(env: Any, observation: dict[str, Any], theme: Theme = "light") -> str | None:
    try:
        render = getattr(env, "render_web", None)
        wishes = {"theme": theme} if render is not None and "theme" in signature(render).parameters else {}
        html = None if render is None else render(dict(observation), **wishes)
        if html is not None and not isinstance(html, str):
            raise TypeError(f"render_web returned a {type(html).__name__}, not text")
        encode(html)  # raises for text that cannot be sent, such as lone surrogates
    except Exception:
        logger.exception("%s.render_web failed", type(env).__name__)
        return None
    return html


def _button(label: Any, action: Any) -> dict[str, Any]:
    fields = action if isinstance(action, dict) else decode(encode(action))
    if not isinstance(fields, dict):
        raise TypeError(f"web_actions offered a {type(action).__name__}, not the fields of an action")
    return {"label": str(label), "action": fields}


def _encode_reply(observation: Any) -> EncodedObservation:
    return encode_with_null(encode_observation, observation)


_PLAIN = build_operations(_encode_reply, encode_state)


def _step(env: Any, move: Move) -> EncodedObservation:
    token = EVENTS.set(move.events)
    try:
        outcome: EncodedObservation = _PLAIN.step.in_lane(env, move.action)
        return outcome
    finally:
        EVENTS.reset(token)


async def _step_async(env: Any, move: Move) -> EncodedObservation:
    EVENTS.set(move.events)  # needs no reset: the call runs in a separate task and context
    if isinstance(env, RemoteEnvironment):  # its `ask` passes no listeners on
        return _encode_reply(await env.step_async(move.action))
    assert _PLAIN.step.in_loop is not None
    outcome: EncodedObservation = await _PLAIN.step.in_loop(env, move.action)
    return outcome


def _step_only_blocks(env: Any, move: Move) -> bool:
    return step_only_blocks(env, move.action)


RESET = _PLAIN.reset
STATE = _PLAIN.state
STEP = Operation("step", _step, _step_async, _step_only_blocks, interrupt_tools)
RENDER = Operation("call", render_of)
DRAW = Operation("call", draw)
