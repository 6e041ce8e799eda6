"""Links of an agent: the verifier sees copies of their targets, and links that the setup made or the task declares."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout import Check, Outcome, Task, run_rollout
from openenv.rollout.agents.builtin import Shell
from openenv.rollout.store.archives import MAX_BYTES, UnusableWorktree
from openenv.rollout.tasks.task import PROTECTED
from openenv.rollout.verify import worktree
from openenv.rollout.verify.worktree import merge
from openenv.rollout.verify.worktree_guard import WorktreeRules
from openenv.sandboxes.base import Sandboxes

FOLDER = None
Tree = Mapping[str, bytes | str | None]
"""A file's content, a link's target, or `FOLDER`."""


def packed(path: Path, files: Tree) -> Path:
    with tarfile.open(path, "w:") as out:
        for name, value in files.items():
            entry = tarfile.TarInfo(name)
            if value is FOLDER:
                entry.type = tarfile.DIRTYPE
            elif isinstance(value, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, value
            else:
                entry.size, entry.mode = len(value), 0o755
            out.addfile(entry, io.BytesIO(value) if isinstance(value, bytes) else None)
    return path


def merged(tmp_path: Path, files: Tree, before: Tree | None = None, **options: Any) -> dict[str, bytes | str]:
    """Merge a work tree over a baseline; return the contents of files and the targets of links."""
    work, target = packed(tmp_path / "work.tar", files), tmp_path / "merged.tar"
    baseline = None
    if before is not None:
        baseline = packed(tmp_path / "base.tar", {f"workdir/{name}": value for name, value in before.items()})
    max_bytes = options.pop("max_bytes", MAX_BYTES)
    rules = WorktreeRules(**{"protected": PROTECTED, **options})
    merge(work, baseline, target, rules, max_bytes=max_bytes)
    with tarfile.open(target) as source:
        return {
            entry.name: entry.linkname if entry.issym() else source.extractfile(entry).read()  # type: ignore[union-attr]
            for entry in source
            if not entry.isdir()
        }


@pytest.mark.parametrize(
    ("target", "copies"),
    [
        ("data/a", {"link": b"A"}),
        ("./data/../data/a", {"link": b"A"}),
        ("../workdir/data/a", {"link": b"A"}),
        ("/home/user/workdir/data/a", {"link": b"A"}),
        ("chain", {"link": b"A"}),
        ("data", {"link/a": b"A", "link/deep/b": b"B", "link/deep/c": b"A"}),
        ("data/deep", {"link/b": b"B", "link/c": b"A"}),
        ("nowhere", {}),
        ("link", {}),
        (".", {}),
        ("..", {}),
        ("/", {}),
        ("/etc/passwd", {}),
        ("/proc/self/cmdline", {}),
        ("/proc/self/cwd/data/a", {}),
        ("/dev/null", {}),
        ("/dev/stdin", {}),
        ("/tmp/../home/user/workdir/data/a", {}),
        ("../../user/workdir/data/a", {"link": b"A"}),
        ("/home/user/workdirs/data/a", {}),
    ],
)
def test_a_link_becomes_a_copy_of_its_target_or_is_dropped(
    tmp_path: Path, target: str, copies: dict[str, bytes]
) -> None:
    files = {"data": FOLDER, "data/a": b"A", "data/deep/b": b"B", "data/deep/c": "../a", "chain": "data/a"}
    rest = {"data/a": b"A", "data/deep/b": b"B", "data/deep/c": b"A", "chain": b"A"}
    assert merged(tmp_path, {**files, "link": target}) == {**rest, **copies}


def test_a_copy_keeps_the_mode_of_its_target(tmp_path: Path) -> None:
    merged(tmp_path, {"run.sh": b"true", "link": "run.sh"})
    with tarfile.open(tmp_path / "merged.tar") as source:
        assert source.getmember("link").mode == 0o755


def test_folders_that_link_to_each_other_end(tmp_path: Path) -> None:
    tree = merged(tmp_path, {"a/f": b"1", "a/x": "../b", "b/g": b"2", "b/y": "../a", "a/up": "..", "a/here": "."})
    assert tree == {"a/f": b"1", "a/x/g": b"2", "b/g": b"2", "b/y/f": b"1"}


def test_links_of_the_setup_and_declared_links_stay(tmp_path: Path) -> None:
    before: Tree = {"now": "v1", "out": "/var/data", "other": "v1", "v1/a": b"1"}
    after: Tree = {**before, "other": "v2", "v2/a": b"2", "sub/mine": "../v1/a", "sub/env": "/proc/self/environ"}
    links = {"now": "v1", "out": "/var/data"}
    files = {"v1/a": b"1", "v2/a": b"2", "other/a": b"2"}
    assert merged(tmp_path, after, before) == {**links, **files, "sub/mine": b"1"}
    declared = merged(tmp_path, after, before, keeps_links=["other", "sub/**"])
    assert declared == {**links, "v1/a": b"1", "v2/a": b"2", "other": "v2", "sub/mine": "../v1/a"}


def test_programs_that_find_their_libraries_through_a_link_keep_it(tmp_path: Path) -> None:
    files: Tree = {
        "env/pyvenv.cfg": b"",
        "env/lib/x.txt": b"",
        "env/lib64": "lib",
        "env/bin/python": "/usr/bin/python3",
        "env/bin/python3": "python",
        "env/bin/sh": "/bin/sh",
        "env/bin/python3.9": "/etc/passwd",
        "env/bin/python3.8": "/tmp/bin/python3",
        "bin/python": "/usr/bin/python3",
        "node_modules/tool/cli.js": b"",
        "node_modules/.bin/tool": "../tool/cli.js",
        "node_modules/.bin/away": "../../mine.js",
        "mine.js": b"",
    }
    asked = ["Make env/, node_modules/.bin/tool and node_modules/.bin/away."]
    tree = merged(tmp_path, files, asked=asked, verify_files={"tests/x": ""})
    assert {name: end for name, end in tree.items() if isinstance(end, str)} == {
        "env/lib64": "lib",
        "env/bin/python": "/usr/bin/python3",
        "env/bin/python3": "python",
        "node_modules/.bin/tool": "../tool/cli.js",
    }
    assert tree["node_modules/.bin/away"] == b""


def test_a_bomb_of_links_makes_the_tree_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb: dict[str, bytes | str | None] = {"d0/file": b"x" * 1000}
    for depth in range(1, 30):
        bomb |= {f"d{depth}/a": f"../d{depth - 1}", f"d{depth}/b": f"../d{depth - 1}"}
    with pytest.raises(UnusableWorktree, match="too large"):
        merged(tmp_path, bomb, max_bytes=100_000)
    monkeypatch.setattr(worktree, "MAX_MEMBERS", 500)
    with pytest.raises(UnusableWorktree, match="with copies of linked folders"):
        merged(tmp_path, bomb)


def test_many_links_to_a_large_folder_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree, "MAX_MEMBERS", 2000)
    nested = {f"{'d/' * depth}{n}": b"" for depth in range(1, 20) for n in range(50)}
    links: Tree = {f"{'d/' * depth}0link": f"d/{'d/' * depth}" for depth in range(1, 18)}
    with pytest.raises(UnusableWorktree, match="with copies of linked folders"):
        merged(tmp_path, {**nested, **links, **{f"more{n}": "d" for n in range(10)}})


# ---- honest solutions, in real sandboxes ----


@dataclass(frozen=True)
class Honest:
    """A task and a solution that leaves links, which must earn the whole reward."""

    name: str
    lines: str
    verify: str | Check
    options: Mapping[str, Any] = field(default_factory=dict)


KEEP = Check(run="cat answer.txt; mkdir -p out; cp answer.txt out/", judge='grep -qx 42 "$OUTPUT/files/out/answer.txt"')
PACKAGE = "mkdir -p pkg; echo 'def f(): return 42' > pkg/core.py; touch pkg/__init__.py"
IS_42 = "grep -qx 42 answer.txt"
HONEST = (
    Honest("file", "echo 42 > a; ln -s a answer.txt", IS_42),
    Honest("hard-link", "echo 42 > a; ln a answer.txt", IS_42),
    Honest("absolute", 'echo 42 > a; ln -s "$PWD/a" answer.txt', IS_42),
    Honest("chain", "echo 42 > a; ln -s a b; ln -s b c; ln -s c answer.txt", IS_42),
    Honest("folder", "mkdir v2; echo 42 > v2/a; ln -s v2 latest", "grep -qx 42 latest/a"),
    Honest("through-a-folder", "mkdir v2; echo 42 > v2/a; ln -s v2 l; ln -s l/a answer.txt", IS_42),
    Honest("up", "mkdir -p x/y; echo 42 > a; ln -s ../../a x/y/answer", "grep -qx 42 x/y/answer"),
    Honest("mode", "printf '#!/bin/sh\\necho 42\\n' > r; chmod 755 r; ln -s r run", '[ "$(./run)" = 42 ]'),
    Honest("judged", "mkdir d; echo 42 > d/a; ln -s d/a answer.txt", KEEP.model_copy(update={"keep": ("out",)})),
    Honest("module", f"{PACKAGE}; ln -s core.py pkg/a.py", "python3 -c 'import pkg.a as a; assert a.f() == 42'"),
    Honest("package", f"{PACKAGE}; ln -s pkg lib42", "python3 -c 'import lib42.core as a; assert a.f() == 42'"),
    Honest("setup-link", "echo 42 > v1/a", "test -L now && grep -qx 42 now/a", {"setup": "mkdir v1; ln -s v1 now"}),
    Honest("setup-link-moved", "mkdir v; echo 42 > v/a; ln -sfn v now", "grep -qx 42 now/a", {"setup": "ln -s x now"}),
    Honest("declared", "echo 42 > a; ln -s a l", '[ "$(readlink l)" = a ]', {"keeps_links": ("l",)}),
    Honest("declared-folder", "mkdir b; ln -s ../a b/l; echo 42 > a", "test -L b/l", {"keeps_links": ("b/**",)}),
    Honest("besides", "echo 42 > answer.txt; ln -s / root; ln -s . here; ln -s x x", IS_42),
    Honest("written", "echo 42 > a; ln -s a b", "echo 1 > b; grep -qx 42 a"),
    Honest("workspace", "mkdir -p packages/m node_modules; echo 42 > packages/m/x; ln -s ../packages/m node_modules/m",
           "grep -qx 42 node_modules/m/x"),
    Honest("make", "printf 'all:\\n\\t@cat data\\n' > build.mk; echo 42 > d; ln -s d data; ln -s build.mk Makefile",
           'grep -q cat Makefile && [ "$(cat data)" = 42 ]'),
    Honest("git", "git init -q .; echo 42 > a; ln -s a b; git add -A; git -c user.name=a -c user.email=b commit -qm x",
           'git show HEAD:a | grep -qx 42', {"needs": "git"}),
)  # fmt: skip


@pytest.fixture
def reward_of(local: Sandboxes) -> Callable[[Honest], Outcome]:
    def run(honest: Honest) -> Outcome:
        options = {name: value for name, value in honest.options.items() if name != "needs"}
        task = Task(instruction="Solve it.", verify=(honest.verify,), **options)
        return run_rollout(task, agent=Shell([honest.lines]), sandbox=local)

    return run


@pytest.mark.parametrize(
    "honest",
    [
        pytest.param(one, id=one.name, marks=[] if number % 4 == 0 else [pytest.mark.slow])
        for number, one in enumerate(HONEST)
    ],
)
def test_an_honest_solution_with_links_keeps_its_reward(reward_of: Callable[[Honest], Outcome], honest: Honest) -> None:
    outcome = reward_of(honest)
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.verify_results


def test_a_virtual_environment_of_the_agent_still_runs(reward_of: Callable[[Honest], Outcome]) -> None:
    lines = (
        "python3 -m venv --without-pip env; for d in env/lib/python3*/site-packages; do echo x = 42 > $d/m.py; done;"
        " cd env; ln -s bin/python py"
    )
    verify = "env/bin/python -c 'import m; assert m.x == 42' && test ! -e env/py"
    outcome = reward_of(Honest("venv", lines, verify, {"solution": "python3 -m venv env/"}))
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.verify_results


def test_a_bomb_of_links_is_a_failure_of_the_agent(
    reward_of: Callable[[Honest], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worktree, "MAX_MEMBERS", 2000)
    lines = (
        "mkdir d0; echo 42 > d0/x; for n in $(seq 40); do mkdir d$n; ln -s ../d$((n-1)) d$n/a; cp -P d$n/a d$n/b; done"
    )
    outcome = reward_of(Honest("bomb", lines, "test -e d0/x"))
    assert (outcome.status, outcome.reward) == ("policy_failed", 0.0), outcome.error
