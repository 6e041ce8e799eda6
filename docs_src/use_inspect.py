import sys

from openenv.core.evals import EvalConfig, InspectAIHarness

config = EvalConfig(
    harness_name="InspectAIHarness",
    harness_version="0.3.285",
    library_versions={},
    dataset="openenv/served_env",  # the name of a task, or a file: sums.py@arithmetic
    eval_parameters={
        "model": "mockllm/model",
        "task_args": {"url": sys.argv[1], "seeds": 2, "max_turns": 3},
        "display": "none",
    },
)
result = InspectAIHarness(log_dir=sys.argv[2]).run_from_config(config)
print(result.scores)
