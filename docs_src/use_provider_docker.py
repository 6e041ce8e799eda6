from openenv import GenericEnvClient

with GenericEnvClient.from_docker_image(
    "gridworld_env", env_vars={"OPENENV_MAX_SESSIONS": "4"}, memory_limit="1g", cpu_limit=1
).sync() as env:
    env.reset(seed=3)
    print(env.step({"move": "right"}).done)
    print(env.state()["step_count"])
