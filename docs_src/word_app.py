from word_env import WordAction, WordGame, WordObservation

from openenv import create_app

app = create_app(WordGame, WordAction, WordObservation, env_name="word_game", max_concurrent_envs=64)
