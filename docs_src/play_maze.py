from maze_env import MazeAction, MazeEnv

with MazeEnv(base_url="http://localhost:8000").sync() as env:
    env.reset(seed=1)
    result = env.step(MazeAction(message="hello"))
    print(result.observation.echoed_message, result.reward)
