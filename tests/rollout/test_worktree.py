"""The work tree between agent and verifier: protected files come from the setup, hostile archives do no harm."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from openenv.rollout.store.archives import MAX_BYTES, UnusableWorktree, read_files
from openenv.rollout.tasks.task import PROTECTED, Patterns, Task
from openenv.rollout.verify import worktree
from openenv.rollout.verify.lookups import ancestors
from openenv.rollout.verify.worktree import VerifierHome, merge, rules_of, write_home
from openenv.rollout.verify.worktree_guard import WorktreeRules


def member(name: str, content: bytes | None = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(name)
    info.size = len(content or b"")
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def folder(name: str) -> tuple[tarfile.TarInfo, bytes | None]:
    return member(name, None, type=tarfile.DIRTYPE, mode=0o755)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes | None]:
    return member(name, None, type=kind, linkname=target)


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes | None]) -> Path:
    with tarfile.open(path, "w:") as out:
        for info, content in members:
            out.addfile(info, io.BytesIO(content) if content is not None else None)
    return path


def content(path: Path) -> dict[str, bytes | str]:
    members: dict[str, bytes | str] = {}
    with tarfile.open(path, "r:") as source:
        for info in source.getmembers():
            if info.isreg():
                members[info.name] = source.extractfile(info).read()  # type: ignore[union-attr]
            elif not info.isdir():
                members[info.name] = f"-> {info.linkname}"
    return members


def merged(
    tmp_path: Path, work: Path, baseline: Path | None = None, *, max_bytes: int = MAX_BYTES, **options: object
) -> dict[str, bytes | str]:
    target = tmp_path / "merged.tar"
    rules = WorktreeRules(**{"protected": PROTECTED, **options})  # type: ignore[arg-type]
    merge(work, baseline, target, rules, max_bytes=max_bytes)
    return content(target)


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("**/conftest.py", "conftest.py", True),
        ("**/conftest.py", "a/b/conftest.py", True),
        ("**/conftest.py", "myconftest.py", False),
        ("**/pytest/**", "pytest/x.py", True),
        ("**/pytest/**", "a/pytest/b/c", True),
        ("**/pytest/**", "pytest.txt", False),
        ("tests/*.py", "tests/a.py", True),
        ("tests/*.py", "tests/a/b.py", False),
        ("tests/**", "tests/a/b.py", True),
        ("file.?", "file.c", True),
        ("**/*.pth", "evil\n.pth", True),
    ],
)
def test_patterns_cover_what_they_say(pattern: str, name: str, covered: bool) -> None:
    assert Patterns([pattern]).cover(name) is covered


def test_no_pattern_covers_nothing() -> None:
    assert not Patterns([]).cover("conftest.py")


def test_the_agents_files_pass_and_protected_ones_do_not(tmp_path: Path) -> None:
    work = archive(
        tmp_path / "work.tar",
        folder("."),
        member("./solution.py", b"x = 1\n"),
        member("./conftest.py", b"cheat"),
        folder("./pkg"),
        member("./pkg/sitecustomize.py", b"cheat"),
        member("./pkg/__pycache__/test_x.cpython-311.pyc", b"cheat"),
        member("./tox.ini", b"cheat"),
    )
    assert merged(tmp_path, work) == {"solution.py": b"x = 1\n"}


def test_protected_files_come_back_as_the_setup_left_them(tmp_path: Path) -> None:
    baseline = archive(
        tmp_path / "base.tar",
        folder("./workdir"),
        member("./workdir/conftest.py", b"honest"),
        member("./workdir/tests/conftest.py", b"honest too"),
        member("./workdir/readme", b"not protected"),
        member("./elsewhere/conftest.py", b"not in the work folder"),
    )
    work = archive(tmp_path / "work.tar", member("./conftest.py", b"cheat"), link("./tests", "/tmp"))
    assert merged(tmp_path, work, baseline) == {"conftest.py": b"honest", "tests/conftest.py": b"honest too"}


def test_a_link_that_stands_for_a_protected_folder_is_dropped(tmp_path: Path) -> None:
    work = archive(tmp_path / "work.tar", link("./pytest", "fake"), member("./fake/__init__.py", b"kept"))
    assert merged(tmp_path, work) == {"fake/__init__.py": b"kept"}


def test_a_configuration_that_steers_pytest_is_taken_back(tmp_path: Path) -> None:
    honest = b"[project]\nname = 'x'\n"
    baseline = archive(tmp_path / "base.tar", member("./workdir/pyproject.toml", honest))
    steering = archive(
        tmp_path / "work.tar",
        member("./pyproject.toml", b"[tool.pytest.ini_options]\naddopts='--co'\n"),
        member("./sub/setup.cfg", b"[tool:pytest]\naddopts=--co\n"),
        member("./sub/pyproject.toml", b'["tool"."\\u0070ytest"]\n'),
    )
    assert merged(tmp_path, steering, baseline) == {"pyproject.toml": honest}
    plain = archive(tmp_path / "plain.tar", member("./pyproject.toml", b"[project]\nname = 'y'\n"))
    assert merged(tmp_path, plain, baseline) == {"pyproject.toml": b"[project]\nname = 'y'\n"}
    linked = archive(tmp_path / "linked.tar", member("./hidden", b"[pytest]"), link("./setup.cfg", "hidden"))
    assert merged(tmp_path, linked, baseline) == {"hidden": b"[pytest]"}
    assert "setup.cfg" in merged(tmp_path, linked, baseline, protected=())


def test_a_configuration_that_is_too_large_to_judge_is_dropped(tmp_path: Path) -> None:
    large = b"[tool.pytest.ini_options]\naddopts='--co'\n" + b"#" * 1024 * 1024
    work = archive(tmp_path / "large.tar", member("./pyproject.toml", large))
    assert merged(tmp_path, work, archive(tmp_path / "base.tar")) == {}


def test_modules_that_python_would_take_for_its_own_are_dropped_beside_the_checks(tmp_path: Path) -> None:
    work = archive(
        tmp_path / "work.tar",
        member("./json.txt", b"no module"),
        member("./calendar.py", b"at the top, but the task asks for it"),
        member("./csv.py", b"at the top, where `python -m` and `python -c` look first"),
        member("./pkg/json.py", b"in a package"),
        folder("./tests"),
        member("./tests/json.py", b"cheat"),
        member("./tests/ast.cpython-311-x86_64-linux-gnu.so", b"cheat"),
        folder("./tests/types"),
        member("./tests/types/__init__.py", b"cheat"),
        link("./tests/re", "../evil"),
        folder("./tests/code"),
        member("./tests/code/data.txt", b"a folder, no module"),
        member("./tests/helper.py", b"no such module"),
    )
    files = {"tests/check.py": "", "/home/user/x/y.py": "", "top.py": ""}
    kept = merged(tmp_path, work, verify_files=files, named=["Write /home/user/workdir/calendar.py."])
    assert sorted(kept) == ["calendar.py", "json.txt", "pkg/json.py"]  # and nothing in the verifier's own folder
    assert "tests/json.py" in merged(tmp_path, work, verify_files={"tests/check.py": ""}, protected=())
    assert "tests/json.py" in merged(tmp_path, work)
    baseline = archive(tmp_path / "base.tar", member("./workdir/csv.py", b"the setup's own"))
    assert "csv.py" in merged(tmp_path, work, baseline)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("Write answer.txt.", {"answer.txt"}),
        ("Write answer.txt and lib/tool.", {"answer.txt", "lib/tool", "lib/deep/check.o"}),
        ("Write answer.txt, and tools in lib.", {"answer.txt", "lib/tool", "lib/deep/check.o"}),
    ],
)
def test_a_folder_of_verify_files_is_the_verifiers_unless_the_task_speaks_of_it(
    tmp_path: Path, asked: str, kept: set[str]
) -> None:
    work = archive(tmp_path / "work.tar", member("answer.txt"), member("lib/tool"), member("lib/deep/check.o"))
    files = {"lib/helper.js": "", "lib/deep/check.c": ""}
    assert merged(tmp_path, work, verify_files=files, asked=[asked]).keys() == kept
    setup = archive(tmp_path / "setup.tar", folder("workdir/lib"))
    with_setup = merged(tmp_path, work, setup, verify_files=files, asked=["Write answer.txt."])
    assert with_setup.keys() == {"answer.txt", "lib/tool"}  # a folder of the setup's is one to work in


def test_a_file_without_ending_that_node_finds_first_is_dropped(tmp_path: Path) -> None:
    work = archive(tmp_path / "work.tar", member("src/lib"), member("src/other"), member("py/tool"))
    setup = archive(tmp_path / "setup.tar", folder("workdir/src"), folder("workdir/py"))
    files = {"src/lib.js": "", "py/tool.py": ""}
    assert merged(tmp_path, work, setup, verify_files=files).keys() == {"src/other", "py/tool"}
    assert "src/lib" in merged(tmp_path, work, setup, verify_files=files, asked=["Write src/lib."])


def test_new_modules_of_an_installed_environment_are_dropped_unless_asked_for(tmp_path: Path) -> None:
    site, packages = ".venv/lib/python3.11/site-packages", "node_modules"
    names = (".venv/pyvenv.cfg", f"{site}/old/__init__.py", f"{packages}/old/index.js")
    parents = {above for name in names for above in ancestors(name)} - {""}
    before = (
        *(folder(f"workdir/{above}") for above in sorted(parents)),
        *(member(f"workdir/{name}") for name in names),
    )
    setup = archive(tmp_path / "setup.tar", *before)
    new = (f"{site}/orjson.py", f"{site}/fast/__init__.py", f"{packages}/chalk/index.js", f"{packages}/.bin/x")
    work = archive(tmp_path / "work.tar", *(member(name) for name in (*names, *new, "answer.txt")))
    check = {"checks": [".venv/bin/python tests/check.py", "node tests/check.js"], "verify_files": {"tests/x": ""}}
    assert merged(tmp_path, work, setup, **check).keys() == {*names, "answer.txt"}
    asked = merged(tmp_path, work, setup, **check, asked=["Install orjson, fast and chalk."])
    assert asked.keys() == {*names, *new[:3], "answer.txt"}


def test_bytecode_of_a_protected_file_is_dropped_and_own_patterns_extend_the_default(tmp_path: Path) -> None:
    files = ("lib/score.py", "lib/score.pyc", "lib/__pycache__/score.cpython-311.pyc", "conftest.py", "lib/own.pyc")
    work = archive(tmp_path / "work.tar", *(member(name) for name in files))
    rules = rules_of(Task(instruction="x", protected=("lib/score.py",)), "/home/user/workdir")
    assert merged(tmp_path, work, protected=rules.protected).keys() == {"lib/own.pyc"}
    assert rules_of(Task(instruction="x", protected=()), "/home/user/workdir").protected == ()


def test_what_a_makefile_of_the_verifier_builds_is_dropped_unless_it_is_asked_for(tmp_path: Path) -> None:
    files = {
        "verify.mk": "check: result.txt\n\tgrep -qx 42 result.txt\nresult.txt: solve.sh out/x\n\tsh solve.sh > $@\n"
    }
    work = archive(tmp_path / "work.tar", *(member(name) for name in ("check", "result.txt", "solve.sh", "other.txt")))
    kept = merged(tmp_path, work, verify_files=files, asked=["Write solve.sh."])
    assert kept.keys() == {"solve.sh", "other.txt"}
    kept = merged(tmp_path, work, verify_files=files, asked=["Write solve.sh, and its output to result.txt."])
    assert kept.keys() == {"solve.sh", "other.txt", "result.txt"}


def test_the_verifiers_files_are_newer_than_all_others(tmp_path: Path) -> None:
    work = archive(tmp_path / "work.tar", member("check.o", mtime=2**31), member("old.c", mtime=7))
    setup = archive(tmp_path / "setup.tar", folder("workdir"), member(".cache", mtime=2**31))
    target = tmp_path / "home.tar"
    write_home(
        target, VerifierHome(baseline=setup, worktree=work, files={"workdir/check.c": "x"}, empty="logs", date=1000)
    )
    with tarfile.open(target, "r:") as home:
        dates = {info.name: info.mtime for info in home.getmembers() if info.isreg()}
    assert dates == {".cache": 999, "workdir/check.o": 999, "workdir/old.c": 7, "workdir/check.c": 1000}


def test_names_that_leave_the_tree_are_dropped(tmp_path: Path) -> None:
    work = archive(
        tmp_path / "work.tar",
        member("/etc/passwd", b"cheat"),
        member("../outside", b"cheat"),
        member("a/../../outside", b"cheat"),
        member("a/../inside", b"kept"),
        link("x", "/etc"),
        member("x/passwd", b"below a link"),
        member("dev", None, type=tarfile.CHRTYPE),
        member("pipe", None, type=tarfile.FIFOTYPE),
    )
    assert merged(tmp_path, work) == {"inside": b"kept"}


def test_hard_links_become_files(tmp_path: Path) -> None:
    work = archive(
        tmp_path / "work.tar",
        member("./a", b"data"),
        link("./b", "./a", tarfile.LNKTYPE),
        member("./conftest.py", b"hidden under a protected name"),
        link("./c", "./conftest.py", tarfile.LNKTYPE),
    )
    assert merged(tmp_path, work) == {"a": b"data", "b": b"data", "c": b"hidden under a protected name"}


def test_a_hard_link_to_a_symbolic_link_is_a_link(tmp_path: Path) -> None:
    work = archive(
        tmp_path / "work.tar",
        member("./stuff/__init__.py", b"cheat = 1"),
        link("./aa", "stuff"),
        link("./json", "./aa", tarfile.LNKTYPE),
        link("./peek", "./aa", tarfile.LNKTYPE),
    )
    assert merged(tmp_path, work) == {f"{name}/__init__.py": b"cheat = 1" for name in ("stuff", "aa", "peek")}


def test_special_bits_and_owners_do_not_pass(tmp_path: Path) -> None:
    work = archive(tmp_path / "work.tar", member("./su", b"x", mode=0o6777, uid=0, uname="root"))
    merged(tmp_path, work)
    with tarfile.open(tmp_path / "merged.tar") as source:
        info = source.getmember("su")
    assert info.mode == 0o755
    assert info.uname == ""


@pytest.mark.parametrize(
    "data",
    [b"", b"not a tar file at all" * 100, b"\0" * 100],
)
def test_what_is_no_archive_is_unusable_or_empty(tmp_path: Path, data: bytes) -> None:
    work = tmp_path / "work.tar"
    work.write_bytes(data)
    try:
        assert merged(tmp_path, work) == {}
    except UnusableWorktree:
        pass


def test_a_tree_that_is_too_large_is_unusable(tmp_path: Path) -> None:
    work = archive(tmp_path / "work.tar", member("./a", b"x" * 600), member("./b", b"x" * 600))
    with pytest.raises(UnusableWorktree, match="too large"):
        merged(tmp_path, work, max_bytes=1000)


def test_a_sparse_file_counts_with_its_whole_size(tmp_path: Path) -> None:
    info = tarfile.TarInfo("huge")
    info.size = 0
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,0"}
    info.pax_headers["GNU.sparse.size"] = str(1 << 40)
    with tarfile.open(tmp_path / "work.tar", "w:", format=tarfile.PAX_FORMAT) as out:
        out.addfile(info)
    with pytest.raises(UnusableWorktree, match="too large"):
        merged(tmp_path, tmp_path / "work.tar")


def test_a_tree_of_too_many_entries_is_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree, "MAX_MEMBERS", 3)
    work = archive(tmp_path / "work.tar", *(member(f"./{n}") for n in range(5)))
    with pytest.raises(UnusableWorktree, match="more than 3 entries"):
        merged(tmp_path, work)


def test_small_text_files_are_shown_and_others_named(tmp_path: Path) -> None:
    work = archive(
        tmp_path / "work.tar",
        member("./a.py", b"text"),
        member("./bin", b"\xff\xfe"),
        member("./d/e.txt", b"deeper"),
        member("./d/f/g.txt", b"too deep"),
        member("./long.txt", b"x" * 9000),
    )
    files = read_files(work, root="/home/user/workdir")
    assert files.texts["/home/user/workdir/a.py"] == "text"
    assert len(files.texts["/home/user/workdir/long.txt"]) == 8000
    assert sorted(files.texts) == [f"/home/user/workdir/{name}" for name in ("a.py", "d/e.txt", "long.txt")]
    assert files.others == ["/home/user/workdir/bin"]
