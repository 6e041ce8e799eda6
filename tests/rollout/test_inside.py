"""Imports in a verifier's sandbox: what is installed comes before what the agent wrote, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openenv.rollout.verify.cases import PlaceContent, VerifierPlace
from openenv.rollout.verify.worktree_guard import SetupTree

Run = Callable[..., str]
TREE = {
    "site-packages/installed.py": "who = 'installed'\n",
    "site-packages/spaces/deep.py": "who = 'installed'\n",
    "site-packages/library.py": "try:\n    import optional\nexcept ImportError:\n    optional = None\n\n\n"
    "def plug_in(name):\n    import importlib\n    return importlib.import_module(name)\n\n\n"
    "def by_name():\n    import importlib\n    return importlib.import_module('optional')\n\n\n"
    "def passed_on():\n    return plug_in('optional')\n\n\n"
    "def through_a_list():\n    return [__import__(name) for name in ('absent.x', 'optional')[1:]]\n\n\n"
    "def users_file(name='optional'):\n    return 'optional.py' and __import__(name)\n\n\n"
    "def by_metadata(name):\n    return __import__(name)\n",
    "site-packages/sitecustomize.py": "import sys\nsys.customized = True\n",
    "site-packages/editable.pth": "ignored: no site folder\n",
    "workdir/installed.py": "who = 'agent'\n",
    "workdir/csv.py": "who = 'agent'\n",
    "workdir/optional.py": "who = 'agent'\n",
    "workdir/own.py": "who = 'agent'\nimport helper\n",
    "workdir/helper.py": "",
    "workdir/package/__init__.py": "from . import part\n",
    "workdir/package/part.py": "who = 'agent'\n",
    "workdir/package/__main__.py": "print('ran')\n",
    "workdir/spaces/deep.py": "who = 'agent'\n",
    "workdir/loose/inner.py": "who = 'agent'\n",
    "workdir/.venv/pyvenv.cfg": "",
    "workdir/.venv/lib/setups.py": "who = 'setup'\n",
    "workdir/setups.py": "who = 'agent'\n",
    "workdir/app/installed.py": "who = 'agent'\n",
    "workdir/app/main.py": "import installed\nprint(installed.who)\n",
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python in the work folder, or one below it, with the verifier's place in front."""
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def python(
        *arguments: str,
        cwd: str = "",
        setup: SetupTree | None = None,
        asked: str = "",
        files: tuple[str, ...] = (),
        paths: tuple[str, ...] = (),
    ) -> str:
        root = tmp_path / "workdir"
        content = PlaceContent(
            root=str(root),
            home=str(tmp_path),
            setup=setup or SetupTree(),
            verify_files=files,
            texts=[asked],
        )
        (mount,) = VerifierPlace(tmp_path / "places", content, mounts=True).mount
        more = (str(tmp_path / path) for path in paths)
        path = os.pathsep.join([str(mount.source), *more, str(tmp_path / "site-packages")])
        environment = {"PYTHONPATH": path, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=root / cwd, env=environment, capture_output=True, text=True, timeout=60)
        return (done.stdout + done.stderr).strip()

    return python


def who(name: str) -> str:
    return f"import {name}; print({name}.who)"


def test_what_is_installed_comes_first(run: Run) -> None:
    assert run("-c", who("installed")) == "installed"
    assert run("app/main.py") == "installed"
    assert run("-c", who("installed"), cwd="app") == "installed"
    assert run("-c", "import csv; print(csv.reader.__name__)") == "reader"
    assert run("-c", "import spaces.deep; print(spaces.deep.who)") == "installed"
    assert run("-c", who("installed"), paths=("workdir", "workdir/app")) == "installed"


def test_what_is_nowhere_else_is_found_in_the_work_folder(run: Run) -> None:
    assert run("-c", who("own")) == "agent"
    assert run("-c", "import package.part; print(package.part.who)") == "agent"
    assert run("-m", "package") == "ran"
    assert run("package") == "ran"
    assert run("-c", "import loose.inner; print(loose.inner.who)") == "agent"
    assert run("-c", who("helper").replace(".who", ".__name__"), cwd="app", paths=("workdir",)) == "helper"
    listed = run("-c", "import pkgutil; print({m.name for m in pkgutil.iter_modules(['.'])} >= {'own', 'package'})")
    assert listed == "True"


def test_what_the_setup_left_or_the_task_asks_for_is_the_agents(run: Run) -> None:
    assert run("-c", who("installed"), setup=SetupTree(files={"installed.py"})) == "agent"
    assert run("-c", who("installed"), cwd="app", setup=SetupTree(files={"installed.py"})) == "installed"
    assert run("-c", who("installed"), asked="Write installed.py.") == "agent"
    assert run("-c", who("installed"), cwd="app", asked="Write /x/workdir/app/installed.py.") == "agent"
    assert run("-c", who("installed"), files=("installed.py",)) == "agent"
    assert run("-c", "import spaces.deep; print(spaces.deep.who)", setup=SetupTree(folders={"spaces"})) == "agent"
    venv = SetupTree(folders={".venv", ".venv/lib"}, files={".venv/pyvenv.cfg"})
    assert run("-c", who("setups"), setup=venv, paths=("workdir/.venv/lib",)) == "setup"


def test_installed_code_that_tries_a_module_does_not_get_the_agents(run: Run) -> None:
    assert run("-c", "import library; print(library.optional)") == "None"
    assert run("-c", "import optional, library; print(library.optional.who)") == "agent"  # a check imported it itself
    assert run("-c", "import library; print(library.plug_in('optional').who)") == "agent"


def test_a_library_that_spells_a_name_in_a_call_does_not_get_the_agents_module(run: Run) -> None:
    for call in ("by_name", "passed_on", "through_a_list"):
        assert run("-c", f"import library; library.{call}()").endswith("No module named 'optional'")
    assert run("-c", "import library; print(library.users_file().who)") == "agent"
    assert run("-c", "import library; print(library.by_metadata('optional').who)") == "agent"


def test_another_sitecustomize_still_runs(run: Run) -> None:
    assert run("-c", "import sys; print(sys.customized)") == "True"


def test_a_finder_of_the_setup_counts_as_installed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "site-packages/sitecustomize.py").write_text(
        "import sys\nfrom importlib.util import spec_from_file_location\n\n\nclass Finder:\n    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        file = {str(tmp_path / 'workdir/src/edited.py')!r}\n"
        "        return spec_from_file_location(name, file) if name == 'edited' else None\n\n\n"
        "sys.meta_path.append(Finder)\n"
    )
    (tmp_path / "workdir/src").mkdir()
    (tmp_path / "workdir/src/edited.py").write_text("who = 'in src'\n")
    (tmp_path / "workdir/edited.py").write_text("who = 'agent'\n")
    assert run("-c", who("edited")) == "in src"


def test_python_that_ignores_its_environment_still_runs(run: Run) -> None:
    assert run("-I", "-c", "print('fine')") == "fine"
    assert run("-S", "-c", "print('fine')") == "fine"


def test_verifications_with_equal_content_share_one_folder_that_no_half_is_seen_of(tmp_path: Path) -> None:
    def place(*texts: str) -> Path:
        content = PlaceContent(root="/w", home="/h", setup=SetupTree(), verify_files=[], texts=texts)
        (mount,) = VerifierPlace(tmp_path / "places", content, mounts=True).mount
        return mount.source

    with ThreadPoolExecutor(8) as pool:
        equal = set(pool.map(lambda _: place("see a.py"), range(32)))
    other = place("see b.py")
    assert len(equal) == 1
    assert {other, *equal} == set((tmp_path / "places").iterdir())
    assert "*/b" in (other / "known").read_text()
    assert "*/b" not in (next(iter(equal)) / "known").read_text()
    assert (other / "sitecustomize.py").stat().st_mode & 0o777 == 0o644
    assert other.stat().st_mode & 0o777 == 0o755
