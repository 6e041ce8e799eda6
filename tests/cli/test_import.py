"""`openenv import`: environments of ORS and verifiers are found in source code, and packages are made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from openenv.cli.__main__ import build
from openenv.cli.importers import DEFAULT_IMPORTERS, EnvironmentImporter, ImporterRegistry
from openenv.cli.importers.base import collect_source_dependencies, import_root, module_path
from openenv.env.manifest import manifest_problems

RUN = 'raise SystemExit("I was run")\n'
ORS = """
from ors import Environment, TextBlock, ToolOutput, tool

class Sums(Environment):
    @tool
    def submit(self, answer: Answer) -> ToolOutput: ...

    @tool(shared=True)
    async def hint(self) -> ToolOutput: ...

    @tool(shared=False)
    def of_some_tasks(self) -> ToolOutput: ...

    def helper(self): ...
"""
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Words"]

class Words(vf.Taskset[Word, vf.TasksetConfig]):
    pass
"""
CLASSIC = "import verifiers as vf\n\ndef load_environment(**kwargs):\n    return vf.SingleTurnEnv()\n"
PROJECT = """
[build-system]
requires = ["hatchling"]

[project]
name = "x"
dependencies = [
  "ors-sdk>=0.1",  # pinned
  'httpx[http2]>=0.27',
]

[tool.other]
dependencies = ["none"]
"""
Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Write a source tree."""

    def write(files: dict[str, str], name: str = "source") -> Path:
        for place, text in files.items():
            path = tmp_path / name / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(build(["import"]), ["import", *map(str, arguments)], env={"COLUMNS": "200"})


def found(source: Path, source_type: str | None = None) -> list[str]:
    every = ImporterRegistry(DEFAULT_IMPORTERS).detect(source, source_type)
    return [f"{one.source_type} {one.qualified_name}" for _, one in every]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (ORS, ["Sums"]),
        ("import ors\nclass A(ors.Environment): ...\nclass B(A): ...\nclass C: ...\n", ["A", "B"]),
        ("from openreward.environments import Environment as Base\nclass A(Base): ...\n", ["A"]),
        ("import openreward.environments.environment as e\nclass A(e.Environment): ...\n", ["A"]),
        ("from openenv import Environment\nclass A(Environment): ...\n", []),
        ("from .ors import Environment\nclass A(Environment): ...\n", []),
        ("class A(", []),
    ],
)
def test_classes_on_the_base_class_of_ors_are_found(text: str, names: list[str], tree: Tree) -> None:
    assert found(tree({"env.py": text})) == [f"ors env:{name}" for name in names]


def test_a_taskset_is_found_where_it_is_exported(tree: Tree) -> None:
    package = {
        "words/__init__.py": 'from words.taskset import Words\n\n__all__ = ["Words"]\n',
        "words/taskset.py": TASKSET,
    }
    assert found(tree(package)) == ["verifiers words:Words"]
    assert found(tree({"words.py": TASKSET}, "flat")) == ["verifiers words:Words"]
    assert found(tree({"words.py": TASKSET.replace('__all__ = ["Words"]', "")}, "hidden")) == []


def test_modules_have_the_names_by_which_they_import_each_other(tree: Tree) -> None:
    source = tree({"src/pkg/__init__.py": "", "src/pkg/env.py": "", "top.py": ""})
    assert module_path(source, source / "src/pkg/env.py") == "pkg.env"
    assert import_root(source, source / "src/pkg/env.py") == source / "src"
    assert module_path(source, source / "top.py") == "top"
    package = tree({"__init__.py": "", "env.py": ""}, "whole")
    assert module_path(package, package / "env.py") == "whole.env"
    assert import_root(package, package / "env.py") == package.parent


def test_a_package_is_made_of_an_ors_class_without_running_it(tree: Tree, tmp_path: Path) -> None:
    files = {
        "env.py": RUN + ORS,
        "data/tasks.json": "[]",
        "pyproject.toml": PROJECT,
        "requirements.txt": "# none\n-r more.txt\nopenenv>=0.10\nnumpy\nORS_SDK\n",
        ".env": "KEY=secret",
        "deploy_secrets.json": "{}",
        ".git/config": "",
        "__pycache__/env.pyc": "",
    }
    done = run(tree(files), "--name", "sums_env", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "env:Sums (ors)" in done.stdout
    assert ".env, deploy_secrets.json" in done.stderr
    folder = tmp_path / "out" / "sums_env"
    vendored = sorted(path.relative_to(folder).as_posix() for path in (folder / "vendor").rglob("*") if path.is_file())
    assert vendored == [
        "vendor/source/data/tasks.json",
        "vendor/source/env.py",
        "vendor/source/pyproject.toml",
        "vendor/source/requirements.txt",
    ]
    assert not (folder / "models.py").exists()
    manifest = yaml.safe_load((folder / "openenv.yaml").read_text())
    assert manifest_problems(manifest) == []
    assert manifest["validation"]["capabilities"]["declared_tools"] == ["hint", "submit"]
    requirements = (folder / "server" / "requirements.txt").read_text().split("\n")
    assert requirements == ["openenv>=0.11.0", "uvicorn>=0.34", "ors-sdk>=0.1", "httpx[http2]>=0.27", "numpy", ""]
    assert '  "httpx[http2]>=0.27",\n' in (folder / "pyproject.toml").read_text()
    wrapper = (folder / "server" / "sums_env_environment.py").read_text()
    assert 'ors_environment(import_module("env").Sums)' in wrapper
    assert '"vendor/source"' in wrapper
    for path in folder.rglob("*"):
        if path.is_file() and "vendor" not in path.parts:
            text = path.read_text()
            assert "__SOURCE" not in text, path
            assert "__ENV_" not in text, path
            if path.suffix == ".py":
                compile(text, str(path), "exec")


def test_a_source_that_is_a_package_keeps_its_name(tree: Tree, tmp_path: Path) -> None:
    source = tree({"__init__.py": TASKSET}, "words")
    assert run(source, "-n", "words_env", "-o", tmp_path / "out").exit_code == 0
    folder = tmp_path / "out" / "words_env"
    assert (folder / "vendor" / "words" / "__init__.py").is_file()
    wrapper = (folder / "server" / "words_env_environment.py").read_text()
    assert '"taskset": {"id": "words"}' in wrapper
    assert 'parents[1] / "vendor")' in wrapper
    assert "verifiers>=0.4" in (folder / "server" / "requirements.txt").read_text()


def test_a_file_is_imported_under_its_own_name_by_default(tree: Tree, tmp_path: Path) -> None:
    source = tree({"Sum-Game.py": ORS}) / "Sum-Game.py"
    done = run(source, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "sum_game" / "vendor" / "Sum_Game" / "Sum-Game.py").is_file()


TWO = {"a.py": ORS, "b.py": ORS.replace("Sums", "Products")}


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"a.py": "x = 1"}, (), "no environment of ors or verifiers"),
        ({"a.py": ORS}, ("--type", "verifiers"), "no environment of verifiers"),
        ({"a.py": ORS}, ("--type", "gym"), "ors, verifiers"),
        ({"a.py": ORS}, ("--env-class", "Sum"), "did you mean Sums?"),
        ({"a.py": ORS}, ("--env-class", "Zebra"), "there are a:Sums"),
        ({"a.py": ORS}, ("--name", "no-name"), "not a valid identifier"),
        (TWO, (), "--env-class: a:Sums, b:Products"),
        ({"a.py": CLASSIC}, (), "before verifiers 0.4"),
        ({"Words.py": TASKSET}, (), "rename Words"),
        ({"a.py": ORS, "pyproject.toml": "[project]\ndependencies = [1\n"}, (), "cannot be read"),
    ],
)
def test_what_cannot_be_imported_is_said_and_leaves_nothing(
    files: dict[str, str], options: tuple[str, ...], message: str, tree: Tree, tmp_path: Path
) -> None:
    done = run(tree(files), "-o", tmp_path / "out", *options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_one_of_several_is_chosen_by_its_name(tree: Tree, tmp_path: Path) -> None:
    assert run(tree(TWO), "-o", tmp_path, "-n", "one", "--env-class", "Products").exit_code == 0
    assert run(tree(TWO), "-o", tmp_path, "-n", "two", "--env-class", "a:Sums").exit_code == 0
    assert 'import_module("b").Products' in (tmp_path / "one/server/one_environment.py").read_text()


def test_nothing_is_written_over(tree: Tree, tmp_path: Path) -> None:
    source = tree({"a.py": ORS})
    (tmp_path / "out" / "mine").mkdir(parents=True)
    (tmp_path / "out" / "mine" / "file").write_text("kept")
    done = run(source, "-o", tmp_path / "out", "-n", "mine")
    assert (done.exit_code, "not empty" in done.stderr) == (2, True)
    assert [path.name for path in (tmp_path / "out" / "mine").iterdir()] == ["file"]
    assert run(tmp_path / "nowhere").exit_code == 2


@pytest.mark.parametrize(
    "files",
    [
        {'x"); raise SystemExit("I was run.py': ORS},
        {"a'b.py": ORS},
        {"a\nb.py": ORS},
        {'"""; raise SystemExit("I was run"); """/a.py': ORS},
        {"back\\slash/a.py": ORS},
    ],
)
def test_names_of_files_that_would_become_code_are_refused(files: dict[str, str], tree: Tree, tmp_path: Path) -> None:
    done = run(tree(files), "-o", tmp_path / "out", "-n", "mine")
    assert done.exit_code == 2, done.output
    assert "cannot be part of an import" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_names_of_files_are_printed_without_escapes(tree: Tree, tmp_path: Path) -> None:
    done = run(tree({"a.py": ORS, "\x1b[2J.pem": "secret"}), "-o", tmp_path / "out", "-n", "mine")
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "\\x1b[2J.pem" in done.output


def test_links_out_of_a_tree_are_not_followed(tree: Tree, tmp_path: Path) -> None:
    source = tree({"a.py": ORS})
    (tmp_path / "outside.txt").write_text("private")
    (source / "link.txt").symlink_to(tmp_path / "outside.txt")
    assert run(source, "-o", tmp_path / "out", "-n", "mine").exit_code == 0
    assert not (tmp_path / "out" / "mine" / "vendor" / "source" / "link.txt").exists()


def test_importers_have_the_published_shape() -> None:
    assert [importer.source_type for importer in DEFAULT_IMPORTERS] == ["ors", "verifiers"]
    assert all(isinstance(importer, EnvironmentImporter) for importer in DEFAULT_IMPORTERS)


def test_dependencies_are_those_of_the_project_and_not_of_its_tools(tree: Tree) -> None:
    assert collect_source_dependencies(tree({"pyproject.toml": PROJECT})) == ["ors-sdk>=0.1", "httpx[http2]>=0.27"]
    assert collect_source_dependencies(tree({"x.py": ""}, "none")) == []
