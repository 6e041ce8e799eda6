from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from openenv.train.trainers.sb3 import ServedVecEnv


def train(url: str, sessions: int = 8, steps: int = 50_000) -> PPO:
    envs = VecMonitor(ServedVecEnv(url, sessions))
    model = PPO("MlpPolicy", envs, n_steps=32, device="cpu")
    model.learn(steps)
    envs.close()
    return model


if __name__ == "__main__":
    train("http://localhost:8000")
