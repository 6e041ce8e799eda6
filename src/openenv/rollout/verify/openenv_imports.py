"""The import guard in a verifier's sandbox: an installed module comes before a module of the agent.

Every Python of a check runs this file first, as `sitecustomize` in the verifier's read-only place. From then on a
folder of the agent is skipped for a top-level module that is installed as well, unless the setup put a module of that
name there, or the task asks for it. Standard library only, and only modules that Python has loaded by then: `install`
runs at every start of Python, from 3.8 on.
"""

# How Python finds `import yaml` in `cd app && python3 -c 'import yaml'`, with the guard:
#
#   sys.meta_path     builtins, frozen modules, then PathFinder. pytest puts its finder in front, which also calls
#                     PathFinder, so a guard in `sys.meta_path` could be bypassed
#   PathFinder        asks one finder per folder of `sys.path`, made by the first hook in `sys.path_hooks` that accepts
#   sys.path[0]=app   the guard's `_AgentFolder`. It sees app/yaml.py and searches `yaml` without the agent's folders.
#                     The search succeeds, so it answers "not here"
#   site-packages     answers
#
# If `yaml` is not installed, it is found in app/, with one exception: the standard library and installed packages try
# optional modules (`try: import pygments`), and the agent must not provide them.

from __future__ import annotations

import os
import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)

TYPE_CHECKING = False  # type checkers treat it as True; importing it from typing would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType

_INSTALLED = ("/site-packages/", "/dist-packages/")
_LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


class ImportGuard:
    """The agent's folders, and the modules that may be imported from them.

    Args:
        root: The work folder.
        more: Other folders with the agent's files.
        trusted: Folders below `root` that the setup installed, such as a virtual environment.
        read_modules: Returns the names of setup modules: `folder/name` relative to the work folder, or `*/name` for any
            folder. Called when it is first needed.
    """

    def __init__(
        self, root: str, trusted: Iterable[str], read_modules: Callable[[], set[str]], *, more: Iterable[str] = ()
    ) -> None:
        self.root = os.path.realpath(root)
        self.more = tuple(os.path.realpath(folder) + os.sep for folder in more)
        self.trusted = tuple(os.path.join(self.root, folder) + os.sep for folder in trusted)
        self._read_modules = read_modules
        self._modules: set[str] | None = None
        self._searching: set[str] = set()
        self._standard_library = os.path.dirname(os.__file__) + os.sep

    def folder(self, path: str) -> str | None:
        """Return a folder of the agent relative to the work folder; None for any other folder."""
        real = os.path.realpath(path or os.curdir) + os.sep
        if self.more and real.startswith(self.more):
            return real  # the setup has no modules there
        if not real.startswith(self.root + os.sep) or real.startswith(self.trusted):
            return None
        return real[len(self.root) + 1 : -1]

    def is_elsewhere(self, name: str, folder: str) -> bool:
        """Return whether a module must not come from this folder of the agent."""
        if name in self._searching:  # for `_is_found`, which searches without the agent's folders
            return True
        if not self._is_found(name) and not self._is_wanted_by_library(name):
            return False
        if self._modules is None:
            self._modules = self._read_modules()
        return f"{folder}/{name}" not in self._modules and f"*/{name}" not in self._modules

    def _is_found(self, name: str) -> bool:
        """Return whether a module is found without the agent's folders."""
        self._searching.add(name)
        try:
            return any(_is_module(_ask(finder, name)) for finder in sys.meta_path)
        finally:
            self._searching.discard(name)

    def _is_wanted_by_library(self, name: str) -> bool:
        """Return whether installed code asks for a module itself: in an import statement, or with a name it spells.

        A program that gets the name of its plug-in from the user asks for the agent's.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or not self._is_library(frame.f_code.co_filename):
            return False
        from opcode import opmap

        # pytest loads tests with `importlib.import_module(name)`: a call, not an import statement.
        code = frame.f_code
        if 0 <= frame.f_lasti < len(code.co_code) and code.co_code[frame.f_lasti] == opmap["IMPORT_NAME"]:
            return any(word == name or word.startswith(name + ".") for word in code.co_names)
        # `zoneinfo` spells the name "tzdata", and a package may pass one on: `optional("numexpr")` calls `__import__`.
        # Flask spells "app.py", the file of its user's application.
        while frame is not None and self._is_library(frame.f_code.co_filename):
            if not self._is_import_library(frame.f_code.co_filename):
                for word in _texts(frame.f_code.co_consts):
                    if word == name or (word.startswith(name + ".") and word != name + ".py"):
                        return True
            frame = frame.f_back
        return False

    def _is_library(self, file: str) -> bool:
        return file.startswith(self._standard_library) or any(part in file for part in _INSTALLED)

    def _is_import_library(self, file: str) -> bool:
        return file.startswith(self._standard_library + "importlib") or file == self._standard_library + "functools.py"


class _AgentFolder(FileFinder):
    """The finder of one folder of the agent."""

    def __init__(self, path: str, folder: str, guard: ImportGuard) -> None:
        super().__init__(path, *_LOADERS)
        self._folder, self._guard = folder, guard

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module, unless it is a top-level module that must come from another folder."""
        spec = super().find_spec(fullname, target)
        if spec is None or "." in fullname or fullname == "__main__":
            return spec
        return None if self._guard.is_elsewhere(fullname, self._folder) else spec


def _ask(finder: object, name: str) -> ModuleSpec | None:
    try:
        return finder.find_spec(name, None)  # type: ignore[attr-defined,no-any-return]
    except Exception:  # this finder has another interface
        return None


def _is_module(spec: ModuleSpec | None) -> bool:
    """Return whether this is a module. A folder without code counts only below `site-packages`."""
    if spec is None:
        return False
    if spec.loader is not None and spec.origin is not None:
        return True
    return any(part in place + "/" for place in spec.submodule_search_locations or () for part in _INSTALLED)


def _texts(constants: Iterable[object]) -> Iterable[str]:
    """Yield the texts among the constants of a function, also those in tuples and sets."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


def _is_machinery(file: str) -> bool:
    return file == _THIS_FILE or file.startswith("<frozen importlib") or "/importlib/_bootstrap" in file


_THIS_FILE = _is_machinery.__code__.co_filename


def guard_imports(guard: ImportGuard) -> None:
    """Guard all later imports of this process."""

    def hook(path: str) -> FileFinder:
        folder = guard.folder(path)
        if folder is None or not os.path.isdir(path or os.curdir):
            raise ImportError  # the next hook may accept the folder
        return _AgentFolder(path or os.getcwd(), folder, guard)

    sys.path_hooks.insert(0, hook)
    for path in list(sys.path_importer_cache):
        if guard.folder(path) is not None:
            del sys.path_importer_cache[path]


def install(place: str) -> None:
    """Guard the imports of this process with the facts in the verifier's place."""
    if any(getattr(finder, "_openenv", False) for finder in sys.path_hooks):
        return
    with open(os.path.join(place, "root")) as file:
        root, more, *trusted = file.read().splitlines()

    def read_modules() -> set[str]:
        with open(os.path.join(place, "known"), errors="surrogateescape") as file:
            return set(file.read().split("\n"))

    guard_imports(ImportGuard(root, trusted, read_modules, more=[more]))
    sys.path_hooks[0]._openenv = True  # type: ignore[attr-defined]


def run_other_sitecustomize(place: str) -> None:
    """Run the `sitecustomize` that the image installed, which this one hides."""
    paths = [path for path in sys.path if os.path.realpath(path) != os.path.realpath(place)]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
