"""Every layout of `folder_layouts.py`: loaded, served, and validated."""

from __future__ import annotations

import json
import site
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import openenv
from folder_layouts import LAYOUTS, LOAD, Layout, not_played
from openenv import GenericEnvClient
from openenv.server.author_frames import install_hint
from openenv.server.folders import FolderError, find_app

some = pytest.mark.parametrize("name", LAYOUTS)


def test_there_are_sixty_layouts_and_no_two_are_the_same(tmp_path: Path) -> None:
    written = set()
    for number, layout in enumerate(LAYOUTS.values()):
        home = tmp_path / str(number)
        layout.write(home)
        files = [path for path in home.rglob("*") if path.is_file()]
        written.add(frozenset((path.relative_to(home), path.read_text()) for path in files))
    assert len(written) == len(LAYOUTS) >= 60


def test_every_layout_is_loaded_and_can_be_played(tmp_path: Path) -> None:
    folders = []
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        home = tmp_path / str(number)
        folders.append([name, str(home / "installed"), str(layout.write(home))])
    done = subprocess.run(
        [sys.executable, "-c", LOAD], input=json.dumps(folders), capture_output=True, text=True, check=True, timeout=300
    )
    assert not_played(done.stdout, LAYOUTS) == {}, done.stderr


@pytest.mark.slow_but_for("its package in a method")  # imports it at the first reset, long after loading
@some
def test_a_layout_is_served(name: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    target = LAYOUTS[name].write(tmp_path)
    served = command("serve", str(target), "--port", "0", PYTHONPATH=_path(tmp_path))
    with GenericEnvClient(served.url).sync() as env:
        assert env.reset().observation["place"] == "start"
        assert env.step({"where": "east"}).observation["place"] == "east"


@pytest.mark.slow
@some
def test_a_layout_is_validated(name: str, tmp_path: Path, openenv_command: Callable[..., Any]) -> None:
    target = LAYOUTS[name].write(tmp_path)
    done = openenv_command("validate", str(target), "--level", "runtime", "--json", PYTHONPATH=_path(tmp_path))
    results = {result["check_id"]: result["status"] for result in json.loads(done.stdout)["results"]}
    failed = {check for check, status in results.items() if status not in ("pass", "skip")}
    assert results["runtime.startup"] == "pass"
    assert failed <= {"static.manifest", "static.layout", "static.entry_point"}, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--runner=process", "--workers=2"])
@pytest.mark.parametrize(
    "name",
    [
        *("top", "relative", "dash, own name", "src, package, dash", "by the names of two above"),
        "its package in a method",
    ],
)
def test_other_processes_find_the_folders_modules(
    name: str, option: str, tmp_path: Path, command: Callable[..., Any]
) -> None:
    served = command("serve", str(LAYOUTS[name].write(tmp_path)), "--port", "0", option, PYTHONPATH=_path(tmp_path))
    with GenericEnvClient(served.url).sync() as env:
        env.reset()
        assert env.step({"where": "west"}).observation["place"] == "west"


@pytest.mark.slow
def test_a_virtual_environment_in_the_folder_is_not_part_of_it(tmp_path: Path) -> None:
    layout = LAYOUTS["relative"]
    folder = replace(layout, imports=(f"import counted\n{layout.imports[0]}", layout.imports[1])).write(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True)
    [packages] = (folder / ".venv").glob("lib/*/site-packages")
    (packages / "others.pth").write_text("\n".join([str(Path(openenv.__file__).parents[1]), *site.getsitepackages()]))
    (packages / "counted.py").write_text("print('imported once')\n")
    done = subprocess.run(
        [str(folder / ".venv" / "bin" / "python"), "-c", LOAD],
        input=json.dumps([["one", str(tmp_path / "installed"), str(folder)]]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["imported once", '["one", "south"]'], "attempts that fail forget only own code"


def _path(home: Path) -> str:
    return f"{home / 'installed'}:{Path(openenv.__file__).parents[1]}"


# -- which application it is ----------------------------------------------------------------------------------------


def test_a_repository_of_several_environments_asks_which(tmp_path: Path) -> None:
    for name in ("maze_env", "hall_env"):
        Layout(folder=f"repo/envs/{name}").write(tmp_path)
    with pytest.raises(FolderError, match=r"several environments; name one of envs/hall_env, envs/maze_env"):
        find_app(tmp_path / "repo")


def test_two_applications_below_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        Layout(folder="repo", code=name, manifest="").write(tmp_path)
    with pytest.raises(FolderError, match=r"name one of one/server/app.py, two/server/app.py"):
        find_app(tmp_path / "repo")


def test_a_named_application_is_meant_even_among_others(tmp_path: Path) -> None:
    for name in ("one", "two"):
        Layout(folder="repo", code=name, named="hall_env.server.app:app").write(tmp_path)
    app = find_app(tmp_path / "repo")
    assert (app.module, app.file) == ("hall_env.server.app", None)


def test_programs_and_tests_are_no_applications(tmp_path: Path) -> None:
    for name in ("main.py", "tests/app.py", ".venv/app.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("app = 1\n" if "/" in name else "from openenv import create_app\nprint('hello')\n")
    with pytest.raises(FolderError, match=r"no application in server/app.py, app.py or main.py"):
        find_app(tmp_path)


def test_a_module_that_is_not_there_is_noted(tmp_path: Path) -> None:
    app = find_app(LAYOUTS["a module that is not there"].write(tmp_path))
    assert app.note is not None
    assert "says that the application is 'maze.main:app'" in app.note
    assert "server/app.py is served" in app.note


@pytest.mark.parametrize("place", ["at the top", pytest.param("in the constructor", marks=pytest.mark.slow)])
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    place: str, tmp_path: Path, openenv_command: Callable[..., Any]
) -> None:
    layout = LAYOUTS["top"]
    target = layout.write(tmp_path)
    if place == "at the top":
        rules = "import cv2\n" + (target / layout.rules).read_text()
    else:
        rules = (target / layout.rules).read_text().replace("super().__init__()", "import cv2")
    (target / layout.rules).write_text(rules)
    missing = "raise ModuleNotFoundError(\"No module named 'cv2'\", name='cv2')\n"  # as where it is not installed
    (tmp_path / "installed").mkdir(exist_ok=True)
    (tmp_path / "installed" / "cv2.py").write_text(missing)
    done = openenv_command("serve", str(target), "--port", "0", PYTHONPATH=_path(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("Install it with: pip install opencv-python-headless")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("openai", ". Install it with: pip install openai"),
        ("no_such_package.part", ". Install it with: pip install no_such_package"),
        ("sklearn.svm", ". Install it with: pip install scikit-learn"),
        ("pydantic.no_such_part", ""),  # the package is there
        ("tkinter", ""),  # a part of Python that some systems leave out
        ("openenv_maze", ""),
    ],
)
def test_the_command_installs_the_distribution_of_a_module(name: str, command: str) -> None:
    assert install_hint(ModuleNotFoundError(f"No module named {name!r}", name=name)) == command
    assert install_hint(ImportError("cannot import name", name=name)) == ""
