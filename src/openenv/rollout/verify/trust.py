"""How far a reward can be trusted: `judged`, `isolated` or `shared`, read from the checks of a task before they run.

Knows shell lines, Python source and which programs only read data. Reads conservatively: what it does not know for
certain is `shared`. Runs nothing, and must not know sandboxes.
"""

# judged     a `Check`: what decides shares no process, user or sandbox with the agent's code
# isolated   a plain line that runs nothing of the agent's: `grep -qx 42 answer.txt`
# shared     the agent's code may run where the decision is made: `pytest`, `python3 -c "from square import square..."`
#
# A plain line is read as a tree (`shell_syntax`). It is isolated if each of its commands is a program that only reads
# data, with arguments that leave it so: `find . -name x` is one, `find . -exec` is not, and neither is `find $(cat x)`,
# where the agent writes the arguments. Python is read in the same way, with everything of the verify files that it
# imports. What the agent's tree could put in the place of such a program or module is the verifier's concern.
#
# The judge of a `Check` may run what it likes but for what the agent left below $OUTPUT. That is read the other way
# round: it is judged unless something shows that it does.

from __future__ import annotations

import ast
import posixpath
import re
import sys
from collections.abc import Callable, Mapping

from openenv.rollout.tasks.checks import Check
from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.trust_levels import Trust
from openenv.rollout.verify.shell_syntax import (
    Command,
    CommandList,
    Compound,
    Expansion,
    Node,
    Pipeline,
    Redirection,
    ShellSyntaxError,
    Word,
    parse,
)
from openenv.sandboxes.base import HOME, WORKDIR


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHELLS = frozenset({"sh", "bash", "dash", "ash"})
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SYSTEM = ("/bin", "/usr/bin", "/usr/local/bin")
_READERS = _words(
    "cat head tail wc cmp diff grep egrep fgrep cut tr nl tac rev od xxd hexdump comm paste join fold expand unexpand "
    "fmt column stat ls du uniq sha1sum sha224sum sha256sum sha384sum sha512sum md5sum b2sum cksum sum basename "
    "dirname readlink realpath seq date expr echo true false pwd sleep numfmt : exit return break continue shift "
    "wait"
)
"""Programs that execute nothing, whatever their arguments are."""
_WRITERS = _words("uniq xxd awk gawk mawk")
"""Those of them, and others that are read, that can write a file: `uniq FROM TO`."""
_SHELL_OPTIONS = re.compile(r"-[eufx]+")
_PYTHON_OPTIONS = re.compile(r"-[IuBbqsO]+")
_PYTEST_OPTIONS = re.compile(r"-[qvxsl]+|-r\w+|--tb=\w+|--no-header|--color=\w+|--maxfail=\d+|--strict-markers")
_SET_OPTIONS = re.compile(r"[-+][eufx]+|pipefail|errexit|nounset")
_FIND_ACTIONS = ("-exec", "-ok", "-delete", "-fprint", "-fls")
_SORT_OPTIONS = re.compile(
    r"-[bdfginrucmsVhRMz]+|-[kt].*|--(unique|reverse|numeric-sort|version-sort|human-numeric-sort)"
)
_SED_SCRIPT = re.compile(
    r"\s*(?:(?:\d+|\$|/[^/]*/)(?:,(?:\d+|\$|/[^/]*/))?)?\s*!?\s*"
    r"(?:[pdq=]|s(?P<d>[/|#,:@])(?:(?!(?P=d)).)*(?P=d)(?:(?!(?P=d)).)*(?P=d)[gpiI0-9]*|y/[^/]*/[^/]*/)\s*"
)
_AWK_RUNS = re.compile(r"system\s*\(|(?<!\|)\|(?!\|)|\|&|@\s*\w|\bgetline\b")
_ARITHMETIC = re.compile(r"[\d\s+\-*/%()]*")
_STEERING = re.compile(
    r"(PATH|IFS|ENV|CDPATH|HOME|SHELL|PS4|POSIXLY_CORRECT|TMPDIR|OUTPUT|URL)$|.*(PATH|OPTIONS|OPTS|FLAGS|STARTUP)$|"
    r"(LD|BASH|PYTHON|PYTEST|GIT|PERL|NODE|RUBY|JAVA|GREP|LESS|OPENENV|AWK|JQ)_?.*"
)
"""Variables by which a program finds other programs, modules or options."""

_DATA_MODULES = _words(
    "__future__ abc argparse array ast base64 binascii bisect bz2 calendar cmath collections collections.abc colorsys "
    "configparser contextlib copy csv dataclasses datetime decimal difflib enum errno fnmatch fractions functools glob "
    "gzip hashlib heapq hmac html html.entities html.parser io ipaddress itertools json json.decoder keyword locale "
    "lzma math numbers operator os os.path pathlib plistlib pprint random re reprlib secrets sqlite3 stat statistics "
    "string struct sys tempfile textwrap time tomllib traceback typing unicodedata urllib.parse uuid warnings "
    "wave xml.dom xml.dom.minidom xml.etree xml.etree.ElementTree zipfile zlib zoneinfo"
)
"""Modules of the standard library that read and compute, and run nothing that they read."""
_OTHER_MODULES = frozenset({"pytest"})
"""Modules that are not Python's, and of the verifier's own Python all the same."""
_SAFE_ATTRIBUTES = {
    "os": _words(
        "path listdir stat lstat scandir walk environ getenv getcwd sep linesep fspath fsencode fsdecode access "
        "readlink R_OK W_OK X_OK F_OK name devnull stat_result DirEntry PathLike makedirs remove unlink"
    ),
    "sys": _words(
        "argv exit stdin stdout stderr version_info version maxsize byteorder float_info int_info platform "
        "getrecursionlimit setrecursionlimit set_int_max_str_digits getsizeof"
    ),
}
"""All that a script may use of modules that can also run things."""
_RUNS_CODE = _words(
    "exec eval compile __import__ breakpoint globals locals vars getattr setattr delattr __builtins__ __loader__ "
    "__spec__ pytest_plugins"
)
_ATTRIBUTES = _words(
    "system popen exec_module load_module load_extension enable_load_extension os sys subprocess builtins importlib "
    "extractall importorskip main setattr delattr syspath_prepend"
)
_DUNDERS = _words("__name__ __file__ __doc__ __init__ __len__ __version__")
_TEST_RUNNERS = re.compile(
    r"(?<![\w.-])(pytest|py\.test|unittest|tox|nox|make|ctest|npm|npx|yarn|pnpm|jest|mocha|vitest|cargo|go|mvn|gradle|"
    r"rspec|bats)(?![\w./-])"
)


def trust_of(check: str | Check, task: Task) -> tuple[Trust, str]:
    """Return the trust of a check in a task, and the reason."""
    problem = line_problem(check, task) if isinstance(check, str) else judge_problem(check, task)
    if problem is not None:
        return "shared", problem
    if isinstance(check, str):
        return "isolated", "it only reads data"
    return "judged", "what the agent wrote runs in one sandbox, and what came of it is judged in another"


def line_problem(line: str, task: Task) -> str | None:
    """Return what of the agent's a plain line may run, or None when it runs nothing of it for certain."""
    # What a setup leaves cannot be read before it runs, and a conftest.py of it may load what the agent wrote.
    try:
        LineReader(task.verify_sources, allows_pytest=not (task.setup or task.files or task.workdir)).read(line)
    except LineRefused as refusal:
        return str(refusal)
    return None


def only_reads(line: str, task: Task) -> bool:
    """Return whether a plain line leaves all as it was: a sandbox in which it ran is as good as a fresh one."""
    try:
        _ReadingLine(task.verify_sources, allows_pytest=False).read(line)
    except LineRefused:
        return False
    return True


class LineRefused(Exception):
    """Why a line does not count as one that only reads data."""


# ---- shell ----


class LineReader:
    """Reads a line, and the verify files that it runs, for programs that could run something of the agent's."""

    def __init__(self, verify_files: Mapping[str, str], *, allows_pytest: bool) -> None:
        self._files = {_absolute(WORKDIR, path): text for path, text in verify_files.items()}
        self._allows_pytest = allows_pytest
        self._cwd: str | None = WORKDIR
        """Where relative paths begin; None after a `cd` that cannot be followed."""
        # Folders that are no links of the agent's: the verifier has laid files below them.
        self._folders = {HOME, WORKDIR, "/", "/tmp", *(folder for path in self._files for folder in _parents(path))}
        self._functions: dict[str, list[Compound]] = {}
        self._read: set[tuple[str, str | None]] = set()
        """The files and functions that are being read or were, and in which folder."""
        self._programs: dict[str, Callable[[Command, tuple[Word, ...]], None]] = {
            "[": self._test,
            "test": self._test,
            "printf": self._printf,
            "read": self._read_variable,
            "set": self._set,
            "cd": self._change_folder,
            "command": self._find_command,
            "sort": self._sort,
            "find": self._find,
            "sed": self._sed,
            "awk": self._awk,
            "gawk": self._awk,
            "mawk": self._awk,
            "jq": self._jq,
            "timeout": self._timeout,
            ".": self._source,
            "pytest": self._pytest,
        }

    def read(self, text: str) -> None:
        """Read a line or the text of a script.

        Raises:
            LineRefused: it may run something of the agent's.
        """
        try:
            self.sequence(parse(text))
        except ShellSyntaxError as exc:
            raise LineRefused(f"it cannot be read for certain: {exc}") from exc

    def sequence(self, sequence: CommandList) -> None:
        """Read the commands of a sequence, in order."""
        for operator, pipeline in sequence.items:
            before = self._cwd
            for node in pipeline.commands:
                self._node(node)
                if len(pipeline.commands) > 1:  # each of them is a subshell
                    self._cwd = before
            if operator == "||" and self._cwd != before:
                self._cwd = None

    def _node(self, node: Node) -> None:
        before = self._cwd
        for word in node.words:
            self._expansions(word)
        for redirection in node.redirections:
            self._redirection(redirection)
        if isinstance(node, Command):
            self._command(node)
            return
        if node.kind == "function":  # read where it is called: its paths begin there
            self._functions.setdefault(node.name, []).append(node)
            return
        if node.name:
            _check_variable(node.name)
        for part in node.parts:
            self.sequence(part)
        if node.kind == "(":
            self._cwd = before
        elif node.kind != "{" and self._cwd != before:
            self._cwd = None

    def _expansions(self, word: Word) -> None:
        for expansion in word.expansions:
            if expansion.kind == "arithmetic" and not _ARITHMETIC.fullmatch(expansion.name):
                raise LineRefused(
                    f"'{word.text}' computes with what the agent may have written, which some shells execute"
                )
            if expansion.command is not None:
                before = self._cwd
                self.sequence(expansion.command)
                self._cwd = before

    def _redirection(self, redirection: Redirection) -> None:
        self._expansions(redirection.word)
        if ">" not in redirection.operator or re.fullmatch(r"\d+|-", redirection.word.literal or ""):
            return
        target = self._path(redirection.word)
        if target is None:
            raise LineRefused(f"it writes to a file whose name it does not know before: {redirection.word.text}")
        if target in self._files:
            raise LineRefused(f"it writes over {redirection.word.text}, one of the verify files")

    def _command(self, command: Command) -> None:
        for name, word in command.assignments:
            self._expansions(word)
            _check_variable(name)
        if not command.words:
            return
        program = _program(command.words[0])
        arguments = command.words[1:]
        if program is None:
            raise LineRefused(f"it runs {command.words[0].text}, which is not one of the system's programs")
        if program in self._functions:
            if self._is_new(f"function {program}"):
                for body in self._functions[program]:
                    self.sequence(body.parts[0])
            return
        if program in _READERS:
            return
        if program in _SHELLS:
            self._shell(command, arguments)
        elif _PYTHON.fullmatch(program):
            self._python(command, arguments)
        elif program in self._programs:
            self._programs[program](command, arguments)
        else:
            raise LineRefused(f"it runs {program}, which can load or run what the agent left")

    def _path(self, word: Word) -> str | None:
        """Return the absolute path that a word names, or None where it is known only when the line runs."""
        parts = [
            HOME if isinstance(part, Expansion) and (part.kind, part.name) == ("variable", "HOME") else part
            for part in word.parts
        ]
        if not all(isinstance(part, str) for part in parts):
            return None
        path = "".join(map(str, parts))
        # Of a folder behind a link, `..` is another one than the text says.
        if re.search(r"[^/.][^/]*/+\.\.(/|$)", path) or (not path.startswith("/") and self._cwd is None):
            return None
        return _absolute(self._cwd or "/", path)

    def _file(self, word: Word, *, what: str) -> tuple[str, str]:
        """Return path and text of a verify file that is run."""
        path = self._path(word)
        if path is None or path not in self._files:
            raise LineRefused(f"{what} {word.text}, which is not one of the verify files")
        return path, self._files[path]

    # Programs. Each returns if the arguments leave it a reader of data, and raises if not.

    def _test(self, command: Command, arguments: tuple[Word, ...]) -> None:
        for word in arguments:
            if word.literal in ("-v", "-R"):
                raise LineRefused(f"'{command.text}' evaluates the name of a variable")
            # Split into words, the agent's text could be such an operator. What counts prints numbers.
            for part in word.expansions:
                if part.kind in ("variable", "command") and not part.quoted and not _prints_a_number(part):
                    raise LineRefused(f"'{word.text}' has no quotes, so the agent's text is split into operators")

    def _printf(self, command: Command, arguments: tuple[Word, ...]) -> None:
        if arguments and (not arguments[0].start or arguments[0].start.startswith("-")):
            raise LineRefused(f"the format of '{command.text}' is not known before")

    def _read_variable(self, command: Command, arguments: tuple[Word, ...]) -> None:
        for word in arguments:
            if word.literal is None:
                raise LineRefused(f"'{command.text}' reads into a variable whose name is not known before")
            if word.literal != "-r":
                _check_variable(word.literal)

    def _set(self, command: Command, arguments: tuple[Word, ...]) -> None:
        options = [word.literal or "" for word in arguments if word.literal != "-o"]
        if not all(_SET_OPTIONS.fullmatch(option) for option in options):
            raise LineRefused(f"'{command.text}' is not read")

    def _change_folder(self, command: Command, arguments: tuple[Word, ...]) -> None:
        named = len(arguments) == 1 and not arguments[0].start.startswith("-")
        folder = self._path(arguments[0]) if named else None
        self._cwd = folder if folder in self._folders else None

    def _find_command(self, command: Command, arguments: tuple[Word, ...]) -> None:
        if not arguments or arguments[0].literal != "-v":
            raise LineRefused(f"'{command.text}' runs a program")

    def _plain_options(self, command: Command, arguments: tuple[Word, ...]) -> list[str]:
        """Return the arguments that are options, for programs of which some options are dangerous."""
        for word in arguments:
            if not word.start and word.literal is None:
                raise LineRefused(f"in '{command.text}' the agent may write options: {word.text}")
        return [word.literal or word.start for word in arguments if word.start.startswith("-") and word.start != "-"]

    def _sort(self, command: Command, arguments: tuple[Word, ...]) -> None:
        for option in self._plain_options(command, arguments):
            if not _SORT_OPTIONS.fullmatch(option):
                raise LineRefused(f"sort {option} can run a program or write a file")

    def _find(self, command: Command, arguments: tuple[Word, ...]) -> None:
        for option in self._plain_options(command, arguments):
            if option.startswith(_FIND_ACTIONS):
                raise LineRefused(f"find {option} does more than read")

    def _sed(self, command: Command, arguments: tuple[Word, ...]) -> None:
        self._plain_options(command, arguments)
        scripts, others = [], []
        words = iter(arguments)
        for word in words:
            option = word.literal if word.start.startswith("-") and word.start != "-" else None
            if option == "-e":
                scripts.append(next(words, word))
            elif option is None:
                others.append(word)
            elif option not in ("-n", "-E", "-r", "-s", "-u", "-z", "--sandbox"):
                raise LineRefused(f"sed {option} is not read")
        scripts = scripts or others[:1]
        if any(word.literal == "--sandbox" for word in arguments):
            return
        for word in scripts:
            text = word.literal
            if text is None or not all(
                _SED_SCRIPT.fullmatch(part) for part in re.split(r"[;\n]", text) if part.strip()
            ):
                raise LineRefused(
                    f"the script of '{command.text}' may run a program or write a file; sed --sandbox cannot"
                )

    def _awk(self, command: Command, arguments: tuple[Word, ...]) -> None:
        words = list(arguments)
        while words and words[0].start.startswith("-"):
            option = words.pop(0)
            if option.literal in ("-v", "-F") and words:
                words.pop(0)
            elif not re.match(r"-[Fv].", option.start):
                raise LineRefused(f"awk {option.text} is not read")
        if not words or words[0].literal is None or _AWK_RUNS.search(words[0].literal):
            raise LineRefused(f"the program of '{command.text}' may run others")

    def _jq(self, command: Command, arguments: tuple[Word, ...]) -> None:
        words = list(arguments)
        while words:
            word = words.pop(0)
            if re.match(r"-\w*L|--library-path", word.start) or re.search(r"\b(import|include)\b", word.text):
                raise LineRefused(f"'{command.text}' loads other files")
            if re.fullmatch(r"-\w*f|--from-file", word.literal or "") and words:
                self._file(words.pop(0), what="jq runs the program")

    def _timeout(self, command: Command, arguments: tuple[Word, ...]) -> None:
        words = list(arguments)
        while words and words[0].start.startswith("-"):
            if words.pop(0).literal in ("-k", "-s") and words:
                words.pop(0)
        if len(words) < 2 or words[0].literal is None:
            raise LineRefused(f"'{command.text}' is not read")
        self._command(Command(command.text, (), tuple(words[1:]), command.redirections))

    def _source(self, command: Command, arguments: tuple[Word, ...]) -> None:
        if len(arguments) != 1 or "/" not in arguments[0].text:
            raise LineRefused(f"'{command.text}' looks for a script in the PATH")
        path, text = self._file(arguments[0], what="it runs")
        if self._is_new(path):
            self.read(text)

    def _shell(self, command: Command, arguments: tuple[Word, ...]) -> None:
        words = list(arguments)
        while words and _SHELL_OPTIONS.fullmatch(words[0].literal or ""):
            words.pop(0)
        before = self._cwd
        if words and words[0].literal in ("-c", "-ec"):
            text = words[1].literal if len(words) > 1 else None
            if text is None:
                raise LineRefused(f"the script of '{command.text}' is not known before")
            self.read(text)
        elif words and not words[0].start.startswith("-"):
            path, text = self._file(words[0], what="it runs")
            if self._is_new(path):
                self.read(text)
        else:
            self.read(_standard_input(command))
        self._cwd = before

    def _is_new(self, name: str) -> bool:
        """Return whether a file or function was not read before, in this folder."""
        before = len(self._read)
        self._read.add((name, self._cwd))
        return len(self._read) > before

    # Python

    def _python(self, command: Command, arguments: tuple[Word, ...]) -> None:
        words = list(arguments)
        ignores_folder = False
        while words and _PYTHON_OPTIONS.fullmatch(words[0].literal or ""):
            ignores_folder = ignores_folder or "I" in words[0].text
            words.pop(0)
        option = words[0].literal if words else "-"
        if option in ("-c", "-", "-m") and self._cwd is None and not ignores_folder:
            raise LineRefused("Python looks for modules in a folder that is the agent's; python3 -I does not")
        if option == "-c":
            code = words[1].literal if len(words) > 1 else None
            if code is None:
                raise LineRefused(f"the program of '{command.text}' is not known before")
            self._code(code, self._cwd)
        elif option == "-":
            self._code(_standard_input(command), self._cwd)
        elif option == "-m":
            module = words[1].literal if len(words) > 1 else None
            if module == "pytest":
                self._pytest(command, tuple(words[2:]))
            elif module != "json.tool":
                raise LineRefused(f"it runs the module {module}, which can load what the agent left")
        elif option is not None and option.startswith("-"):
            raise LineRefused(f"python3 {option} is not read")
        else:
            path, text = self._file(words[0], what="it runs")
            self._python_file(path, text, posixpath.dirname(path))

    def _pytest(self, command: Command, arguments: tuple[Word, ...]) -> None:
        """Read tests that are named one by one; what else pytest loads is the verifier's or the setup's."""
        if not self._allows_pytest:
            raise LineRefused("pytest loads the configuration that the setup left, and what that imports")
        tests = [word for word in arguments if not word.start.startswith("-")]
        for word in set(arguments) - set(tests):
            if not _PYTEST_OPTIONS.fullmatch(word.literal or ""):
                raise LineRefused(f"pytest {word.text} can load what the agent left")
        if not tests:
            raise LineRefused("pytest looks for tests itself, and loads what they import into its own process")
        for word in tests:
            name = (word.literal or "").partition("::")[0]
            if self._path(Word(word.text, (name,))) not in self._files:
                raise LineRefused(
                    f"pytest looks for tests in {word.text}, and loads what they import into its own process"
                )
            path, text = self._file(Word(word.text, (name,)), what="pytest runs")
            # A package of the agent's beside the test would change where other verify files are imported from.
            self._python_file(path, text, None)

    def _python_file(self, path: str, text: str, folder: str | None) -> None:
        if self._is_new(path):
            self._code(text, folder)

    def _code(self, source: str, folder: str | None) -> None:
        """Read Python that finds its modules in a folder, None for an unknown one."""
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError) as exc:
            raise LineRefused(f"its Python cannot be read: {exc}") from exc
        modules: dict[str, str] = {}
        bases: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for item in node.names:
                    self._import(item.name, folder)
                    name = item.name if item.asname else item.name.partition(".")[0]
                    if name in _SAFE_ATTRIBUTES:
                        modules[item.asname or name] = name
            elif isinstance(node, ast.ImportFrom):
                self._import_from("." * node.level + (node.module or ""), [item.name for item in node.names], folder)
            elif isinstance(node, ast.Attribute):
                bases.add(id(node.value))
        for node in ast.walk(tree):
            _check_python(node, modules, is_base=id(node) in bases)

    def _import_from(self, module: str, names: list[str], folder: str | None) -> None:
        for name in names:
            if name not in _SAFE_ATTRIBUTES.get(module, (name,)):
                raise LineRefused(f"it uses {module}.{name}")
        package = None if folder is None else posixpath.join(folder, module.replace(".", "/"), "__init__.py")
        if module in _DATA_MODULES or package not in self._files:
            for name in names:
                self._import(f"{module}.{name}" if f"{module}.{name}" in _DATA_MODULES else module, folder)
            return
        # A name that the package does not define is one of its modules, which the agent could have added.
        defined = _defined(self._files[str(package)])
        for name in names:
            self._import(module if name in defined else f"{module}.{name}", folder)

    def _import(self, module: str, folder: str | None) -> None:
        """Read an imported module of the verify files, or refuse one that may be the agent's."""
        parents = module.split(".")[:-1]
        packages = [f"{folder}/{'/'.join(parents[: n + 1])}/__init__.py" for n in range(len(parents))]
        path = f"{folder}/{module.replace('.', '/')}"
        for file in (f"{path}/__init__.py", f"{path}.py"):
            # Without the packages above it, the agent's own would be loaded first.
            if file in self._files and all(package in self._files for package in packages):
                for each in (*packages, file):
                    self._python_file(each, self._files[each], folder)
                return
        if module.partition(".")[0] not in sys.stdlib_module_names and module not in _OTHER_MODULES:
            raise LineRefused(
                f"it imports {module.lstrip('.') or 'a part of its package'}, which the agent may have written"
            )
        if module not in _DATA_MODULES and module not in _OTHER_MODULES:
            raise LineRefused(f"it imports {module}, which can run other code")


class _ReadingLine(LineReader):
    """Reads a line for programs that could write anything: fewer are known not to than to run nothing."""

    def _redirection(self, redirection: Redirection) -> None:
        super()._redirection(redirection)
        if ">" in redirection.operator and not re.fullmatch(r"\d+|-|/dev/null", redirection.word.literal or ""):
            raise LineRefused(f"it writes to {redirection.word.text}")

    def _command(self, command: Command) -> None:
        if command.words and _program(command.words[0]) in _WRITERS:
            raise LineRefused(f"'{command.text}' may write a file")
        super()._command(command)

    def _python(self, command: Command, arguments: tuple[Word, ...]) -> None:
        raise LineRefused("Python may write files")

    def _pytest(self, command: Command, arguments: tuple[Word, ...]) -> None:
        raise LineRefused("pytest writes files")


def _program(word: Word) -> str | None:
    """Return the name of a program of the system; None for another, or one that is known only when the line runs."""
    name = word.literal
    if not name:
        return None
    folder, base = posixpath.split(name)
    return base if not folder or folder in _SYSTEM else None


def _parents(path: str) -> list[str]:
    folders = []
    while (path := posixpath.dirname(path)) not in ("", "/"):
        folders.append(path)
    return folders


def _absolute(folder: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


def _check_variable(name: str) -> None:
    if not name.isidentifier():
        raise LineRefused(f"'{name}' is no variable")
    if _STEERING.match(name):
        raise LineRefused(f"it sets {name}, which decides what other programs load")


def _prints_a_number(expansion: Expansion) -> bool:
    """Return whether a substitution ends in a program that prints nothing but numbers."""
    if expansion.command is None or len(expansion.command.items) != 1:
        return expansion.name in ("?", "#")
    last = expansion.command.items[0][1].commands[-1]
    if not isinstance(last, Command) or not last.words:
        return False
    words = [word.literal or "" for word in last.words]
    if words[0] == "wc":
        return len(words) <= 2 and all(re.fullmatch(r"-[lwcm]", word) for word in words[1:])
    operands = [word for word in last.words[1:] if not word.start.startswith("-")]
    counts = words[0] == "grep" and any(re.fullmatch(r"-[ciEFwxvq]*c[iEFwxv]*", word) for word in words)
    # The pattern and a file: of several, it prints the names, too.
    return counts and len(operands) <= 2 and all(word.literal is not None for word in operands)


def _standard_input(command: Command) -> str:
    """Return the here-document that a program reads its own program from."""
    for redirection in command.redirections:
        if redirection.operator == "<<" and redirection.word.literal is not None:
            return redirection.word.literal
    raise LineRefused(f"'{command.text}' runs what it reads from its standard input")


def _defined(source: str) -> set[str]:
    """Return the names that a module defines at its top."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {item.asname or item.name for item in node.names}
    return names


def _check_python(node: ast.AST, modules: Mapping[str, str], *, is_base: bool) -> None:
    """Refuse what could run something: builtins, attributes, and modules of which only parts are safe."""
    if isinstance(node, ast.Name):
        if node.id in _RUNS_CODE:
            raise LineRefused(f"it uses {node.id}")
        if node.id in modules and not is_base:
            raise LineRefused(f"it passes the module {modules[node.id]} on")
    elif isinstance(node, ast.Attribute):
        base = node.value
        if isinstance(base, ast.Name) and base.id in modules:
            if node.attr not in _SAFE_ATTRIBUTES[modules[base.id]]:
                raise LineRefused(f"it uses {modules[base.id]}.{node.attr}")
        elif node.attr in _ATTRIBUTES or (node.attr.startswith("__") and node.attr not in _DUNDERS):
            raise LineRefused(f"it uses .{node.attr}")


# ---- judges ----

_INTERPRETERS = _words("node deno bun perl ruby php lua Rscript julia osascript tclsh go cargo java make")
COMPILERS = _words("gcc g++ cc c++ clang clang++ rustc javac tsc ghc")
_STARTERS = _words("eval exec env xargs nice nohup setsid stdbuf time sudo su chmod")
_COPIERS = _words("cp mv ln install rsync tar unzip cpio patch")
_LOADERS = _words(
    "pickle cPickle _pickle dill cloudpickle joblib marshal shelve importlib runpy ctypes imp code codeop subprocess "
    "pty multiprocessing"
)
_LOADING = re.compile(
    r"allow_pickle|\btorch\.load\b|\byaml\.(load|unsafe_load|full_load)\b|\bsys\.path\b|"
    r"\bos\.(system|popen|exec\w*|spawn\w*|posix_spawn\w*)\b"
)
_POSITIONAL = frozenset("123456789@*")


def judge_problem(check: Check, task: Task) -> str | None:
    """Return how a check's judge may run what the agent left, or let it decide; None when nothing shows that."""
    files = {**task.verify_sources, **check.files}
    reader = _JudgeReader(files)
    try:
        reader.read(check.judge, {"OUTPUT"})
    except ShellSyntaxError as exc:
        return f"its judge cannot be read for certain: {exc}"
    except LineRefused as refusal:
        return f"its judge {refusal}"
    if check.port is None and reader.outputs == {"exit_code"} and runs_tests(check.run, files):
        return "its judge reads only the exit code of tests that ran beside the agent's code, which can set it"
    return None


def runs_tests(run: str, files: Mapping[str, str]) -> bool:
    """Return whether the `run` of a check runs tests: its exit code is then a verdict, and not an answer."""
    words = {_absolute(WORKDIR, word) for word in re.findall(r"[^\s'\"<>|;&()=,`]+", run)}
    scripts = {_absolute(WORKDIR, path) for path in files if path.endswith((".py", ".sh", ".js", ".rb", ".pl", ".ts"))}
    return bool(_TEST_RUNNERS.search(run) or words & scripts)


class _JudgeReader:
    """Reads a judge for uses of what the agent left as a program.

    Variables that hold a path or text of it are followed through assignments, loops and the arguments of scripts.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = {_absolute(WORKDIR, path): text for path, text in files.items()}
        self._read: set[tuple[str, bool]] = set()
        self.outputs: set[str] = set()
        """What of $OUTPUT is read, by the first part of the path."""

    def read(self, text: str, tainted: set[str]) -> None:
        """Read a line or a script in which these variables are the agent's.

        Raises:
            LineRefused: it runs something of the agent's.
            ShellSyntaxError: it cannot be read.
        """
        self._sequence(parse(text), tainted)

    def _sequence(self, sequence: CommandList, tainted: set[str], *, piped: bool = False) -> bool:
        """Read a sequence; return whether it names anything of the agent's. `piped`: its input is the agent's."""
        return any([self._pipeline(pipeline, tainted, piped=piped) for _, pipeline in sequence.items])

    def _pipeline(self, pipeline: Pipeline, tainted: set[str], *, piped: bool) -> bool:
        theirs = piped
        for node in pipeline.commands:
            theirs = self._node(node, tainted, piped=theirs) or theirs
        return theirs

    def _node(self, node: Node, tainted: set[str], *, piped: bool) -> bool:
        words = [*node.words, *(redirection.word for redirection in node.redirections)]
        marks = [self._is_theirs(word, tainted) for word in words]
        if isinstance(node, Command):
            for name, word in node.assignments:
                if self._is_theirs(word, tainted):
                    if _STEERING.match(name):
                        raise LineRefused(f"sets {name} to a place below $OUTPUT")
                    tainted.add(name)
            self._command(node, tainted, piped=piped or any(marks[len(node.words) :]))
            return any(marks) or _asks_server(node)
        if node.name and any(marks):
            tainted.add(node.name)
        inside = tainted | _POSITIONAL if node.kind == "function" else tainted
        inner = [self._sequence(part, inside, piped=piped or any(marks)) for part in node.parts]
        return any(marks) or any(inner)

    def _is_theirs(self, word: Word, tainted: set[str]) -> bool:
        theirs = False
        for number, part in enumerate(word.parts):
            if isinstance(part, str):
                continue
            if part.command is not None:
                theirs = self._sequence(part.command, tainted) or theirs
            elif part.name in tainted:
                theirs = True
                if part.name == "OUTPUT":
                    rest = "".join(each for each in word.parts[number + 1 :] if isinstance(each, str))
                    self.outputs.add(rest.strip("/").partition("/")[0])
        return theirs

    def _command(self, command: Command, tainted: set[str], *, piped: bool) -> None:
        if not command.words:
            return
        theirs = [self._is_theirs(word, tainted) for word in command.words]
        if theirs[0]:
            raise LineRefused(f"runs {command.words[0].text}")
        program = posixpath.basename(command.words[0].literal or "")
        arguments = [(word, mark) for word, mark in zip(command.words, theirs, strict=True)][1:]
        if program in _COPIERS | COMPILERS and any(theirs):
            raise LineRefused(f"copies or compiles what the agent left ('{command.text}'); it can be read where it is")
        if program in _STARTERS | {"."} and any(theirs):
            raise LineRefused(f"runs what the agent left: '{command.text}'")
        if program == "cd" and any(theirs):
            raise LineRefused("works in $OUTPUT, where programs look for their files")
        if program in ("read", "for"):
            tainted |= {word.literal for word, _ in arguments if word.literal} if piped else set()
        elif program == "timeout" and len(arguments) > 1:
            self._command(Command(command.text, (), tuple(word for word, _ in arguments[1:])), tainted, piped=piped)
        elif program in _SHELLS or _PYTHON.fullmatch(program) or program in _INTERPRETERS | {"pytest"}:
            self._interpreter(program, command, arguments, piped=piped)

    def _interpreter(self, program: str, command: Command, arguments: list[tuple[Word, bool]], *, piped: bool) -> None:
        given = list(arguments)
        while given and given[0][0].start.startswith("-") and given[0][0].literal not in ("-c", "-e", "-m", "-f", "-"):
            given.pop(0)
        if program == "pytest" or (given and given[0][0].literal == "-m"):
            if any(mark for _, mark in given):
                raise LineRefused(f"loads what the agent left: '{command.text}'")
            return
        inline = bool(given) and given[0][0].literal in ("-c", "-e")
        script, mark = given[1] if inline and len(given) > 1 else given[0] if given else (None, False)
        if mark:
            raise LineRefused(f"runs what the agent left: '{command.text}'")
        if script is None or script.literal == "-":
            if piped:
                raise LineRefused(f"runs what the agent printed: '{command.text}'")
            return
        rest = any(mark for _, mark in given[1 + inline :])
        text = script.literal if inline else self._files.get(_absolute(WORKDIR, script.literal or ""))
        if text is None or ((script.text, rest) in self._read):
            return
        self._read.add((script.text, rest))
        if program in _SHELLS:
            self.read(text, {"OUTPUT"} | (set(_POSITIONAL) if rest else set()))
        elif _PYTHON.fullmatch(program):
            problem = _loads_code(text)
            if problem is not None:
                raise LineRefused(f"{problem}, which can run what the agent left")


def _asks_server(command: Command) -> bool:
    """Return whether a command may print what a server of the agent's sent."""
    return any(part.name in ("URL", "PORT") for word in command.words for part in word.expansions)


def _loads_code(source: str) -> str | None:
    """Return what of a Python program can run data, or None."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None  # it will not run
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in _LOADERS:
                return f"uses {name}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("exec", "eval", "__import__")
        ):
            return f"uses {node.func.id}"
    match = _LOADING.search(source)
    return None if match is None else f"uses {match[0]}"
