"""GRPO on the Gridworld, with NumPy alone: groups of episodes on one map, all stepped together through `VectorEnv`.

    32 maps x 8 episodes ──reset(seed=...)──> 256 sessions of one server ──step(...)──> returns ──> advantages by group
           ^                                                                                            │
           └────────────────────── a clipped step of policy gradient  <────────────────────────────────┘

The policy sees the board around it. It is tested on the maps that it trains on, and on as many that it never sees.

python examples/cpu/gridworld_grpo.py --plot curve.png
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from networks import Array, Network, clipped_slope, log_softmax, sample

from openenv import VectorEnv
from openenv.providers import ProcessProvider
from openenv.train import advantages

SIZE = 4
MOVES = ("up", "down", "left", "right")
TRAIN, UNSEEN = range(400), range(1_000_000, 1_000_100)  # seeds of maps: some of the splits `train` and `test`
SHOWN = TRAIN[:100]  # the maps of both kinds that are tested on are equally many
GAMES = Path(__file__).parents[2] / "envs" / "gridworld_env"


class Boards:
    """Boards as the policy sees them: walls, pits and goal, with itself in the middle."""

    features = 3 * (2 * SIZE - 1) ** 2

    def __init__(self) -> None:
        self._padded: dict[tuple[str, ...], Array] = {}

    def view(self, observation: dict[str, Any]) -> Array:
        """Return the board around the agent, as numbers."""
        tiles = tuple(observation["tiles"])
        padded = self._padded.get(tiles)
        if padded is None:
            board = np.array([list(row) for row in tiles])
            channels = np.stack([board == "#", board == "o", board == "G"]).astype(np.float32)
            padded = np.zeros((3, 3 * SIZE - 2, 3 * SIZE - 2), np.float32)
            padded[0] = 1.0  # outside of the board there is wall
            middle = slice(SIZE - 1, 2 * SIZE - 1)
            padded[:, middle, middle] = channels
            self._padded[tiles] = padded
        row, column = observation["position"]
        return padded[:, row : row + 2 * SIZE - 1, column : column + 2 * SIZE - 1].ravel()


@dataclass(slots=True)
class Batch:
    """Moves to learn from: what was seen, what was done, how probable it was, and how much better than the group."""

    inputs: Array
    moves: Array
    logprobs: Array
    advantages: Array

    def shuffled(self, chance: np.random.Generator, parts: int) -> Iterator[Batch]:
        """Return the batch in parts, in random order."""
        for rows in np.array_split(chance.permutation(len(self.moves)), parts):
            yield Batch(self.inputs[rows], self.moves[rows], self.logprobs[rows], self.advantages[rows])


@dataclass(slots=True)
class Episode:
    """One episode as it was played."""

    views: list[Array] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0


class Player:
    """Plays one episode in each session, all at the same time."""

    def __init__(self, envs: VectorEnv[Any, Any], policy: Network, chance: np.random.Generator) -> None:
        self.envs = envs
        self.policy = policy
        self.steps = 0
        self._boards = Boards()
        self._chance = chance

    def play(self, seeds: Sequence[int]) -> list[Episode]:
        """Play on the map of each seed, one per session."""
        episodes = [Episode() for _ in seeds]
        result = self.envs.reset(seed=list(seeds), slots=range(len(seeds)), size=SIZE)
        playing = list(zip(result.slots, result.observations, strict=True))
        while playing:
            views = np.stack([self._boards.view(observation) for _, observation in playing])
            logprobs = log_softmax(self.policy(views))
            moves = sample(logprobs, self._chance)
            for (slot, _), view, move, row in zip(playing, views, moves, logprobs, strict=True):
                episode = episodes[slot]
                episode.views.append(view)
                episode.moves.append(int(move))
                episode.logprobs.append(float(row[move]))
            actions = {slot: {"move": MOVES[move]} for (slot, _), move in zip(playing, moves, strict=True)}
            result = self.envs.step(actions)
            self.steps += len(playing)
            for slot, reward in zip(result.slots, result.rewards, strict=True):
                episodes[slot].reward += float(reward)
            rows = zip(result.slots, result.observations, result.dones, strict=True)
            playing = [(slot, observation) for slot, observation, done in rows if not done]
        return episodes

    def best_rewards(self, seeds: Sequence[int]) -> list[float]:
        """Return what the shortest way earns on each map: 0.9 for the goal, less 0.01 for each move."""
        self.envs.reset(seed=list(seeds), slots=range(len(seeds)), size=SIZE)
        states = self.envs.states()[: len(seeds)]
        return [0.9 - 0.01 * state["shortest_path"] for state in states]


def batch_of(groups: list[list[Episode]]) -> Batch:
    """Return the moves of all episodes, each with the advantage of its episode over its group."""
    gains = advantages([[episode.reward for episode in group] for group in groups], "grpo")
    inputs, moves, logprobs, gained = [], [], [], []
    for group, group_gains in zip(groups, gains, strict=True):
        for episode, gain in zip(group, group_gains, strict=True):
            assert gain is not None  # every episode has a reward: a session that fails raises
            inputs += episode.views
            moves += episode.moves
            logprobs += episode.logprobs
            gained += [gain] * len(episode.moves)
    return Batch(np.stack(inputs), np.array(moves), np.float32(logprobs), np.float32(gained))


def train(url: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train a policy and return a row of figures for each test."""
    chance = np.random.default_rng(options.seed)
    policy = Network((Boards.features, 128, 64, len(MOVES)), chance, learning_rate=0.0, output_scale=0.01)
    log: list[dict[str, float]] = []
    began = time.monotonic()
    with VectorEnv(url, max(options.maps * options.samples, len(SHOWN) + len(UNSEEN)), autoreset="disabled") as envs:
        player = Player(envs, policy, chance)
        best = player.best_rewards([*SHOWN, *UNSEEN])

        def test(update: int) -> None:
            rewards = [episode.reward for episode in player.play([*SHOWN, *UNSEEN])]
            share, unseen = (
                sum(rewards[part]) / sum(best[part]) for part in (slice(len(SHOWN)), slice(len(SHOWN), None))
            )
            seconds = time.monotonic() - began
            log.append({"update": update, "share": share, "unseen": unseen, "seconds": seconds, "steps": player.steps})
            print(f"update {update:4d}  {share:6.1%} of the best reward, {unseen:6.1%} on maps never seen"
                  f"  {player.steps / seconds:6.0f} steps/s  {seconds:4.0f} s", flush=True)  # fmt: skip

        test(0)
        for update in range(1, options.updates + 1):
            left = 1 - update / options.updates  # in the end smaller steps, and no bonus for trying things
            policy.learning_rate = options.learning_rate * (0.1 + 0.9 * left)
            seeds = np.repeat(chance.integers(TRAIN.start, TRAIN.stop, options.maps), options.samples)
            episodes = player.play([int(seed) for seed in seeds])
            groups = [episodes[start : start + options.samples] for start in range(0, len(episodes), options.samples)]
            for _ in range(options.epochs):
                for part in batch_of(groups).shuffled(chance, 4):
                    layers = policy.forward(part.inputs)
                    slope = clipped_slope(
                        log_softmax(layers[-1]),
                        part.moves,
                        part.logprobs,
                        part.advantages,
                        entropy=options.entropy * left,
                    )
                    policy.descend(layers, slope)
            if update % options.test_every == 0 or update == options.updates:
                test(update)
    return log


def plot(log: list[dict[str, float]], path: Path) -> None:
    """Draw the share of the best possible reward over time."""
    import matplotlib  # only where a picture is wanted

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    seconds = [row["seconds"] for row in log]
    axes.plot(seconds, [row["share"] for row in log], color="#3465a4", linewidth=2, label="maps it trains on")
    axes.plot(seconds, [row["unseen"] for row in log], color="#c17d11", linewidth=1.5, label="maps it has never seen")
    axes.legend(loc="lower right")
    axes.axhline(0.9, color="#888888", linewidth=1, linestyle="--")
    axes.set(xlabel="seconds on two cores", ylabel="share of the best reward", title="Gridworld")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Serve the environment, train, and write the log and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server of gridworld_env; by default one is started")
    parser.add_argument("--log", type=Path, help="a file for the figures, one JSON object in each line")
    parser.add_argument("--plot", type=Path, help="a file for the curve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--maps", type=int, default=32, help="groups per update")
    parser.add_argument("--samples", type=int, default=8, help="episodes per group")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--entropy", type=float, default=0.03)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--test-every", type=int, default=20)
    options = parser.parse_args()
    if options.url is not None:
        log = train(options.url, options)
    else:
        with ProcessProvider(GAMES) as server:
            log = train(server.base_url, options)
    if options.log is not None:
        options.log.write_text("".join(json.dumps(row) + "\n" for row in log))
    if options.plot is not None:
        plot(log, options.plot)


if __name__ == "__main__":
    main()
