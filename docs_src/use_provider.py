from word_client import WordEnv
from word_env import WordAction

from openenv.providers import ProcessProvider

with ProcessProvider("word_app.py") as provider, WordEnv(provider.base_url).sync() as env:
    env.reset(seed=5)
    print(env.step(WordAction(guess="eagle")).reward)
print(provider.log().splitlines()[-1][:25])
