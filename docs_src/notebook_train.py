# %% [markdown]
# # Train a policy
#
# A table of preferences learns Rock, Paper, Scissors against a player who likes rock. Every group of episodes shares a
# seed; `advantages` compares the rewards within a group, as GRPO does for language models.

# %%
import random

import numpy as np

from openenv import Action, Environment, Observation, VectorEnv
from openenv.testing import serve
from openenv.train import advantages

MOVES = ("rock", "paper", "scissors")


class Move(Action):
    hand: str


class Rps(Environment[Move, Observation]):
    """Play Rock, Paper, Scissors. The other player likes rock."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None):
        self.other = random.Random(seed).choices(MOVES, weights=(0.6, 0.2, 0.2))[0]
        return Observation()

    def step(self, action):
        lead = (MOVES.index(action.hand) - MOVES.index(self.other)) % 3
        return Observation(reward=(0.5, 1.0, 0.0)[lead], done=True)


# %% [markdown]
# One update: play 16 groups of 4 episodes at once, and move the preferences along the advantages.

# %%
chance = np.random.default_rng(0)
preferences = np.zeros(3)


def probabilities():
    weights = np.exp(preferences - preferences.max())
    return weights / weights.sum()


def update(envs, first_seed):
    seeds = [first_seed + slot // 4 for slot in range(64)]  # four slots share a seed
    envs.reset(seed=seeds)
    hands = chance.choice(3, size=64, p=probabilities())
    result = envs.step([{"hand": MOVES[hand]} for hand in hands])
    rewards = np.reshape(result.rewards, (16, 4))
    for hand, advantage in zip(hands, np.ravel(advantages(rewards.tolist())), strict=True):
        preferences[:] += 0.05 * advantage * (np.eye(3)[hand] - probabilities())
    return rewards.mean()


# %%
with serve(Rps) as server, VectorEnv(server.url, 64, autoreset="disabled") as envs:
    curve = [update(envs, 16 * number) for number in range(60)]

print(f"mean reward: {np.mean(curve[:10]):.2f} in the first ten updates, {np.mean(curve[-10:]):.2f} in the last ten")
print({hand: round(float(chance), 2) for hand, chance in zip(MOVES, probabilities(), strict=True)})

# %% [markdown]
# The same loop trains language models: `openenv.train.play` yields groups with rewards, exact tokens and advantages.
