from openenv import GenericEnvClient

with GenericEnvClient.from_env(
    "org/echo-space", use_docker=False, project_path="my_project", context_timeout_s=300
).sync() as env:
    print(env.reset().done)
