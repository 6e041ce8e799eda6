import random

from openenv import Action, Environment, Observation, State


class Guess(Action):
    number: int


class GuessTheNumber(Environment[Guess, Observation, State]):
    state = State()

    def reset(self, seed=0, **kwargs):
        self.secret = random.Random(seed).randint(0, 9)
        return Observation()

    def step(self, action, **kwargs):
        right = action.number == self.secret
        return Observation(reward=float(right), done=right)
