from opencode_env import OpenCodeEnv

CHECK = "python3 -c 'from binary_search import binary_search as b; assert b([1, 3, 5], 5) == 2'"


def show(progress: float, total: float | None, message: str | None) -> None:
    print(message)


with OpenCodeEnv(base_url="http://localhost:8000").sync() as env:
    result = env.run_rollout(
        endpoint="scripted",
        instruction="Write a function binary_search(items, target) into binary_search.py.",
        setup=["echo ready > note.txt"],
        verify=[CHECK, "test -s note.txt"],
        on_progress=show,
    )
    print(result.status, result.reward, sorted(result.files))
    for turn in result.proxy_turns:
        print(turn.finish_reason, len(turn.completion_token_ids), len(turn.per_token_logps))
