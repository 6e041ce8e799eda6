from openenv.rollout import Task

task = Task(
    instruction="Make the tests of this project pass.",
    image="my-project:1",  # image of all sandboxes of the task
    workdir="/app",  # the project's folder in the image
    setup=("pip install --user pytest",),
    network="setup",  # network for the setup only
    files={"logo.png": b"\x89PNG\r\n"},
    verify=("python3 -m pytest -q tests",),
)
print(task.image, task.workdir, task.network)
