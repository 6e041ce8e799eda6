from functools import partial
from typing import Any

from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from openenv.rollout import Model, Task
from openenv.train.trainers.trl import RolloutSessionFactory

TASKS = [Task(instruction="Write hello into hello.txt.", verify=('test "$(cat hello.txt)" = hello',))]


def worker(model: Model, **options: Any) -> HarnessRolloutWorker:
    sessions = partial(RolloutSessionFactory, TASKS, model=model, agent="opencode", sandbox="local")
    return HarnessRolloutWorker(harness_session_factory=sessions, model_name=model.name, **options)
