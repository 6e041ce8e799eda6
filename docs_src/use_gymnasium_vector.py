from openenv.adapters.gymnasium import GymnasiumVectorEnv

envs = GymnasiumVectorEnv("http://localhost:8000", 8)
observations, infos = envs.reset(seed=1)
for _ in range(50):
    lean = observations[:, 2] + observations[:, 3]
    observations, rewards, terminated, truncated, infos = envs.step((lean > 0).astype(int))
print(observations.shape, rewards.sum())
envs.close()
