from openenv.rollout import Model, Task, run_rollout
from openenv.testing import ScriptedModel
from openenv.testing.scripted.agent_scripts import binary_search

task = Task(
    instruction="Write a function binary_search(items, target) into binary_search.py.",
    verify=("python3 -c 'from binary_search import binary_search as b; assert b([1, 3, 5], 5) == 2'",),
)

with ScriptedModel(binary_search()) as scripted:  # or a real one: Model(base_url=..., name=..., api_key=...)
    outcome = run_rollout(task, agent="opencode", model=Model(**scripted.model()))

print(outcome.status, outcome.reward)
for turn in outcome.turns:
    print(turn.finish_reason, len(turn.completion_token_ids), len(turn.per_token_logps))
