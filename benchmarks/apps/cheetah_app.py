"""A Gymnasium MuJoCo episode: state in C. Needs gymnasium[mujoco]."""

from openenv import create_app
from openenv.adapters.gymnasium import gymnasium_environment

Cheetah = gymnasium_environment("HalfCheetah-v5")
app = create_app(Cheetah, Cheetah.action_cls, Cheetah.observation_cls, max_concurrent_envs=256)
