from openenv.rollout import Model, Task, python_check, run_rollout
from openenv.testing import ScriptedModel
from openenv.testing.scripted.agent_scripts import binary_search

TEST = "from binary_search import binary_search as b; assert b([1, 3, 5], 5) == 2"
task = Task(
    instruction="Write a function binary_search(items, target) into binary_search.py.",
    verify=(python_check(f"-c '{TEST}'", of="binary_search"),),  # earns 1 if the test passes
)

with ScriptedModel(binary_search()) as scripted:  # or a real one: Model(base_url=..., name=..., api_key=...)
    outcome = run_rollout(task, agent="opencode", model=Model(**scripted.model()))

print(outcome.status, outcome.reward, outcome.trust)
for turn in outcome.turns:
    print(turn.finish_reason, len(turn.completion_token_ids), len(turn.per_token_logps))
