from word_env import WORDS

from openenv import VectorEnv

with VectorEnv("http://localhost:8000", 16, on_failure="restart") as envs:
    envs.reset(seed=0)
    envs.step_async([{"guess": "apple"}] * 16, each=True)
    steps = 0
    while steps < 100:
        ready = envs.step_wait(k=4)  # at least four slots; the others continue
        steps += len(ready)
        for slot, error in ready.errors.items():
            print(f"slot {slot} was restarted: {error}")
        envs.step_async({slot: {"guess": WORDS[steps % 6]} for slot in ready.slots})
    envs.step_wait()  # the rest
    print("done")
