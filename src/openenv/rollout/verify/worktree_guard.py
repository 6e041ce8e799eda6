"""The guard of a work tree: which of the agent's files must not reach the verifier of one task.

Knows names, patterns and texts. Must not open archives, nor know sandboxes.
"""

# Files that come from the baseline (the home after the setup) instead of the agent, and why:
#
#   conftest.py, *.pth, pytest.py ...   a protected pattern (`task.PROTECTED`): decides how Python and pytest start
#   tests/helper.py, lib/check.o        a folder of verify files belongs to the verifier if its name is a test folder's,
#                                       or if the baseline lacks it and neither instruction nor solution mention it
#   grade.out                           a rule of the verifier's makefile builds it: make would think it is up to date
#   test_mine.py                        pytest runs every test below its folder; only the verifier's tests count, and
#                                       the baseline's tests are restored
#   tests/test_it/__init__.py, tests.py Python would import it instead of `tests/test_it.py`, or of the folder `tests`
#   random.py, app/json.py              shadows a module of Python or pytest in a folder that checks start or lie in
#   GNUmakefile, .git/hooks             steers a tool that the checks use (`lookups.FAMILIES`), or makes git run things
#   .proverc, uv.toml, .Rprofile        settings of a tool that no text of the task mentions (`lookups.Settings`)
#   .venv/bin/python, node_modules/...  programs and libraries that the setup installed
#   pyproject.toml with [tool.pytest]   changed by the agent, and able to steer pytest
#
# A file that the instruction or the solution names is the agent's to write. Names cannot cover everything: in the
# verifier's sandbox an import guard (`cases.VerifierPlace`) puts installed modules before the agent's.
#
# `plan_guard` computes the facts about a task and its baseline once; `WorktreeGuard` is the frozen result:
#
#   WorktreeRules  ─┐                     covers(name)    take it from the baseline?
#                   ├─> plan_guard ─> WorktreeGuard ──>   shadows(name)   drop it: Python would import it?
#   SetupTree      ─┘                     reveals(end)    may no link lead there?
#
# Links are replaced by copies before the guard decides about names (`worktree.TreeWithoutLinks`).

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from openenv.rollout.store.archives import ancestors
from openenv.rollout.tasks.checks import Check
from openenv.rollout.tasks.task import Patterns
from openenv.rollout.verify.lookups import GIT_FILES, RUNNERS, Lookups, Settings, Texts
from openenv.sandboxes.base import WORKDIR

_BESIDE_PYTEST = frozenset(
    {"colorama", "exceptiongroup", "iniconfig", "packaging", "pluggy", "py", "pygments", "tomli"}
)
_MODULES = frozenset(sys.stdlib_module_names) | _BESIDE_PYTEST
_CODE = re.compile(r"py|pyc|(?:.*\.)?so")
_TEST = re.compile(r"test_.*\.py|.*_test\.(?:py|go)|.*\.(?:test|spec)\.[cm]?[jt]sx?|.*Tests?\.(?:java|kt)")
_TEST_FOLDER = re.compile(
    r"tests?|__tests__|specs?|.*[_-]tests?|tests?[_-].*|checks?|verif(?:y|ier|ication)|grad(?:er|ing)|judge",
    re.IGNORECASE,
)
_TEST_SCRIPT = re.compile(r"(?:run[_-]?)?(?:all[_-]?)?(?:tests?|checks?|verif(?:y|ier)|grader?)\.\w+", re.IGNORECASE)
_DOT = re.compile(r"\.")
_PROGRAMS = frozenset({"bin", ".bin", "Scripts", "sbin"})
_LANGUAGES = (
    # the ending of a verifier file, and endings that an import could find instead: json.cpython-311-x86.so
    (re.compile(r"pyi?"), re.compile(r"py[ciwd]?|(?:[\w-]+\.)?so")),
    (re.compile(r"[cm]?[jt]sx?"), re.compile(r"(?:d\.)?[cm]?[jt]sx?|json|node")),
    (re.compile(r"h|hh|hpp"), re.compile(r"(?:h|hh|hpp)\.gch")),
)

_LINE_WORD = re.compile(r"[^\s'\"<>|;&()=,`]+")

Kind = Literal["file", "folder", "link"]


def run_files(check: Check, verify_files: Mapping[str, str], workdir: str) -> dict[str, str]:
    """Return the verifier's files that the `run` of a check sees: by `needs`, or by the words of the line."""
    verify_files = {**verify_files, **check.files}
    if check.needs is not None:
        patterns = Patterns(check.needs)
        return {path: text for path, text in verify_files.items() if patterns.cover(posixpath.normpath(path))}
    words = {posixpath.normpath(posixpath.join(workdir, word)) for word in _LINE_WORD.findall(check.run)}
    return {path: text for path, text in verify_files.items() if posixpath.join(workdir, path) in words}


@dataclass(slots=True)
class SetupTree:
    """The work folder after the setup: its names, and the contents of files that steer tools."""

    files: set[str] = field(default_factory=set)
    """Files and links."""
    folders: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorktreeRules:
    """The rules of a task about its work tree.

    Args:
        protected: The task's patterns. Without any, the guard only replaces links.
        keeps_links: Patterns of paths that may be links.
        verify_files: The files that the verifier will write over the tree.
        named: All texts of the task. The agent may write any module or test that they name.
        checks: The lines of the checks, and the verifier's files. They show which tools the checks use.
        asked: Instruction and solution. The agent may write any file that they name.
        setup: The setup lines, and the initial files.
        root: The work folder inside the sandbox.
    """

    protected: Sequence[str] = ()
    keeps_links: Sequence[str] = ()
    verify_files: Mapping[str, str] = field(default_factory=dict)
    named: Sequence[str] = ()
    checks: Sequence[str] = ()
    asked: Sequence[str] = ()
    setup: Sequence[str] = ()
    root: str = WORKDIR


@dataclass(frozen=True, slots=True)
class WorktreeGuard:
    """The frozen plan of one task: decides which files of the agent must not reach the verifier."""

    root: str
    strict: bool
    """Whether the task protects anything besides its verify files."""
    patterns: Patterns
    links: Patterns
    """The links that the task declares."""
    setup: SetupTree
    texts: Texts
    """The checks, and the texts that ask the agent for files."""
    named: Texts
    """All texts of the task."""
    secrets: frozenset[str]
    """Absolute paths of the verifier's files."""
    verify_files: frozenset[str]
    """The verifier's files in the work folder, relative to it."""
    has_tests: bool
    """Whether one of `verify_files` is a test."""
    verify_folders: frozenset[str]
    """Folders that belong to the verifier."""
    setup_tests: frozenset[str]
    """Files of the setup that the checks run as tests."""
    import_places: Mapping[str, Mapping[str, ImportPlace]]
    """The names that imports of the verifier's and of protected files go through, by folder and stem."""
    lookups: Lookups
    start_folders: frozenset[str]
    """Folders that checks start or lie in."""
    tools: InstalledTools

    def covers(self, name: str, kind: Kind = "file") -> bool:
        """Return whether the verifier sees the baseline's version of a path, or nothing if the baseline has none."""
        if self._covers(name, kind):
            return True
        # A declared link may stand for a folder.
        return kind == "link" and not self.texts.asks_for(name) and self._covers(f"{name}/x", "file")

    def _covers(self, name: str, kind: Kind) -> bool:
        if self.patterns.cover(name) or (name.endswith(".pyc") and self.patterns.cover(name[:-1])):
            return True
        if not self.strict:
            return False
        return (
            self._is_test(name)
            or self._takes_place(name, kind)
            or self.lookups.steers(name)
            or self._is_git(name, kind)
            or self._is_tool(name, kind)
        )

    def names_a_tool(self, content: bytes) -> bool:
        """Return whether a configuration could steer a tool of the checks."""
        return self.lookups.names_a_tool(content)

    def _is_agents(self, name: str) -> bool:
        """Return whether a text of the task wants this file from the agent."""
        if self.texts.asks_for(name):
            return True
        # If a check runs a test that neither setup nor verify files contain, the agent has to write it.
        is_new_test = _TEST.fullmatch(posixpath.basename(name)) and name not in self.verify_files | self.setup.files
        return bool(is_new_test) and self.named.asks_for(name)

    def _is_test(self, name: str) -> bool:
        """Return whether this is a test that the agent must not write, or a file that is loaded with one."""
        if any(name == folder or name.startswith(f"{folder}/") for folder in self.verify_folders):
            return not self._is_agents(name)
        folder, base = posixpath.split(name)
        if not folder and self.has_tests and base.startswith("__init__."):
            return True  # pytest runs the code of every package above a test
        if name in self.setup_tests:
            return True
        return self.has_tests and bool(_TEST.fullmatch(base)) and not self.named.asks_for(name)

    def _takes_place(self, name: str, kind: Kind) -> bool:
        """Return whether an import would find this instead of a file or folder of the verifier."""
        parts = name.split("/")
        for at, part in enumerate(parts):
            places = self.import_places.get("/".join(parts[:at]))
            if places is None:
                continue
            is_last = at == len(parts) - 1
            is_plain = is_last and kind == "file" and "." in part
            stems = [] if is_plain else [(part, "")]
            if is_last and kind != "folder":
                stems += [(part[: dot.start()], part[dot.end() :]) for dot in _DOT.finditer(part)]
            for stem, ending in stems:
                place = places.get(stem)
                if place is None or part in place.names or not place.takes(ending):
                    continue
                # node finds a file `lib` before `lib.js`; Python needs an ending.
                if ending or not is_last or kind != "file" or place.takes("js"):
                    return not self._is_agents(name)
        return False

    def _is_git(self, name: str, kind: Kind) -> bool:
        if kind == "folder" and posixpath.basename(name) == ".git":
            return False
        return bool(GIT_FILES.fullmatch(name)) and not self.texts.asks_for(name)

    def _is_tool(self, name: str, kind: Kind) -> bool:
        """Return whether this is a program or library that the setup installed, or takes the place of one."""
        tools, folders = self.tools, self.setup.folders
        if not tools.folders:
            return False
        if not any(above in tools.folders for above in (*ancestors(name), name)):
            # A script in lib finds lib/node_modules/x before node_modules/x.
            names = self.lookups.folders
            return any(part in names and below in tools.libraries for part, below in pairwise(name.split("/")))
        is_program = not _PROGRAMS.isdisjoint(name.split("/")[:-1])
        if self.texts.asks_for(name, by_path=True) and not is_program:
            return False
        if name in self.setup.files or name in folders:
            return name not in folders or kind != "folder"
        # The first part of the path that is missing in the setup is the agent's addition.
        folder = max((above for above in ancestors(name) if above in folders), key=len, default="")
        added = name[len(folder) :].lstrip("/").split("/")[0]
        if is_program or added in _PROGRAMS or added == "node_modules" or added.startswith("."):
            return True
        if added.split(".")[0] in tools.stems.get(folder, ()):
            return True
        # A program of the setup may import a new library, which nobody asked for.
        return not (self.texts.mentions(added.split(".")[0]) or self.texts.asks_for_environment(name))

    def shadows(self, name: str, *, is_link: bool) -> bool:
        """Return whether Python would import this file instead of one of its modules in a folder of the checks.

        The agent may change a module that the setup left at the top.
        """
        if not self.strict:
            return False
        folder, base = posixpath.split(name)
        stem, dot, ending = base.partition(".")
        if (dot and not _CODE.fullmatch(ending)) or not (dot or is_link):
            return False
        if stem == "__init__":  # the module is the folder
            folder, stem = posixpath.split(folder)
        if folder not in self.start_folders or stem not in _MODULES:
            return False
        return not (stem in self.named.modules or name in self.setup.files or self._is_agents(name))

    def declares(self, name: str) -> bool:
        """Return whether the task declares that this path may be a link."""
        return self.links.cover(name)

    def reveals(self, end: str | None) -> bool:
        """Return whether a link that ends there leads to a verifier file, one of their folders, or an unknown place.

        Args:
            end: The result of `LinkResolver.resolve`.
        """
        if end is None:
            return False
        if end == "/proc":
            return True
        if not self.secrets:
            return False
        above = "/" if end == "/" else f"{end}/"
        if any(secret == end or secret.startswith(above) for secret in self.secrets):
            return True
        # The host cannot know the links in these folders of the sandbox.
        unclear = ("/proc/", "/dev/", "/tmp/", "/var/", "/run/", f"{posixpath.dirname(self.root)}/")
        return not above.startswith(f"{self.root}/") and above.startswith(unclear) and end != "/dev/null"


def plan_guard(rules: WorktreeRules, setup: SetupTree | None = None) -> WorktreeGuard:
    """Return the guard of a task with these rules, over a baseline."""
    setup = setup or SetupTree()
    root, strict, patterns = rules.root, bool(rules.protected), Patterns(rules.protected)
    paths = {posixpath.normpath(posixpath.join(root, file)): text for file, text in rules.verify_files.items()}
    inner = {path[len(root) + 1 :]: text for path, text in paths.items() if path.startswith(f"{root}/")}
    texts = Texts(rules.checks, rules.asked, root=root)
    verify_files = frozenset(inner)
    setup_tests = frozenset(file for file in setup.files if _is_setup_test(file, texts))
    above = {folder for file in verify_files for folder in ancestors(file)}
    runners = {
        name: content.decode("utf-8", "replace") for name, content in setup.contents.items() if RUNNERS.fullmatch(name)
    }
    start_folders = {"", *(posixpath.dirname(file) for file in verify_files), *texts.starts()}
    python = {text for file, text in paths.items() if file.endswith(".py")}
    settings = Settings(
        lines=(*(text for text in rules.checks if text not in python), *runners.values()),
        asked=rules.asked,
        texts=(*rules.named, *rules.asked, *rules.checks, *rules.setup),
        places=(*start_folders, *(posixpath.dirname(file) for file in setup_tests)),
        setup=setup.files,
    )
    lookups = Lookups(
        texts,
        files=setup.files | setup.folders | verify_files | above,
        runners=runners,
        verify_files=inner,
        settings=settings,
    )
    return WorktreeGuard(
        root=root,
        strict=strict,
        patterns=patterns,
        links=Patterns(rules.keeps_links),
        setup=setup,
        texts=texts,
        named=Texts(asked=rules.named, root=root),
        secrets=frozenset(paths),
        verify_files=verify_files,
        has_tests=any(_TEST.fullmatch(posixpath.basename(file)) for file in verify_files),
        verify_folders=frozenset(
            folder
            for file in verify_files
            for folder in (_test_folder(file), _new_folder(file, setup, texts))
            if folder
        ),
        setup_tests=setup_tests,
        import_places=_import_places(verify_files | setup_tests | set(filter(patterns.cover, setup.files))),
        lookups=lookups,
        start_folders=frozenset(start_folders),
        tools=_installed_tools(setup, lookups) if strict else InstalledTools(),
    )


def _test_folder(file: str) -> str | None:
    """Return the first folder above a file that is named like a test folder, or None."""
    return next((above for above in ancestors(file) if _TEST_FOLDER.fullmatch(posixpath.basename(above))), None)


def _new_folder(file: str, setup: SetupTree, texts: Texts) -> str | None:
    """Return the outermost folder of a verify file that only the verifier uses, or None.

    A folder of the setup may hold the agent's work, and so may a folder that the task mentions.
    """
    new = [folder for folder in ancestors(file)[1:] if folder not in setup.folders]
    return new[0] if new and not any(map(texts.mentions, new)) else None


def _is_setup_test(name: str, texts: Texts) -> bool:
    """Return whether the checks run this file of the setup as a test; then it belongs to the verifier."""
    base = posixpath.basename(name)
    if texts.asks_for(name):
        return False
    if _TEST.fullmatch(base):
        return True
    return bool(_TEST_SCRIPT.fullmatch(base)) and any(base in text for text in texts.checks)


@dataclass(slots=True)
class ImportPlace:
    """The files under one name in a folder of the verifier, and the endings that an import would find instead."""

    names: set[str] = field(default_factory=set)
    endings: list[re.Pattern[str]] = field(default_factory=list)

    def takes(self, ending: str) -> bool:
        """Return whether an import would find a file with this ending; a folder has none, and may be found."""
        return not ending or any(pattern.fullmatch(ending) for pattern in self.endings)


def _import_places(files: Collection[str]) -> dict[str, dict[str, ImportPlace]]:
    """Return the names that imports of these files go through: by folder, then by name without ending."""
    places: dict[str, dict[str, ImportPlace]] = {}

    def add(path: str, stem: str, endings: Iterable[re.Pattern[str]]) -> None:
        folder, base = posixpath.split(path)
        place = places.setdefault(folder, {}).setdefault(stem, ImportPlace())
        place.names.add(base)
        place.endings.extend(endings)

    for file in files:
        stem, ending = posixpath.splitext(posixpath.basename(file))
        rivals = [others for language, others in _LANGUAGES if language.fullmatch(ending[1:])]
        if rivals:
            add(file, stem, rivals)
        for above in ancestors(file)[1:]:
            add(above, posixpath.basename(above), rivals)
    return places


@dataclass(frozen=True, slots=True)
class InstalledTools:
    """Programs and libraries that the setup installed in the work folder."""

    folders: frozenset[str] = frozenset()
    """Virtual environments and folders such as `node_modules`."""
    stems: Mapping[str, set[str]] = field(default_factory=dict)
    """For each folder of the setup, its names without endings."""
    libraries: frozenset[str] = frozenset()
    """The names of libraries in `node_modules` and similar folders."""


def _installed_tools(setup: SetupTree, lookups: Lookups) -> InstalledTools:
    folders = frozenset(
        folder
        for folder in setup.folders
        if posixpath.basename(folder) in lookups.folders or f"{folder}/pyvenv.cfg" in setup.files
    )
    stems: dict[str, set[str]] = {}
    libraries: set[str] = set()
    for name in setup.files | setup.folders if folders else ():
        folder, base = posixpath.split(name)
        stems.setdefault(folder, set()).add(base.split(".")[0])
        if posixpath.basename(folder) in lookups.folders:
            libraries.add(base)
    return InstalledTools(folders, stems, frozenset(libraries))
