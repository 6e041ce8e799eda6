import numpy as np

from openenv import VectorEnv

if __name__ == "__main__":
    with VectorEnv("gymnasium:CartPole-v1", n=32, workers="auto") as envs:
        envs.reset(seed=0)
        result = envs.step({"action": np.zeros(32, int)})
        print(result.rewards.sum(), result.columns.observations[0].shape)
