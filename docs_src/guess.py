import random

from openenv import Action, Environment, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = "I have a number from 0 to 9."


class GuessTheNumber(Environment[Guess, Hint, State]):
    """Guess a number from 0 to 9."""

    def reset(self, seed=None):
        self.secret = random.Random(seed).randint(0, 9)
        return Hint()

    def step(self, action):
        if action.number == self.secret:
            return Hint(hint="Right!", reward=1.0, done=True)
        return Hint(hint="higher" if action.number < self.secret else "lower", reward=0.0)
