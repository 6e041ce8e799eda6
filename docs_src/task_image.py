from openenv.rollout import Task

task = Task(
    instruction="Make the tests of this project pass.",
    image="my-project:1",  # what all sandboxes of the task start from, the verifier's too
    workdir="/app",  # the project is there in the image
    setup=("pip install --user pytest",),
    network="setup",  # for those lines; the agent and the verifier have none
    files={"logo.png": b"\x89PNG\r\n"},
    verify=("python3 -m pytest -q tests",),
)
print(task.image, task.workdir, task.network)
