import openenv

with openenv.connect("http://localhost:8000").sync() as env:
    env.reset(seed=5)
    result = env.step(env.Action(guess="cable"))  # or a dict: {"guess": "cable"}
    print(result.observation.marks, result.observation.tries_left)
