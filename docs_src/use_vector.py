from word_client import WordEnv
from word_env import WORDS, WordAction

from openenv import VectorEnv

with VectorEnv("http://localhost:8000", 16, client=WordEnv, autoreset="disabled") as envs:
    envs.reset(seed=0)  # slot 0 gets seed 0, slot 1 gets 1, ...
    playing, total = set(range(16)), 0.0
    for word in WORDS:
        result = envs.step({slot: WordAction(guess=word) for slot in playing})
        total += sum(result.rewards)
        playing -= {slot for slot, done in zip(result.slots, result.dones, strict=True) if done}
    print(f"mean reward {total / 16}")
