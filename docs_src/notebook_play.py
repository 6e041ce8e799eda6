# %% [markdown]
# # Write and play an environment
#
# An environment is one class: `reset` begins an episode, `step` takes an action.

# %%
import random

from openenv import Action, Environment, GenericEnvClient, Observation, VectorEnv
from openenv.testing import serve


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = "I have a number from 0 to 9."


class GuessTheNumber(Environment[Guess, Hint]):
    """Guess a number from 0 to 9."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None):
        self.secret = random.Random(seed).randint(0, 9)
        return Hint()

    def step(self, action):
        if action.number == self.secret:
            return Hint(hint="Right!", reward=1.0, done=True)
        return Hint(hint="higher" if action.number < self.secret else "lower", reward=0.0)


# %% [markdown]
# Serve it on a free port. The page at `/web` plays it by hand.

# %%
served = serve(GuessTheNumber)
server = served.__enter__()
env = GenericEnvClient(server.url).sync()
env.reset(seed=1)

# %% [markdown]
# The last value of a cell is shown as a table.

# %%
env.step({"number": 5})

# %% [markdown]
# Sixteen episodes at once: each slot has a seed, and the mean reward says how good this player is.

# %%
with VectorEnv(server.url, 16, autoreset="disabled") as envs:
    envs.reset(seed=0)
    low, high, playing, guesses = [0] * 16, [9] * 16, set(range(16)), 0
    while playing:
        middle = {slot: (low[slot] + high[slot]) // 2 for slot in playing}
        result = envs.step({slot: {"number": number} for slot, number in middle.items()})
        guesses += len(middle)
        for slot, observation, done in zip(result.slots, result.observations, result.dones, strict=True):
            if done:
                playing.discard(slot)
            elif observation["hint"] == "higher":
                low[slot] = middle[slot] + 1
            else:
                high[slot] = middle[slot] - 1

print(f"{guesses / 16:.2f} guesses per episode")

# %%
env.close()
served.__exit__(None, None, None)
