"""A reader of shell lines: what a line would run, as a tree, without running it.

Knows the grammar of sh(1) that checks are written in. What it does not know (arrays, `[[`, process substitution, ...)
is a `ShellSyntaxError`: callers must not guess. Must not know what a program does.
"""

# The tree of `[ "$(sh square.sh 7)" = 49 ] && grep -q x < out.txt`:
#
#   CommandList(&&)
#     Command  words: [, "$(...)", =, 49, ]      the second word holds a CommandList of its own: Command  sh square.sh 7
#     Command  words: grep, -q, x                redirections: < out.txt
#
# Every node has the text that it was read from. Precedence, as in POSIX.1-2017, XCU 2.10:
#
#   sequence  :=  pipeline ((&& | || | ; | & | newline) pipeline)*
#   pipeline  :=  [!] command (| command)*
#   command   :=  { sequence }  |  ( sequence )  |  if ...  |  for ...  |  name() command  |  simple

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BLANK = " \t"
_ENDS_WORD = frozenset(" \t\n;&|()<>")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
_REDIRECTION = re.compile(r"(\d*)(<<-|<<|<&|<>|<|>>|>&|>\||>)")
_PARAMETER = re.compile(r"\{(#?[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-])((?::?[-=?+]|##?|%%?)[^$`'\"\\{}]*)?\}")
_BRACKETS = re.compile(r"\[[^\s;&|()<>]+\]")
_FUNCTION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*\([ \t]*\)")
_SPECIAL = frozenset("0123456789@*#?$!-")
_RESERVED = frozenset(
    ["if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "in", "{", "}", "!"]
)
_UNKNOWN = frozenset(["[[", "function", "select", "time", "coproc"])
_MAX_DEPTH = 40


class ShellSyntaxError(ValueError):
    """A line is no shell, or uses what this reader does not know."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """A part of a word that is known only when the line runs."""

    kind: str
    """`variable`, `command`, `arithmetic` or `glob`."""
    name: str = ""
    """Of a variable; the text of an arithmetic expression."""
    command: CommandList | None = None
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command: literal text and expansions, in order."""

    text: str
    parts: tuple[str | Expansion, ...] = ()
    quoted: bool = False
    """Whether any of it is quoted: `"if"` is no reserved word."""

    @property
    def literal(self) -> str | None:
        """The word as the program gets it, or None where that is known only when the line runs."""
        return "".join(map(str, self.parts)) if all(isinstance(part, str) for part in self.parts) else None

    @property
    def start(self) -> str:
        """The literal text that the word begins with."""
        return self.parts[0] if self.parts and isinstance(self.parts[0], str) else ""

    @property
    def expansions(self) -> tuple[Expansion, ...]:
        """Its expansions."""
        return tuple(part for part in self.parts if isinstance(part, Expansion))


@dataclass(frozen=True, slots=True)
class Redirection:
    """`2> file`, `< file`, `<<EOF`: the word is the file, or the text of a here-document."""

    operator: str
    word: Word


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command: assignments, the program with its arguments, redirections."""

    text: str
    assignments: tuple[tuple[str, Word], ...] = ()
    words: tuple[Word, ...] = ()
    redirections: tuple[Redirection, ...] = ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by `|`, with `!` before them or not."""

    text: str
    commands: tuple[Node, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Compound:
    """`( )`, `{ }`, `if`, `for`, `while`, `until`, `case` or a function, with everything that is in it."""

    text: str
    kind: str
    parts: tuple[CommandList, ...]
    words: tuple[Word, ...] = ()
    """What `for` and `case` go over; patterns included."""
    redirections: tuple[Redirection, ...] = ()
    name: str = ""
    """Of a function, or the variable of `for`."""


@dataclass(frozen=True, slots=True)
class CommandList:
    """Pipelines and the operator before each; that of the first is empty."""

    text: str
    items: tuple[tuple[str, Pipeline], ...]


Node = Command | Compound


def parse(line: str) -> CommandList:
    """Read a shell line, or the text of a script.

    Raises:
        ShellSyntaxError: it cannot be read for certain.
    """
    parser = _Parser(line)
    sequence = parser.sequence(frozenset())
    parser.expect_end()
    return sequence


def commands(node: CommandList | Pipeline | Node) -> Iterator[Command]:
    """Yield every simple command of a tree, also those in substitutions, in the order of the text."""
    if isinstance(node, CommandList):
        for _, pipeline in node.items:
            yield from commands(pipeline)
    elif isinstance(node, Pipeline):
        for command in node.commands:
            yield from commands(command)
    else:
        words = [*node.words, *(redirection.word for redirection in node.redirections)]
        if isinstance(node, Command):
            words += [word for _, word in node.assignments]
        for word in words:
            yield from word_commands(word)
        if isinstance(node, Command):
            yield node
        else:
            for part in node.parts:
                yield from commands(part)


def word_commands(word: Word) -> Iterator[Command]:
    """Yield the commands in the substitutions of a word."""
    for expansion in word.expansions:
        if expansion.command is not None:
            yield from commands(expansion.command)


@dataclass(slots=True)
class _Parser:
    """Recursive descent over the characters of a line."""

    line: str
    at: int = 0
    depth: int = 0

    # ---- lists, pipelines, commands ----

    def sequence(self, ends: frozenset[str], *, until: str = "") -> CommandList:
        """Read pipelines up to a reserved word among `ends`, the character `until`, or the end."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ShellSyntaxError("it is nested too deeply")
        start, items, operator = self.at, list[tuple[str, Pipeline]](), ""
        while True:
            self.skip_lines()
            if self._is_end(ends, until):
                break
            items.append((operator, self.pipeline()))
            operator = self._operator()
            if not operator:
                break
        if operator in ("&&", "||"):
            raise ShellSyntaxError(f"nothing follows {operator}")
        self.depth -= 1
        return CommandList(self.line[start : self.at].strip(), tuple(items))

    def _is_end(self, ends: frozenset[str], until: str) -> bool:
        if self.at >= len(self.line) or (until and self.line.startswith(until, self.at)):
            return True
        return self._reserved() in ends

    def _operator(self) -> str:
        self.skip_blanks()
        for operator in ("&&", "||"):
            if self.line.startswith(operator, self.at):
                self.at += 2
                return operator
        if self.line.startswith((";;", "&>", "|&"), self.at):
            if self.line.startswith(";;", self.at):
                return ""
            raise ShellSyntaxError("&> and |& mean other things in other shells")
        if self.at < len(self.line) and self.line[self.at] in ";&\n":
            self.at += 1
            return self.line[self.at - 1]
        return ""

    def pipeline(self) -> Pipeline:
        """Read commands joined by `|`."""
        self.skip_blanks()
        start, negated = self.at, False
        while self._reserved() == "!":
            self.at += 1
            negated = not negated
            self.skip_blanks()
        parts = [self.command()]
        while True:
            self.skip_blanks()
            if not self.line.startswith("|", self.at) or self.line.startswith(("||", "|&"), self.at):
                break
            self.at += 1
            self.skip_lines()
            parts.append(self.command())
        return Pipeline(self.line[start : self.at].strip(), tuple(parts), negated)

    def command(self) -> Node:
        """Read a simple or a compound command."""
        self.skip_blanks()
        start = self.at
        reserved = self._reserved()
        if self.line.startswith("((", self.at):
            raise ShellSyntaxError("(( is not sh")
        if self.line.startswith("(", self.at):
            self.at += 1
            body = self.sequence(frozenset(), until=")")
            self._take(")")
            return self._compound(start, "(", body)
        if reserved == "{":
            self.at += 1
            body = self.sequence(frozenset("}"))
            self._take_reserved("}")
            return self._compound(start, "{", body)
        if reserved == "if":
            return self._if(start)
        if reserved in ("while", "until"):
            self.at += len(reserved)
            condition = self.sequence(frozenset(["do"]))
            return self._compound(start, reserved, condition, self._loop_body())
        if reserved == "for":
            return self._for(start)
        if reserved == "case":
            return self._case(start)
        if reserved:
            raise ShellSyntaxError(f"{reserved!r} was not expected")
        return self._function(start) or self._simple(start)

    def _compound(
        self, start: int, kind: str, *parts: CommandList, words: tuple[Word, ...] = (), name: str = ""
    ) -> Compound:
        redirections = []
        while (redirection := self._redirection()) is not None:
            redirections.append(redirection)
        return Compound(self.line[start : self.at].strip(), kind, parts, words, tuple(redirections), name)

    def _if(self, start: int) -> Compound:
        self._take_reserved("if")
        parts = [self.sequence(frozenset(["then"]))]
        self._take_reserved("then")
        while True:
            parts.append(self.sequence(frozenset(["elif", "else", "fi"])))
            word = self._reserved()
            self._take_reserved(word)
            if word == "elif":
                parts.append(self.sequence(frozenset(["then"])))
                self._take_reserved("then")
            elif word == "fi":
                return self._compound(start, "if", *parts)

    def _loop_body(self) -> CommandList:
        self._take_reserved("do")
        body = self.sequence(frozenset(["done"]))
        self._take_reserved("done")
        return body

    def _for(self, start: int) -> Compound:
        self._take_reserved("for")
        self.skip_blanks()
        name = self._name()
        self.skip_lines()
        words: list[Word] = []
        if self._reserved() == "in":
            self._take_reserved("in")
            while (word := self._word()) is not None:
                words.append(word)
        self.skip_blanks()
        if self.line.startswith(";", self.at):
            self.at += 1
        self.skip_lines()
        return self._compound(start, "for", self._loop_body(), words=tuple(words), name=name)

    def _case(self, start: int) -> Compound:
        self._take_reserved("case")
        subject = self._word()
        if subject is None:
            raise ShellSyntaxError("case has no word")
        self.skip_lines()
        self._take_reserved("in")
        words, parts = [subject], list[CommandList]()
        while True:
            self.skip_lines()
            if self._reserved() == "esac":
                self._take_reserved("esac")
                return self._compound(start, "case", *parts, words=tuple(words))
            self.skip_over("(")
            while (pattern := self._word()) is not None:
                words.append(pattern)
                self.skip_blanks()
                if not self.skip_over("|"):
                    break
            self.skip_blanks()
            self._take(")")
            parts.append(self.sequence(frozenset(["esac"]), until=";;"))
            self.skip_over(";;")

    def _function(self, start: int) -> Compound | None:
        match = _FUNCTION.match(self.line, self.at)
        if match is None:
            return None
        self.at = match.end()
        self.skip_lines()
        body_start = self.at
        body = self.command()
        if not isinstance(body, Compound):
            raise ShellSyntaxError("the body of a function is no { } or ( )")
        text = self.line[body_start : self.at]
        whole = CommandList(text, (("", Pipeline(text, (body,))),))
        return Compound(self.line[start : self.at], "function", (whole,), name=match[1])

    def _simple(self, start: int) -> Command:
        assignments: list[tuple[str, Word]] = []
        words: list[Word] = []
        redirections: list[Redirection] = []
        while True:
            redirection = self._redirection()
            if redirection is not None:
                redirections.append(redirection)
                continue
            self.skip_blanks()
            match = _ASSIGNMENT.match(self.line, self.at) if not words else None
            if match is not None:
                self.at = match.end()
                if self.line.startswith("(", self.at):
                    raise ShellSyntaxError("arrays are not sh")
                assignments.append((match[1], self._word() or Word("", ("",))))
                continue
            word = self._word()
            if word is None:
                break
            words.append(word)
        if not (assignments or words or redirections):
            raise ShellSyntaxError(f"a command was expected before {self.line[self.at : self.at + 20]!r}")
        if words and not words[0].quoted and words[0].literal in _UNKNOWN:
            raise ShellSyntaxError(f"{words[0].text} is not read")
        if self.line.startswith("(", self.at):
            raise ShellSyntaxError("( was not expected")
        text = self.line[start : self.at].strip()
        return Command(text, tuple(assignments), tuple(words), tuple(redirections))

    def _redirection(self) -> Redirection | None:
        self.skip_blanks()
        match = _REDIRECTION.match(self.line, self.at)
        if match is None:
            return None
        self.at = match.end()
        operator = match[2]
        if self.line.startswith(("(", "<"), self.at):
            raise ShellSyntaxError(f"{operator}{self.line[self.at]} is not sh")
        word = self._word()
        if word is None:
            raise ShellSyntaxError(f"nothing follows {operator}")
        if operator not in ("<<", "<<-"):
            return Redirection(operator, word)
        if word.literal is None:
            raise ShellSyntaxError("the delimiter of a here-document is no plain word")
        return Redirection("<<", self._document(word.literal, literal=word.quoted, strip_tabs=operator == "<<-"))

    # ---- words ----

    def _word(self) -> Word | None:
        """Read a word; None where there is none."""
        self.skip_blanks()
        start = self.at
        parts: list[str | Expansion] = []
        quoted = False
        while self.at < len(self.line) and (char := self.line[self.at]) not in _ENDS_WORD:
            if char == "'":
                end = self._find("'", self.at + 1)
                parts.append(self.line[self.at + 1 : end])
                self.at, quoted = end + 1, True
            elif char == '"':
                self.at += 1
                parts += self.quoted_parts('"')
                self.at, quoted = self.at + 1, True
            elif char == "\\":
                if self.line.startswith("\\\n", self.at):  # `i\<newline>f` would be a reserved word
                    raise ShellSyntaxError("a word goes on in the next line")
                parts.append(self.line[self.at + 1 : self.at + 2])
                self.at, quoted = self.at + 2, True
            elif char in "$`":
                parts.append(self._expansion(quoted=False))
            elif char in "*?" or (char == "[" and _BRACKETS.match(self.line, self.at)):
                parts.append(Expansion("glob", char))
                self.at += 1
            elif char == "~" and not parts and self.at == start:
                parts.append(self._tilde())
            else:
                parts.append(char)
                self.at += 1
        if self.at == start:
            return None
        return Word(self.line[start : self.at], _joined(parts), quoted)

    def _tilde(self) -> Expansion:
        self.at += 1
        if self.at < len(self.line) and self.line[self.at] not in _ENDS_WORD | {"/"}:
            raise ShellSyntaxError("the home of another user is not read")
        return Expansion("variable", "HOME", quoted=True)

    def quoted_parts(self, end: str) -> list[str | Expansion]:
        """Read what is between double quotes, or a here-document with `end` empty; leave the end unread."""
        parts: list[str | Expansion] = []
        while True:
            if self.at >= len(self.line):
                if end:
                    raise ShellSyntaxError("a quotation has no end")
                return parts
            char = self.line[self.at]
            if char == end:
                return parts
            if char == "\\" and self.line[self.at + 1 : self.at + 2] in ("$", "`", "\\", "\n", end or "$"):
                parts.append(self.line[self.at + 1].replace("\n", ""))
                self.at += 2
            elif char in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                parts.append(char)
                self.at += 1

    def _expansion(self, *, quoted: bool) -> str | Expansion:
        """Read what begins with `$` or a backtick."""
        if self.line[self.at] == "`":
            return self._backticks(quoted)
        rest = self.line[self.at + 1 : self.at + 2]
        if self.line.startswith("((", self.at + 1):
            end = self._find("))", self.at + 3)
            text = self.line[self.at + 3 : end]
            self.at = end + 2
            return Expansion("arithmetic", text, quoted=quoted)
        if rest == "(":
            self.at += 2
            inner = self.sequence(frozenset(), until=")")
            self._take(")")
            return Expansion("command", command=inner, quoted=quoted)
        if rest == "{":
            match = _PARAMETER.match(self.line, self.at + 1)
            if match is None:
                raise ShellSyntaxError(f"{self.line[self.at : self.at + 12]!r} is not read")
            self.at = match.end()
            return Expansion("variable", match[1].lstrip("#") or "#", quoted=quoted)
        match = _NAME.match(self.line, self.at + 1)
        if match is not None:
            self.at = match.end()
            return Expansion("variable", match[0], quoted=quoted)
        if rest in _SPECIAL and rest:
            self.at += 2
            return Expansion("variable", rest, quoted=quoted)
        if rest in ("'", '"') and not quoted:
            raise ShellSyntaxError(f"${rest} means other things in other shells")
        self.at += 1
        return "$"

    def _backticks(self, quoted: bool) -> Expansion:
        end = self.at + 1
        while end < len(self.line) and self.line[end] != "`":
            end += 2 if self.line[end] == "\\" else 1
        if end >= len(self.line):
            raise ShellSyntaxError("a backtick has no end")
        inner = re.sub(r"\\([\\`$])", r"\1", self.line[self.at + 1 : end])
        self.at = end + 1
        parser = _Parser(inner, depth=self.depth)
        sequence = parser.sequence(frozenset())
        parser.expect_end()
        return Expansion("command", command=sequence, quoted=quoted)

    # ---- here-documents ----

    def _document(self, delimiter: str, *, literal: bool, strip_tabs: bool) -> Word:
        """Take the text of a here-document out of the lines that follow this one."""
        end = self.line.find("\n", self.at)
        rest = self.line[self.at : end]
        if end < 0 or rest.count("'") % 2 or rest.count('"') % 2:  # a quotation would go on behind the document
            raise ShellSyntaxError("a here-document has no text")
        lines, place = list[str](), end + 1
        while True:
            stop = self.line.find("\n", place)
            text = self.line[place:] if stop < 0 else self.line[place:stop]
            text = text.lstrip("\t") if strip_tabs else text
            if text == delimiter:
                break
            if stop < 0:
                raise ShellSyntaxError(f"a here-document does not end with {delimiter!r}")
            lines.append(text)
            place = stop + 1
        self.line = self.line[:end] + ("" if stop < 0 else self.line[stop:])
        body = "".join(f"{text}\n" for text in lines)
        parts: list[str | Expansion] = [body] if literal else _Parser(body, depth=self.depth).quoted_parts("")
        return Word(body, _joined(parts), quoted=True)

    # ---- characters ----

    def skip_blanks(self) -> None:
        """Go over blanks, line continuations and a comment."""
        while self.at < len(self.line):
            if self.line[self.at] in _BLANK:
                self.at += 1
            elif self.line.startswith("\\\n", self.at):
                self.at += 2
            elif self.line[self.at] == "#" and (self.at == 0 or self.line[self.at - 1] in _ENDS_WORD):
                end = self.line.find("\n", self.at)
                self.at = len(self.line) if end < 0 else end
            else:
                return

    def expect_end(self) -> None:
        """Raise if anything is left."""
        if self.at < len(self.line):
            raise ShellSyntaxError(f"{self.line[self.at : self.at + 20]!r} was not expected")

    def skip_lines(self) -> None:
        """Go over blanks and ends of lines."""
        self.skip_blanks()
        while self.line.startswith("\n", self.at):
            self.at += 1
            self.skip_blanks()

    def skip_over(self, text: str) -> bool:
        """Go over a text if it is here."""
        if not self.line.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _reserved(self) -> str:
        """Return the reserved word that is here, or an empty text."""
        end = self.at
        while end < len(self.line) and self.line[end] not in _ENDS_WORD:
            end += 1
        word = self.line[self.at : end]
        return word if word in _RESERVED else ""

    def _take_reserved(self, word: str) -> None:
        self.skip_blanks()
        if not word or self._reserved() != word:
            raise ShellSyntaxError(f"{word or 'the end of a compound command'!r} is missing")
        self.at += len(word)

    def _take(self, char: str) -> None:
        if not self.skip_over(char):
            raise ShellSyntaxError(f"{char!r} is missing")

    def _name(self) -> str:
        match = _NAME.match(self.line, self.at)
        if match is None:
            raise ShellSyntaxError("a name is missing")
        self.at = match.end()
        return match[0]

    def _find(self, text: str, start: int) -> int:
        end = self.line.find(text, start)
        if end < 0:
            raise ShellSyntaxError(f"{text} is missing")
        return end


def _joined(parts: list[str | Expansion]) -> tuple[str | Expansion, ...]:
    """Join neighbouring literal parts; a word of nothing but quotes is the empty text."""
    joined: list[str | Expansion] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "" or not joined:
            joined.append(part)
    return tuple(joined) or ("",)
