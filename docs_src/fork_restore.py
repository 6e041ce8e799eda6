from word_client import WordEnv
from word_env import WORDS, WordAction

with WordEnv(base_url="http://localhost:8000").sync() as env:
    env.reset(seed=5)
    env.step(WordAction(guess="cable"))  # or another slow start
    snapshot = env.snapshot()
    for word in WORDS:
        env.restore(snapshot)
        if env.step(WordAction(guess=word)).done:
            print(word, env.state().step_count)
    snapshot.close()
