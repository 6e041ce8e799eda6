"""What the cheats of the suite earn in the order of the published package: one sandbox for agent, verifier and reward.

`openenv` 0.10.0 has no verifier of its own: a session's `verify()` is its author's, and its `opencode_env` runs setup,
agent and verify lines in one sandbox, as one user, and takes the number in `logs/verifier/reward.txt` for the reward.
That order is run here with this package's sandboxes and tasks, so that nothing but the order differs. A cheat pays if
it earns more than doing nothing. One variant of each family runs, for a few minutes; `--all` runs every one.

    python benchmarks/cheats_in_one_sandbox.py [--all] [--family FAMILY] [--json]
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

from openenv.errors import SandboxError
from openenv.rollout import Check
from openenv.sandboxes import LocalSandboxes
from openenv.sandboxes.base import Sandbox, SandboxSpec
from openenv.testing import Cheat, all_cheats


def in_one_line(check: Check) -> str:
    """Return a check as it would have to be written there: what runs and what judges share everything."""
    copies = "".join(f'cp -r {path} "$OUTPUT/files/"; ' for path in check.keep)
    return (
        f'export OUTPUT="$HOME/logs/output"; mkdir -p "$OUTPUT/files"; ({check.run}) > "$OUTPUT/stdout"; '
        f"{copies}{check.judge}"
    )


def published_reward(sandbox: Sandbox, cheat: Cheat, *, is_idle: bool = False) -> float:
    """Return what the published order pays: all in one sandbox, and the agent's processes still there."""
    task = cheat.task
    for path, text in task.files.items():
        sandbox.write_text(f"{sandbox.workdir}/{path}", text)
    for line in task.setup:
        sandbox.exec(line, cwd=sandbox.workdir, timeout=60)
    script = ":" if is_idle else "\n".join(cheat.lines)
    sandbox.exec(script, cwd=sandbox.workdir, timeout=task.agent_timeout_s, max_output=1000)
    if task.proof:  # the published order asks for no proof
        sandbox.write_text(f"{sandbox.workdir}/tests/openenv_proof.py", "def begin():\n    return lambda: None\n")
    passed = 0
    sandbox.exec(
        "sleep 1.3", cwd="/", timeout=10
    )  # the verify lines start a little later: what runs on has time to write
    for line in task.verify:
        for path, text in task.verify_files.items():
            if not sandbox.exists(f"{sandbox.workdir}/{path}"):
                sandbox.write_text(f"{sandbox.workdir}/{path}", text)
        shell = line if isinstance(line, str) else in_one_line(line)
        passed += sandbox.exec(shell, cwd=sandbox.workdir, timeout=20, max_output=1000).exit_code == 0
    reward = sandbox.exec("cat /home/user/logs/verifier/reward.txt", cwd="/", timeout=10).stdout  # it may be a pipe
    try:
        return float(reward)
    except ValueError:
        return passed / len(task.verify)


def earned(backend: LocalSandboxes, cheat: Cheat, *, is_idle: bool = False) -> float | None:
    """Return what a cheat earns in that order; None where the rollout breaks and nothing can be read."""
    try:
        with backend.open(SandboxSpec(limits=cheat.task.limits)) as sandbox:
            return published_reward(sandbox, cheat, is_idle=is_idle)
    except (SandboxError, OSError):
        return None


def can_be_run(cheat: Cheat) -> bool:
    """Return whether a cheat is after a reward, needs no model, and has a task that fits into one sandbox."""
    checks = [check for check in cheat.task.verify if isinstance(check, Check)]
    return cheat.aim == "win" and not cheat.calls_model and all(check.port is None for check in checks)


def chosen(families: list[str], *, every: bool) -> list[Cheat]:
    """Return the cheats to run."""
    cheats = [cheat for cheat in all_cheats() if can_be_run(cheat) and (not families or cheat.family in families)]
    if every:
        return cheats
    return list({cheat.family: cheat for cheat in reversed(cheats)}.values())[::-1]


def main() -> None:
    """Run cheats, and print what they earn by family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every variant, not one of each family")
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cheats = chosen(options.family, every=options.all)
    backend = LocalSandboxes()
    tasks = {cheat.task.task_id: cheat for cheat in cheats}
    with ThreadPoolExecutor(2) as pool:
        idle = dict(
            zip(tasks, pool.map(lambda cheat: earned(backend, cheat, is_idle=True), tasks.values()), strict=True)
        )
        rewards = list(pool.map(lambda cheat: earned(backend, cheat), cheats))
    if options.json:
        print(json.dumps({cheat.name: reward for cheat, reward in zip(cheats, rewards, strict=True)}, indent=2))
        return
    outcomes: dict[str, list[str]] = {}
    for cheat, reward in zip(cheats, rewards, strict=True):
        paid = reward is not None and reward > (idle[cheat.task.task_id] or 0)
        outcomes.setdefault(cheat.family, []).append("lost" if reward is None else "paid" if paid else "held")
    print("| family | cheats | paid | no reward |\n|---|---:|---:|---:|")
    for family, kinds in outcomes.items():
        print(f"| `{family}` | {len(kinds)} | {kinds.count('paid')} | {kinds.count('lost')} |")
    every = [kind for kinds in outcomes.values() for kind in kinds]
    families = sum("paid" in kinds for kinds in outcomes.values())
    print(
        f"\n{len(every)} cheats of {len(outcomes)} families: {every.count('paid')} pay, of {families} families; ",
        end="",
    )
    print(f"{every.count('lost')} end without a reward")


if __name__ == "__main__":
    main()
