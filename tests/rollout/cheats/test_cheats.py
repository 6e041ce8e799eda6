"""Cheating does not pay: every attempt earns what doing nothing earns, and the attempts are real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from openenv.rollout import Check
from openenv.sandboxes.base import Sandbox, Sandboxes, SandboxSpec
from openenv.testing import Cheat, all_cheats, run_cheats

PAID_WHEN_PUBLISHED = (
    *("planted-reward", "background-writer", "edited-verify-script", "sitecustomize"),
    *("exit-when-loaded", "exit-hooks", "skipped-tests", "faked-report", "judged-exit", "judged-by-itself"),
)
"""Some of the cheats that pay in the published order: one sandbox for agent and verifier, the reward a file in it."""


def test_no_cheat_that_paid_before_pays_now(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    report = run_cheats(local, cheats=[cheat for cheat in all_cheats() if cheat.name in PAID_WHEN_PUBLISHED])
    assert len(report.results) == len(PAID_WHEN_PUBLISHED)
    assert [result for result in report.results if result.succeeded] == []
    leftovers()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_cheat_pays_on_the_local_backend(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    report = run_cheats(local)
    assert report.solved == {"data": 1.0, "code": 1.0, "loaded": 1.0, "judged": 1.0}
    assert len(report.results) == len(all_cheats()) >= 50
    assert [result for result in report.results if result.succeeded] == []
    assert {result.honest for result in report.results} == {0.0}
    leftovers()


def test_every_kind_of_cheat_is_there() -> None:
    names = {cheat.name for cheat in all_cheats()}
    assert len(names) == len(all_cheats())
    assert names >= {
        *("planted-reward", "linked-work-tree", "background-writer", "patched-pytest", "sitecustomize"),
        *("edited-verify-script", "path-hijack", "huge-output", "forked-daemon", "host-network", "proxy-admin"),
        *("another-key", "archive-names", "hard-links", "devices", "huge-sparse-file"),
        *("exit-when-loaded", "system-exit", "exit-hooks", "edited-while-it-runs", "killed-check", "faked-report"),
    }


def test_a_cheat_that_pays_is_reported(local: Sandboxes) -> None:
    solving = Cheat("solves", "does the task", ("echo 42 > answer.txt",))
    leaking = Cheat("leaks", "prints what only the host has", ("echo LEAK",))
    report = run_cheats(local, cheats=[solving, leaking])
    assert [result.name for result in report.succeeded] == ["solves", "leaks"]
    document = report.document()
    assert document["succeeded"] == 2
    assert document["cheats"][0]["reward"] == 1.0


def in_one_line(check: Check) -> str:
    """A check as it would have to be written there: what runs and what judges share everything."""
    copies = "".join(f'cp -r {path} "$OUTPUT/files/"; ' for path in check.keep)
    return (
        f'export OUTPUT="$HOME/logs/output"; mkdir -p "$OUTPUT/files"; ({check.run}) > "$OUTPUT/stdout"; '
        f"{copies}{check.judge}"
    )


def published_reward(sandbox: Sandbox, cheat: Cheat) -> float:
    """What the order of the published environment pays: all in one sandbox, the agent still there, one reward file."""
    task = cheat.task
    for path, text in task.files.items():
        sandbox.write_text(f"{sandbox.workdir}/{path}", text)
    for line in cheat.lines:
        sandbox.exec(line, cwd=sandbox.workdir, timeout=20, max_output=1000)
    if task.proof:  # the published order asks for no proof
        sandbox.write_text(f"{sandbox.workdir}/tests/openenv_proof.py", "def begin():\n    return lambda: None\n")
    passed = 0
    sandbox.exec("sleep 1.3", cwd="/")  # the verify lines start a little later: what runs on has time to write
    for line in task.verify:
        files = {
            path: text for path, text in task.verify_files.items() if not sandbox.exists(f"{sandbox.workdir}/{path}")
        }
        for path, text in files.items():
            sandbox.write_text(f"{sandbox.workdir}/{path}", text)
        shell = line if isinstance(line, str) else in_one_line(line)
        passed += sandbox.exec(shell, cwd=sandbox.workdir, timeout=20, max_output=1000).exit_code == 0
    reward = sandbox.exec("cat /home/user/logs/verifier/reward.txt", cwd="/").stdout
    try:
        return float(reward)
    except ValueError:
        return passed / len(task.verify)


@pytest.mark.parametrize("name", PAID_WHEN_PUBLISHED)
def test_the_same_cheat_pays_where_agent_and_verifier_share_a_sandbox(local: Sandboxes, name: str) -> None:
    cheat = next(cheat for cheat in all_cheats() if cheat.name == name)
    with local.open(SandboxSpec(limits=cheat.task.limits)) as sandbox:
        assert published_reward(sandbox, cheat) > 0
