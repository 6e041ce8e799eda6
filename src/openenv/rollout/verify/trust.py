"""Trust labels: how far the reward of a check can be trusted, read from the check before it runs.

A short table lists the safe forms. Every other check is `shared`, even if it happens to be sound: the label is a
promise, and `openenv rollouts lint` shows the safe form of most checks. Runs nothing and knows no sandboxes.
"""

# judged     a `Check`: its judge compares data in a sandbox without the agent's code
# isolated   a plain line that only reads the agent's files: `grep -qx 42 answer.txt`
# shared     everything else: the agent's code may run beside the decision
#
#   line     step, joined by && || ; or a new line               test -s out.txt && ! grep -q TODO out.txt
#   step     reader | reader | ...                               sort out.txt | cmp - expected.txt
#   reader   a program of `_SHAPES` with those arguments, or     head -n 1 out.txt
#            sh FILE: a verify file with safe lines only, or     sh compare.sh
#            python3 FILE, -c CODE, -m pytest FILE               python3 check.py (see `_PythonReader`)
#   word     text without $, ` and \; "$OUTPUT/..." in a judge;  "$OUTPUT/stdout"
#            "$(step)" in [ ] and test                           [ "$(wc -l < out.txt)" -eq 3 ]
#
# The agent chooses the content of its files and, for a pattern like `src/*.py`, their names. These names start with a
# folder, so they are never options. The agent cannot choose any other word of a command.

from __future__ import annotations

import ast
import builtins
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..tasks.checks import CASES_JUDGE, JUDGE_SCRIPT, Check
from ..tasks.task import Task, Trust

_SHAPES: Mapping[str, str] = {
    "cat": r"( -[AbenstTv]+)?( W)*",
    "grep egrep fgrep": r"( -[cEFhHilLnoqrsvwxP]+| -[mABC] W| -m\d+)*( -e W)*( --)?( W)*",
    "head tail": r"( -[nc] W| -[nc]?\d+)?( W)*",
    "wc": r"( -[clmw]+)?( W)*",
    "cmp": r"( -[bls]+)?( W){1,2}",
    "diff": r"( -[abBdEiNqrstuwyZ]+| --strip-trailing-cr| --brief)*( W){2}",
    "sort": r"( -[bcdfghMnRruVz]+| -[kt] W| -[kt]\S+)*( W)*",
    "uniq": r"( -[cdiu]+)?( W)?",
    "comm": r"( -[123]+)?( W){2}",
    "cut": r"( -[bcdf] W| -[bcdf]\S+| -s)+( W)*",
    "tr": r"( -[cCds]+)?( W){1,2}",
    "paste rev tac nl fold od hexdump": r"( -[acdnsvxA]+)*( W)?",
    "sha1sum sha256sum sha512sum md5sum cksum": r"( -c| --quiet| --status| --strict)*( W)*",
    "stat readlink realpath basename dirname": r"( -[efL]| -c W)*( W)+",
    "ls": r"( -[1aAdlR]+)?( W)*",
    "true false :": "",
    "echo printf": r"( -n)?( W)*",
    "curl": r"( -[fsSiL]+| -[XdH] W)*( W)+",
}
"""Programs that execute and write nothing, with the arguments that keep it so. `W` is a word that is not an option."""
_ARGUMENTS = {name: re.compile(shape) for names, shape in _SHAPES.items() for name in names.split()}
_CONDITION = re.compile(r"!?(-[defhLnrsxz])?W|!?W(=|==|!=|-eq|-ne|-lt|-le|-gt|-ge)W")
_PRINTS_A_NUMBER = re.compile(r"wc -[clmw]( <| -)?|grep -c[EFivwxs]*")
_TOKENS = re.compile(
    r"""[ \t]*(?:(?P<joint>&&|\|\||;|\n+|\|)|(?P<quiet>2>&1|[12]?>[ ]?/dev/null|\#.*)|(?P<input><(?!<))
    |(?P<reward>>[ ]?"?(?:~|\$HOME)/logs/verifier/reward\.txt"?)
    |"(?P<output>\$(?:OUTPUT|URL)(?:/[\w./-]*)?)"
    |(?P<inner>"?\$\((?:[^"()`$\\\n]|"\$(?:OUTPUT|URL)(?:/[\w./-]*)?")*\)"?)
    |(?P<glob>(?:\./|\w[\w.-]*/)[\w./-]*[*?][\w./*?-]*)
    |(?P<word>(?:[^\s'"`$\\|&;<>()*?{}\[\]\#]|'[^']*'|"[^"$`\\]*")+|\[(?=\s)|\](?=\s|;|$)))""",
    re.VERBOSE,
)
_CALLS = re.compile(r"python3 -m openenv_calls judge ([\w. ]+?)(?: --classes [\w,]+)? -- (.+)", re.DOTALL)
_MOST_NESTING = 8
_NAME_FIELDS = ("id", "arg", "name", "asname")  # of the nodes that define a name


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DATA_MODULES = _words(
    "__future__ abc array base64 binascii bisect calendar cmath collections collections.abc concurrent.futures "
    "configparser contextlib copy csv dataclasses datetime decimal difflib enum fnmatch fractions functools hashlib "
    "heapq html html.parser io itertools json math numbers operator os.path pathlib random re statistics string "
    "struct textwrap time tomllib traceback typing unicodedata urllib.parse uuid warnings xml.etree "
    "xml.etree.ElementTree zlib"
)
"""Modules of the standard library that compute, and execute nothing they read."""
_PARTS = {
    "os": _words("path environ getenv getcwd listdir scandir walk stat sep linesep"),
    "sys": _words("argv exit stdin stdout stderr version_info maxsize byteorder setrecursionlimit"),
    "ast": _words("literal_eval"),
    "numpy": _words(
        "array asarray allclose isclose array_equal testing linspace arange zeros ones eye mean std sum abs max min "
        "dot float32 float64 int32 int64 uint8 bool_ ndarray isfinite isnan nan inf pi sqrt exp log sin cos sort unique"
    ),
}
"""Of modules that can also execute or write: the names that may be used."""
_BUILTINS = _words(
    "abs all any ascii bin bool bytearray bytes callable chr classmethod complex dict divmod enumerate filter float "
    "format frozenset hasattr hash hex id int isinstance issubclass iter len list map max memoryview min next object "
    "oct open ord pow print property range repr reversed round set slice sorted staticmethod str sum super tuple type "
    "zip __name__ __file__"
) | {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)}
_DUNDERS = _words("__name__ __file__ __doc__ __init__ __len__ __version__")
_WRITERS = _words("write_text write_bytes unlink rename symlink_to hardlink_to chmod")
_WRITE_MODE = re.compile(r"[rbt]*[wax+][wabxrt+]*")


class UnsafeForm(Exception):
    """A check has none of the safe forms; the text says which part, for a reader."""


def trust_of(check: str | Check, task: Task) -> tuple[Trust, str]:
    """Return the trust of a check in a task, and the reason."""
    problem = line_problem(check, task) if isinstance(check, str) else judge_problem(check, task)
    if problem is not None:
        return "shared", problem
    if isinstance(check, str):
        return "isolated", "it only reads data"
    return "judged", "the agent's code runs in one sandbox, and its output is judged as data in another"


def line_problem(line: str, task: Task) -> str | None:
    """Return why a plain line is not in a safe form, or None."""
    # A setup may leave a conftest.py, which pytest would load.
    has_setup = bool(task.setup or task.files or task.workdir)
    modules = _words("" if has_setup else "pytest")
    return _problem(_LineReader(task.verify_sources, modules), line, "it")


def only_reads(line: str, task: Task) -> bool:
    """Return whether a plain line leaves its sandbox as it was, so that the next line may use it."""
    reader = _LineReader(task.verify_sources)
    return _problem(reader, line, "it") is None and not reader.may_write


def judge_problem(check: Check, task: Task) -> str | None:
    """Return why a check's judge is not in a safe form, or None."""
    files = {**task.verify_sources, **check.files}
    if check.judge == CASES_JUDGE and files.get(CASES_JUDGE.partition(" ")[2]) == JUDGE_SCRIPT:
        return None  # our own comparison of outputs; the cases are data
    calls = _CALLS.fullmatch(check.judge)
    if calls is not None:
        modules = frozenset({"pytest", "unittest", "numpy", *calls[1].split()})
        return _problem(_LineReader(files, modules), f"python3 {calls[2]}", "its test code")
    server = _words("urllib.request urllib.error http.client socket" if check.port is not None else "")
    reader = _LineReader(files, server | {"pytest", "numpy"}, judges=True)
    problem = _problem(reader, check.judge, "its judge")
    if problem is None and reader.outputs == {"exit_code"}:
        return "its judge reads only an exit code, which the agent's code can choose"
    return problem


def _problem(reader: _LineReader, line: str, subject: str) -> str | None:
    try:
        reader.read(line)
    except UnsafeForm as problem:
        return f"{subject} {problem}"
    return None


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of a command. `kind`: `word` (literal), `output` ($OUTPUT/...), `inner` (a substitution), `glob`."""

    text: str
    kind: str = "word"

    @property
    def shape(self) -> str:
        """Return the word as `_SHAPES` has it: options as they are, everything else as W."""
        is_option = self.kind == "word" and re.match(r"-[^-\s]|--.", self.text)
        return "_".join(self.text.split(" ")) if is_option else "W"


@dataclass(slots=True)
class _LineReader:
    """Reads lines, and the verify files they run. Raises `UnsafeForm`."""

    files: Mapping[str, str]
    modules: frozenset[str] = frozenset()
    """Python modules that may be imported beside `_DATA_MODULES`."""
    judges: bool = False
    """Whether `$OUTPUT` and `$URL`, data of the agent, are there."""
    may_write: bool = False
    outputs: set[str] = field(default_factory=set)
    """What of `$OUTPUT` is read, by the first part of the path."""
    depth: int = 0

    def read(self, line: str) -> None:
        if self.depth > _MOST_NESTING:
            raise UnsafeForm("is nested too deeply to be read")
        self.depth += 1
        words: list[_Word] = []
        tokens = _tokens(line.strip())
        for kind, text in tokens:
            if kind == "input":
                kind, text = "quiet", self._word(*next(tokens, ("", ""))).text
            if kind == "joint":
                self._command(words)
                words = []
            elif kind == "reward":
                self.may_write = True
                if not words or words[0].text not in ("echo", "printf"):
                    raise UnsafeForm("writes a reward that is not literal")
            elif kind != "quiet":
                words.append(self._word(kind, text))
        self._command(words)
        self.depth -= 1

    def _word(self, kind: str, text: str) -> _Word:
        if kind == "output" and not self.judges:
            raise UnsafeForm(f"uses {text}, which only a judge has")
        self.outputs |= {part.partition("/")[0] for part in re.findall(r"\$OUTPUT/?([\w./-]*)", text)}
        return _Word("".join(shlex.split(text)) if kind == "word" else text, kind)

    def _command(self, words: list[_Word]) -> None:
        words = words[1:] if words[:1] == [_Word("!")] else words
        if not words:
            return
        program, arguments = words[0].text, words[1:]
        if words[0].kind == "word" and program in ("[", "test"):
            self._test(arguments[:-1] if program == "[" and arguments[-1:] == [_Word("]")] else arguments)
        elif words[0].kind != "word" or any(word.kind == "inner" for word in arguments):
            raise UnsafeForm(f"uses the output of a command as a program or an argument: '{_text(words)}'")
        elif program in ("sh", "bash") and len(arguments) == 1:
            self.read(self._file(arguments[0]))
        elif program in ("python", "python3"):
            self._python(arguments)
        elif program == "pytest":
            self._python([_Word("-m"), *words])
        elif program not in _ARGUMENTS or not _ARGUMENTS[program].fullmatch("".join(f" {w.shape}" for w in arguments)):
            raise UnsafeForm(f"runs '{_text(words)}', which is not in the list of safe forms")

    def _test(self, words: list[_Word]) -> None:
        for word in (word for word in words if word.kind == "inner"):
            command = word.text.strip('"')[2:-1]
            self.read(command)
            if not word.text.startswith('"') and not _PRINTS_A_NUMBER.match(command.rpartition("|")[2].strip()):
                raise UnsafeForm(f"has no quotes around {word.text}, so the agent's text is split into operators")
        if not _CONDITION.fullmatch("".join(w.text if w.text in ("!", "=", "==", "!=") else w.shape for w in words)):
            raise UnsafeForm(f"has a condition that is not a simple comparison: '{_text(words)}'")

    def _file(self, word: _Word) -> str:
        path = posixpath.normpath(word.text)
        if word.kind != "word" or ".." in word.text or path not in self.files:
            raise UnsafeForm(f"runs {word.text}, which is not one of the verify files")
        return self.files[path]

    def _python(self, words: list[_Word]) -> None:
        self.may_write = True  # a script may write the reward
        while words and re.fullmatch(r"-[IuBsE]+", words[0].text):
            words = words[1:]
        python = _PythonReader(self.files, self.modules)
        first = words[0].text if words else ""
        if first == "-c" and len(words) > 1 and words[1].kind == "word":
            python.read(words[1].text)
        elif first == "-m" and len(words) > 2 and words[1].text in {"pytest", "unittest"} & self.modules:
            self._tests(python, words[2:])
        elif not first or first.startswith("-"):
            raise UnsafeForm(f"runs Python with options or input that are not read: '{_text(words)}'")
        else:
            python.read(self._file(words[0]), posixpath.dirname(posixpath.normpath(first)))

    def _tests(self, python: _PythonReader, words: list[_Word]) -> None:
        places = [word.text for word in words if not re.fullmatch(r"-[qvxs]+|-p|no:\w+|--tb=\w+", word.text)]
        named = tuple(posixpath.normpath(place.partition("::")[0]) for place in places)
        sources = [path for path in self.files if path.startswith(named) or posixpath.basename(path) == "conftest.py"]
        if not sources or any(place.startswith("-") for place in places):
            raise UnsafeForm(f"runs tests or options that are not read: '{_text(words)}'")
        for path in sources:
            if path.endswith(".py"):
                python.read(self.files[path], posixpath.dirname(path))


def _text(words: list[_Word]) -> str:
    return " ".join(word.text for word in words)


def _tokens(line: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(line):
        match = _TOKENS.match(line, place)
        if match is None or match.lastgroup is None:
            raise UnsafeForm(f"has syntax that is not read: {line[place : place + 40]!r}")
        place = match.end()
        yield match.lastgroup, match[match.lastgroup]


@dataclass(slots=True)
class _PythonReader:
    """Reads Python, with the verify files it imports, for modules and names outside the lists. Raises `UnsafeForm`."""

    files: Mapping[str, str]
    modules: frozenset[str]
    imported: set[str] = field(default_factory=set)

    def read(self, source: str, folder: str = "") -> None:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UnsafeForm("has Python that cannot be parsed") from None
        loads = {id(node) for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        values = (getattr(node, key, None) for node in nodes if id(node) not in loads for key in _NAME_FIELDS)
        names = _BUILTINS | {value.partition(".")[0] for value in values if isinstance(value, str)}
        aliases = {item.asname: item.name for node in nodes if isinstance(node, ast.Import) for item in node.names}
        bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Name) and aliases.get(node.id, node.id) in _PARTS and id(node) not in bases:
                raise UnsafeForm(f"passes the module {node.id} on")
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._imports(node, folder)
            self._check(node, names, aliases)

    def _imports(self, node: ast.Import | ast.ImportFrom, folder: str) -> None:
        parts = {item.name for item in node.names}
        if isinstance(node, ast.Import):
            for module in parts:
                self._import(module, folder)
            return
        module = "" if node.level else node.module or ""
        if "*" in parts or not parts <= _PARTS.get(module, parts):
            raise UnsafeForm(f"imports {', '.join(sorted(parts))} from {module or 'its package'}")
        self._import(module, folder)

    def _import(self, module: str, folder: str) -> None:
        top = module.partition(".")[0]
        if module in _DATA_MODULES or module in ("os", "sys", "ast") or {module, top} & self.modules:
            return
        path = posixpath.normpath(posixpath.join(folder, f"{module.replace('.', '/')}.py"))
        if path not in self.files:
            raise UnsafeForm(f"imports {module}, which is neither a data module nor a verify file")
        if path not in self.imported:
            self.imported.add(path)
            self.read(self.files[path], posixpath.dirname(path))

    def _check(self, node: ast.AST, names: frozenset[str], aliases: Mapping[str | None, str]) -> None:
        if isinstance(node, ast.Name) and node.id not in names:
            raise UnsafeForm(f"uses {node.id}")
        if isinstance(node, ast.Attribute):
            module = aliases.get(node.value.id, node.value.id) if isinstance(node.value, ast.Name) else ""
            is_private = node.attr.startswith("_") and node.attr not in _DUNDERS
            if is_private or node.attr not in _PARTS.get(module, {node.attr}):
                raise UnsafeForm(f"uses {module}.{node.attr}")
        if isinstance(node, ast.Call) and _writes(node) and "reward.txt" not in ast.unparse(node):
            raise UnsafeForm(f"writes a file that is not the reward: '{ast.unparse(node)}'")


def _writes(call: ast.Call) -> bool:
    """Return whether a call may open a file for writing, or write one by its path."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    modes = [*call.args[:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    reads = all(isinstance(mode, ast.Constant) and not _WRITE_MODE.fullmatch(str(mode.value)) for mode in modes[1:])
    first = getattr(modes[0], "value", "") if modes else ""
    return name in _WRITERS or (name == "open" and not (reads and not _WRITE_MODE.fullmatch(str(first))))
