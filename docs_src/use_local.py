from word_env import WordGame

from openenv import LocalEnv

with LocalEnv(WordGame).sync() as env:
    env.reset(seed=5)
    result = env.step({"guess": "cable"})  # a dict, or a WordAction
    print(result.observation.marks)
    print(env.state().word)
