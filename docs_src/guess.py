import random

from openenv import Action, Environment, Observation, State


class Guess(Action):
    number: int


class GuessTheNumber(Environment[Guess, Observation, State]):
    """Guess a number from 0 to 9."""

    def reset(self, seed=None):
        self.secret = random.Random(seed).randint(0, 9)
        return Observation()

    def step(self, action):
        right = action.number == self.secret
        return Observation(reward=float(right), done=right)
