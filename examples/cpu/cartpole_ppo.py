"""PPO on Gymnasium's CartPole, served and stepped through `GymnasiumVectorEnv`, with NumPy alone.

It ends when the last 100 episodes lasted 475 steps or more in the mean, which counts as solved.

python examples/cpu/cartpole_ppo.py --plot curve.png --compare
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from networks import Array, Network, clipped_slope, log_softmax, sample

from openenv.adapters.gymnasium import GymnasiumVectorEnv
from openenv.providers import ProcessProvider

SOLVED = 475.0
DISCOUNT, TRACE = 0.99, 0.95
COMPARISON = Path(__file__).parents[2] / "benchmarks" / "gymnasium_vector.py"


@dataclass(slots=True)
class Rollout:
    """Some steps of all environments; rows are steps, columns environments."""

    observations: Array
    actions: Array
    logprobs: Array
    values: Array
    rewards: Array
    terminated: Array
    over: Array
    begins: Array
    """Where the action was ignored: the step after an episode's end begins the next one."""

    @classmethod
    def empty(cls, steps: int, envs: int, width: int) -> Rollout:
        """Make room for one more observation and value than steps: those after the last one."""
        numbers = [np.zeros((steps, envs), np.float32) for _ in range(2)]
        flags = [np.zeros((steps, envs), bool) for _ in range(3)]
        values = np.zeros((steps + 1, envs), np.float32)
        observations = np.zeros((steps + 1, envs, width), np.float32)
        return cls(observations, np.zeros((steps, envs), np.int64), numbers[0], values, numbers[1], *flags)

    def advantages(self) -> Array:
        """Return generalised advantages. An episode that was cut off goes on in theory: only its end has no value."""
        result, following = np.zeros_like(self.rewards), np.zeros(self.rewards.shape[1], np.float32)
        for step in reversed(range(len(self.rewards))):
            ahead = DISCOUNT * self.values[step + 1] * ~self.terminated[step]
            surprise = self.rewards[step] + ahead - self.values[step]
            following = surprise + DISCOUNT * TRACE * following * ~self.over[step]
            result[step] = following
        return result


class Trainer:
    """An actor and a critic, and the environments they learn from."""

    def __init__(self, envs: GymnasiumVectorEnv, options: argparse.Namespace) -> None:
        self.envs = envs
        self.options = options
        self.chance = np.random.default_rng(options.seed)
        width, choices = envs.single_observation_space.shape[0], envs.single_action_space.n
        rate = options.learning_rate
        self.actor = Network((width, 64, 64, int(choices)), self.chance, learning_rate=rate, output_scale=0.01)
        self.critic = Network((width, 64, 64, 1), self.chance, learning_rate=rate)
        self.returns: deque[float] = deque(maxlen=100)
        self.stepping_s = 0.0
        self._observations, _ = envs.reset(seed=options.seed)
        self._over = np.zeros(envs.num_envs, bool)
        self._running = np.zeros(envs.num_envs)

    def play(self) -> Rollout:
        """Take some steps in all environments."""
        rollout = Rollout.empty(self.options.steps, self.envs.num_envs, self._observations.shape[1])
        for step in range(self.options.steps):
            logprobs = log_softmax(self.actor(self._observations))
            actions = sample(logprobs, self.chance)
            rollout.observations[step], rollout.actions[step] = self._observations, actions
            rollout.logprobs[step] = logprobs[np.arange(len(actions)), actions]
            rollout.begins[step] = self._over
            began = time.perf_counter()
            self._observations, rewards, terminated, truncated, _ = self.envs.step(actions)
            self.stepping_s += time.perf_counter() - began
            self._over = terminated | truncated
            rollout.rewards[step], rollout.terminated[step], rollout.over[step] = rewards, terminated, self._over
            self._running += rewards
            self.returns.extend(self._running[self._over])
            self._running[self._over] = 0.0
        rollout.observations[-1] = self._observations
        rollout.values[:] = self.critic(rollout.observations.reshape(-1, self._observations.shape[1])).reshape(
            rollout.values.shape
        )
        return rollout

    def learn(self, rollout: Rollout) -> None:
        """Improve the actor and the critic by some epochs over a rollout."""
        advantages = rollout.advantages()
        targets = advantages + rollout.values[:-1]
        counts = ~rollout.begins
        observations, actions = rollout.observations[:-1][counts], rollout.actions[counts]
        old, gains, wanted = rollout.logprobs[counts], advantages[counts], targets[counts]
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        for _ in range(self.options.epochs):
            order = self.chance.permutation(len(actions))
            for rows in np.array_split(order, max(1, len(order) // self.options.minibatch)):
                layers = self.actor.forward(observations[rows])
                slope = clipped_slope(
                    log_softmax(layers[-1]), actions[rows], old[rows], gains[rows], entropy=self.options.entropy
                )
                self.actor.descend(layers, slope)
                layers = self.critic.forward(observations[rows])
                self.critic.descend(layers, (layers[-1] - wanted[rows, None]) / len(rows))


def train(url: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train until the task is solved or the steps are used up; return a row of figures for each update."""
    log: list[dict[str, float]] = []
    envs = GymnasiumVectorEnv(url, options.envs)
    try:
        trainer, began, per_update = Trainer(envs, options), time.perf_counter(), options.steps * options.envs
        for update in range(1, options.most_steps // per_update + 1):
            left = 1 - (update - 1) * per_update / options.most_steps
            trainer.actor.learning_rate = trainer.critic.learning_rate = options.learning_rate * left
            trainer.learn(trainer.play())
            mean = float(np.mean(trainer.returns)) if trainer.returns else 0.0
            seconds, steps = time.perf_counter() - began, update * per_update
            log.append({"steps": steps, "return": mean, "episodes": len(trainer.returns), "seconds": seconds,
                        "steps_per_s": steps / trainer.stepping_s})  # fmt: skip
            is_solved = len(trainer.returns) == 100 and mean >= SOLVED
            if is_solved or update % 10 == 0:
                print(f"{steps:7d} steps  mean return {mean:5.1f}  {seconds:5.1f} s  "
                      f"{steps / trainer.stepping_s:6.0f} steps/s of the environments", flush=True)  # fmt: skip
            if is_solved:
                print(f"solved after {steps} steps, {seconds:.0f} s")
                return log
    finally:
        envs.close()
    raise SystemExit(f"not solved within {options.most_steps} steps: mean return {log[-1]['return']:.1f}")


def plot(log: list[dict[str, float]], path: Path) -> None:
    """Draw the mean return over the steps."""
    import matplotlib  # only where a picture is wanted

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot([row["steps"] for row in log], [row["return"] for row in log], color="#3465a4", linewidth=2)
    axes.axhline(SOLVED, color="#888888", linewidth=1, linestyle="--")
    axes.set(xlabel="steps", ylabel="mean return of 100 episodes", title="CartPole-v1")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Serve the environment, train, and write the log and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server of gymnasium:CartPole-v1; by default one is started")
    parser.add_argument("--log", type=Path, help="a file for the figures, one JSON object in each line")
    parser.add_argument("--plot", type=Path, help="a file for the curve")
    parser.add_argument("--compare", action="store_true", help="then measure steps/s beside Gymnasium's own vectors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64, help="of each environment, per update")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--minibatch", type=int, default=256)
    parser.add_argument("--entropy", type=float, default=0.005)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--most-steps", type=int, default=400_000)
    options = parser.parse_args()
    with ExitStack() as stack:
        url: Any = options.url
        if url is None:
            url = stack.enter_context(ProcessProvider("gymnasium:CartPole-v1")).base_url
        log = train(url, options)
    if options.log is not None:
        options.log.write_text("".join(json.dumps(row) + "\n" for row in log))
    if options.plot is not None:
        plot(log, options.plot)
    if options.compare:
        subprocess.run([sys.executable, str(COMPARISON)], check=True)


if __name__ == "__main__":
    main()
