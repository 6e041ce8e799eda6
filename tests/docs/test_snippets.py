"""Every snippet of the documentation runs and prints what its page says, and every page shows the files as they are."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import http_calls

ROOT = Path(__file__).parents[2]
RunSnippet = Callable[..., str]
RunPython = Callable[..., subprocess.CompletedProcess[str]]

ALONE = {
    "capture_budget.py": (
        "Two. end_turn\nStep budget exhausted; stopping. end_turn\n1 calls 1 None\ntokens True 5\n['budget_stop']\n"
    ),
    "capture_sampling.py": ("1.0 7 ('temperature', 'grammar') () 5\n1.0 None () ('tool_choice: forced tool',) 0\n"),
    "capture_sessions.py": "Two.\nTrue 5 5\n",
    "use_capture.py": "Two. False\ncomplete 10 5\nTrue 5\nTrue 0.7\n",
    "async_env.py": "{'answer': 'WHY?'} 1\n",
    "fork_external.py": "['tea', 'cup'] ['tea', 'pot']\n",
    "guess.py": "",
    "limits.py": "",
    "mounted_app.py": "",
    "observation_encodings.py": (
        "{'observation': {'metadata': {}, 'raw': 'AP8=', 'pixels': [[0.0, 0.0], [0.0, 0.0]], 'depth': None}, "
        "'reward': None, 'done': False, 'metadata': {'nonfinite_reward': 'inf'}}\n"
    ),
    "rubric_basic.py": "0.12 {'rubric_scores': {'Solved': 0.0, 'Closeness': 0.6}}\n",
    "rubric_gate.py": "1.0\n0.0\n0.0\n",
    "rubric_judge.py": "0.8\n",
    "rubric_trajectory.py": "0.0\n0.0\n1.0\n[0.25, 0.5, 1.0]\n",
    "scripted_model.py": (
        "I write the file. write {'path': '/home/user/note.txt', 'text': 'for Ada'}\nDone: 12 bytes\nTrue\n"
    ),
    "task_image.py": "my-project:1 /app setup\n",
    "turn_program.py": "1 HELLO\n2 GOOD BYE\n",
    "tree_search.py": "[0, 0, 2] 0\n",
    "use_tasks.py": "['train', 'test'] 4\n"
    + "".join(
        f"{{'split': 'train', 'index': {index}, 'letters': 5}} {rewards}\n"
        for index, rewards in enumerate(([1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]))
    ),
    "readme_train.py": "".join(
        f"seed-{seed} {[float(seed > 2)] * 4} {52 if seed > 2 else 1040}\n" for seed in (1, 2, 3, 4)
    ),
    "use_evaluate.py": (
        "reward 0.500 [0.002, 0.998] pass@4 0.500 [0.002, 0.998] of 2 tasks\n16 values at step 1\n16 values at step 1\n"
    ),
    "use_play.py": "".join(f"seed-{seed} [1.0, 1.0, 1.0, 1.0]\n" for seed in (1, 2, 3))
    + "12 sequences, 204 tokens to train on\n",
    "use_auto.py": "(1, 7)\n",
    "use_collect.py": (
        "2 collected, 1 dropped, 0 failed\nep-000001 {'seed': 1} [0, 1, 2]\nep-000002 {'seed': 2} [0]\n"
    ),
    "use_environments.py": "2b1k3/1pppp1q1/2n5/8/7K/1PP5/5r1P/3R4 b - - 1 26\n['f2h2']\n",
    "use_local.py": ".=.==\neagle\n",
    "web_hooks.py": (
        "<b style='background:goldenrod'>&emsp;</b>"
        + 4 * " <b style='background:lightgray'>&emsp;</b>"
        + "\n(\"Try 'apple'\", {'guess': 'apple'})\n"
    ),
    "use_local_vector.py": "32.0 (32, 4)\n",
    "use_plugins.py": "in the sandbox\nFalse\n",
    "word_client.py": "",
    "word_env.py": "",
}
WITH_WORD_SERVER = {
    "fork_restore.py": "eagle 2\n",
    "fork_words.py": "[0.0, 0.0, 0.0, 0.0, 1.0, 0.0] 0\n",
    "handle_errors.py": "1.0\n",
    "http_session.py": ".=.== 0.0 False\n===== 1.0 True\n",
    "use_async.py": ".=.==\n",
    "use_http.py": "2 True\n",
    "use_many.py": "16 episodes, mean reward 1.0\n",
    "use_resume.py": "1.0 2\n",
    "use_connect.py": ".=.== 5\n",
    "use_sync.py": ".=.== 0.0 False\n1\n",
    "use_vector.py": "mean reward 1.0\n",
    "use_vector_async.py": "16\n",
    "use_vector_ready.py": "done\n",
    "ws_frames.py": "observation \nobservation \nerror VALIDATION_ERROR\nstate \n",
}
WITH_SHELF_SERVER = {
    "connect_fastmcp.py": "1 of 2\n2 of 2\n['apple', 'pear']\n",
    "connect_mcp.py": "['put', 'sort']\n{'result': 2} False\n",
    "use_tools.py": "['put', 'sort']\n1 2\n1 of 2\n2 of 2\n['apple', 'pear']\nput\n",
}
WITH_CART_POLE = {
    "use_gymnasium.py": "100.0 False True\n",
    "use_gymnasium_vector.py": "(8, 4) 8.0\n",
}
ELSEWHERE = {
    "notebook_inspect.py",  # tests/examples, as the next ones
    "notebook_play.py",
    "notebook_train.py",
    "connect_four.py",
    "play_connect_four.py",
    "test_connect_four.py",
    "agent_session.py",
    "cancel_opencode.py",
    "cart_pole.py",
    "docker_sandbox.py",
    "e2b_sandbox.py",
    "daytona_sandbox.py",
    "use_cloud.py",
    "fragile_app.py",
    "gradio_app.py",
    "opencode_harness.py",
    "opencode_turns.py",
    "own_agent.py",
    "own_cheat.py",
    "own_grader.py",
    "own_sandbox.py",
    "play_guess.py",
    "play_maze.py",
    "sandbox_limits.py",
    "sandbox_pool.py",
    "sandbox_port.py",
    "sandbox_snapshot.py",
    "sandbox_trees.py",
    "secure_app.py",
    "shelf_app.py",
    "tasks_env.py",
    "test_served_word.py",
    "test_plugins.py",
    "test_word_env.py",
    "tool_reward.py",
    "rock_paper.py",  # tests/train/trainers, as the next ones
    "serve_ors.py",
    "serve_verifiers.py",
    "use_pettingzoo.py",
    "train_sb3.py",
    "train_skyrl.py",
    "train_trl.py",
    "train_trl_agents.py",
    "readme_rollout.py",
    "use_check.py",
    "use_harbor.py",
    "use_harbor_client.py",
    "use_checks.py",
    "use_git_server.py",  # tests/sandboxes/tools
    "use_inspect.py",  # tests/adapters/inspect
    "use_kubernetes.py",
    "use_opencode.py",
    "use_processes.py",
    "use_provider.py",
    "use_provider_docker.py",
    "use_provider_errors.py",
    "use_provider_own.py",
    "use_provider_uv.py",
    "use_py_executor.py",
    "use_ray.py",
    "use_ray_servers.py",
    "use_rollout.py",
    "use_rollouts.py",
    "use_branch.py",
    "use_sandbox.py",
    "use_stream.py",
    "use_task_sets.py",
    "turn_app.py",
    "use_token.py",
    "use_turns.py",
    "validate_package.py",
    "word_app.py",
}


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_page_shows_the_snippets_as_they_are(run_python: RunPython) -> None:
    done = run_python("scripts/snippets.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_snippet_is_run_and_shown() -> None:
    files = {path.name for path in (ROOT / "docs_src").glob("*.py")}
    shown = {name for page in pages() for name in re.findall(r"<!-- snippet: ([\w.]+)", page.read_text("utf-8"))}
    assert files == {*ALONE, *WITH_WORD_SERVER, *WITH_SHELF_SERVER, *WITH_CART_POLE, *ELSEWHERE}
    assert files == shown


@pytest.mark.parametrize("file", sorted(ALONE))
def test_a_snippet_that_needs_no_server_prints_what_it_should(file: str, run_snippet: RunSnippet) -> None:
    assert run_snippet(file) == ALONE[file]


@pytest.mark.slow
def test_the_snippets_of_clients_print_what_they_should(
    run_snippet: RunSnippet, serve_snippet: Callable[[str], str]
) -> None:
    url = serve_snippet("word_app.py")
    printed = {file: run_snippet(file, url) for file in WITH_WORD_SERVER}
    assert printed == WITH_WORD_SERVER


def test_the_first_environment_is_served_as_a_bare_class(
    run_snippet: RunSnippet, serve_snippet: Callable[[str], str]
) -> None:
    assert run_snippet("play_guess.py", serve_snippet("guess.py")) == "It was 3, reward 1.0\n"


@pytest.mark.slow
def test_the_snippets_with_tools_print_what_they_should(
    run_snippet: RunSnippet, serve_snippet: Callable[[str], str]
) -> None:
    url = serve_snippet("shelf_app.py")
    printed = {file: run_snippet(file, url) for file in WITH_SHELF_SERVER}
    assert printed == WITH_SHELF_SERVER


def test_the_example_with_tokens_prints_what_it_should(
    run_snippet: RunSnippet, serve_snippet: Callable[[str], str]
) -> None:
    url = serve_snippet("secure_app.py")
    assert run_snippet("use_token.py", url) == "False\nUNAUTHORIZED\n"
    for token, status in [("trainer-1c7f", 200), ("agent-9a2b", 401)]:
        answer = http_calls.get(f"{url}/words", headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        assert answer.status_code == status


def test_the_example_with_turns_prints_what_it_should(
    run_snippet: RunSnippet, serve_snippet: Callable[[str], str]
) -> None:
    page = (ROOT / "docs" / "howto" / "harness.md").read_text("utf-8")
    shown = re.search(r"```\n(clerk\n.*?)```", page, re.DOTALL)
    assert shown is not None
    assert run_snippet("use_turns.py", serve_snippet("turn_app.py")) == shown[1]


@pytest.mark.slow
def test_the_example_with_processes_prints_what_it_should(
    run_snippet: RunSnippet, serve_snippet: Callable[[str], str]
) -> None:
    assert run_snippet("use_processes.py", serve_snippet("fragile_app.py")) == "worker crashed\nFalse\n"


@pytest.mark.slow
def test_the_snippets_with_gymnasium_print_what_they_should(
    run_snippet: RunSnippet, serve_snippet: Callable[[str], str]
) -> None:
    url = serve_snippet("cart_pole.py:CartPole")
    printed = {file: run_snippet(file, url) for file in WITH_CART_POLE}
    assert printed == WITH_CART_POLE


@pytest.mark.slow
def test_the_example_of_agent_and_orchestrator_prints_what_it_should(
    run_snippet: RunSnippet, serve_snippet: Callable[[str], str]
) -> None:
    printed = run_snippet("agent_session.py", serve_snippet("tool_reward.py"))
    episode = {"steps": 4, "reward": 1.0, "total_reward": 1.0, "done": True}
    assert printed == f"['apple', 'pear', 'plum']\n{episode}\n"


def test_the_configuration_of_a_desktop_agent_starts_a_server(run_python: RunPython) -> None:
    page = (ROOT / "docs" / "howto" / "tools.md").read_text("utf-8")
    config = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])  # type: ignore[index]
    server = config["mcpServers"]["shelf"]
    assert server["command"] == "openenv"
    arguments = ["-m", "openenv", *(part.replace("shelf_app.py", "docs_src/shelf_app.py") for part in server["args"])]
    code = (
        "import asyncio, os, sys\n"
        "from fastmcp import Client\n"
        "from fastmcp.client.transports import StdioTransport\n"
        "async def main():\n"
        f"    async with Client(StdioTransport(sys.executable, {arguments!r}, env=dict(os.environ))) as client:\n"
        "        await client.call_tool('put', {'item': 'pear'})\n"
        "        print((await client.call_tool('put', {'item': 'apple'})).data)\n"
        "asyncio.run(main())\n"
    )
    done = run_python("-c", code)
    assert done.stdout == "2\n", done.stderr


@pytest.mark.parametrize("file", ["test_plugins.py", "test_word_env.py", "test_served_word.py"])
def test_the_example_of_a_test_passes(file: str, run_python: RunPython) -> None:
    done = run_python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:schemathesis",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        f"docs_src/{file}",
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_the_example_with_tasks_answers_the_task_api(
    run_python: RunPython, serve_snippet: Callable[[str], str]
) -> None:
    url = serve_snippet("tasks_env.py")
    code = (
        "import json, urllib.request as u\n"
        f"ask = lambda path, data=None: json.load(u.urlopen(u.Request('{url}/WordTasks' + path, data, "
        "{'Content-Type': 'application/json'})))\n"
        "print([split['name'] for split in ask('/splits')], ask('/num_tasks', b'{\"split\": \"test\"}'))\n"
        'print(ask(\'/task_range\', b\'{"split": "train", "start": 3}\'))\n'
    )
    done = run_python("-c", code)
    assert done.stdout.splitlines() == [
        "['train', 'test'] {'num_tasks': 2}",
        "{'tasks': [{'split': 'train', 'index': 3, 'letters': 5}]}",
    ], done.stderr
