"""The reader of shell lines: the tree of a line, and that a real shell runs nothing which the reader has not seen."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from openenv.rollout.verify.shell_syntax import Command, Compound, ShellSyntaxError, commands, parse


def programs(line: str) -> list[str | None]:
    return [command.words[0].literal for command in commands(parse(line)) if command.words]


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("a x | b && ! c || d; e & f\ng", ["a", "b", "c", "d", "e", "f", "g"]),
        ('a "$(b "`c`")" $(d | e)', ["c", "b", "d", "e", "a"]),
        ("if a; then b; elif c; then d; else e; fi", ["a", "b", "c", "d", "e"]),
        ("for x in $(a) b; do c; done < $(d)", ["a", "d", "c"]),
        ("while a; do b; done; until c; do d; done", ["a", "b", "c", "d"]),
        ("case $(a) in (b|c) d;; *) e;; esac", ["a", "d", "e"]),
        ("f() { a; }; (b; { c; }) > $(d)", ["a", "d", "b", "c"]),
        ("x=$(a) y=1; x=2 b", ["a", "b"]),
        ("a <<E | b <<'F'\n$(c)\nE\n$(d)\nF\ne", ["c", "a", "b", "e"]),
        ("a # b; c\nd 'e; f' \\; g", ["a", "d"]),
        ("a \"\\$(b)\" '$(c)' \\`d\\` $", ["a"]),
        ("\"a\" 'b'; $c; d$e", ["a", None, None]),
        ("a \\\n b; '' c", ["a", ""]),
        ("", []),
    ],
)
def test_every_command_of_a_line_is_seen(line: str, seen: list[str | None]) -> None:
    assert programs(line) == seen


def test_a_tree_has_the_text_that_it_was_read_from() -> None:
    tree = parse(' [ "$(sh square.sh 7)" = 49 ]  && ! ./a > "out 1" 2>&1 | b ')
    assert [(operator, pipeline.text, pipeline.negated) for operator, pipeline in tree.items] == [
        ("", '[ "$(sh square.sh 7)" = 49 ]', False),
        ("&&", '! ./a > "out 1" 2>&1 | b', True),
    ]
    test, writes = tree.items[0][1].commands[0], tree.items[1][1].commands[0]
    assert isinstance(test, Command)
    assert isinstance(writes, Command)
    assert [word.literal for word in test.words] == ["[", None, "=", "49", "]"]
    inner = test.words[1].expansions[0]
    assert inner.command is not None
    assert (inner.kind, inner.quoted, inner.command.text) == ("command", True, "sh square.sh 7")
    assert [(each.operator, each.word.literal) for each in writes.redirections] == [(">", "out 1"), (">&", "1")]
    [(_, group)] = parse("f() { a; }").items
    assert isinstance(group.commands[0], Compound)
    assert (group.commands[0].kind, group.commands[0].name) == ("function", "f")


@pytest.mark.parametrize(
    "line",
    [
        *("a &&", "| a", "a; ;b", "(a", "a)", "{ a", "if a; then b", "case a in b) c"),
        *("a 'b", 'a "b', "a `b", "$(a", "${a"),
        *("a <(b)", "a <<< b", "a &> b", "a |& b", "x=(1)", "((x))", "[[ a ]]", "function f { a; }", "${!x}", "$'a'"),
        *("i\\\nf a", "a <<E", "a <<E\nb", "for 1 in a; do b; done", "f() a", "a (b)", "~other/a"),
    ],
)
def test_what_is_no_shell_or_not_of_every_shell_is_refused(line: str) -> None:
    with pytest.raises(ShellSyntaxError):
        parse(line)


WORDS = r"""a b 'x_y' "q$v" $v ${v} ${v:-w} $(c_d) `e` v=1 v=a #c [_-e_x_] \; '' * [ab] $((1+2))
$ = -x ' " \ # x y "a" \a 'b' `echo_\`c\`` "$(a_"$(b)")" $(echo_a)"""
OTHERS = r"""; & && || | ( ) { } ! if then else elif fi for in case esac x) y|z) ;; f() f()_{ >_o <_/dev/null 2>&1
>>_p ;_a"""
TOKENS = [token.replace("_", " ") for text in (WORDS, OTHERS) for token in text.split()]
TOKENS += ["\n", "\\\n", "<<E\nbody $v $(b)\nE\n", "<<'E'\n$(c)\nE\n"]


@pytest.mark.slow
def test_a_real_shell_runs_only_what_the_reader_has_seen(tmp_path: Path) -> None:
    chance = random.Random(12)
    log, bin_folder, work = tmp_path / "log", tmp_path / "bin", tmp_path / "work"
    bin_folder.mkdir()
    work.mkdir()
    for number, name in enumerate("abcdefqvwxyz"):
        (bin_folder / name).write_text(f"#!/bin/sh\necho {name} >> {log}\necho {name}\nexit {number % 2}\n")
        (bin_folder / name).chmod(0o755)
    ran = 0
    for _ in range(6000):
        line = " ".join(chance.choice(TOKENS) for _ in range(chance.randrange(1, 9)))
        line = line.replace(" ", "", chance.choice([0, 0, 1, 2]))
        try:
            seen = programs(line)
        except ShellSyntaxError:
            continue
        if None in seen:  # a program that is known only when the line runs: a reader must refuse it
            continue
        log.write_text("")
        command = ["/bin/sh", "-c", line]
        environment = {"PATH": str(bin_folder)}
        subprocess.run(command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
        started = set(log.read_text().split())
        ran += bool(started)
        assert started <= set(seen), line
    assert ran > 200
