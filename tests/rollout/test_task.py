"""Tasks from files: short to write, and clear about what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from openenv.errors import RolloutError
from openenv.rollout import Check, Task, load_task
from openenv.rollout.tasks.checks import Case, case_check
from openenv.rollout.tasks.task import parse_check


def test_a_task_is_read_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "test_it.py").write_text("assert True")
    (tmp_path / "sum.yaml").write_text(
        "instruction: write sum.py\nverify: python3 test_it.py\nverify_files_from: hidden\nsetup: [a, b]\n"
        "limits: {memory_mb: 256}\n"
    )
    task = load_task(tmp_path / "sum.yaml")
    assert task.task_id == "sum"
    assert task.verify == ("python3 test_it.py",)
    assert task.setup == ("a", "b")
    assert task.verify_files == {"test_it.py": "assert True"}
    assert task.limits.memory_mb == 256


def test_a_task_is_read_from_json(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"instruction": "x", "task_id": "other"}))
    assert load_task(tmp_path / "t.json").task_id == "other"


REPEATED = "instruction: x\nmetadata:\n  a0: &a0 [x, x]\n" + "".join(
    f"  a{level}: &a{level} [*a{level - 1}, *a{level - 1}]\n" for level in range(1, 40)
)


def test_a_task_may_have_aliases(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("instruction: &text x\nsetup: [*text]\nmetadata: {a: &a [1], b: [*a, *a]}\n")
    assert load_task(tmp_path / "t.yaml").metadata == {"a": [1], "b": [[1], [1]]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("verify: [x]", "instruction"),
        ("instruction: x\nverfy: [x]", "verfy"),
        ("[1, 2]", "mapping"),
        ("instruction: [", "cannot be read"),
        ("instruction: x\nmetadata: " + "[" * 2000, "cannot be read"),
        (REPEATED, "more than 1,000,000 values"),
        ("instruction: x\nmetadata: {a: &a [*a]}", "more than 1,000,000 values"),
        ("instruction: x\nfiles_from: nowhere", "does not exist"),
        ("instruction: x\nverify: {run: a}", "judge"),
        ("instruction: x\nverify: [{run: a, judge: b, keep: [/etc]}]", "below the work folder"),
    ],
)
def test_an_invalid_task_is_an_error_that_names_the_problem(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(RolloutError, match=problem):
        load_task(tmp_path / "t.yaml")


def test_a_check_in_two_parts_is_read_from_a_file(tmp_path: Path) -> None:
    check = 'run: sh go.sh\n    judge: grep -q x "$OUTPUT/stdout"\n    keep: [out]'
    (tmp_path / "many.yaml").write_text(f"instruction: x\nverify:\n  - {check}\n  - 'true'\n")
    expected = Check(run="sh go.sh", judge='grep -q x "$OUTPUT/stdout"', keep=("out",))
    assert load_task(tmp_path / "many.yaml").verify == (expected, "true")
    (tmp_path / "one.json").write_text(json.dumps({"instruction": "x", "verify": {"run": "a", "judge": "b"}}))
    assert load_task(tmp_path / "one.json").verify == (Check(run="a", judge="b"),)


@pytest.mark.parametrize("text", ["true", "{ true; }", '"quoted"', "[ -e x ]", "[1]", "7"])
def test_a_shell_line_on_a_command_line_stays_one(text: str) -> None:
    assert parse_check(text) == text


def test_a_check_on_a_command_line_is_json() -> None:
    assert parse_check('{"run": "a", "judge": "b", "needs": ["*.in"]}') == Check(run="a", judge="b", needs=("*.in",))
    with pytest.raises(RolloutError, match="judge"):
        parse_check('{"run": "a"}')


def test_a_missing_task_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="cannot be read"):
        load_task(tmp_path / "t.yaml")


def test_a_single_line_or_check_may_stand_for_a_list() -> None:
    task = Task(instruction="x", setup="true", verify=Check(run="a", judge="b"), solution="c")  # type: ignore[arg-type]
    assert (task.setup, task.verify, task.solution) == (("true",), (Check(run="a", judge="b"),), ("c",))


@pytest.mark.parametrize("line", ["", "  \t", "# later", "\n  # one\n# two\n", " \\\n", "\\\n# later"])
def test_a_verify_line_that_runs_nothing_is_refused(line: str) -> None:
    with pytest.raises(ValidationError, match=r"line 2, .* is blank or a comment"):
        Task(instruction="x", verify=("true", line))
    with pytest.raises(ValidationError, match="runs nothing"):
        Check(run="true", judge=line)
    with pytest.raises(RolloutError, match="runs nothing"):
        parse_check(json.dumps({"run": line, "judge": "true"}))
    with pytest.raises(ValidationError, match="runs nothing"):
        Task.model_validate({"instruction": "x", "verify": [{"run": "true", "judge": line}]})
    with pytest.raises(ValueError, match="runs nothing"):
        case_check(line, [Case(stdout="1")])  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["# why\ntest -e a", "true # why", "echo '\n# text\n'", "# a \\\nfalse", ":"])
def test_a_verify_line_with_a_comment_stays(line: str) -> None:
    assert Task(instruction="x", verify=line).verify == (line,)


@pytest.mark.parametrize("instruction", ["", " \n\t"])
def test_an_empty_instruction_is_refused(instruction: str) -> None:
    with pytest.raises(ValidationError, match="describe the work of the agent"):
        Task(instruction=instruction, verify=("true",))
