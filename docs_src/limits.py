from word_env import WordAction, WordGame, WordObservation

from openenv.core.env_server import ConcurrencyConfig, create_app

app = create_app(
    WordGame,
    WordAction,
    WordObservation,
    concurrency_config=ConcurrencyConfig(max_concurrent_envs=1000, session_timeout=300),
    runner="inline",  # a step takes microseconds: run it on the event loop
)
