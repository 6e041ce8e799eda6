"""`openenv rollouts`: run, list, show, export and verify again from the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openenv.cli.rollouts import rollouts
from openenv.errors import SandboxUnavailable
from openenv.rollout import CommandResult, Outcome, RolloutStore, Task
from openenv.sandboxes.base import backend
from openenv.testing import Script, ScriptedModel, Turn
from stored_rollouts import add_square

Call = Callable[..., Any]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Call the command line with a store of the test's own."""

    def run(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(rollouts, [*arguments, "--store", str(tmp_path / "store")])
        assert done.exit_code == code, done.output + done.stderr
        return json.loads(done.stdout) if "--json" in arguments else done.stdout + done.stderr

    return run


@pytest.fixture
def task(tmp_path: Path) -> str:
    """A task file; skips where it could not be run."""
    try:
        backend("local").check()
    except SandboxUnavailable as exc:
        pytest.skip(f"no local sandboxes here: {exc}")
    path = tmp_path / "answer.yaml"
    path.write_text("instruction: write 42\nverify: grep -qx 42 answer.txt\nsolution: echo 42 > answer.txt\n")
    return str(path)


def test_a_task_is_run_listed_shown_exported_and_verified_again(call: Call, task: str, tmp_path: Path) -> None:
    ran = call("run", task, "--agent", "oracle", "--samples", "2", "--concurrency", "2", "--json")
    assert [(outcome["status"], outcome["reward"]) for outcome in ran] == [("ok", 1.0)] * 2
    listed = call("ls", "--json")
    assert {row["rollout_id"] for row in listed["rollouts"]} == {outcome["rollout_id"] for outcome in ran}
    assert listed["interrupted"] == []
    first = ran[0]["rollout_id"]
    table = call("ls", "--limit", "10")
    assert first in table
    assert "answer" in table
    assert len({row["group"] for row in listed["rollouts"]}) == 1
    assert listed["rollouts"][0]["group"].startswith("answer-")
    again = call("reverify", first, "--verify", "true", "--verify", "false", "--name", "stricter", "--json")
    assert again[0]["reward"] == 0.5
    shown = call("show", first[:8])
    assert "reward    1 (isolated)" in shown
    assert "verdict   stricter" in shown
    later = call("show", first[:8], "--verdict", "last")
    assert "reward    0.5 (isolated), verdict stricter" in later
    assert "verify    [1] false" in later
    assert "verdict   first" in later
    assert [record["verdict"] for record in call("show", first, "--json")] == ["first", "stricter"]
    history = call("show", first, "--verdict", "stri", "--json")
    assert [record["kind"] for record in history] == ["reverify", "rollout"]
    assert "2 rollouts" in call("export", str(tmp_path / "out.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [1.0, 1.0]
    assert all(line["capture"] is None for line in lines)
    known = ("status", "task_id", "agent", "model", "verdict")
    assert {name: lines[0][name] for name in known} == {
        "status": "ok",
        "task_id": "answer",
        "agent": "oracle",
        "model": "",
        "verdict": "first",
    }
    assert lines[0]["group"] == listed["rollouts"][0]["group"]
    assert "1 rollout in" in call("export", str(tmp_path / "out.jsonl"), "--verdict", "stricter")
    assert json.loads((tmp_path / "out.jsonl").read_text())["reward"] == 0.5
    assert [row["reward"] for row in call("ls", "--json")["rollouts"]] == [1.0, 1.0]
    assert sorted(row["reward"] for row in call("ls", "--json", "--verdict", "last")["rollouts"]) == [0.5, 1.0]
    assert "There is no verdict 'other'" in call("ls", "--verdict", "other", code=1)


@pytest.mark.parametrize(("options", "setups"), [((), 1), (("--no-share-setup",), 2)])
def test_repeated_rollouts_share_their_setup_unless_an_option_says_no(
    options: tuple[str, ...], setups: int, call: Call, task: str
) -> None:
    Path(task).write_text("instruction: x\nsetup: cat /proc/sys/kernel/random/uuid > token\nverify: test -s token\n")
    ran = call("run", task, "--agent", "noop", "--samples", "2", "--json", *options)
    assert len({outcome["files"]["/home/user/workdir/token"] for outcome in ran}) == setups


def test_the_first_difference_of_two_rollouts_and_of_two_stores_is_shown(call: Call, task: str, tmp_path: Path) -> None:
    solved = call("run", task, "--agent", "oracle", "--samples", "2", "--seed", "7", "--json")
    [idle] = call("run", task, "--agent", "noop", "--seed", "7", "--json")
    ids = [each["rollout_id"] for each in (*solved, idle)]
    assert "1 equal, 0 different" in call("diff", ids[0][:8], ids[1])
    different = call("diff", ids[0], ids[2], code=1)
    assert "rollout: agent" in different
    assert 'A: ["oracle", 0]' in different
    other = tmp_path / "other"
    CliRunner().invoke(
        rollouts, ["run", task, "--agent", "oracle", "--samples", "2", "--seed", "7", "--store", str(other)]
    )
    document = call("diff", str(tmp_path / "store"), str(other), "--json", code=1)
    assert (document["equal"], document["differences"][0]["name"]) == (1, "answer 0")
    assert "no rollout 'nothing'" in call("diff", "nothing", ids[0], code=1)


def test_a_clock_that_is_no_time_is_refused(call: Call, task: str) -> None:
    assert "clock must be a time" in call("run", task, "--agent", "oracle", "--clock", "noon", code=2)


def test_rollouts_are_branched_and_resumed(call: Call, task: str, tmp_path: Path) -> None:
    turns = (Turn(text="Looking."), Turn(text="Still looking."))
    with ScriptedModel(Script(name="branch", turns=turns, ending="42")) as model:
        address = model.model()
        flags = ("--llm-url", address["base_url"], "--model", address["name"])
        [ran] = call("run", task, "--agent", "single-turn", *flags, "--json")
        before = len(model.played())
        branches = call("branch", ran["rollout_id"][:8], "--at", "1", "-n", "3", "--json")
        assert [each["start"]["rollout_id"] for each in branches] == [ran["rollout_id"]] * 3
        assert [each["metadata"]["replayed"] for each in branches] == [1] * 3
        assert len(model.played()) == before
        assert "has no answer of call 9" in call("branch", ran["rollout_id"], "--at", "9", code=1)
        assert "No rollout was interrupted" in call("resume")
        with RolloutStore(tmp_path / "store") as store:
            about = {"engine": {"agent": "noop", "sandbox": "local"}, "metadata": {"from": "before"}}
            store.begin("killed", Task(task_id="t", instruction="x", verify=("true",)), about=about)
            (tmp_path / "store" / "rollouts" / "torn").mkdir()
            store.release("killed")
            [resumed] = call("resume", "--json")
            assert (resumed["rollout_id"], resumed["status"], resumed["reward"]) == ("killed", "ok", 1.0)
            assert resumed["metadata"]["from"] == "before"
            assert store.interrupted() == []


def test_a_task_file_can_bring_the_new_checks(call: Call, task: str, tmp_path: Path) -> None:
    first = call("run", task, "--agent", "noop", "--json")[0]
    assert first["reward"] == 0.0
    (tmp_path / "lenient.yaml").write_text("instruction: x\nverify: 'true'\n")
    assert "reward 1" in call("reverify", first["rollout_id"], "--task", str(tmp_path / "lenient.yaml"))


def test_a_check_in_two_parts_is_verified_again_and_shown(call: Call, task: str) -> None:
    first = call("run", task, "--agent", "oracle", "--json")[0]["rollout_id"]
    check = {"run": "cat answer.txt; echo oops >&2", "judge": 'cat "$OUTPUT/stderr"; grep -qx 43 "$OUTPUT/stdout"'}
    dead = {"run": "kill -9 $$", "judge": "true"}
    part = {"run": "true", "judge": "echo 0.5 > ~/logs/verifier/reward.txt"}
    checks = [argument for each in (check, dead, part) for argument in ("--verify", json.dumps(each))]
    assert call("reverify", first, *checks, "--json")[0]["reward"] == pytest.approx(0.5 / 3)
    shown = call("show", first, "--verdict", "last").splitlines()
    at = shown.index(f"run       [0] {check['run']}")
    assert shown[at + 1 : at + 5] == [
        "            42",
        "            oops",
        f"judge     [1] {check['judge']}",
        "            oops",
    ]
    assert "judge     [137] true" in shown
    assert "            (not judged: its run was ended by signal 9)" in shown
    assert "            score 0.5" in shown
    assert "is not a valid check" in call("reverify", first, "--verify", '{"run": "true"}', code=1)


def test_what_a_terminal_would_obey_is_shown_escaped(call: Call, tmp_path: Path) -> None:
    odd = "\x1b[2Jred\rgreen \u202e \x9b \u2028"
    shown = r"\x1b[2Jred\rgreen \u202e \x9b \u2028"
    line = CommandResult(cmd="two\nlines", exit_code=1, stdout=f"first\r\n\ttab {odd}\n", stderr=odd, note=odd)
    outcome = Outcome(
        rollout_id="odd", status="policy_failed", reason=odd, verify_results=[line], files={odd: ""}, files_extra=[odd]
    )
    with RolloutStore(tmp_path / "store") as store:
        store.add(outcome, Task(instruction="x", task_id=odd))
    output = call("show", "odd")
    assert not {character for character in output if unicodedata.category(character)[0] == "C"} - {"\n", "\t"}
    lines = output.splitlines()
    assert f"status    policy_failed in done: {shown}" in lines
    assert [text for text in lines if text.startswith("file")] == [f"file      {shown}"] * 2
    at = lines.index("verify    [1] two")
    places = [
        "lines",
        "            first",
        f"            \ttab {shown}",
        f"            {shown}",
        f"            ({shown})",
    ]
    assert lines[at + 1 : at + 6] == places
    assert "\x1b" not in call("ls")


def test_a_rollout_is_shown_with_its_transcript_tokens_and_changes(call: Call, tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "store") as store:
        add_square(store, "whole", folder=tmp_path)
    shown = call("show", "whole").splitlines()
    assert "assistant thinks: The user wants a square." in shown
    assert any(line.startswith("          write {") for line in shown)
    assert any(line.startswith("turn 3: 3 tokens in") and "retry" in line for line in shown)
    assert "          ... 18 more lines" in shown
    assert "changed   README.md +2 -1" in shown
    assert "          + new" in shown
    assert not any(line.startswith("tokens") for line in shown)
    more = call("show", "whole", "--tokens", "--full").splitlines()
    assert "tokens    Not │this │one. " in more
    assert not any("more lines" in line for line in more)


def test_rollouts_are_listed_with_their_age_since_a_time_and_counted(call: Call, tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "store") as store:
        for number, reward in enumerate((1.0, 0.0, None)):
            status = "ok" if reward is not None else "env_failed"
            outcome = Outcome(rollout_id=f"r{number}", status=status, reward=reward, task_id="a", model=f"m{number}")
            store.add(outcome, Task(instruction="x"))
    table = call("ls", "--since", "1h")
    assert "AGE" in table.splitlines()[0]
    assert "0 s" in table
    assert call("ls", "--since", "0.001s", "--json")["rollouts"] == []
    assert [
        row["rollout_id"] for row in call("ls", "--since", "2020-01-01", "--model", "m1", "--json")["rollouts"]
    ] == ["r1"]
    assert "since '2999-01-01'" in call("ls", "--since", "2999-01-01")
    assert "is not a time" in call("ls", "--since", "yesterday", code=2)
    counted = call("stats", "--json")
    assert [(row["name"], row["rollouts"], row["scored"], row["pass_rate"]) for row in counted["rows"]] == [
        ("a", 3, 2, 0.5)
    ]
    assert counted["all"]["mean"] == 0.5
    lines = call("stats", "--by", "model").splitlines()
    assert [line.split()[0] for line in lines] == ["MODEL", "m0", "m1", "m2", "all"]
    assert "3 (2 scored)" in lines[-1]
    assert "50.0%" in lines[-1]
    assert "is not one of" in call("stats", "--by", "colour", code=2)
    assert "No rollouts match" in call("stats", "--task", "none")


def lint(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(rollouts, ["lint", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout


def test_lint_says_how_far_checks_can_be_trusted_and_how_to_write_them(tmp_path: Path) -> None:
    path = str(tmp_path / "square.yaml")
    Path(path).write_text(
        "instruction: Write square.py\nverify:\n  - grep -q x a.txt\n  - python3 check.py\n  - make test\n"
        "  - {run: ./a.out, judge: 'grep -q 9 \"$OUTPUT/stdout\"'}\n"
        "verify_files: {check.py: 'from square import square'}\n"
    )
    table = lint(path).splitlines()
    assert table[:4] == [
        "square: shared",
        "  1  isolated   grep -q x a.txt",
        "  2  shared     python3 check.py",
        "                it imports square, which is neither a data module nor a verify file",
    ]
    assert "                  - python: check.py" in table
    assert '  4  judged     ./a.out => grep -q 9 "$OUTPUT/stdout"' in table
    [document] = json.loads(lint(path, "--json", "--min-trust", "isolated", code=1))
    assert (document["task_id"], document["trust"]) == ("square", "shared")
    assert [each["trust"] for each in document["checks"]] == ["isolated", "shared", "shared", "judged"]
    assert document["checks"][1]["suggestion"] == {"python": "check.py", "of": "square"}
    lint(path, "--min-trust", "shared")
    lint(path, "--min-trust", "much", code=2)
    Path(path).write_text("instruction: x\nverify: grep -q x a.txt\nmin_trust: judged\n")
    lint(path, code=1)
    lint(path, "--min-trust", "isolated")


def test_weak_tasks_are_refused_and_weak_rollouts_left_out(call: Call, task: str, tmp_path: Path) -> None:
    call("run", task, "--agent", "oracle", "--min-trust", "isolated")
    assert "is isolated, and judged is required" in call(
        "run", task, "--agent", "oracle", "--min-trust", "judged", code=1
    )
    assert [row["trust"] for row in call("ls", "--json")["rollouts"]] == ["isolated"]
    assert call("ls", "--json", "--min-trust", "judged")["rollouts"] == []
    assert "0 rollouts" in call("export", str(tmp_path / "out.jsonl"), "--min-trust", "judged")


def test_failures_are_one_line_and_an_exit_code(call: Call, tmp_path: Path) -> None:
    assert "Error: There are no rollouts in" in call("show", "x", code=1)
    assert "cannot be read" in call("run", str(tmp_path / "nowhere.yaml"), code=1)
    (tmp_path / "t.yaml").write_text("instruction: x\n")
    assert "go together" in call("run", str(tmp_path / "t.yaml"), "--model", "m", code=1)
    assert "--llm-url and its id with --model" in call("run", str(tmp_path / "t.yaml"), code=1)
    model = ("--llm-url", "http://localhost:1/v1", "--model", "m")
    assert "not JSON" in call("run", str(tmp_path / "t.yaml"), *model, "--sampling", "{", code=1)
    assert "one answer" in call("run", str(tmp_path / "t.yaml"), *model, "--sampling", '{"n": 2}', code=1)
    assert "unknown agent 'no-such-agent'" in call("run", str(tmp_path / "t.yaml"), "--agent", "no_such_agent", code=1)
    assert "Error: There are no rollouts in" in call("ls", code=1)
    RolloutStore(tmp_path / "store").close()
    assert "No rollouts" in call("ls")
    assert "Error: There is no rollout 'x'" in call("show", "x", code=1)


def test_the_endpoint_is_asked_before_anything_else(call: Call, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("instruction: x\n")
    model = ("--llm-url", "http://127.0.0.1:1/v1", "--model", "m", "--agent", "mini-swe-agent@0.0.0.no-such-version")
    output = call("run", str(tmp_path / "t.yaml"), *model, code=1)
    assert "Error: The endpoint http://127.0.0.1:1/v1 does not answer for the model 'm': no connection" in output
    assert not (tmp_path / "store").exists()
    with ScriptedModel(Script(name="s", turns=(Turn(text="yes"),)), api_key="the-key") as server:
        there = ("--llm-url", server.url, "--model", server.name, "--agent", "mini-swe-agent@0.0.0.no-such-version")
        assert "status 401" in call("run", str(tmp_path / "t.yaml"), *there, code=1)
        answered = call("run", str(tmp_path / "t.yaml"), *there, "--api-key", "the-key", "--sandbox", "nowhere", code=1)
        assert "unknown sandbox backend 'nowhere'" in answered


def test_a_run_whose_machinery_failed_exits_with_1_and_counts_what_is_done(call: Call, task: str) -> None:
    Path(task).write_text("instruction: x\nsetup: 'false'\nverify: 'true'\nsolution: 'true'\n")
    output = call("run", task, "--agent", "oracle", "--samples", "2", code=1)
    assert "env_failed" in output
    assert "2 of 2 done: env_failed, reward" in output
    Path(task).write_text("instruction: x\nverify: 'false'\nsolution: 'true'\n")
    assert "reward 0" in call("run", task, "--agent", "oracle")


def test_interrupted_rollouts_are_listed(call: Call, tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "store") as store:
        store.add(Outcome(rollout_id="whole", status="ok"), Task(instruction="x"))
        store.begin("lost", Task(instruction="x"))
    assert "1 more were interrupted" in call("ls")
    assert call("ls", "--json")["interrupted"] == ["lost"]


def test_ctrl_c_ends_and_stores_what_runs(call: Call, task: str, tmp_path: Path) -> None:
    Path(task).write_text("instruction: sleep\nverify: 'true'\nsolution: sleep 60\n")
    command = [sys.executable, "-m", "openenv", "rollouts", "run", task, "--agent", "oracle", "--samples", "3"]
    process = subprocess.Popen(
        [*command, "--concurrency", "3", "--store", str(tmp_path / "store")],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    next(line for line in process.stderr if "starting oracle" in line)
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait(30) == 130
    process.stderr.close()
    listed = call("ls", "--json")
    assert {row["status"] for row in listed["rollouts"]} == {"cancelled"}
    assert listed["interrupted"] == []


@pytest.mark.slow
def test_cheats_can_be_run_one_by_one(task: str) -> None:
    done = CliRunner().invoke(rollouts, ["cheats", "--cheat", "planted-reward", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["succeeded"] == 0
    assert [cheat["name"] for cheat in report["cheats"]] == ["planted-reward"]


def test_a_chosen_cheat_runs_and_its_result_is_printed(task: str) -> None:
    done = CliRunner().invoke(rollouts, ["cheats", "--cheat", "path-hijack", "--quick"])
    assert done.exit_code == 0, done.output
    assert "0 wins and 0 dodges in 1 cheats on local" in done.stdout


def test_an_unknown_cheat_is_named() -> None:
    done = CliRunner().invoke(rollouts, ["cheats", "--cheat", "nothing", "--cheat", "path-hijack", "--list"])
    assert done.exit_code == 1
    assert "unknown cheat nothing; --list prints all" in done.output


def test_logs_of_inspect_need_inspect(call: Call, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    call("run", task, "--agent", "oracle", "--json")
    for words in (("export", str(tmp_path / "log.eval")), ("export", str(tmp_path / "logs"), "--to", "inspect")):
        assert "inspect-ai is required: pip install 'inspect-ai>=" in call(*words, code=1)
    assert "inspect-ai is required" in call("import", str(tmp_path / "log.eval"), code=1)
    assert "--messages is for JSONL" in call("export", str(tmp_path / "out.parquet"), "--messages", code=1)
    assert "'inspec' is not one of" in call("export", str(tmp_path / "out.parquet"), "--to", "inspec", code=2)
    assert "0 rows in" in call("export", str(tmp_path / "out.data"), "--to", "parquet")


def test_task_sets_are_listed_printed_and_run(tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(rollouts, ["tasks"])
    assert listed.exit_code == 0
    assert re.search(r"^git +isolated +git +a commit", listed.stdout, re.MULTILINE)
    names = [each["name"] for each in json.loads(runner.invoke(rollouts, ["tasks", "--json"]).stdout)]
    assert "arithmetic" in names
    printed = runner.invoke(rollouts, ["tasks", "dates", "--tasks", "2", "--task-seed", "7"])
    assert printed.stdout.startswith("dates-7-0\n  ")
    assert "answer.txt" in printed.stdout
    drawn = json.loads(runner.invoke(rollouts, ["tasks", "dates", "--tasks", "2", "--task-seed", "7", "--json"]).stdout)
    assert [task["task_id"] for task in drawn] == ["dates-7-0", "dates-7-1"]
    arguments = ["run", "arithmetic", "--tasks", "2", "--task-seed", "7", "--agent", "oracle", "--store", str(tmp_path)]
    done = runner.invoke(rollouts, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.stdout)
    assert [(each["task_id"], each["reward"]) for each in outcomes] == [
        ("arithmetic-7-0", 1.0),
        ("arithmetic-7-1", 1.0),
    ]
    refused = runner.invoke(rollouts, ["tasks", "arithmetics"])
    assert refused.exit_code == 1
    assert "no such file, folder or task set" in refused.stderr


def test_rollouts_that_nobody_can_train_on_are_named(tmp_path: Path) -> None:
    task = tmp_path / "sum.yaml"
    task.write_text("instruction: What is 6 * 7?\nmetadata: {answer: answer.txt}\nverify: [grep -qx 42 answer.txt]\n")
    excluded = "excluded from training: the endpoint's defaults decided about"
    cases: list[tuple[list[str], bool]] = [([], False), (["--sampling", '{"temperature": 0.7}'], False)]
    with ScriptedModel(Script(name="sum", turns=(Turn(text="42"),))) as model:
        address = model.model()
        endpoint = ["--llm-url", address["base_url"], "--model", address["name"], "--agent", "single-turn"]
        for sampling, warns in (*cases, (["--sampling", "{}"], True)):
            at = ["--store", str(tmp_path / f"store{len(sampling)}{warns}")]
            result = CliRunner().invoke(rollouts, ["run", str(task), *endpoint, *sampling, *at])
            assert (result.exit_code, "reward 1" in result.stdout) == (0, True), result.output
            assert (excluded in result.stderr) is warns, result.stderr
            for kind in ("jsonl", "parquet") if find_spec("pyarrow") else ("jsonl",):
                exported = CliRunner().invoke(rollouts, ["export", str(tmp_path / f"out.{kind}"), *at])
                assert (excluded in exported.stderr) is warns
            rollout_id = json.loads((tmp_path / "out.jsonl").read_text())["outcome"]["rollout_id"]
            shown = CliRunner().invoke(rollouts, ["show", rollout_id, *at])
            assert (excluded in " ".join(shown.stdout.split())) is warns, shown.output
    assert "FATAL" not in shown.output
