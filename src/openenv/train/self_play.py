"""`self_play`: several policies play a served multi-agent environment, each with its own conversation and reward.

    players = {"player_0": Player(model=policy), "player_1": Player(model=last_week, is_trained=False)}
    async with self_play(url, players, seeds, samples=8) as stream:
        async for group in stream:
            batch = collate(group.by_player().values())

The environment speaks the interface of `pettingzoo_environment`: observations name the agents in `acting`, and have the
observation and the reward of each agent; an action has `actions` by agent.
"""

# One step of a match:
#
#   acting ──> each agent's model reads its own observation ──> moves ──> step ──> rewards by agent
#     ▲              ▲   all of them at once                     │          │
#     │              └── not readable: the model reads why ──────┘          ├─ refused: those agents read the error
#     └────────────────────────────── the next agents ──────────────────────┘
#
# A failure of the server or of any endpoint ends the match without rewards, and the sample is repeated. An agent whose
# conversation is refused, or that has used `max_turns`, ends it as `truncated` for all.

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Unpack

from openenv.client.env_client import GenericEnvClient
from openenv.errors import OpenEnvError, RequestValidationError, RolloutError, SessionCapacityError, message_of
from openenv.rollout.agents.dialogue import AnswerRefused, Json, TextDialogue
from openenv.rollout.capture import Capture, CaptureServer, export
from openenv.rollout.run.engine import new_rollout_id
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.tasks.task import Model

from .episodes import (
    EpisodeStream,
    PlayArguments,
    PlayedEpisode,
    PlayOptions,
    PlayStart,
    Start,
    player_proxy,
)
from .groups import EpisodeSample
from .stream import OpenGroup, model_to_train

_INTEGER = re.compile(r"-?\d+")


class PlayerDialogue:
    """How a model plays one agent: observations become messages, replies become actions. Subclasses change the forms.

    Args:
        system: The system message, such as the rules of the game.
    """

    def __init__(self, system: str = "") -> None:
        self.system = system

    def shown(self, view: Any) -> str:
        """Return an agent's observation as text."""
        return view if isinstance(view, str) else json.dumps(view, ensure_ascii=False)

    def move(self, text: str) -> Any:
        """Return the action in a reply: the reply as JSON, else its last whole number.

        Raises:
            AnswerRefused: The reply has no action; the model reads the text and may reply again.
        """
        with contextlib.suppress(ValueError):
            return json.loads(text)
        numbers = _INTEGER.findall(text)
        if not numbers:
            raise AnswerRefused("Answer with a number.")
        return int(numbers[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """The policy of one agent."""

    model: Model
    is_trained: bool = True
    """Whether its episodes are in the groups. The others are opponents, such as an older policy."""
    dialogue: PlayerDialogue = field(default_factory=PlayerDialogue)


@contextlib.asynccontextmanager
async def self_play(
    url: str | Sequence[str], players: Mapping[str, Player], starts: Iterable[Start], **options: Unpack[PlayArguments]
) -> AsyncIterator[SelfPlayStream]:
    """Let several policies play matches; yield a stream of groups, which `by_player` splits by agent.

    Args:
        url: The server, or several servers that share the sessions.
        players: The policy of each agent, by the agent's name in the environment.
        starts: One group per start, as in `play`.
        options: The options of `play`. `store` and `dialogue` are not supported; `max_turns` counts the replies of an
            agent.

    Raises:
        ValueError: An option is out of range or not supported, or no player is trained.
        RolloutError: While the stream runs: as in `play`, or the environment names an agent without a player.
    """
    chosen = PlayOptions(**options)
    if chosen.store is not None or chosen.dialogue is not None:
        raise ValueError("self_play keeps no store, and each Player has its own dialogue")
    if not any(player.is_trained for player in players.values()):
        raise ValueError("at least one player must be trained")
    urls = [url] if isinstance(url, str) else list(url)
    async with player_proxy(None) as proxy:
        stream = SelfPlayStream(starts, chosen, urls=urls, players=players, proxy=proxy)
        async with stream:
            yield stream


@dataclass(slots=True)
class _Seat:
    """One agent in a match."""

    player: Player
    episode: PlayedEpisode
    capture: Capture
    messages: list[Json] = field(default_factory=list)
    early: float = 0.0
    """Its rewards before its first reply."""

    @property
    def reward(self) -> float | None:
        return None if self.episode.reward is None else self.episode.reward + self.early

    def credit(self, reward: float) -> None:
        if self.episode.turn_rewards:
            self.episode.add_reward(reward)
        else:
            self.early += reward
            self.episode.is_rewarded = True


class SelfPlayStream(EpisodeStream):
    """Groups of matches: `async for group in stream`. `self_play` creates it."""

    def __init__(
        self,
        starts: Iterable[Start],
        options: PlayOptions,
        *,
        urls: Sequence[str],
        players: Mapping[str, Player],
        proxy: CaptureServer,
    ) -> None:
        self._players = players
        model = next(model_to_train(player.model) for player in players.values() if player.is_trained)
        super().__init__(starts, options, urls=urls, dialogue=TextDialogue(), model=model, proxy=proxy)

    async def sample(self, worker: int, group: OpenGroup[PlayStart], index: int, attempt: int) -> EpisodeSample:
        labels = {**group.labels(index, attempt), "start": self.arguments_of(group)}
        match = PlayedEpisode(new_rollout_id(), group.name, labels, self.options.reward)
        seats: dict[str, _Seat] = {}
        client = self._client(worker)
        try:
            with match.waits_for_environment():
                first = await client.reset(**labels["start"])
            self.settled.add(worker)
            for name, player in self._players.items():
                seats[name] = self._seat(match, name, player, labels)
            await self._play(client, first.observation, match, seats)
        except SessionCapacityError:
            await self.release(worker)
            raise
        except (OpenEnvError, OSError) as exc:
            match.fail(exc)
        except asyncio.CancelledError:
            match.finish("cancelled", "the match was no longer needed")
            raise
        finally:
            for seat in seats.values():
                await seat.capture.aclose()
        return self._result(match, seats)

    def _seat(self, match: PlayedEpisode, name: str, player: Player, labels: Json) -> _Seat:
        rollout_id = f"{match.rollout_id}-{name}"
        about = {**labels, "player": name}
        episode = PlayedEpisode(rollout_id, f"{labels['item']}/{name}", about, self.options.reward)
        return _Seat(player, episode, self._open_capture(rollout_id, model_to_train(player.model), metadata=about))

    async def _play(
        self, client: GenericEnvClient, observed: Json, match: PlayedEpisode, seats: Mapping[str, _Seat]
    ) -> None:
        """Play until the match is over, or an agent cannot continue."""
        views = _views(observed, seats)
        while not match.is_over:
            # All of them end before the match goes on, also if one fails.
            moves = await asyncio.gather(
                *(self._move(seats[name], view) for name, view in views.items()), return_exceptions=True
            )
            for move in moves:
                if isinstance(move, BaseException):
                    raise move
            stopped = next((seats[name].episode for name in views if seats[name].episode.is_over), None)
            if stopped is not None:
                match.finish(stopped.status, stopped.reason)
                return
            try:
                with match.waits_for_environment():
                    result = await client.step({"actions": dict(zip(views, moves, strict=True))})
            except RequestValidationError as exc:  # one of the moves is illegal
                views = dict.fromkeys(views, f"Error: {message_of(exc)}")
                continue
            for name, reward in (result.observation.get("rewards") or {}).items():
                if name in seats:
                    seats[name].credit(float(reward))
            if result.done:
                match.finish("ok")
            else:
                views = _views(result.observation, seats)

    async def _move(self, seat: _Seat, view: Any) -> Any:
        """Return an agent's action; if it cannot move, its episode is over."""
        dialogue = seat.player.dialogue
        if not seat.messages and dialogue.system:
            seat.messages.append({"role": "system", "content": dialogue.system})
        seat.messages.append({"role": "user", "content": dialogue.shown(view)})
        while len(seat.episode.turn_rewards) < self.options.max_turns:
            answer = await self._ask(seat.messages, seat.episode, seat.capture)
            if answer is None:
                return None
            seat.messages.append(answer)
            seat.episode.turn_rewards.append(0.0)
            try:
                return dialogue.move(str(answer.get("content") or ""))
            except AnswerRefused as exc:
                seat.messages.append({"role": "user", "content": str(exc)})
        seat.episode.finish("truncated", f"the match was not over after {self.options.max_turns} replies of an agent")
        return None

    def _result(self, match: PlayedEpisode, seats: Mapping[str, _Seat]) -> EpisodeSample:
        """Return a match as a sample, with a sample for each trained player."""
        self.counts.environment_s += match.environment_s
        players = {}
        for name, seat in seats.items():
            seat.episode.finish(match.status, match.reason)
            self.counts.model_s += seat.episode.model_s
            if seat.player.is_trained:
                players[name] = self._player_sample(seat)
        first = next(iter(players.values()), None)
        whole: Outcome = match.outcome("")
        whole.reward = None if first is None else first.reward
        is_rewarded = any(player.is_rewarded for player in players.values())
        return EpisodeSample(whole, is_rewarded=is_rewarded, players=players)

    def _player_sample(self, seat: _Seat) -> EpisodeSample:
        recording = seat.capture.trace()
        outcome = seat.episode.outcome(seat.player.model.name, export.turns(recording))
        outcome.reward = seat.reward
        calls = [call.number for call in recording.calls if call.sampled]
        rewards = dict(zip(calls, seat.episode.turn_rewards, strict=False))
        sequences = export.sequences(recording)
        outcome.keep_sequences(sequences)
        return EpisodeSample(outcome, sequences, is_rewarded=seat.episode.is_rewarded, turn_rewards=rewards)


def _views(observed: Any, seats: Mapping[str, _Seat]) -> dict[str, Any]:
    """Return the observations of the agents that act next.

    Raises:
        RolloutError: The environment is not of several agents, or an agent has no player.
    """
    acting = observed.get("acting") if isinstance(observed, Mapping) else None
    if not isinstance(acting, list) or not acting:
        raise RolloutError("the observation does not name the agents that act: serve a multi-agent environment")
    unknown = [str(name) for name in acting if name not in seats]
    if unknown:
        raise RolloutError(f"no player for the agent {unknown[0]!r}; the players are {', '.join(seats)}")
    return {str(name): (observed.get("observations") or {}).get(name) for name in acting}
