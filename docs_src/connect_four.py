import random

from pydantic import Field

from openenv import Action, EnvClient, Environment, Observation, State


class Drop(Action):
    column: int = Field(ge=0, le=6)


class Board(Observation):
    board: list[str]  # rows from the top; X is you, O the opponent


class ConnectFour(Environment[Drop, Board, State]):
    """Drop pieces into seven columns. Four of yours in a line win; the opponent wins when it can."""

    def reset(self, seed=None):
        self.random = random.Random(seed)
        self.columns = [[] for _ in range(7)]
        return self.see()

    def step(self, action):
        if len(self.columns[action.column]) == 6:
            return self.see(reward=0.0, done=True)  # a full column loses
        for piece, choose in (("X", lambda: action.column), ("O", self.answer)):
            self.columns[choose()].append(piece)
            if self.wins(piece):
                return self.see(reward=float(piece == "X"), done=True)
        return self.see(reward=0.0, done=not self.free())

    def answer(self):
        return next((c for c in self.free() if self.would_win(c)), self.random.choice(self.free()))

    def would_win(self, column):
        self.columns[column].append("O")
        won = self.wins("O")
        self.columns[column].pop()
        return won

    def free(self):
        return [number for number, column in enumerate(self.columns) if len(column) < 6]

    def wins(self, piece):
        own = {(x, y) for x, column in enumerate(self.columns) for y, one in enumerate(column) if one == piece}
        lines = ((1, 0), (0, 1), (1, 1), (1, -1))
        return any(all((x + n * dx, y + n * dy) in own for n in range(4)) for x, y in own for dx, dy in lines)

    def see(self, **result):
        rows = ["".join((column + ["."] * 6)[y] for column in self.columns) for y in range(5, -1, -1)]
        return Board(board=rows, **result)


class ConnectFourEnv(EnvClient[Drop, Board, State]):
    pass
