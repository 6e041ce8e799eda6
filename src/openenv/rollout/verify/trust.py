"""Trust labels: how far the reward of a check can be trusted, read from the check before it runs.

A short table lists the safe forms. Every other check is `shared`, even if it happens to be sound: the label is a
promise, and `openenv rollouts lint` shows the safe form of most checks. Runs nothing and knows no sandboxes.
"""

# judged     a `Check`: its judge compares data in a sandbox without the agent's code
# isolated   a plain line that only reads the agent's files: `grep -qx 42 answer.txt`
# shared     everything else: the agent's code or data may decide
#
# The agent chooses the contents of its files, and whether they exist or are folders. So in a safe form
#   - one of two compared files is fixed, which the agent cannot change: cmp out.txt expected.txt (a verify file);
#   - nothing passes without the agent's file, as `! grep`, `[ -z "$(...)" ]` and `cat a.txt | wc -l | grep 0` do;
#   - a script refuses NaN, which is neither above nor below a limit, and exits with a code that it chooses itself;
#   - `run` decides nothing, because the agent's program could print the same verdict.

from __future__ import annotations

import ast
import builtins
import posixpath
import re
import shlex
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..tasks.checks import CASES_JUDGE, JUDGE_SCRIPT, Check
from ..tasks.task import Patterns, Task, Trust
from .worktree_guard import run_files

# ---- lines: programs that execute and write nothing, with the options that keep it so ----
_TEXT = r"""(?:[^\s'"`$\\|&;<>()*?{}\[\]#]|'[^']*'|"[^"$`\\]*")+"""
_DATA = r'"\$(?:OUTPUT|URL)(?:/[\w./-]*)?"'
_W = rf"""(?:{_DATA}|-(?!\S)|(?!['"]*-){_TEXT})"""  # a word, but no option, not even in quotes
_WG = rf"(?: {_W}| (?:\./|\w[\w.-]*/)[\w./-]*[*?][\w./*?-]*)*"  # words and globs
_QUOTED = rf'"\$\((?:[^"()`$\\\n]|{_DATA})*\)"'
_NUMBER = rf"\$\((?:wc -[clmw]|grep -c)(?:[\w\s<./-]|'[^']*'|{_DATA})*\)"  # no text that a shell splits into operators
_VALUE = rf"(?P<left>{_QUOTED}|{_NUMBER}) (?P<operator>=|==|!=|-eq|-ne|-lt|-le|-gt|-ge) (?P<right>{_QUOTED}|{_W})"
_CONDITION = rf"(?:(?:! )?-[defhLrsx] {_W}|(?P<unary>-[nz]) (?P<only>{_QUOTED})|{_VALUE})"
_READERS = (
    rf"(?:cat|tac|rev|nl)(?: -[AbenstTv]+)*{_WG}|wc(?: -[clmw]+)?{_WG}|(?:head|tail)(?: -[nc] ?\+?\d+| -\d+)?{_WG}"
    rf"|[ef]?grep(?: -[cEFhHilLnoqrsvwxP]+| -[mABC] ?\d+)*(?:(?: -e {_W})+|(?P<pattern> {_W})){_WG}"
    rf"|sort(?: -[bcdfghMnRruVz]+| -[kt] ?{_TEXT})*{_WG}|uniq(?: -[cdiu]+)*|cut(?: -[bcdf] ?{_TEXT}| -s)+{_WG}"
    rf"|tr(?: -[cCds]+)*(?: {_W}){{1,2}}|(?:md5|sha1|sha256|sha512)sum{_WG}|paste -s{_WG}|true|false"
    rf"|(?:stat -c|readlink(?: -f)?|realpath|basename|dirname) {_W}{_WG}|ls(?: -[1aAdlR]+)?{_WG}"
    rf"|sed -n '?\d+(?:,\d+)?p'?{_WG}|jq -e '[.\w]+ == [\w.\"]+'{_WG}"
    rf"|curl(?: -[fsSiL]+| -[XdH] {_W})*(?: {_W})+|(?P<prints>(?:echo|printf)(?: -n)?(?: {_W})*)"
    rf"|(?P<compares>(?:cmp|diff|comm)(?: -[abBdEiNlqrstuwyZ123]+| --brief)*(?: {_W}){{2}}"
    rf"|(?:md5|sha1|sha256|sha512)sum(?: --quiet| --status)* -c(?: --quiet| --status)*{_WG})"
    rf"|(?P<test>(?:test|(?P<bracket>\[)) {_CONDITION}(?(bracket) \]))"
    rf"|(?:sh|bash) (?P<script>{_W})|(?P<python>python3?|pytest)(?: {_TEXT}| {_DATA})*"
)
_COMMAND = re.compile(
    rf"(?P<not>! )?(?P<words>{_READERS})(?: ?< ?(?P<input>{_W}))?(?: [12]?> ?/dev/null| 2>&1)*"
    r"(?P<reward> > ?\"?(?:~|\$HOME)/logs/verifier/reward\.txt\"?)?(?P<joint>[ \t]*(?:&&|\|\|?|;|\n|$)|[ \t]+#[^\n]*)"
)
_BETWEEN = re.compile(r"^(?:[ \t\n]|#[^\n]*)*")  # a comment starts where a word could
_PROOF = re.compile(r"(?:[ef]?grep(?! .*-\w*[rL])|cat) ")  # they fail without their file; `grep -r` takes a folder
# ---- `run`: it builds and runs the agent's program; `echo` may feed a program, but not report on one ----
_ARGUMENT = r"""(?:[^\s'"`$\\|&;<>(){}#]|'[^']*'|"(?:[^"$`\\]|\$PORT\b)*"|\$PORT\b)+"""
_PROGRAM = (
    r"(?:\./[\w./+-]+|cd|mkdir|cp|mv|rm|touch|chmod|cat|ls|true|exit|gcc|g\+\+|cc|c\+\+|clang|rustc|javac|java|tsc|cmake|make"
    r"|git (?:show|log|cat-file|rev-parse)|(?:npm|yarn|cargo|go|dotnet|deno|bun) (?:run|build|start|install|ci)"
    r"|(?:node|ruby|perl|php|lua|Rscript|sh|bash)(?! -)|sqlite3|python3?(?: -c '[^']*'|(?: -[uBIO]+)*(?! -)))"
)
_STEP = rf"(?:(?:echo|printf|cat)(?: {_ARGUMENT})* \| )?{_PROGRAM}(?: {_ARGUMENT})*(?: ?[<>] ?{_ARGUMENT}| >&2| 2>&1)*"
_RUN = re.compile(rf"(?:{_STEP}\s*(?:&&|\|\||;|\n|$)\s*)+")
_TEST_NAME = re.compile(r"(?<![a-z])(?:tests?|checks?|specs?|verif\w*|grade\w*|\w*test|tox|mocha)(?![a-z/])", re.I)
_CASES = re.compile(r"sh -c (.+?) < \.checks/\d+\.in|\{\n(.*)\n\} < /dev/null", re.DOTALL)
_CALLS = re.compile(r"python3 -m openenv_calls judge ([\w. ]+?)(?: --classes [\w,]+)? -- (.+)", re.DOTALL)
_DATA_FILE = re.compile(r"(?!.*reward)\S*\.(?:txt|json|csv|tsv|in|out|ya?ml|xml|toml|sql|md|html|dat|bin|log)")
_DECISIONS = ast.Compare | ast.Assert | ast.If | ast.IfExp | ast.BoolOp | ast.Try | ast.Match

# ---- Python: modules that execute nothing they read, safe parts of others, and builtins that only compute ----
_MODULES = shlex.split(
    """__future__ abc array ast base64 binascii bisect calendar cmath collections collections.abc concurrent.futures
    configparser contextlib copy csv dataclasses datetime decimal difflib enum fnmatch fractions functools hashlib heapq
    html html.parser http.client itertools json math numbers os os.path pathlib random re socket statistics string zlib
    struct sys textwrap time typing unicodedata unittest urllib.error urllib.parse urllib.request uuid
    xml.etree.ElementTree"""
)
_PARTS = re.compile(
    r"\b(?:os\.(?:path\.(?:basename|dirname|exists|expanduser|getsize|isdir|isfile|join|normpath|relpath|splitext)"
    r"|environ|getenv|getcwd|listdir|scandir|walk|stat|sep|linesep)|sys\.(?:argv|exit|std(?:in|out|err)|version_info)"
    r"|ast\.literal_eval|urllib\.request\.(?:Request|urlopen)|unittest\.(?:TestCase|main|skip)"
    r"|pytest\.(?:approx|fixture|mark|param|raises|fail|skip)|(?:numpy|np)\.(?:array|asarray|allclose|isclose|array_equal"
    r"|zeros|ones|arange|linspace|mean|std|sum|abs|max|min|isnan|isfinite|testing\.assert_\w+))\b"
)
_PARTED = re.compile(r"(?<!\.)\b(?:os|sys|ast|pytest|unittest|numpy|np|urllib\.request)\b|\bopen\b(?!\()")
_BUILTINS = {name for name, value in vars(builtins).items() if isinstance(value, type) and name[0] != "_"}.union(
    re.findall(
        r"\w+", "abs all any bin chr divmod format hasattr hex isinstance issubclass iter len max min next open"
    ),
    re.findall(r"\w+", "oct ord pow print repr round sorted sum __name__ __file__"),
)
_REFUSED = re.compile(r"_(?!_(?:name|file|doc|init|len)__$)|(?:write_\w+|unlink|rename|\w+_to|chmod|touch|mkdir)$")
_OTHER_MODULES = sys.stdlib_module_names - {*_MODULES} | {"os", "sys", "ast", "unittest"}
_EXIT = re.compile(
    r"[eE]xit\((?!(?:\d*|(?!.* (?:or|and|if) )(?:not |f?['\"]).*|\d if (?!.* if ).* else (?:\d|f?['\"].*))\)).*"
)
_NAN = re.compile(r"\b(?:float\(|json\b|Decimal\b|statistics\b|np\b|numpy\b)")
_NAN_PASSES = re.compile(r"\b(?:max|min)\(| = .*[<>]|(?s:(?=.*(?<!-)[<>]).*\b(?:not|if|else|while|lambda|False|sum)\b)")


class UnsafeForm(Exception):
    """A check has none of the safe forms; the text says which part, for a reader."""


def trust_of(check: str | Check, task: Task) -> tuple[Trust, str]:
    """Return the trust of a check in a task, and the reason."""
    try:
        if isinstance(check, str):
            # A setup may leave a conftest.py, which pytest would load.
            modules = _MODULES if task.setup or task.files or task.workdir else [*_MODULES, "pytest"]
            _Reader(task.verify_sources, modules, protected=Patterns(task.protected)).line(check)
            return "isolated", "it only reads data"
        _read_check(check, {**task.verify_sources, **check.files}, run_files(check, task.verify_sources, "/"))
        return "judged", "the agent's code runs in one sandbox, and its output is judged as data in another"
    except UnsafeForm as problem:
        return "shared", str(problem)
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
        return "shared", "it cannot be parsed"


def _read_check(check: Check, files: Mapping[str, str], beside: Mapping[str, str]) -> None:
    if check.judge == CASES_JUDGE and files.get(".checks/judge.sh") == JUDGE_SCRIPT:
        if not any(re.fullmatch(r"\.checks/\d+\.out", path) for path in check.files):
            raise UnsafeForm("its cases compare only exit codes, which the agent's code can choose")
        for case, build in _CASES.findall(check.files[".checks/run.sh"]) or [("test", "")]:
            _read_run(build or shlex.split(case)[0], {})
        return
    calls = _CALLS.fullmatch(check.judge)
    modules, line = (calls[1].split(), f"python3 {calls[2]}") if calls else ([], check.judge)
    judge = _Reader(files, [*_MODULES, "pytest", "numpy"], agents=modules, judges=True)
    judge.line(line)
    if not calls and not re.search(r"(?<!sys\.)\b(stdout|stderr|files|URL|PORT)\b", "\n".join(judge.texts)):
        raise UnsafeForm("its judge reads at most an exit code, which the agent's code can choose")
    _read_run("true" if calls else check.run, beside)


# CPython 3.11 counts the depth of its parser for all threads together. If a finalizer lets another thread parse in the
# meantime, one of them fails with a SystemError, which would end a whole `run_many`.
_PARSING = threading.RLock()


def parse_python(source: str) -> ast.Module:
    """Parse Python in any of several threads."""
    with _PARSING:
        return ast.parse(source)


def _read_run(run: str, files: Mapping[str, str]) -> None:
    """Refuse verdicts in `run` or its verify files, and verify files in other languages."""
    if _TEST_NAME.search(re.sub(r"[<>] ?\S+", "", run)):
        raise UnsafeForm("its `run` is a test runner, and the agent's code beside it can print any result")
    codes = re.findall(r"python3? -c '([^']*)'", run)
    for path, text in files.items():
        codes += [text] if path.endswith(".py") else []
        run += f"\n{text}" if path.endswith(".sh") else ""
        if not path.endswith((".py", ".sh")) and not _DATA_FILE.fullmatch(path):
            raise UnsafeForm(f"its `run` may run {path}, which is not read")
    trees = [parse_python(code) for code in codes]
    prints = re.search(r"(?:print|write)\(f?['\"\d]", "\n".join(map(ast.unparse, trees)))
    decides = any(isinstance(node, _DECISIONS) for tree in trees for node in ast.walk(tree))
    if prints or decides or not _RUN.fullmatch(re.sub(r"(?m)^\s*(#.*)?\n", "", run.strip())):
        raise UnsafeForm("its `run` may decide beside the agent's code, which could print the same; decide in `judge`")


@dataclass(slots=True)
class _Reader:
    """Reads lines and scripts, with the verify files that they run. Raises `UnsafeForm`."""

    files: Mapping[str, str]
    modules: Collection[str]  # Python modules that may be imported
    agents: Collection[str] = ()  # the agent's modules, which are called in another sandbox and let no NaN pass
    judges: bool = False  # whether `$OUTPUT` and `$URL` are there, and no other data of the agent
    protected: Patterns = field(default_factory=lambda: Patterns(()))
    texts: list[str] = field(default_factory=list)  # all lines and scripts

    def line(self, line: str) -> list[str]:
        """Read a line; return the files that it reads."""
        self.texts.append(line)
        is_weak = is_fed = False
        pipeline, proven, every = list[str](), list[str](), list[str]()
        while line := _BETWEEN.sub("", line.rstrip(" \t\n"), count=1):
            command = _COMMAND.match(line)
            if command is None or (not self.judges and re.search(r"\$(OUTPUT|URL)", command[0])):
                raise UnsafeForm(f"it has a part that is not in the list of safe forms: {line[:60]!r}")
            line, joint = line[command.end() :], command["joint"].strip()
            files, is_weak = self._command(command, is_fed, is_weak or bool(command["not"]), bool(pipeline))
            is_fed = joint == "|" and (is_fed or bool(command["prints"]))
            pipeline += files
            if joint == "|":
                continue
            if is_weak and not all(self._is_fixed(f) or f in proven or f[:11] == "$OUTPUT/std" for f in pipeline):
                raise UnsafeForm("it negates a reader or counts nothing, and so passes without the agent's file")
            is_proof = not is_weak and pipeline == files and len(files) == 1 and _PROOF.match(command["words"])
            proven = (proven + files * bool(is_proof)) if joint == "&&" else []
            every, pipeline, is_weak = every + pipeline, [], False
        return every

    def _command(self, command: re.Match[str], is_fed: bool, is_weak: bool, is_piped: bool) -> tuple[list[str], bool]:
        """Return the files that a command reads, and whether it may also pass without them."""
        words = shlex.split(command["words"])
        files = [word for word in words[1:] if not re.match("-.", word)]
        if command["test"]:
            files, is_weak = self._test(command, is_weak)
        elif command["script"]:
            files = self.line(self._file(words[1]))
        elif command["python"]:
            self._python(words)
        is_fileless = command["python"] or command["prints"] or words[:1] == ["tr"]
        files = [] if is_fileless else files[bool(command["pattern"]) :]
        files += shlex.split(command["input"] or "")
        if command["compares"] and not any(is_fed if file == "-" else self._is_fixed(file) for file in files):
            raise UnsafeForm(f"it compares files that the agent can all change: '{command['words']}'")
        if command["reward"] and not command["prints"]:
            raise UnsafeForm("it writes a reward that is not literal")
        return [file for file in files if file != "-"], is_weak or (is_piped and "0" in words)

    def _is_fixed(self, file: str) -> bool:
        """Return whether the agent can choose neither the content nor the name of a file."""
        path = posixpath.normpath(file)
        is_verifiers = any(f"{name}/".startswith(f"{path}/") for name in self.files)
        return file[:1] != "$" if self.judges else is_verifiers or self.protected.cover(path)

    def _file(self, word: str) -> str:
        if ".." in word or posixpath.normpath(word) not in self.files:
            raise UnsafeForm(f"it runs {word}, which is not one of the verify files")
        return self.files[posixpath.normpath(word)]

    def _test(self, command: re.Match[str], is_weak: bool) -> tuple[list[str], bool]:
        sides = [side for side in command.group("left", "right", "only") if side and "$(" in side]
        read = [self.line(side.strip('"')[2:-1]) for side in sides]
        if len(read) == 2 and not any(files and all(map(self._is_fixed, files)) for files in read):
            raise UnsafeForm(f"it compares files that the agent can all change: '{command['words']}'")
        weak = "-z|!=|''|\"\"" + "|-ne|-lt|-le|0" * any(re.search(r"\||wc|grep", side) for side in sides)
        is_weak |= any(re.fullmatch(weak, word or "-") for word in command.group("operator", "right", "unary"))
        return [file for files in read for file in files], is_weak

    def _python(self, words: list[str]) -> None:
        words = [word for word in words if not re.fullmatch(r"python3?|-[IuBsE]+", word)]
        if words[0] in ("-m", "pytest"):
            runner, *places = (word for word in words if not re.fullmatch(r"-m|-[qvxs]+|-p|no:\w+|--tb=\w+", word))
            names = tuple(re.sub(r"\.(?!py$)", "/", place.partition("::")[0]) for place in places)
            paths = [path for path in self.files if path.startswith(names) or posixpath.basename(path) == "conftest.py"]
            if runner not in {"pytest", "unittest"} & {*self.modules} or not paths or "-" in {n[:1] for n in names}:
                raise UnsafeForm(f"it runs tests or options that are not read: '{' '.join(words)}'")
            code = "".join(self._script(self.files[path], path) for path in paths if path.endswith(".py"))
        else:
            code = self._script(words[1] if words[0] == "-c" else self._file(words[0]), posixpath.normpath(words[0]))
        code = re.sub(r"len\([^()]*\) [<>]=? \d+", "", code)
        if not self.agents and _NAN.search(code) and _NAN_PASSES.search(code) and "isfinite" not in code:
            raise UnsafeForm("it may let NaN pass a limit; check math.isfinite first, or use only `assert x < limit`")

    def _script(self, source: str, path: str) -> str:
        """Read a script; return its code, and that of the verify files it imports, without texts and imports."""
        if source in self.texts:
            return ""
        self.texts.append(source)
        nodes = list(ast.walk(tree := parse_python(source)))
        stored = [node for node in nodes if not isinstance(getattr(node, "ctx", node), ast.Load | ast.keyword)]
        fields = ("id", "arg", "name", "asname")
        names = _BUILTINS.union(str(getattr(node, key, "")).partition(".")[0] for node in stored for key in fields)
        modules = {item.asname or item.name for node in nodes if isinstance(node, ast.Import) for item in node.names}
        code, agents = "", set[str]()
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                code += "".join(self._import(node, item, posixpath.dirname(path)) for item in node.names)
            elif _is_unsafe(node, names, modules):
                raise UnsafeForm(f"it uses {ast.unparse(node)}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # after the call with this text
                agents |= {node.value} if _DATA_FILE.fullmatch(node.value) and not self._is_fixed(node.value) else set()
                node.value = ""
        if len(agents) > 1:
            raise UnsafeForm(f"it reads {' and '.join(sorted(agents))}, which the agent can both change")
        code += re.sub(r"(?m)^\s*(?:import|from) .*$", "", ast.unparse(tree))
        if part := _PARTED.search(_PARTS.sub("", code)):
            raise UnsafeForm(f"it uses a part of {part[0]} that is not in the list of safe forms")
        if number := _EXIT.search(code):
            raise UnsafeForm(f"it exits with a number that the agent may influence (256 counts as 0): '{number[0]}'")
        return code

    def _import(self, node: ast.Import | ast.ImportFrom, item: ast.alias, folder: str) -> str:
        module, part = (item.name, "") if isinstance(node, ast.Import) else (node.module or "", item.name)
        is_safe = part not in _OTHER_MODULES and not re.match(r"_|\*", part) and not getattr(node, "level", 0)
        if _PARTED.match(module):
            is_safe &= item.asname in (None, "np") and (not part or bool(_PARTS.fullmatch(f"{module}.{part}")))
        if not is_safe:
            raise UnsafeForm(f"it imports {part or item.asname} from {module or 'its package'}")
        if module in self.modules or {module, module.partition(".")[0]} & {*self.agents}:
            return ""
        path = posixpath.normpath(posixpath.join(folder, f"{module.replace('.', '/')}.py"))
        if path not in self.files:
            raise UnsafeForm(f"it imports {module}, which is neither a data module nor a verify file")
        return self._script(self.files[path], path)


def _is_unsafe(node: ast.AST, names: set[str], modules: set[str]) -> bool:
    """Return whether a node uses a builtin that executes, a private name or a module's module, or writes a file."""
    match node:
        case ast.Name(id=name):
            return name not in names
        case ast.Attribute(value=value, attr=name):
            is_module = name in _OTHER_MODULES and ast.unparse(value) in modules
            return (is_module or bool(_REFUSED.match(name))) and "reward.txt" not in ast.unparse(node)
        case ast.Call(func=ast.Name("open") | ast.Attribute(attr="open"), args=words, keywords=options):
            has_mode = len(words) > isinstance(node.func, ast.Name) or "mode" in [option.arg for option in options]
            return has_mode and "reward.txt" not in ast.unparse(node)
    return False
