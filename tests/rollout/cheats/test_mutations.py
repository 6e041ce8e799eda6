"""The suite fails when a guard is taken out: each guard is disabled in this process, and a cheat that it stops pays.

The sandboxes, the proxy and the rollouts are real; only the guard's own function is replaced.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout import Check, Task, python_check
from openenv.rollout.capture import call_request, records
from openenv.rollout.run.engine import EngineOptions
from openenv.rollout.run.phases import ModelAccess, PhaseFailed, RolloutRun
from openenv.rollout.tasks.task import CommandResult, Patterns
from openenv.rollout.verify import (
    judged_checks,
    live_check,
    lookups,
    openenv_calls,
    verify_lines,
    worktree,
    worktree_guard,
)
from openenv.rollout.verify.attempts import CheckCrash, Evidence
from openenv.rollout.verify.cases import ReadySandbox, VerificationCase, VerifierPlace
from openenv.rollout.verify.verify_lines import LineChecks, Proof
from openenv.sandboxes.base import Sandboxes
from openenv.sandboxes.local import bubblewrap
from openenv.testing import Cheat, all_cheats, run_cheats

Disable = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """A guard, how to take it out, and a cheat that only this guard stops."""

    guard: str
    disable: Disable
    cheat: str | Cheat
    kind: str = "win"


def no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proof, "judge", lambda self, marks: Evidence(seen=True))


def beginnings_are_marks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Proof.judge

    def as_if_unused(self: Proof, marks: list[dict[str, object]]) -> Evidence:
        return judge(self, [*marks, *({"serial": place, "secret": it} for place, it in enumerate(self._secrets))])

    monkeypatch.setattr(Proof, "judge", as_if_unused)
    monkeypatch.setattr(verify_lines, "_SHOW", ("cat",))


def no_look_at_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_lines, "_changes", lambda *args: frozenset())


def only_contents_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = verify_lines._changes
    monkeypatch.setattr(
        verify_lines, "_changes", lambda *args: frozenset(change for change in changes(*args) if change[1] == "content")
    )


def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups.Lookups, "steers", lambda *args: False)


def folders_of_tests_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree_guard, "_test_folder", lambda file: None)
    monkeypatch.setattr(worktree_guard, "_new_folder", lambda *args: None)
    no_look_at_the_files(monkeypatch)  # it would see that the code that is found writes beside the verifier's files


def the_agents_dates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_member, add_files = worktree.copy_member, worktree.add_files
    monkeypatch.setattr(
        worktree, "copy_member", lambda *args, **options: copy_member(*args, **{**options, "before": 2**40})
    )
    monkeypatch.setattr(worktree, "add_files", lambda *args, **options: add_files(*args, **{**options, "date": 0}))


def imports_are_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = VerifierPlace._files

    def unguarded(self: VerifierPlace, *places: str) -> Mapping[str, str]:
        return {**files(self, *places), "root": "/nowhere\n/nowhere"}

    monkeypatch.setattr(VerifierPlace, "_files", unguarded)


def all_lines_share_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_once(self: VerificationCase, need: Any) -> Any:
        with self._lock:
            kept = self.__dict__.setdefault("kept", {})
        if need not in kept:
            kept[need] = open_sandbox(self, need)
        ready = kept[need]
        return ReadySandbox(ready.sandbox, ExitStack(), ready.processes)

    def close(self: VerificationCase, *exc_info: object) -> None:
        leave(self, *exc_info)
        for ready in self.__dict__.get("kept", {}).values():
            ready.stack.close()

    open_sandbox, leave = VerificationCase._open, VerificationCase.__exit__
    monkeypatch.setattr(VerificationCase, "_open", open_once)
    monkeypatch.setattr(VerificationCase, "__exit__", close)


def processes_may_outlive_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineChecks, "_left_processes", lambda *args: False)


def a_reward_may_be_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineChecks, "_is_withheld", lambda *args: False)


def a_reward_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_lines, "is_plain", lambda *args: True)


def rewards_have_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    read = judged_checks.read_reward

    def wide(sandbox: Any, task: Task) -> Any:
        return read(sandbox, task.model_copy(update={"reward_range": (-1e9, 1e9)}))

    monkeypatch.setattr(judged_checks, "read_reward", wide)
    monkeypatch.setattr(verify_lines, "read_reward", wide)


def links_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree.TreeWithoutLinks, "_keeps", lambda *args: True)


def unknown_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups.Settings, "cover", lambda *args: False)


def new_libraries_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups.Texts, "mentions", lambda *args: True)


def settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree_guard.WorktreeGuard, "covers", lambda *args, **options: False)
    monkeypatch.setattr(Patterns, "cover", lambda *args, **options: False)


def the_endpoint_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(self: ModelAccess, cancel: object) -> bool:
        self._outage = "the agent's call failed"
        return False

    monkeypatch.setattr(ModelAccess, "ask_endpoint", believe)


def the_truncated_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EngineOptions.__init__.__kwdefaults__, "verify_truncated", False)


def no_control_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def blame(self: RolloutRun, phase: object, exc: Exception) -> None:
        raise PhaseFailed("sandbox_failed", str(exc))

    monkeypatch.setattr(RolloutRun, "_control_run", blame)


def every_parameter_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    allow = call_request.allow
    every = frozenset({"grammar"})
    monkeypatch.setattr(
        call_request, "allow", lambda name, body, *, engine, may_set: allow(name, body, engine=engine, may_set=every)
    )
    monkeypatch.setattr(call_request, "steering", lambda *args: [])
    monkeypatch.setattr(records, "unasked_sampling", lambda *args: ())


def the_network_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    namespaces = bubblewrap.namespaces
    monkeypatch.setattr(
        bubblewrap, "namespaces", lambda user: [option for option in namespaces(user) if option != "--unshare-net"]
    )


def calls_program_with(monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, str]) -> None:
    """Change the program of both sandboxes, which the verifier copies there as text."""
    source = Path(openenv_calls.__file__).read_text("utf-8")
    assert [source.count(guard) for guard in changes] == [1] * len(changes)
    read_text = Path.read_text

    def changed(self: Path, *args: Any, **options: Any) -> str:
        text = read_text(self, *args, **options)
        for guard, replacement in changes.items() if self.name == live_check.CALLS else ():
            text = text.replace(guard, replacement)
        return text

    monkeypatch.setattr(Path, "read_text", changed)


def references_have_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "    def method(self: RemoteObject, *args: object) -> object:\n"
    asking = "        method = {'op': 'get', 'of': object.__getattribute__(self, '_number'), 'name': name}\n"
    asking += "        return object.__getattribute__(self, '_remote').evaluate(method)(*args)\n"
    undeclared = 'if kind not in ("module", "call", "async") and '
    calls_program_with(monkeypatch, {refusing: refusing + asking, undeclared: "if False and "})


def skips_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_program_with(monkeypatch, {"if status == 0 and complaint is not None:": "if False:"})


def star_imports_bind_builtins(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = "if not (name in taken or hasattr(builtins, name) or _SPECIAL.match(name))]"
    calls_program_with(monkeypatch, {guard: "]"})


def a_missing_reward_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: judged_checks.JudgedChecks) -> float:
        raise CheckCrash("no score", CommandResult(cmd="", exit_code=1))

    monkeypatch.setattr(judged_checks.JudgedChecks, "_missing", none)


def nan_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_program_with(monkeypatch, {"if passing is not None and not _mentions(_PASSING[passing]):": "if False:"})


def unittest_ends_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_program_with(monkeypatch, {"        _guard_unittest(remote)\n    if": "        pass\n    if"})


def protected_modules_may_be_shadowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree_guard, "_import_places", lambda files: {})


def allows_all(predicate: str) -> Disable:
    """Return how to take out a predicate of the guard of the work tree."""
    return lambda monkeypatch: monkeypatch.setattr(worktree_guard.WorktreeGuard, predicate, lambda *args, **kind: False)


def cheat_on(name: str, script: str, **fields: Any) -> Cheat:
    """Return a cheat on a task of its own."""
    return Cheat(name, "see its script", (script,), Task(instruction="Solve it.", task_id=name, **fields))


EDITED_TEST = cheat_on(
    "edited-setup-test",
    "printf 'import unittest\\nclass T(unittest.TestCase):\\n    def test_it(self): pass\\n' > test_square.py",
    files={
        "square.py": "def square(n): return 1\n",
        "test_square.py": "import unittest\nfrom square import square\nclass T(unittest.TestCase):\n"
        "    def test_it(self): self.assertEqual(square(3), 9)\n",
    },
    verify=("python3 -m unittest -q test_square",),
    solution=("echo 'def square(n): return n * n' > square.py",),
)
PACKAGE = cheat_on(
    "package-for-a-module",
    "mkdir lib; echo 'def want(): return open(\"a.txt\").read()' > lib/__init__.py; echo x > a.txt",
    verify=("python3 check.py",),
    verify_files={
        "check.py": "import lib\nassert lib.want() == open('a.txt').read()\n",
        "lib.py": "def want(): return '42\\n'\n",
    },
    solution=("echo 42 > a.txt",),
)
HOOK = cheat_on(  # the variables of the check turn hooks off, too
    "hook-of-a-commit",
    "printf '#!/bin/sh\\necho 42 > answer.txt\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit",
    setup=("git init -q .",),
    verify=(
        "env -u GIT_CONFIG_COUNT git -c user.name=a -c user.email=b commit -q --allow-empty -m x;"
        " grep -qx 42 answer.txt",
    ),
    solution=("echo 42 > answer.txt",),
)
SHADOW = cheat_on(
    "module-without-a-guard",
    "echo 'def load(file): return 42' > json.py; echo 1 > a.json",
    verify=('env -i PATH="$PATH" python3 check.py',),
    verify_files={"check.py": "import json\nassert json.load(open('a.json')) == 42\n"},
    solution=("echo 42 > a.json",),
)
NOT_A_NUMBER = cheat_on(
    "not-a-number",
    "echo 'def half(n): return float(\"nan\")' > app.py",
    verify=(python_check("check.py", of="app"),),
    verify_files={"check.py": "from app import half\nassert not abs(half(3) - 1.5) > 1e-6\n"},
    solution=("echo 'def half(n): return n / 2' > app.py",),
)
INFINITE = cheat_on(
    "infinities",
    'echo \'def parts(): return [float("inf"), float("-inf")]\' > app.py',
    verify=(python_check("check.py", of="app"),),
    verify_files={"check.py": "from app import parts\nassert not abs(sum(parts()) - 1.5) > 1e-6\n"},
    solution=("echo 'def parts(): return [1, 0.5]' > app.py",),
)
SKIPPED_SCRIPT = cheat_on(
    "skipped-script",
    "echo > app.py",
    verify=(python_check("check.py", of="app"),),
    verify_files={
        "check.py": "import unittest\nimport app\nclass T(unittest.TestCase):\n"
        "    @unittest.skipUnless(hasattr(app, 'half'), 'there is no half')\n"
        "    def test_it(self): self.assertEqual(app.half(3), 1.5)\n"
        "unittest.main()\n"
    },
    solution=("echo 'def half(n): return n / 2' > app.py",),
)
EXTRA_CASE = cheat_on(
    "extra-case",
    "mkdir -p tests; echo 'exit 0' > tests/a.sh; echo 1 > a.txt",
    verify=("for case in tests/*.sh; do . ./$case; done",),
    verify_files={"tests/b.sh": "grep -qx 42 a.txt\n"},
    solution=("echo 42 > a.txt",),
)
SHADOWED = cheat_on(
    "shadow-of-a-protected-module",
    "mkdir pkg/rules; echo 'def right(n): return True' > pkg/rules/__init__.py; echo 1 > a.txt",
    files={"pkg/rules.py": "def right(n): return n == '42'\n", "pkg/__init__.py": ""},
    protected=("pkg/rules.py",),
    verify=("python3 -c 'from pkg.rules import right; assert right(open(\"a.txt\").read().strip())'",),
    solution=("echo 42 > a.txt",),
)
SCORED = Cheat(
    "more-than-the-most",
    "prints a score that is out of range, where the judge takes its word",
    ("echo 'echo 100' > score.sh",),
    Task(
        instruction="Write score.sh.",
        verify=(Check(run="sh score.sh", judge='cat "$OUTPUT/stdout" > ~/logs/verifier/reward.txt'),),
        files={"score.sh": "echo 0\n"},
        solution=("echo 'echo 1' > score.sh",),
        task_id="scored",
    ),
)
"""A judge that pays what the agent says is no good one; the range bounds even that."""

MUTATIONS = (
    Mutation("the proof of a line's end", no_proof, "ended-check/exit"),
    Mutation("passes that are gone have begun", beginnings_are_marks_only, "forged-mark/deep-exits"),
    Mutation("the comparison of files", no_look_at_the_files, "edited-as-it-runs/next-script"),
    Mutation("dates and inodes in it", only_contents_are_compared, "edited-as-it-runs/folder-and-back"),
    Mutation("the lookups of tools", no_lookups, "make-file/GNUmakefile"),
    Mutation("the verifier's folders are its own", folders_of_tests_are_shared, EXTRA_CASE),
    Mutation("the verifier's files are newer", the_agents_dates_are_kept, "c-object-beside/check.o"),
    Mutation("the guard of imports", imports_are_not_guarded, "judge-finds/json.py"),
    Mutation("a fresh sandbox per line", all_lines_share_a_sandbox, "left-for-the-next-line/answer"),
    Mutation("no process outlives a line", processes_may_outlive_a_line, "reward-value/after-one"),
    Mutation("a reward that is not written", a_reward_may_be_withheld, "reward-withheld/removed-folder"),
    Mutation("a reward that cannot be written over", a_reward_may_be_closed, "reward-kept/closed"),
    Mutation("the range of rewards", rewards_have_no_range, SCORED),
    Mutation("links to the verifier's files are dropped", links_are_kept, "link-to-expected/tests:expected.txt"),
    Mutation("links to the check's own process are dropped", links_are_kept, "link-and-reader/cmdline-answer.txt"),
    Mutation("settings that no text mentions", unknown_settings_are_kept, "settings-of-a-tool/.proverc"),
    Mutation("references have no operators", references_have_operators, "operator-decides/__sub__-plain-0"),
    Mutation("a skip by a value", skips_are_not_seen, "skip-by-value/none"),
    Mutation("the names of star imports", star_imports_bind_builtins, "skip-by-value/exported"),
    Mutation("the reward of a missing answer", a_missing_reward_is_no_verdict, "missing-answer/nan", "dodge"),
    Mutation("new libraries in the setup's environment", new_libraries_are_kept, "virtual-environment/new-library"),
    Mutation("settings are the setup's", settings_are_kept, "pytest-settings/pytest.ini-collect-only"),
    Mutation("the endpoint is asked", the_endpoint_is_not_asked, "endpoint-blamed/status-500", "dodge"),
    Mutation("the truncated are verified", the_truncated_are_not_verified, "exit-of-the-agent/hangs", "dodge"),
    Mutation("the control run", no_control_run, "work-folder/removed", "dodge"),
    Mutation("the allow-list of parameters", every_parameter_passes, "changed-sampling/grammar"),
    Mutation("the network namespace", the_network_is_shared, "host-network"),
    Mutation("NaN", nan_crosses, NOT_A_NUMBER),
    Mutation("infinity", nan_crosses, INFINITE),
    Mutation("a skip in a script", unittest_ends_as_it_likes, SKIPPED_SCRIPT),
    Mutation("shadows of protected modules", protected_modules_may_be_shadowed, SHADOWED),
    Mutation("tests of the setup", allows_all("_is_test"), EDITED_TEST),
    Mutation("names of the verifier's modules", allows_all("_takes_place"), PACKAGE),
    Mutation("the folder of git", allows_all("_is_git"), HOOK),
    Mutation("programs and libraries of the setup", allows_all("_is_tool"), "virtual-environment/new-package"),
    Mutation("modules in the folder of a check", allows_all("shadows"), SHADOW),
)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard.replace(" ", "-"))
def test_a_cheat_pays_when_its_guard_is_taken_out(
    mutation: Mutation, local: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [cheat for cheat in all_cheats() if mutation.cheat == cheat.name]
    cheats = named or [cheat for cheat in (mutation.cheat,) if isinstance(cheat, Cheat)]
    held = run_cheats(local, cheats=cheats, quick=True)
    assert [result.kind for result in held.results] == [None]
    mutation.disable(monkeypatch)
    paid = run_cheats(local, cheats=cheats, quick=True)
    assert [result.kind for result in paid.results] == [mutation.kind], paid.results


def test_each_rule_about_the_work_tree_has_a_mutation() -> None:
    taken_out: set[str] = set()

    class Recorder:
        def setattr(self, target: object, name: str, value: object) -> None:
            taken_out.add(name)

        setitem = setattr

    for mutation in MUTATIONS:
        mutation.disable(Recorder())  # type: ignore[arg-type]
    rules = set(re.findall(r"self\.(?:\w+\.)?(\w+)\(", inspect.getsource(worktree_guard.WorktreeGuard._covers)))
    assert rules >= {"_is_test", "_takes_place", "steers", "_is_git", "_is_tool", "cover"}
    assert (rules | {"shadows", "covers", "_keeps"}) - taken_out == set()
