"""What the cheats of the suite earn in the order of the published package: one sandbox for agent, verifier and reward.

`openenv` 0.10.0 has no verifier of its own: a session's `verify()` is its author's, and its `opencode_env` runs setup,
agent and verify lines in one sandbox, as one user, and takes the number in `logs/verifier/reward.txt` for the reward.
That order is run here with this package's sandboxes and tasks, so that nothing but the order differs.

    python benchmarks/cheats_in_one_sandbox.py [--family FAMILY] [--json]
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


def published_reward(sandbox: Sandbox, cheat: Cheat) -> float:
    """Return what the published order pays: all in one sandbox, and the agent's processes still there."""
    task = cheat.task
    for path, text in task.files.items():
        sandbox.write_text(f"{sandbox.workdir}/{path}", text)
    for line in task.setup:
        sandbox.exec(line, cwd=sandbox.workdir, timeout=60)
    script = "\n".join(cheat.lines)
    sandbox.exec(script, cwd=sandbox.workdir, timeout=task.agent_timeout_s, max_output=1000)
    if task.proof:  # the published order asks for no proof
        sandbox.write_text(f"{sandbox.workdir}/tests/openenv_proof.py", "def begin():\n    return lambda: None\n")
    passed = 0
    sandbox.exec("sleep 1.3", cwd="/")  # the verify lines start a little later: what runs on has time to write
    for line in task.verify:
        for path, text in task.verify_files.items():
            if not sandbox.exists(f"{sandbox.workdir}/{path}"):
                sandbox.write_text(f"{sandbox.workdir}/{path}", text)
        shell = line if isinstance(line, str) else in_one_line(line)
        passed += sandbox.exec(shell, cwd=sandbox.workdir, timeout=20, max_output=1000).exit_code == 0
    reward = sandbox.exec("cat /home/user/logs/verifier/reward.txt", cwd="/").stdout
    try:
        return float(reward)
    except ValueError:
        return passed / len(task.verify)


def earned(backend: LocalSandboxes, cheat: Cheat) -> float | None:
    """Return what a cheat earns in that order; None where the rollout breaks and nothing can be read."""
    try:
        with backend.open(SandboxSpec(limits=cheat.task.limits)) as sandbox:
            return published_reward(sandbox, cheat)
    except (SandboxError, OSError):
        return None


def main() -> None:
    """Run the cheats that need no model, and print what they earn by family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cheats = [
        cheat
        for cheat in all_cheats()
        if not cheat.calls_model and (not options.family or cheat.family in options.family)
    ]
    backend = LocalSandboxes()
    with ThreadPoolExecutor(2) as pool:
        rewards = dict(
            zip((cheat.name for cheat in cheats), pool.map(lambda cheat: earned(backend, cheat), cheats), strict=True)
        )
    if options.json:
        print(json.dumps(rewards, indent=2))
        return
    families: dict[str, list[float | None]] = {}
    for name, reward in rewards.items():
        families.setdefault(name.partition("/")[0], []).append(reward)
    print(f"{'family':32} cheats  paid  lost")
    for family, some in families.items():
        paid = sum(reward is not None and reward != 0 for reward in some)
        print(f"{family:32} {len(some):6} {paid:5} {sum(reward is None for reward in some):5}")
    values = list(rewards.values())
    paid, lost = sum(value is not None and value != 0 for value in values), values.count(None)
    print(f"{len(values)} cheats: {paid} paid, {lost} ended without a reward")


if __name__ == "__main__":
    main()
