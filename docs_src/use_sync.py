from word_client import WordEnv
from word_env import WordAction

with WordEnv(base_url="http://localhost:8000").sync() as env:
    env.reset(seed=5)
    result = env.step(WordAction(guess="cable"))
    print(result.observation.marks, result.reward, result.done)
    print(env.state().step_count)
