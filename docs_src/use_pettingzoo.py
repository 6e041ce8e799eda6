from openenv.adapters.pettingzoo import ServedParallelEnv

ROCK, PAPER = 0, 1

env = ServedParallelEnv("http://localhost:8000")
observations, infos = env.reset(seed=1)
total = dict.fromkeys(env.possible_agents, 0.0)
while env.agents:
    actions = {"player_0": ROCK, "player_1": PAPER}
    observations, rewards, terminations, truncations, infos = env.step(actions)
    total = {agent: total[agent] + rewards[agent] for agent in total}
print(total)
env.close()
