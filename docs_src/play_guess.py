from openenv import GenericEnvClient

with GenericEnvClient(base_url="http://localhost:8000").sync() as env:
    env.reset(seed=3)
    for number in range(10):
        result = env.step({"number": number})
        if result.done:
            print(f"It was {number}, reward {result.reward}")
            break
