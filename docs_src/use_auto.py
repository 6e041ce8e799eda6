from openenv import AutoAction, AutoEnv

with AutoEnv.from_env("gridworld").sync() as env:  # pip install openenv-gridworld_env
    Move = AutoAction.from_env("gridworld")
    env.reset(seed=3)
    print(env.step(Move(move="right")).observation.position)
