"""Files that tools look up by name in a work tree, and the files that the texts of a task mention.

Knows names and texts: the tools that a task's checks use, the folders they start in, and the files that the task asks
the agent to write. Must not open archives, nor know sandboxes.
"""

# A check runs `make test`, and make reads GNUmakefile before Makefile. `FAMILIES` lists the files that make a folder a
# project of a tool. If the setup or the verify files contain a project, the baseline's version of these files counts.
# Other settings, such as .npmrc, follow a rule for all tools (`Settings`):
#
#   baseline             the agent left               the verifier sees
#   Makefile             Makefile (changed)           the baseline's Makefile, if a check uses make
#                        GNUmakefile, test            neither: the file `test` would make the target `test` up to date
#   (tests/Makefile)     tests/grade.out              nothing, if the verifier's Makefile has a rule for it
#   package.json         .npmrc, app/package.json     no .npmrc; app/package.json only if no check starts in app/
#   (no project)         Makefile, package.json       both: the check is about the agent's project
#
# The agent may write every file that the instruction or the solution names.

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from openenv.rollout.store.archives import ancestors


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """The files that steer tools of one kind; all fields are words or patterns, separated by spaces.

    Args:
        tools: Words in a check that use a tool of this family.
        project: Files that make a folder a project. A tool reads them in its start folder, or in the next one above.
        hides: Files of the tool that a file with the same name would hide.
        folders: Folders of programs and libraries that a tool runs.
    """

    tools: str
    project: str = ""
    hides: str = ""
    folders: str = ""


FAMILIES = (
    # make builds a missing or older Makefile itself: from Makefile.sh, or out of RCS and SCCS
    ToolFamily("make gmake", project="*makefile makefile.* *makefile,v s.*makefile RCS/** SCCS/** *.mk *.mk.*"),
    ToolFamily("cmake ctest", project="CMakeLists.txt CMakePresets.json CMakeUserPresets.json"),
    ToolFamily(
        "npm npx yarn pnpm bun node jest mocha vitest ava nyc c8",
        project="package.json package-lock.json npm-shrinkwrap.json yarn.lock pnpm-lock.yaml pnpm-workspace.yaml",
        folders="node_modules",
    ),
    ToolFamily("tsc tsx ts-node", project="tsconfig*.json jsconfig.json"),
    ToolFamily("cargo rustc", project="Cargo.toml Cargo.lock", folders="vendor"),
    ToolFamily("go", project="go.mod go.sum go.work go.work.sum", folders="vendor"),
    ToolFamily("mvn gradle gradlew", project="pom.xml build.gradle* settings.gradle* gradle/**"),
    ToolFamily("bazel", project="WORKSPACE MODULE.bazel"),
    ToolFamily("ruby rake rspec bundle", project="Rakefile Gemfile*", folders="vendor"),
    ToolFamily(  # headers that `-I.` would find before the headers of the compiler
        "gcc g++ cc c++ clang clang++ make cmake",
        hides="assert.h complex.h ctype.h errno.h fenv.h float.h inttypes.h iso646.h limits.h locale.h math.h "
        "setjmp.h signal.h stdalign.h stdarg.h stdatomic.h stdbool.h stddef.h stdint.h stdio.h stdlib.h stdnoreturn.h "
        "string.h strings.h tgmath.h threads.h time.h uchar.h unistd.h wchar.h wctype.h fcntl.h pthread.h",
    ),
    ToolFamily("g++ c++ clang++", hides="cassert cmath cstdio cstdlib cstring iostream string vector memory algorithm"),
)
_PROGRAM_FILES = "venv/bin/** node_modules/.bin/**"
"""Programs that a line finds through the folder of an environment or of packages."""
_PYTHON_TOOLS = ("tox", "nox", "coverage", "ruff", "mypy", "flake8", "pylint", "black", "isort", "pyright", "bandit")
SHARED_CONFIG = frozenset({"pyproject.toml", "setup.cfg"})
"""Files with one section per tool; the agent may change sections of tools that the checks do not use."""
RUNNERS = re.compile(r"(?:.*/)?(?:(?:gnu)?makefile|package\.json|tox\.ini|noxfile\.py|justfile|[^/]*\.(?:sh|mk))", re.I)
"""Files of a project that start tools: a check that runs `make test` uses the tools in the Makefile."""

_WORD = re.compile(r"[\w.@+~$/{}-]+")
_FILE_NAME = re.compile(r"[./_-]|file$|rc$")
"""Sets `Makefile` and `answer.txt` apart from words such as "test" and "string"."""
_ENTERS = re.compile(r"(?:\bcd\s+|\s-C\s*|--(?:prefix|directory|manifest-path|rootdir)[=\s]\s*)([\w.~$/{}-]+)")
_MODULE = re.compile(r"(?<![\w.-])([A-Za-z_]\w*)(?:/[\w/]*)?\.py\b")
_RULE = re.compile(r"^([\w. /-]+?)\s*::?(?!=)([^=#\n]*)", re.MULTILINE)
_MAKE = re.compile(r"(?<![\w./-])g?make((?:[ \t]+[\w./=:+-]+)*)")


class Texts:
    """The texts of a task, searched for names of files, folders and modules.

    Args:
        checks: The lines of its checks, and the verifier's files.
        asked: Instruction and solution, which name the agent's files.
        root: The work folder inside.
    """

    def __init__(self, checks: Sequence[str] = (), asked: Sequence[str] = (), *, root: str) -> None:
        self.checks, self._root = tuple(checks), root
        words = {word.rstrip(".,:") for text in asked for word in _WORD.findall(text)}
        names = {name for word in words if _FILE_NAME.search(word) and (name := self.below_root(word))}
        self._named = {name.lower() for name in names}
        self._parts = {part.lower() for word in words for part in re.split(r"[/.]", word)}
        self.modules = {match[1] for text in asked for match in _MODULE.finditer(self._relative(text))}
        """Modules and packages at the top that the texts name as files."""
        self.python_files = {name for name in names if name.endswith(".py")}

    def asks_for(self, name: str, *, by_path: bool = False) -> bool:
        """Return whether a file is named, by its path or, unless `by_path`, by its last parts."""
        parts = name.lower().split("/")
        # `__init__.py` by itself says nothing: every package has one.
        starts = range(1 if by_path else len(parts) - parts[-1].startswith("__init__."))
        return any("/".join(parts[start:]) in self._named for start in starts)

    def mentions(self, folder: str) -> bool:
        """Return whether the name of a folder is a word in the texts, alone or in a path."""
        return posixpath.basename(folder).lower() in self._parts

    def asks_for_environment(self, name: str) -> bool:
        """Return whether the texts name the virtual environment of a file."""
        return any(above in self._named for above in ancestors(name.lower()) if "venv" in above)

    def starts(self) -> set[str]:
        """Return the folders that the checks enter."""
        places = (self.below_root(match[1]) for text in self.checks for match in _ENTERS.finditer(text))
        return {place for place in places if place}

    def below_root(self, word: str) -> str | None:
        """Return a path from a text relative to the work folder, or None if it is not below."""
        clean = posixpath.normpath(self._relative(word))
        return None if clean.startswith(("/", "..", "~", "$")) or clean == "." else clean

    def _relative(self, text: str) -> str:
        return re.sub(rf"[\w./~${{}}-]*\b{re.escape(posixpath.basename(self._root))}/", "", text)


@dataclass(frozen=True, slots=True)
class _Project:
    """The project files of one family, the folders that contain one, and whether a check uses it."""

    pattern: re.Pattern[str]
    provided: set[str]
    is_used: bool

    def has(self, name: str, starts: set[str], *, is_new: bool) -> bool:
        """Return whether a file belongs to one of these projects. If no check uses the tool, only new files count."""
        if not (self.is_used or is_new) or not self.provided or not self.pattern.fullmatch(name):
            return False
        folder = posixpath.dirname(name)
        return folder in self.provided or (
            folder in starts and any(_is_above(place, folder) for place in self.provided)
        )


class Lookups:
    """Decides which files of a tree steer the tools of a task's checks, and must come from the baseline.

    Args:
        texts: The texts of the task.
        files: Files and folders of the setup and of the verifier, relative to the work folder.
        runners: The contents of setup files that start tools (`RUNNERS`).
        verify_files: The texts of verifier files, by their paths relative to the work folder.
        settings: The rule for settings of all tools.
    """

    def __init__(
        self,
        texts: Texts,
        *,
        files: Collection[str],
        runners: Mapping[str, str],
        verify_files: Mapping[str, str],
        settings: Settings,
    ) -> None:
        self._texts, self._files = texts, files
        said = "\n".join((*texts.checks, *runners.values()))
        self._starts = texts.starts() | {posixpath.dirname(file) for file in verify_files}
        self._starts |= {above for start in self._starts for above in ancestors(start)}
        self._projects: list[_Project] = []
        hides: list[str] = []
        folders: list[str] = []
        starts_project = False
        for family in FAMILIES:
            pattern = any_of(family.project)
            provided = {posixpath.dirname(file) for file in files if pattern.fullmatch(file)}
            is_used = _says(family.tools, said)
            self._projects.append(_Project(pattern, provided, is_used))
            if is_used:
                starts_project = starts_project or (bool(family.project) and not provided)
                hides.append(family.hides)
                folders.append(family.folders)
        # A project that the agent started brings its settings, unless verify files lie in it.
        self._is_agents_project = starts_project and not verify_files
        self._programs = any_of(" ".join([*hides, *([] if self._is_agents_project else [_PROGRAM_FILES])]))
        self._settings = settings
        self.folders = frozenset(" ".join(folders).split())
        """Names of folders with programs and libraries of the tools."""
        self._targets = {
            folder: {target for target in targets if posixpath.join(folder, target) not in files}
            for folder, targets in _make_targets(texts, runners).items()
        }
        self._built = _built_files(verify_files) - set(files)
        self._sections = ["pytest", *(tool for tool in _PYTHON_TOOLS if _says(tool, said))]

    def steers(self, name: str) -> bool:
        """Return whether a file could steer a tool of the checks."""
        if self._is_target(name):
            return True
        if self._texts.asks_for(name, by_path="node_modules/" in name):
            return False
        if self._programs.fullmatch(name):
            return not self._texts.asks_for_environment(name)
        if self._is_setting(name):
            return True
        return any(project.has(name, self._starts, is_new=name not in self._files) for project in self._projects)

    def _is_setting(self, name: str) -> bool:
        if self._is_agents_project or posixpath.basename(name) in SHARED_CONFIG or not self._settings.cover(name):
            return False
        is_of_new_project = any(not project.provided and project.pattern.fullmatch(name) for project in self._projects)
        return not (is_of_new_project or self._texts.asks_for_environment(name))

    def names_a_tool(self, content: bytes) -> bool:
        """Return whether a `SHARED_CONFIG` has a section for a tool of the checks; pytest always counts as one."""
        text = content.decode("utf-8", "replace").lower()
        # An escape in a TOML key could spell the word, so that counts too.
        return any(word in text for word in ("\\u", "\\x", *self._sections))

    def _is_target(self, name: str) -> bool:
        """Return whether make would consider this file, or a folder above it, an up-to-date target."""
        if not self._built.isdisjoint((*ancestors(name), name)):
            return not self._texts.asks_for(name)
        for folder, targets in self._targets.items():
            if _is_above(folder, name):
                target, _, below = name[len(folder) :].lstrip("/").partition("/")
                if target in targets:
                    return not (below and self._texts.asks_for(name))
        return False


@lru_cache(maxsize=256)  # each work tree has the same few; they come from this module and from texts of tasks
def any_of(patterns: str) -> re.Pattern[str]:
    """Return an expression for paths with last parts that match one of the patterns; `**` crosses folders."""
    expressions = []
    for pattern in patterns.split():
        parts = re.split(r"(\*\*|\*)", pattern)
        wildcards = {"**": r".*", "*": r"[^/]*"}
        expressions.append("".join(wildcards.get(part, re.escape(part)) for part in parts))
    return re.compile(rf"(?s:(?:.*/)?(?:{'|'.join(expressions)}))" if expressions else r"(?!)", re.IGNORECASE)


def _is_above(folder: str, name: str) -> bool:
    return not folder or name.startswith(f"{folder}/")


def _says(words: str, text: str) -> bool:
    return _any_word(words).search(text) is not None


@lru_cache(maxsize=256)
def _any_word(words: str) -> re.Pattern[str]:
    names = "|".join(re.escape(word) for word in words.split())
    return re.compile(rf"(?<![\w.-])(?:{names})(?![\w+-])")


def _make_targets(texts: Texts, runners: Mapping[str, str]) -> dict[str, set[str]]:
    """Return, by folder, the targets that checks make there, and their prerequisites.

    Only targets without a dot count, such as `test`, not `answer.txt`. Makefiles that the agent may write are ignored.
    """
    goals = [word for text in texts.checks for match in _MAKE.finditer(text) for word in match[1].split()]
    makefiles = {
        name: text for name, text in runners.items() if "makefile" in name.lower() and not texts.asks_for(name)
    }
    targets_by_folder: dict[str, set[str]] = {}
    for name, text in makefiles.items() if _says("make gmake", "\n".join(texts.checks)) else ():
        rules: dict[str, list[str]] = {}
        for match in _RULE.finditer(text):
            for target in match[1].split():
                rules.setdefault(target, []).extend(match[2].split())
        wanted = [*goals, *list(rules)[:1]]  # a line without a target makes the first one
        reached: set[str] = set()
        while wanted:
            target = wanted.pop()
            if target in rules and target not in reached:
                reached.add(target)
                wanted.extend(rules[target])
        targets_by_folder[posixpath.dirname(name)] = {
            target for target in reached if "." not in target and "/" not in target
        }
    return targets_by_folder


def _built_files(verify_files: Mapping[str, str]) -> set[str]:
    """Return the targets of verifier makefiles, beside them (`make -C`) and at the top (`make -f`)."""
    built: set[str] = set()
    for name, text in verify_files.items():
        if RUNNERS.fullmatch(name) and ("makefile" in name.lower() or name.endswith(".mk")):
            targets = [target for match in _RULE.finditer(text) for target in match[1].split()]
            folders = {"", posixpath.dirname(name)}
            built |= {posixpath.normpath(posixpath.join(folder, target)) for folder in folders for target in targets}
    return built


# ---- settings that no text of the task mentions ----
#
# A tool reads settings that nobody mentions: prove reads .proverc, R reads .Rprofile. There are too many tools for a
# list, but their settings share names and places:
#
#   name                                                place                     counts as settings
#   .proverc, .cargo/config.toml, pylintrc, a.conf.js   any folder                always
#   deno.json, phpunit.xml, frob-config.ts, Justfile    any folder                if a check runs such a program
#   build.xml, src/meson.build                          any folder                if the setup has it
#   uv.toml, bun.lock, tsconfig.json, Justfile          of a check, or above      if the agent added it
#   config.json, settings.toml, pets.yaml               any folder                never: data of the agent's programs
#
# A text of the task that mentions a file makes it the agent's: `pyproject.toml` in the instruction, `data.ini` in a
# check, `.env` in the setup. If the setup has the file, only instruction and solution count: a check that mentions it
# relies on it.

_ALWAYS = re.compile(r"\..+|.*[a-z]rc|.+\.(?:config|conf|workspace)\.\w+|.+-toolchain", re.IGNORECASE)
_STRICT = re.compile(
    r".+\.(?:toml|ini|cfg|conf|config|lock|properties|props|targets|neon|rules|kdl|hcl|pkl|edn|ron|cue|dhall|opts|plist"
    r"|env|bzl|star|jsonnet|hjson)|[a-z]+file(?:\.py)?",
    re.IGNORECASE,
)
_DATA = re.compile(r".+\.(?:json[c5]?|xml|ya?ml)(?:\.dist)?", re.IGNORECASE)
_TOOLISH = re.compile(r".+[-_]?(?:config|conf|rc|lock|settings|workspace|project|manifest)", re.IGNORECASE)
_BUILD = re.compile(r"build(?:\.\w+)*|.+\.build|sconstruct|wscript", re.IGNORECASE)
_SUFFIX = re.compile(r"[-_.]?(?:config|conf|rc|file)$")
_GENERIC = re.compile(
    r"(?:.*[-_])?(?:config|conf|settings|options|defaults?|data|params|parameters)(?:[-_].*)?", re.IGNORECASE
)
_FILE_OF_DATA = re.compile(r"(?:pro|log|out|in|read|write|text|data|temp|tmp|input|output|re)file", re.IGNORECASE)
_GIT = frozenset({".gitignore", ".gitattributes", ".gitmodules", ".gitkeep", ".mailmap"})
"""Files that cannot make git run a command, because its configuration comes from the baseline (`safe_git_config`)."""
_SETTING_WORD = re.compile(r"[\w.+-]+")
_STARTERS = "if then do else exec run npx time env xargs sudo".replace(" ", "|")
_COMMAND = re.compile(  # a lookahead, because in `npx turbo test` both `npx` and `turbo` are programs
    rf"(?=(?:^|[;&|(!`{{]|\b(?:{_STARTERS})\b|-m)[ \t]*(?:\w+=\S*[ \t]+)*([\w./+-]+))", re.MULTILINE
)


class Settings:
    """Decides which files of a tree are settings that the checks must not find.

    Args:
        lines: The shell lines of the checks, and the scripts that they run.
        asked: Instruction and solution.
        texts: All texts of the task, its setup included.
        places: The folders that checks start or lie in.
        setup: The files of the setup.
    """

    def __init__(
        self,
        *,
        lines: Iterable[str],
        asked: Sequence[str],
        texts: Sequence[str],
        places: Iterable[str],
        setup: Collection[str],
    ) -> None:
        self._programs = {posixpath.basename(match[1]).lower() for line in lines for match in _COMMAND.finditer(line)}
        self._asked, self._mentioned = _words(asked), _words(texts)
        self._places = {above for place in places for above in (place, *_above(place))} | {""}
        self._setup = setup

    def cover(self, name: str) -> bool:
        """Return whether this file comes from the baseline, or not at all if the baseline lacks it."""
        folder, base = posixpath.split(name)
        hidden = [part for part in name.split("/") if part.startswith(".")]
        if ".git" in hidden or base in _GIT or base == "__init__.py":
            return False
        if "node_modules" in name.split("/")[:-1]:
            return False  # the layouts of package managers; `Lookups` protects the programs in it
        if not self._is_setting(folder, base, bool(hidden), is_new=name not in self._setup):
            return False
        words = self._asked if name in self._setup else self._mentioned
        return words.isdisjoint(part.lower() for part in (base, *hidden))

    def _is_setting(self, folder: str, base: str, is_hidden: bool, *, is_new: bool) -> bool:
        if is_hidden or _ALWAYS.fullmatch(base):
            return True
        if _BUILD.fullmatch(base) and not is_new:
            return True
        stem = base.split(".")[0].lower()
        tool = _SUFFIX.sub("", stem)
        if tool != stem and not _FILE_OF_DATA.fullmatch(stem) and self._is_program(tool):
            return True
        is_strict, is_data = _STRICT.fullmatch(base), _DATA.fullmatch(base)
        if not is_strict and not is_data:
            return False
        if stem in self._programs:
            return True
        if not is_new or folder not in self._places or _GENERIC.fullmatch(stem) or _FILE_OF_DATA.fullmatch(stem):
            return False
        return bool(is_strict or _TOOLISH.fullmatch(stem))

    def _is_program(self, name: str) -> bool:
        """Return whether a check runs a program with this name, or with a longer one: Snakefile of snakemake."""
        return any(name == program or (len(name) > 3 and program.startswith(name)) for program in self._programs)


def _words(texts: Iterable[str]) -> set[str]:
    return {word.lower().rstrip(".,:") for text in texts for word in _SETTING_WORD.findall(text)}


def _above(folder: str) -> list[str]:
    parts = folder.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts))]


# ---- git ----

GIT_FILES = re.compile(
    r"(?:.*/)?\.git(?:/(?:modules/.+/|worktrees/[^/]+/)?"
    r"(?:config\.worktree|commondir|gitdir|hooks(?:/.*)?|info/.*|objects/info/(?:http-)?alternates))?",
    re.DOTALL,
)
"""Files that make git run a command or read other folders, including a `.git` that is a file or a link."""
GIT_CONFIG = re.compile(r"(?:.*/)?\.git/(?:modules/.+/)?config", re.DOTALL)
_GIT_SECTION = re.compile(r'\s*\[([A-Za-z0-9-]+)(?: "([^"\\\n]*)")?\]\s*')
_GIT_VALUE = re.compile(r'\s*([A-Za-z][A-Za-z0-9-]*)\s*=\s*([^"\\#;\n]*?)\s*')
_GIT_HARMLESS = {
    "branch": frozenset({"remote", "merge", "rebase"}),
    "core": frozenset({"repositoryformatversion", "filemode", "bare", "logallrefupdates", "ignorecase"}),
    "extensions": frozenset({"objectformat"}),
    "remote": frozenset({"url", "fetch"}),
    "user": frozenset({"name", "email"}),
}
"""Keys that never make git run a command. The agent may set these; all others come from the baseline."""


def safe_git_config(agents: bytes, setups: bytes = b"") -> bytes:
    """Return a repository's configuration: harmless keys of the agent, everything else from the baseline.

    The agent's keys are parsed strictly and written again in the plainest form, so git reads them the same way.
    """
    ours = [line for line, setting in _git_settings(setups) if setting is None]
    theirs = [setting for _, setting in _git_settings(agents) if setting is not None]
    if theirs == [setting for _, setting in _git_settings(setups) if setting is not None]:
        return setups
    return "\n".join([*ours, *theirs, ""]).encode("utf-8", "surrogateescape")


def _git_settings(content: bytes) -> Iterable[tuple[str, str | None]]:
    """Return each line with its harmless setting in the plainest form, or with None."""
    head, keys = "", frozenset[str]()
    for line in content.decode("utf-8", "surrogateescape").split("\n"):
        setting = None
        if section := _GIT_SECTION.fullmatch(line):
            name = "" if section[2] is None else f' "{section[2]}"'
            head, keys = f"[{section[1].lower()}{name}]", _GIT_HARMLESS.get(section[1].lower(), frozenset())
        elif line.lstrip().startswith("["):
            keys = frozenset()  # an unusual header: ignore the keys below it
        elif (value := _GIT_VALUE.fullmatch(line)) and value[1].lower() in keys:
            setting = f"{head}\n\t{value[1].lower()} = {value[2]}"
        yield line, setting
