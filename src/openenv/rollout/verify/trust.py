"""Trust labels: how far the reward of a check can be trusted, read from the check before it runs.

A short table lists the safe forms. Every other check is `shared`, even if it happens to be sound: the label is a
promise, and `openenv rollouts lint` shows the safe form of most checks. Runs nothing and knows no sandboxes.
"""

# judged     a `Check`: its judge compares data in a sandbox without the agent's code
# isolated   a plain line that only reads the agent's files: `grep -qx 42 answer.txt`
# shared     everything else: the agent's code or data may decide
#
#   line     step, joined by && || ; or a new line               test -s out.txt && ! grep -q TODO out.txt
#   step     reader | reader | ...                               sort out.txt | cmp - expected.txt
#   reader   a program of `_SHAPES` with those arguments, or     head -n 1 out.txt
#            sh FILE: a verify file with safe lines only, or     sh compare.sh
#            python3 FILE, -c CODE, -m pytest FILE               python3 check.py (see `_PythonReader`)
#   word     text without $, ` and \; "$OUTPUT/..." in a judge;  "$OUTPUT/stdout"
#            "$(step)" in [ ] and test; a glob as a last word    [ "$(wc -l < out.txt)" -eq 3 ]
#
# The agent chooses the contents of its files, and whether they exist. So:
#   - of two compared files, the agent must be unable to change one: cmp out.txt expected.txt (a verify file);
#   - a negated reader needs an earlier step that reads the same file: it also passes for a missing file;
#   - a script refuses NaN, which is neither above nor below a limit, and exits with a code that it chooses itself.

from __future__ import annotations

import ast
import builtins
import itertools
import posixpath
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ..tasks.checks import CASES_JUDGE, JUDGE_SCRIPT, Check
from ..tasks.task import Task, Trust
from .worktree_guard import Patterns

_SHAPES: Mapping[str, str] = {
    "cat": r"( -[AbenstTv]+)?( [WG])*",
    "grep egrep fgrep": r"( -[cEFhHilLnoqrsvwxP]+| -[mABC] W| -m\d+)*(( -e W)+| W)( --)?( [WG])*",
    "head tail": r"( -[nc] W| -[nc]?\d+)?( [WG])*",
    "wc": r"( -[clmw]+)?( [WG])*",
    "cmp": r"( -[bls]+)?( W){1,2}",
    "diff": r"( -[abBdEiNqrstuwyZ]+| --strip-trailing-cr| --brief)*( W){2}",
    "sort": r"( -[bcdfghMnRruVz]+| -[kt] W| -[kt]\S+)*( [WG])*",
    "uniq": r"( -[cdiu]+)?( W)?",
    "comm": r"( -[123]+)?( W){2}",
    "cut": r"( -[bcdf] W| -[bcdf]\S+| -s)+( W)*",
    "tr": r"( -[cCds]+)?( W){1,2}",
    "paste rev tac nl fold od hexdump": r"( -[acdnsvxA]+)*( W)?",
    "sha1sum sha256sum sha512sum md5sum cksum": r"( -c| --quiet| --status| --strict)*( [WG])*",
    "stat readlink realpath basename dirname": r"( -[efL]| -c W)*( W)+",
    "ls": r"( -[1aAdlR]+)?( [WG])*",
    "true false :": "",
    "echo printf": r"( -n)?( W)*",
    "curl": r"( -[fsSiL]+| -[XdH] W)*( W)+",
}
"""Programs that execute and write nothing, with the arguments that keep it so: `W` is a word, `G` a glob."""
_ARGUMENTS = {name: re.compile(shape) for names, shape in _SHAPES.items() for name in names.split()}
_COMPARING = re.compile(r"cmp|diff|comm|\w+sum(?= .*-c)")
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
_TEST_RUNNERS = re.compile(
    r"(?<![\w./-])((py\.?test|unittest|tox|ctest|jest|mocha)(?![\w./-])|"
    r"(make|npm|npx|yarn|cargo|go|mvn|gradle)\b[^;&|]*\b(test|check|verify)\b)"
)
_ALWAYS_THERE = ("$OUTPUT/stdout", "$OUTPUT/stderr", "$OUTPUT/exit_code")
_PATH = re.compile(r"[\w./-]*\w\.[a-z]\w*")
_PRINTERS = ("echo", "printf")
_MOST_NESTING = 8
_NAME_FIELDS = ("id", "arg", "name", "asname")  # of the nodes that define a name


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DATA_MODULES = _words(
    "__future__ abc array base64 binascii bisect calendar cmath collections collections.abc concurrent.futures "
    "configparser contextlib copy csv dataclasses datetime decimal difflib enum fnmatch fractions functools hashlib "
    "heapq html html.parser io itertools json math numbers operator os.path pathlib random re statistics string "
    "struct textwrap time traceback typing unicodedata urllib.parse uuid warnings xml.etree xml.etree.ElementTree zlib"
)
"""Modules of every Python's standard library that compute, and execute nothing they read."""
_PARTS = {
    "os": _words("path environ getenv getcwd listdir scandir walk stat sep linesep"),
    "os.path": _words(
        "basename dirname exists expanduser getsize isdir isfile join normpath relpath sep split splitext"
    ),
    "sys": _words("argv exit stdin stdout stderr version_info maxsize byteorder setrecursionlimit"),
    "io": _words("BytesIO StringIO open"),
    "operator": _words("add and_ eq ge gt itemgetter le lt mul ne not_ or_ sub xor"),
    "typing": _words("Any Callable Iterable Iterator NamedTuple Optional Sequence TypedDict Union"),
    "urllib.request": _words("Request urlopen"),
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
_WRITERS = _words("write_text write_bytes unlink rename symlink_to hardlink_to chmod touch mkdir")
_WRITE_MODE = re.compile(r"[rbt]*[wax+][wabxrt+]*")
_MAY_BE_NAN = re.compile(r"\bfloat\(|\b(json|Decimal|statistics|numpy)\b")
_KNOWS_NAN = re.compile(r"isfinite|isnan|parse_constant|allclose|approx")


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
    return _problem(_line_reader(task), line, "it")


def only_reads(line: str, task: Task) -> bool:
    """Return whether a plain line leaves its sandbox as it was, so that the next line may use it."""
    reader = _line_reader(task)
    return _problem(reader, line, "it") is None and not reader.may_write


def _line_reader(task: Task) -> _LineReader:
    # A setup may leave a conftest.py, which pytest would load.
    modules = _words("" if task.setup or task.files or task.workdir else "pytest")
    initial = {*task.files, *_PATH.findall("\n".join(task.setup))}
    return _LineReader(task.verify_sources, modules, protected=Patterns(task.protected), initial=initial)


def judge_problem(check: Check, task: Task) -> str | None:
    """Return why a check's judge is not in a safe form, or None."""
    files = {**task.verify_sources, **check.files}
    if check.judge == CASES_JUDGE and files.get(CASES_JUDGE.partition(" ")[2]) == JUDGE_SCRIPT:
        has_output = any(re.fullmatch(r"\.checks/\d+\.out", path) for path in check.files)
        return None if has_output else "its cases compare only exit codes, which the agent's code can choose"
    calls = _CALLS.fullmatch(check.judge)
    if calls is not None:
        reader = _LineReader(files, _words(f"pytest unittest numpy {calls[1]}"), judges=True, calls=True)
        return _problem(reader, f"python3 {calls[2]}", "its test code")
    server = _words("urllib.request urllib.error http.client socket" if check.port is not None else "")
    reader = _LineReader(files, server | {"pytest", "numpy"}, judges=True)
    problem = _problem(reader, check.judge, "its judge")
    if problem is None and reader.outputs == {"exit_code"}:
        return "its judge reads only an exit code, which the agent's code can choose"
    beside = "\n".join([check.run, *(text for path, text in files.items() if path in check.run)])
    said = next((text for text in sorted(reader.texts) if re.search(rf"\b{re.escape(text)}\b", beside)), None)
    if problem is None and said is not None:
        return f"its judge looks for '{said}', which `run` contains, so the decision may be beside the agent's code"
    if problem is None and _TEST_RUNNERS.search(check.run):
        return "its `run` is a test runner, and the agent's code beside it can print any result"
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
        """Return the word as `_SHAPES` has it."""
        if self.kind == "word" and re.match(r"-[^-\s]|--.", self.text):
            return "_".join(self.text.split(" "))
        return "G" if self.kind == "glob" else "W"


@dataclass(slots=True)
class _LineReader:
    """Reads lines, and the verify files they run. Raises `UnsafeForm`."""

    files: Mapping[str, str]
    modules: frozenset[str]
    """Python modules that may be imported beside `_DATA_MODULES`."""
    judges: bool = False
    """Whether `$OUTPUT` and `$URL` are there, and no other data of the agent."""
    calls: bool = False
    """Whether Python calls the agent's code in another sandbox, which lets no NaN pass."""
    protected: Patterns = field(default_factory=lambda: Patterns(()))
    initial: Collection[str] = ()
    """The task's initial files, as far as its texts name them."""
    may_write: bool = False
    outputs: set[str] = field(default_factory=set)
    """What of `$OUTPUT` is read, by the first part of the path."""
    texts: set[str] = field(default_factory=set)
    """The words that it looks for."""
    depth: int = 0

    def read(self, line: str) -> list[_Word]:
        """Return the files that a line reads."""
        if self.depth > _MOST_NESTING:
            raise UnsafeForm("is nested too deeply to be read")
        self.depth += 1
        step: list[_Word] = []  # the files of a pipeline
        before: list[_Word] = []  # of the steps that have to succeed before it
        every: list[_Word] = []
        is_negated = fixed_input = False
        for words, inputs, joint in self._commands(line):
            if words[:1] == [_Word("!")]:
                is_negated = True
                words.pop(0)
            files = [*inputs, *self._command(words, fixed_input, is_negated)]
            prints = bool(words) and words[0].text in _PRINTERS
            fixed_input = joint == "|" and (all(map(self.is_fixed, files)) if files else fixed_input or prints)
            step += files
            if joint == "|":
                continue
            if is_negated and not all(file in before or self._is_there(file) for file in step):
                raise UnsafeForm("negates a reader, which also passes if a file is missing")
            every += step
            before = before + step * (not is_negated) if joint == "&&" else []
            step, is_negated = [], False
        self.depth -= 1
        return every

    def _commands(self, line: str) -> Iterator[tuple[list[_Word], list[_Word], str]]:
        """Yield the commands of a line: the words, the files that are their input, and the operator behind it."""
        words: list[_Word] = []
        inputs: list[_Word] = []
        tokens = _tokens(line.strip())
        for kind, text in itertools.chain(tokens, [("joint", "\n")]):
            if kind == "joint":
                yield words, inputs, text
                words, inputs = [], []
            elif kind == "input":
                inputs.append(self._word(*next(tokens, ("", ""))))
            elif kind == "reward":
                self.may_write = True
                if not words or words[0].text not in _PRINTERS:
                    raise UnsafeForm("writes a reward that is not literal")
            elif kind != "quiet":
                words.append(self._word(kind, text))

    def is_fixed(self, word: _Word) -> bool:
        """Return whether the agent can choose neither the content nor the name of a file."""
        path = posixpath.normpath(word.text)
        if self.judges or word.kind != "word":
            return word.kind == "word"
        return any(f"{file}/".startswith(f"{path}/") for file in self.files) or self.protected.cover(path)

    def _is_there(self, file: _Word) -> bool:
        return file.text in _ALWAYS_THERE or self.is_fixed(file)

    def _word(self, kind: str, text: str) -> _Word:
        if kind == "output" and not self.judges:
            raise UnsafeForm(f"uses {text}, which only a judge has")
        self.outputs |= {part.partition("/")[0] for part in re.findall(r"\$OUTPUT/?([\w./-]*)", text)}
        return _Word("".join(shlex.split(text)) if kind == "word" else text, kind)

    def _command(self, words: list[_Word], fixed_input: bool, is_negated: bool) -> list[_Word]:
        """Read a command; return the files that it reads."""
        if not words:
            return []
        program, arguments = words[0].text, words[1:]
        shape = "".join(f" {word.shape}" for word in arguments)
        if words[0].kind == "word" and program in ("[", "test"):
            return self._test(arguments[: -1 if arguments[-1:] == [_Word("]")] else None], is_negated)
        if words[0].kind != "word" or any(word.kind == "inner" for word in arguments):
            raise UnsafeForm(f"uses the output of a command as a program or an argument: '{_text(words)}'")
        if program in ("sh", "bash") and len(arguments) == 1:
            return self.read(self._file(arguments[0]))
        if program in ("python", "python3", "pytest"):
            return self._python(arguments if program != "pytest" else [_Word("-m"), *words])
        if program not in _ARGUMENTS or not _ARGUMENTS[program].fullmatch(shape):
            raise UnsafeForm(f"runs '{_text(words)}', which is not in the list of safe forms")
        files = [word for word in arguments if word.shape in "WG"]
        if program.endswith("grep") and "-e" not in shape.split():
            self._look_for(files.pop(0))
        if program in (*_PRINTERS, "tr"):
            return []
        given = [fixed_input if file.text == "-" else self.is_fixed(file) for file in files] or [fixed_input]
        if _COMPARING.match(f"{program}{shape}") and not any(given):
            raise UnsafeForm(f"compares files that the agent can all change: '{_text(words)}'")
        return [file for file in files if file.text != "-"]

    def _look_for(self, word: _Word) -> None:
        self.texts |= {word.text} if re.search("[A-Za-z]{2}", word.text) else set()

    def _test(self, words: list[_Word], is_negated: bool) -> list[_Word]:
        if not _CONDITION.fullmatch("".join(w.text if w.text in ("!", "=", "==", "!=") else w.shape for w in words)):
            raise UnsafeForm(f"has a condition that is not a simple comparison: '{_text(words)}'")
        inner = [word for word in words if word.kind == "inner"]
        files = []
        for word in inner:
            command = word.text.strip('"')[2:-1]
            files.append(self.read(command))
            if not word.text.startswith('"') and not _PRINTS_A_NUMBER.match(command.rpartition("|")[2].strip()):
                raise UnsafeForm(f"has no quotes around {word.text}, so the agent's text is split into operators")
        if len(inner) == 2 and not any(each and all(map(self.is_fixed, each)) for each in files):
            raise UnsafeForm(f"compares files that the agent can all change: '{_text(words)}'")
        if inner:
            self._look_for(words[-1])
            return [file for each in files for file in each]
        return [] if is_negated or _Word("!") in words else words[-1:]

    def _file(self, word: _Word) -> str:
        path = posixpath.normpath(word.text)
        if word.kind != "word" or ".." in word.text or path not in self.files:
            raise UnsafeForm(f"runs {word.text}, which is not one of the verify files")
        return self.files[path]

    def _python(self, words: list[_Word]) -> list[_Word]:
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
        if not self.calls:
            python.refuse_nan()
        agents = {path for path in python.paths if not self.is_fixed(_Word(path))}
        if agents & set(self.initial) and agents - set(self.initial):
            name = min(agents & set(self.initial))
            raise UnsafeForm(f"reads {name}, which the agent can change; protect it, or use a verify file")
        return [_Word("a file of Python", "python")]

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
    sources: list[str] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    """The texts in it that look like paths."""
    limits: list[str] = field(default_factory=list)
    """The comparisons that a NaN could pass."""

    def read(self, source: str, folder: str = "") -> None:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UnsafeForm("has Python that cannot be parsed") from None
        self.sources.append(source)
        loads = {id(node) for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        values = (getattr(node, key, None) for node in nodes if id(node) not in loads for key in _NAME_FIELDS)
        names = _BUILTINS | {value.partition(".")[0] for value in values if isinstance(value, str)}
        aliases = dict(_imported(nodes))
        bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        asserted = {id(inner) for node in nodes if isinstance(node, ast.Assert) for inner in ast.walk(node.test)}
        for node in nodes:
            if (
                isinstance(node, ast.Name | ast.Attribute)
                and id(node) not in bases
                and _dotted(node, aliases) in _PARTS
            ):
                raise UnsafeForm(f"passes the module {ast.unparse(node)} on")
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._imports(node, folder)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _PATH.fullmatch(node.value):
                self.paths.add(posixpath.normpath(node.value))
            if _passes_nan(node, is_asserted=id(node) in asserted):
                self.limits.append(ast.unparse(node))
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                asserted -= {id(inner) for inner in ast.walk(node)}
            self._check(node, names, aliases)
        returns = {
            node.name: [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
            for node in nodes
            if isinstance(node, ast.FunctionDef)
        }
        for node in nodes:
            name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if (
                isinstance(node, ast.Call)
                and name in ("exit", "SystemExit")
                and not all(_is_verdict(value, returns) for value in node.args)
            ):
                raise UnsafeForm(
                    f"exits with a number that the agent may influence (256 counts as 0): '{ast.unparse(node)}'"
                )

    def refuse_nan(self) -> None:
        """Refuse limits that a NaN passes, in scripts that may read one and do not look for it."""
        source = "\n".join(self.sources)
        if self.limits and _MAY_BE_NAN.search(source) and not _KNOWS_NAN.search(source):
            raise UnsafeForm(
                f"lets NaN pass '{self.limits[0]}'; check math.isfinite first, or assert that it is below a limit"
            )

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
        if module in _DATA_MODULES | _PARTS.keys() - {"numpy"} | self.modules or top in self.modules - {"numpy"}:
            return
        path = posixpath.normpath(posixpath.join(folder, f"{module.replace('.', '/')}.py"))
        if path not in self.files:
            raise UnsafeForm(f"imports {module}, which is neither a data module nor a verify file")
        if path not in self.imported:
            self.imported.add(path)
            self.read(self.files[path], posixpath.dirname(path))

    def _check(self, node: ast.AST, names: frozenset[str], aliases: Mapping[str, str]) -> None:
        if isinstance(node, ast.Name) and node.id not in names:
            raise UnsafeForm(f"uses {node.id}")
        if isinstance(node, ast.Attribute):
            module = _dotted(node.value, aliases)
            is_private = node.attr.startswith("_") and node.attr not in _DUNDERS
            # The modules of a module: pathlib.os
            is_module = module in _DATA_MODULES and node.attr in sys.stdlib_module_names - {module}
            is_module = is_module and f"{module}.{node.attr}" not in _DATA_MODULES
            if is_private or is_module or node.attr not in _PARTS.get(module, {node.attr}):
                raise UnsafeForm(f"uses {ast.unparse(node)}")
        if isinstance(node, ast.Call) and _writes(node) and "reward.txt" not in ast.unparse(node):
            raise UnsafeForm(f"writes a file that is not the reward: '{ast.unparse(node)}'")


def _imported(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the names that stand for modules or their parts."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                name = item.asname or item.name.partition(".")[0]
                yield name, item.name if item.asname else name
        elif isinstance(node, ast.ImportFrom):
            for item in node.names:
                yield item.asname or item.name, f"{node.module}.{item.name}"


def _dotted(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """Return the module that an expression such as `os.path` may be."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    return f"{_dotted(node.value, aliases)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _passes_nan(node: ast.AST, *, is_asserted: bool) -> bool:
    """Return whether this may be true for a NaN: `not x < 1`, `x > 1` outside an assert, `max(x, y)`."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("max", "min"):
        return True
    if not isinstance(node, ast.Compare) or all(
        isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in node.ops
    ):
        return False
    counts = (
        isinstance(each, ast.Constant) or ast.unparse(each).startswith("len(")
        for each in (node.left, *node.comparators)
    )
    return not is_asserted and not all(counts)


def _is_verdict(value: ast.expr | None, returns: Mapping[str, list[ast.expr | None]]) -> bool:
    """Return whether an exit code is chosen by the script: `0 if right else 1`, `not right`, a text, `main()`."""
    if isinstance(value, ast.IfExp):
        return _is_verdict(value.body, returns) and _is_verdict(value.orelse, returns)
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func)
        inner = value.args if name in ("int", "bool") else returns.get(name, [value])
        return all(each is not value and _is_verdict(each, {}) for each in inner)
    is_not = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    return value is None or is_not or isinstance(value, ast.Constant | ast.JoinedStr | ast.Compare)


def _writes(call: ast.Call) -> bool:
    """Return whether a call may open a file for writing, or write one by its path."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    modes = [*call.args[:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    reads = all(isinstance(mode, ast.Constant) and not _WRITE_MODE.fullmatch(str(mode.value)) for mode in modes[1:])
    first = getattr(modes[0], "value", "") if modes else ""
    return name in _WRITERS or (name == "open" and not (reads and not _WRITE_MODE.fullmatch(str(first))))
