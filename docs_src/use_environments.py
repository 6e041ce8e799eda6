from chess_env import ChessAction
from chess_env.server.chess_environment import ChessEnvironment
from openenv import LocalEnv

with LocalEnv(ChessEnvironment).sync() as env:
    position = env.reset(split="test", index=0, opponent="random").observation
    print(position.fen)
    solved = []
    for move in position.legal_moves:
        env.reset(split="test", index=0, opponent="random")
        if env.step(ChessAction(move=move)).reward == 1.0:
            solved.append(move)
    print(solved)
