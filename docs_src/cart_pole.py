from openenv.adapters.gymnasium import gymnasium_environment

CartPole = gymnasium_environment("CartPole-v1", max_episode_steps=100)
