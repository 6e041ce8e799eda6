from openenv.adapters.gymnasium import GymnasiumEnv

env = GymnasiumEnv("http://localhost:8000")
observation, info = env.reset(seed=1)
over = False
total = 0.0
while not over:
    lean = observation[2] + observation[3]  # angle and its speed
    observation, reward, terminated, truncated, info = env.step(int(lean > 0))
    total += reward
    over = terminated or truncated
print(total, terminated, truncated)
env.close()
