"""The verifier's own place in its sandboxes: what every Python of a check runs first, out of the agent's reach.

Knows `openenv_imports.py` and `openenv_proof.py`, which run there, and what they have to know of a task. It is mounted
read-only where the backend can mount, and laid into the home where it cannot.
"""

# /opt/openenv                       read-only
#   sitecustomize.py                 found through PYTHONPATH: guards the imports (`openenv_imports`)
#   openenv_imports.py, openenv_proof.py
#   root, known                      where the agent's files are; the modules that the setup left there
#   lib/python3.N/site-packages/     found through PYTHONUSERBASE: the same once more for a script or a Makefile that
#     openenv.pth                    sets PYTHONPATH itself. Python without either (`-I`, `env -i`) has no guard

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path

from openenv.rollout.store.archives import write_archive
from openenv.rollout.verify.lookups import Texts, ancestors
from openenv.rollout.verify.worktree import SetupTree
from openenv.sandboxes.base import Mount, Sandbox

MOUNTED_AT = "/opt/openenv"
IN_HOME = ".openenv"
OUTPUT = "logs/output"
"""Below the home of a judge's sandbox: the folder that `$OUTPUT` names."""
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


class VerifierPlace:
    """The files of one verification, and how a check's commands find them.

    Args:
        folder: A folder of the host for them; it is made.
        root: The work folder inside.
        home: The home inside.
        setup: What the setup left in it.
        verify_files: The verifier's files, relative to it.
        texts: The texts of the task: modules that they name are the agent's to write.
        mounts: Whether the backend can mount.
    """

    def __init__(
        self,
        folder: Path,
        *,
        root: str,
        home: str,
        setup: SetupTree,
        verify_files: Collection[str],
        texts: Texts,
        mounts: bool,
    ) -> None:
        self.mounts = mounts
        self._folder = folder
        self._root, self._home = root, home
        self._trusted = sorted(name for name in setup.folders if f"{name}/pyvenv.cfg" in setup.files)
        self._known = known_modules(setup, verify_files, texts)
        if mounts:
            self._write()

    @property
    def mount(self) -> tuple[Mount, ...]:
        """What sandboxes mount."""
        return (Mount(self._folder, MOUNTED_AT),) if self.mounts else ()

    def lay(self, sandbox: Sandbox, archive: Path) -> None:
        """Lay the files into a sandbox that has not mounted them, by way of an archive on the host."""
        if not self.mounts:
            files = self._files(self.path(sandbox), sandbox.workdir, sandbox.home)
            write_archive(archive, {name: text.encode() for name, text in files.items()}, mode=0o444)
            sandbox.unpack(archive, self.path(sandbox))

    def path(self, sandbox: Sandbox) -> str:
        """Return where the files are inside."""
        return MOUNTED_AT if self.mounts else posixpath.join(sandbox.home, IN_HOME)

    def environment(self, sandbox: Sandbox) -> dict[str, str]:
        """Return what leads every Python to the files."""
        return {"PYTHONPATH": self.path(sandbox), "PYTHONUSERBASE": self.path(sandbox)}

    def command(self, line: str, sandbox: Sandbox) -> str:
        """Return a line in which a PYTHONPATH that it sets keeps the place in front."""
        place = self.path(sandbox)
        return _PATHS.sub(lambda match: f"PYTHONPATH={place}{'' if match[1] is not None else ':'}", line)

    def _write(self) -> None:
        for name, text in self._files(MOUNTED_AT, self._root, self._home).items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, errors="surrogateescape")
            path.chmod(0o644)
        for folder in (self._folder, *(path for path in self._folder.rglob("*") if path.is_dir())):
            folder.chmod(0o755)  # the sandbox's user is another one

    def _files(self, place: str, root: str, home: str) -> Mapping[str, str]:
        load = f"sys.path.insert(0, {place!r}); import openenv_imports; sys.path.remove({place!r})"
        start = f"import sys; {load}; openenv_imports.install({place!r})\n"
        source = resources.files(__package__)
        return {
            "sitecustomize.py": _SITECUSTOMIZE,
            "root": "\n".join([root, f"{home}/{OUTPUT}", *self._trusted]),
            "known": "\n".join(sorted(self._known)),
            **{name: source.joinpath(name).read_text("utf-8") for name in _MODULES},
            **{f"lib/python3.{minor}/site-packages/openenv.pth": start for minor in _MINORS},
        }


def known_modules(setup: SetupTree, verify_files: Collection[str], texts: Texts) -> set[str]:
    """Return the modules that imports may find in the work folder although they are installed elsewhere.

    As `folder/name`, relative to the work folder, or as `*/name` for any folder.
    """
    known = {f"*/{name}" for name in texts.modules}
    for file in (*setup.files, *verify_files, *texts.python_files):
        folder, base = posixpath.split(file)
        stem, _, ending = base.partition(".")
        if _CODE.fullmatch(ending):
            known.add(f"{folder}/{stem}")
    own = {above for file in (*verify_files, *texts.python_files) for above in ancestors(file)}
    for name in (setup.folders | own) - {""}:
        folder, base = posixpath.split(name)
        known.add(f"{folder}/{base}")
    return {name for name in known if "\n" not in name}
