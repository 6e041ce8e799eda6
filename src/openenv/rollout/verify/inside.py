"""The verifier's place in its sandboxes: a folder with code that every Python of a check runs first.

Knows `openenv_imports.py` and `openenv_proof.py`, which run there, and the facts about a task that they need. The
folder is mounted read-only if the backend can mount; otherwise it is copied into the home.
"""

# /opt/openenv                       read-only
#   sitecustomize.py                 found through PYTHONPATH: guards the imports (`openenv_imports`)
#   openenv_imports.py, openenv_proof.py
#   root                             the folders of the agent's files, one per line
#   known                            modules of the setup in them, which may come before installed modules
#   lib/python3.N/site-packages/     found through PYTHONUSERBASE: the same guard for a script or a Makefile that
#     openenv.pth                    sets PYTHONPATH itself. Python without either (`-I`, `env -i`) has no guard
#
# The order of imports in a check's Python:
#
#   without the guard    work folder (agent's `json.py`!)  ->  standard library  ->  site-packages
#   with the guard       standard library  ->  site-packages  ->  work folder
#                        but modules in `known` come from the work folder first: the task's `app.py` is one

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from openenv.rollout.store.archives import write_archive
from openenv.rollout.verify.lookups import Texts, ancestors
from openenv.rollout.verify.worktree_guard import SetupTree
from openenv.sandboxes.base import Mount, Sandbox

MOUNTED_AT = "/opt/openenv"
IN_HOME = ".openenv"
OUTPUT = "logs/output"
"""The folder that `$OUTPUT` names, below the home of a judge's sandbox."""
_MODULES = ("openenv_imports.py", "openenv_proof.py")
_MINORS = range(8, 21)
_PATHS = re.compile(r"(?<![\w$])PYTHONPATH=(?=(\s|$)?)")
_CODE = re.compile(r"(?:py|pyc|(?:[\w-]+\.)?so)")
_SITECUSTOMIZE = """\
import os

import openenv_imports

_place = os.path.dirname(os.path.abspath(__file__))
openenv_imports.install(_place)
openenv_imports.run_other_sitecustomize(_place)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceContent:
    """The facts about a task that its place needs.

    Args:
        root: The work folder inside.
        home: The home inside.
        setup: The work folder after the setup.
        verify_files: The verifier's files, relative to the work folder.
        texts: The texts of the task. The agent may write any module that they name.
    """

    root: str
    home: str
    setup: SetupTree
    verify_files: Collection[str]
    texts: Texts


class VerifierPlace:
    """The files of one verification, and the way a check's commands find them.

    Args:
        folder: A folder of the host for the files; it is created.
        content: The facts about the task.
        mounts: Whether the backend can mount.
    """

    def __init__(self, folder: Path, content: PlaceContent, *, mounts: bool) -> None:
        self.mounts = mounts
        self._folder = folder
        self._root, self._home = content.root, content.home
        setup = content.setup
        self._environments = sorted(name for name in setup.folders if f"{name}/pyvenv.cfg" in setup.files)
        self._modules = local_modules(setup, content.verify_files, content.texts)
        if mounts:
            self._write()

    @property
    def mount(self) -> tuple[Mount, ...]:
        """The mounts of sandboxes; empty if the backend cannot mount."""
        return (Mount(self._folder, MOUNTED_AT),) if self.mounts else ()

    def lay(self, sandbox: Sandbox, archive: Path) -> None:
        """Copy the files into a sandbox that has not mounted them, through an archive on the host."""
        if not self.mounts:
            files = self._files(self.path(sandbox), sandbox.workdir, sandbox.home)
            write_archive(archive, {name: text.encode() for name, text in files.items()}, mode=0o444)
            sandbox.unpack(archive, self.path(sandbox))

    def path(self, sandbox: Sandbox) -> str:
        """Return the folder of the files inside."""
        return MOUNTED_AT if self.mounts else posixpath.join(sandbox.home, IN_HOME)

    def environment(self, sandbox: Sandbox) -> dict[str, str]:
        """Return the variables that lead every Python to the files."""
        return {"PYTHONPATH": self.path(sandbox), "PYTHONUSERBASE": self.path(sandbox)}

    def command(self, line: str, sandbox: Sandbox) -> str:
        """Return the line with the place in front of every PYTHONPATH that the line sets."""
        place = self.path(sandbox)
        return _PATHS.sub(lambda match: f"PYTHONPATH={place}{'' if match[1] is not None else ':'}", line)

    def _write(self) -> None:
        for name, text in self._files(MOUNTED_AT, self._root, self._home).items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, errors="surrogateescape")
            path.chmod(0o644)
        for folder in (self._folder, *(path for path in self._folder.rglob("*") if path.is_dir())):
            folder.chmod(0o755)  # the sandbox has another user

    def _files(self, place: str, root: str, home: str) -> Mapping[str, str]:
        load = f"sys.path.insert(0, {place!r}); import openenv_imports; sys.path.remove({place!r})"
        start = f"import sys; {load}; openenv_imports.install({place!r})\n"
        source = resources.files(__package__)
        return {
            "sitecustomize.py": _SITECUSTOMIZE,
            "root": "\n".join([root, f"{home}/{OUTPUT}", *self._environments]),
            "known": "\n".join(sorted(self._modules)),
            **{name: source.joinpath(name).read_text("utf-8") for name in _MODULES},
            **{f"lib/python3.{minor}/site-packages/openenv.pth": start for minor in _MINORS},
        }


def local_modules(setup: SetupTree, verify_files: Collection[str], texts: Texts) -> set[str]:
    """Return the modules that imports may find in the work folder before an installed module of that name.

    Each is `folder/name`, relative to the work folder, or `*/name` for any folder.
    """
    modules = {f"*/{name}" for name in texts.modules}
    for file in (*setup.files, *verify_files, *texts.python_files):
        folder, base = posixpath.split(file)
        stem, _, ending = base.partition(".")
        if _CODE.fullmatch(ending):
            modules.add(f"{folder}/{stem}")
    verify_folders = {above for file in (*verify_files, *texts.python_files) for above in ancestors(file)}
    for name in (setup.folders | verify_folders) - {""}:
        folder, base = posixpath.split(name)
        modules.add(f"{folder}/{base}")
    return {name for name in modules if "\n" not in name}
