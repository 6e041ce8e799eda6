"""The copy of a package that becomes a Space: which files, which Dockerfile, which README."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from pathlib import Path, PurePosixPath

import pytest
import yaml

from openenv.cli.init import Names, write_package
from openenv.packaging.hub.staging import (
    IgnoreRules,
    PackageStructureError,
    SpacePackage,
    docker_file,
    read_package,
    space_readme,
    staged_space,
)


@pytest.fixture
def maze(tmp_path: Path) -> Path:
    write_package(Names.of("maze_env"), tmp_path / "maze_env")
    return tmp_path / "maze_env"


def front_matter(text: str) -> dict[str, object]:
    _, block, _ = text.split("---\n", 2)
    data: dict[str, object] = yaml.safe_load(block)
    return data


# -- structure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__init__.py", "client.py", "README.md", "pyproject.toml", "server/app.py"])
def test_a_missing_file_is_named(maze: Path, name: str) -> None:
    (maze / name).unlink()
    with pytest.raises(PackageStructureError, match=name):
        read_package(maze)


def test_a_dockerfile_may_be_in_either_place_and_a_root_one_starts_anything(maze: Path) -> None:
    (maze / "server" / "Dockerfile").rename(maze / "Dockerfile")
    (maze / "server" / "app.py").unlink()
    assert read_package(maze).name == "maze_env"
    (maze / "Dockerfile").unlink()
    with pytest.raises(PackageStructureError, match=r"server/Dockerfile or Dockerfile"):
        read_package(maze)


@pytest.mark.parametrize(
    ("manifest", "fragment"),
    [
        ("- a list", "dictionary"),
        ("name: [", "not valid YAML"),
        ("version: 1", "name"),
        ("name: maze\nvariables: [A]", "mapping"),
        ("name: maze\nvariables: {A: [1]}", "variable A"),
        ("name: maze\nport: high", "port"),
    ],
)
def test_a_wrong_manifest_says_what_is_wrong(maze: Path, manifest: str, fragment: str) -> None:
    (maze / "openenv.yaml").write_text(manifest)
    with pytest.raises(PackageStructureError, match=fragment):
        read_package(maze)


def test_variables_are_texts_as_yaml_writes_them(maze: Path) -> None:
    (maze / "openenv.yaml").write_text("name: maze\nport: 9000\nvariables: {A: true, B: 3, C: x=y, D: }")
    package = read_package(maze)
    assert package.variables == {"A": "true", "B": "3", "C": "x=y", "D": ""}
    assert package.port == 9000


# -- ignore rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "is_folder", "excluded"),
    [
        ("*.log", "a/b/x.log", False, True),
        ("*.log", "x.log.txt", False, False),
        ("/top.txt", "top.txt", False, True),
        ("/top.txt", "a/top.txt", False, False),
        ("data/", "a/data", True, True),
        ("data/", "a/data", False, False),
        ("docs/*.md", "docs/a.md", False, True),
        ("docs/*.md", "docs/x/a.md", False, False),
        ("docs/**/a.md", "docs/a.md", False, True),
        ("docs/**/a.md", "docs/x/y/a.md", False, True),
        ("**/cache", "x/cache", True, True),
        ("out/**", "out/x/y", False, True),
        ("out/**", "out", True, False),
        ("?.txt", "a.txt", False, True),
        ("[!a].txt", "a.txt", False, False),
        ("[a-c].txt", "b.txt", False, True),
        ("./x", "x", False, True),
        ("# x", "x", False, False),
        (r"\#x", "#x", False, True),
        ("a.b", "axb", False, False),
        ("trailing   ", "trailing", False, True),
        ("", "x", False, False),
        ("/", "x", True, False),
    ],
)
def test_patterns_mean_what_they_do_in_a_gitignore(pattern: str, path: str, is_folder: bool, excluded: bool) -> None:
    assert IgnoreRules([pattern]).excludes(PurePosixPath(path), is_folder=is_folder) is excluded


def test_git_leaves_out_the_same_files(tmp_path: Path) -> None:
    chance = random.Random(4)
    parts = ["a", "b", "*", "?", "**", "a*", "*.txt", "[ab]", "[!a]", ".h", ".*", "ab", "x y", r"\[z]", "*b", "[a-b]?"]
    folders = {"a", "a/b", "b", "a/b/ab"}
    names = ["a", "b", "ab", "a.txt", ".h", "x y", "[z]"]
    paths = [place + name for place in ("", "a/", "a/b/", "b/", "a/b/ab/") for name in names]
    for folder in sorted(folders):
        (tmp_path / folder).mkdir()
    for path in set(paths) - folders:
        (tmp_path / path).touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for _ in range(60):
        lines = [
            "!" * (chance.random() < 0.25)
            + "/" * (chance.random() < 0.2)
            + "/".join(chance.choices(parts, k=chance.randint(1, 3)))
            + "/" * (chance.random() < 0.2)
            for _ in range(chance.randint(1, 4))
        ]
        (tmp_path / ".git" / "info" / "exclude").write_text("\n".join(lines))
        ask = ["git", "check-ignore", "--no-index", "--stdin", "-z"]
        shown = subprocess.run(ask, cwd=tmp_path, input="\0".join(paths), capture_output=True, text=True).stdout
        rules = IgnoreRules(lines)
        left_out = {
            path
            for path in paths
            if any(
                rules.excludes(one, is_folder=one.as_posix() in folders)
                for one in (PurePosixPath(path), *PurePosixPath(path).parents[:-1])
            )
        }
        assert left_out == set(shown.split("\0")) - {""}, lines


def test_the_last_pattern_that_matches_decides() -> None:
    rules = IgnoreRules([".*", "!.keep", "*.txt", "!a.txt", "a.txt"])
    assert not rules.excludes(PurePosixPath(".keep"), is_folder=False)
    assert rules.excludes(PurePosixPath(".env"), is_folder=False)
    assert rules.excludes(PurePosixPath("a.txt"), is_folder=False)


# -- the copy -------------------------------------------------------------------------------------------------------


def test_the_copy_has_what_a_space_needs_and_no_secrets_and_caches(maze: Path) -> None:
    for name in (".env", ".git/config", "__pycache__/x.pyc", "build/lib.py", "a.egg-info/PKG", "notes/secret.txt"):
        (maze / name).parent.mkdir(parents=True, exist_ok=True)
        (maze / name).write_text("x")
    (maze / "data").mkdir()
    (maze / "data" / ".keep").write_text("")
    with staged_space(read_package(maze), ignore=["notes/", "!.keep"]) as folder:
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert "ENV ENABLE_WEB_INTERFACE=true\nCMD" in (folder / "Dockerfile").read_text()
    assert {"Dockerfile", "README.md", "openenv.yaml", "server/app.py", "data/.keep"} <= files
    assert not [name for name in files if "secret" in name or ".env" in name or "build" in name or "egg" in name]
    assert "server/Dockerfile" not in files
    assert not folder.exists()


def test_the_copy_goes_when_the_upload_fails(maze: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.raises(KeyboardInterrupt), staged_space(read_package(maze)):
        raise KeyboardInterrupt
    assert not list((tmp_path / "tmp").iterdir())


def test_a_link_out_of_the_package_is_not_uploaded(maze: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("private")
    os.symlink(tmp_path / "key", maze / "key")
    with pytest.raises(PackageStructureError, match="key is a link"), staged_space(read_package(maze)):
        pass
    (maze / "key").unlink()
    os.symlink("README.md", maze / "README.txt")
    with staged_space(read_package(maze)) as folder:
        assert (folder / "README.txt").read_text().startswith("---")


def test_rules_that_leave_out_the_dockerfile_are_an_error(maze: Path) -> None:
    with pytest.raises(PackageStructureError, match="leave out Dockerfile"):
        with staged_space(read_package(maze), ignore=["Dockerfile"]):
            pass


# -- the Dockerfile -------------------------------------------------------------------------------------------------

STAGES = """ARG BASE_IMAGE=old:1
FROM ${BASE_IMAGE} AS builder
RUN <<EOF
CMD in a script
EOF
CMD ["not this one"]
FROM ${BASE_IMAGE}
HEALTHCHECK --interval=3s \\
  # every three seconds
  CMD curl localhost
cmd ["server"]
"""


def test_the_page_is_turned_on_before_the_command_of_the_last_stage() -> None:
    assert docker_file(STAGES, interface=True) == STAGES.replace("cmd", "ENV ENABLE_WEB_INTERFACE=true\ncmd")
    assert docker_file(STAGES) == STAGES
    assert docker_file(STAGES, interface=False) == STAGES  # a server has no page by default


def test_without_a_command_the_variable_comes_last() -> None:
    assert docker_file("FROM a\nENTRYPOINT x\n\n", interface=True).endswith("x\nENV ENABLE_WEB_INTERFACE=true\n")


def test_the_dockerfiles_own_setting_stays_unless_it_is_overridden(maze: Path) -> None:
    path = maze / "server" / "Dockerfile"
    text = path.read_text().replace("EXPOSE", "ENV ENABLE_WEB_INTERFACE=false\nEXPOSE")
    path.write_text(text)
    with staged_space(read_package(maze)) as folder:
        assert (folder / "Dockerfile").read_text().count("ENV ENABLE_WEB_INTERFACE") == 1
        assert "ENV ENABLE_WEB_INTERFACE=false\nEXPOSE" in (folder / "Dockerfile").read_text()
    with staged_space(read_package(maze), interface=True) as folder:
        assert "ENV ENABLE_WEB_INTERFACE=true\nCMD" in (folder / "Dockerfile").read_text()
    path.write_text(text.replace("false", "true"))
    with staged_space(read_package(maze), interface=False) as folder:
        assert "ENV ENABLE_WEB_INTERFACE=false\nCMD" in (folder / "Dockerfile").read_text()


def test_a_base_image_replaces_the_default_or_all_stages_of_that_image() -> None:
    assert docker_file(STAGES, base_image="new:2") == STAGES.replace("old:1", "new:2")
    text = "FROM --platform=linux/amd64 old:1 AS a\nFROM other\nFROM old:1\n"
    assert docker_file(text, base_image="new") == "FROM --platform=linux/amd64 new AS a\nFROM other\nFROM new\n"
    unused = "ARG BASE_IMAGE=x\nFROM old\nRUN echo $((1<<2)) <<here\nFROM old\n"
    assert docker_file(unused, base_image="new") == unused.replace("old", "new")
    with pytest.raises(PackageStructureError, match="one line"):
        docker_file("FROM \\\n  old\n", base_image="new")


# -- the README -----------------------------------------------------------------------------------------------------

POND = SpacePackage(Path(), "pond_env", 9000)


def test_a_readme_without_front_matter_gets_one() -> None:
    text = space_readme("# Pond\n\nbase_path: /web\n", POND)
    data = front_matter(text)
    assert data["title"] == "Pond Environment"
    assert (data["sdk"], data["app_port"], data["base_path"], data["tags"]) == ("docker", 9000, "/web", ["openenv"])
    assert text.endswith("# Pond\n\nbase_path: /web\n")


def test_front_matter_keeps_what_it_has_and_gets_what_is_missing() -> None:
    text = "---\ntitle: Mine # a comment\nbase_path: /page\ntags: [x]\n---\nbody\n---\nrule\n---\n"
    made = space_readme(text, POND)
    data = front_matter(made)
    assert data == {"title": "Mine", "base_path": "/page", "tags": ["x"], "sdk": "docker", "app_port": 9000}
    assert "# a comment" in made
    assert made.endswith("---\nbody\n---\nrule\n---\n")


def test_a_space_without_page_has_no_path_of_it() -> None:
    assert "base_path" not in front_matter(space_readme("hello", POND, interface=False))
    assert "base_path" not in front_matter(space_readme("---\ntitle: x\n---\n", POND, interface=False))


@pytest.mark.parametrize(
    ("block", "fragment"), [("sdk: gradio", "sdk: gradio"), ("a: [", "not valid YAML"), ("- a", "mapping")]
)
def test_front_matter_that_cannot_work_is_an_error(block: str, fragment: str) -> None:
    with pytest.raises(PackageStructureError, match=fragment):
        space_readme(f"---\n{block}\n---\n", POND)
