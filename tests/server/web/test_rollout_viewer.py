"""The viewer's routes: lists, figures, one rollout in parts, what a running one does, exports, and who may look."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from openenv.rollout import Case, CommandResult, Outcome, RolloutStore, Task, case_check
from openenv.rollout.capture.records import FILE, Recorder
from openenv.rollout.progress import Progress
from openenv.rollout.tasks.task import BranchPoint
from openenv.rollout.viewer.rollout_routes import viewer_app
from openenv.server.access import AccessPolicy
from servers import Serve
from stored_rollouts import SQUARE, Talk, add_square, fill_store, rollout_outcome


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with RolloutStore(tmp_path / "store") as opened:
        yield opened


Get = Callable[..., Any]


@pytest.fixture
def get(store: RolloutStore, serve: Serve) -> Iterator[Get]:
    """Ask the viewer of the test's store."""
    server = serve(viewer_app({"store": store.root}))
    with httpx2.Client(base_url=f"{server.url}/web/", trust_env=False, timeout=30) as client:

        def ask(path: str, code: int = 200, /, **query: Any) -> Any:
            answer = client.get(path, params=query)
            assert answer.status_code == code, answer.text
            return answer.json()

        yield ask


def test_the_list_is_filtered_ordered_and_cut_into_pages(store: RolloutStore, get: Get) -> None:
    for number in range(5):
        status = "truncated" if number == 3 else "ok"
        store.add(rollout_outcome(f"r{number}", reward=number / 4, model=f"m{number % 2}", status=status), SQUARE)
    answer = get("rollouts")
    assert (answer["total"], [row["rollout_id"] for row in answer["rows"]]) == (5, ["r4", "r3", "r2", "r1", "r0"])
    assert answer["rows"][0]["model"] == "m0"
    page = get("rollouts", order="reward", offset=1, limit=2)
    assert (page["offset"], [row["reward"] for row in page["rows"]]) == (1, [0.75, 0.5])
    assert get("rollouts", status=["truncated", "cancelled"])["total"] == 1
    assert get("rollouts", model="m1", min_reward=0.5)["total"] == 1
    assert get("rollouts", text="R2")["total"] == 1
    assert get("rollouts", since=1e12)["total"] == 0
    assert get("rollouts", task="square", agent="opencode", min_trust="shared")["total"] == 5
    names = get("rollouts/-/names")
    assert names["stores"] == ["store"]
    assert names["names"]["model"] == [["m0", 3], ["m1", 2]]


def test_a_store_may_be_empty_and_is_shown_when_it_is_filled(tmp_path: Path, serve: Serve) -> None:
    folders = {name: tmp_path / name for name in ("empty", "missing", "other")}
    folders["empty"].mkdir()
    folders["other"].mkdir()
    (folders["other"] / "notes.txt").write_text("not a rollout")
    server = serve(viewer_app(folders))
    with httpx2.Client(base_url=f"{server.url}/web/", trust_env=False, timeout=30) as client:
        for name in ("empty", "missing"):
            answer = client.get("rollouts", params={"store": name}).json()
            assert (answer["total"], answer["all"]) == (0, None)
            with RolloutStore(folders[name]) as store:
                store.add(rollout_outcome("first"), SQUARE)
            answer = client.get("rollouts", params={"store": name}).json()
            assert (answer["total"], answer["all"]["scored"]) == (1, 1)
        assert "no store of rollouts" in client.get("rollouts", params={"store": "other"}).json()["detail"]


def test_rows_have_the_instruction_and_all_rollouts_a_pass_rate(store: RolloutStore, get: Get) -> None:
    for number in range(4):
        about = {"environment": "chess", "policy_version": number}
        store.add(rollout_outcome(f"r{number}", reward=float(number == 3), metadata=about), SQUARE)
    answer = get("rollouts", environment="chess", policy_version=["2", "3"])
    assert [(row["policy_version"], row["environment"]) for row in answer["rows"]] == [("3", "chess"), ("2", "chess")]
    assert answer["rows"][0]["instruction"] == SQUARE.instruction
    assert (answer["all"]["pass_rate"], answer["all"]["mean"]) == (0.5, 0.5)


def test_learning_curves_have_lines_and_versions(store: RolloutStore, get: Get) -> None:
    for number in range(8):
        about = {"environment": ("chess", "go")[number % 2], "policy_version": number // 2}
        store.add(rollout_outcome(f"r{number}", reward=float(number > 3), metadata=about), SQUARE)
    store.add(rollout_outcome("failed", status="env_failed", reward=None, trust=None), SQUARE)
    points = get("rollouts/-/curve", by="environment", over="policy_version")["points"]
    assert [(each["name"], each["at"], each["mean"]) for each in points if each["name"] == "go"] == [
        ("go", "0", 0.0),
        ("go", "1", 0.0),
        ("go", "2", 1.0),
        ("go", "3", 1.0),
    ]
    assert {each["name"] for each in points} == {"chess", "go"}
    over_time = get("rollouts/-/curve", task="square")["points"]
    assert sum(each["scored"] for each in over_time) == 8
    assert [each["at"] for each in over_time] == sorted(each["at"] for each in over_time)
    assert "over must be one of" in get("rollouts/-/curve", 422, over="weeks")["detail"]


def test_a_rollout_has_neighbours_in_its_list_and_its_record_and_calls_as_stored(
    store: RolloutStore, get: Get, tmp_path: Path
) -> None:
    for number in range(3):
        store.add(rollout_outcome(f"r{number}", task_id=f"t{number % 2}"), SQUARE)
    assert get("rollouts/r1/beside") == {"before": "r2", "after": "r0"}
    assert get("rollouts/r0/beside", task="t0") == {"before": "r2", "after": None}
    assert get("rollouts/r2/beside", order="oldest") == {"before": "r1", "after": None}
    add_square(store, "whole", folder=tmp_path)
    record = get("rollouts/whole/raw")
    assert (record["task"]["instruction"], record["outcome"]["reward"]) == (SQUARE.instruction, pytest.approx(2 / 3))
    call = get("rollouts/whole/calls/2")
    assert (call["turn"], call["status"], call["request"]["messages"][1]["content"]) == (2, 200, "Write square.py.")
    assert call["response"]["choices"][0]["message"]["content"] == "I will write it."
    assert "no model call 9" in get("rollouts/whole/calls/9", 404)["detail"]


def test_a_rollout_has_the_tree_of_its_branches(store: RolloutStore, get: Get) -> None:
    def add(rollout_id: str, parent: str = "", call: int | None = None) -> None:
        start = BranchPoint(parent, call) if parent else None
        store.add(rollout_outcome(rollout_id, start=start, metadata={"parent": "a label"}), SQUARE)

    add("root")
    assert get("rollouts/root")["tree"] == {"nodes": [], "left_out": 0}
    add("one", "root", 2)
    add("two", "root", 4)
    add("deep", "one", 3)
    for each in ("root", "two", "deep"):
        nodes = get(f"rollouts/{each}")["tree"]["nodes"]
        assert nodes[0]["rollout_id"] == "root"
        assert {(node["rollout_id"], node["parent"], node["parent_call"]) for node in nodes} == {
            ("root", "", None),
            ("one", "root", 2),
            ("two", "root", 4),
            ("deep", "one", 3),
        }
    assert get("rollouts")["rows"][0]["parent"] == "one"
    # Labels are free-form, so parents can form a circle.
    add("egg", "hen", 1)
    add("hen", "egg", 1)
    assert {node["rollout_id"] for node in get("rollouts/egg")["tree"]["nodes"]} == {"egg", "hen"}


def test_checks_have_their_authors_names_with_expected_and_actual_outputs(store: RolloutStore, get: Get) -> None:
    cases = (Case(stdin="3", stdout="9"), Case(stdin="4", stdout="16\n"), Case(stdin="x", exit_code=1))
    check = case_check("python3 square.py", cases)
    # An output of the agent is indented, so that it cannot pretend to be a result.
    said = "case 2: unexpected output\n  expected: 16\n  actual:   case 1: unexpected output\n  actual:   8\n"
    result = CommandResult(cmd=check.judge, exit_code=1, stdout=f"{said}2 of 3 cases are right\n", name=str(check))
    plain = CommandResult(cmd="test -e square.py", exit_code=0)
    task = SQUARE.model_copy(update={"verify": (check, "test -e square.py")})
    store.add(rollout_outcome("one", verify_results=[result, plain]), task)
    first, second = get("rollouts/one")["verdicts"][0]["results"]
    assert (first["name"], second["cmd"]) == ("python3 square.py: 3 cases", "test -e square.py")
    assert [(each["number"], each["problem"]) for each in first["cases"]] == [
        (1, ""),
        (2, "unexpected output"),
        (3, ""),
    ]
    failed = first["cases"][1]
    assert (failed["stdin"], failed["expected"], failed["actual"]) == ("4", "16\n", "case 1: unexpected output\n8")
    assert second["cases"] == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"colour": "red"}, "unknown parameter colour"),
        ({"order": "beauty"}, "order must be one of"),
        ({"limit": "-1"}, "limit must be a whole number"),
        ({"min_reward": "nan"}, "min_reward must be a number"),
        ({"store": "other"}, "unknown store"),
        ({"min_trust": "much"}, "min_trust must be one of"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(get: Get, query: dict[str, str], problem: str) -> None:
    assert problem in get("rollouts", 422, **query)["detail"]


def test_figures_have_a_spread_and_an_interval(store: RolloutStore, get: Get) -> None:
    for number in range(4):
        store.add(rollout_outcome(f"r{number}", task_id=f"t{number % 2}", reward=float(number > 1)), SQUARE)
    answer = get("rollouts/-/stats", by="task")
    assert [(row["name"], row["rollouts"], row["pass_rate"]) for row in answer["rows"]] == [
        ("t0", 2, 0.5),
        ("t1", 2, 0.5),
    ]
    assert answer["all"]["deviation"] == pytest.approx(0.57735, abs=1e-4)
    assert answer["all"]["interval"][0] < 0.5 < answer["all"]["interval"][1]
    assert get("rollouts/-/stats", by="model", task="none") == {"by": "model", "rows": [], "all": None}


def test_one_rollout_has_its_verdicts_transcript_tokens_changes_and_log(
    store: RolloutStore, get: Get, tmp_path: Path
) -> None:
    add_square(store, "abc123", folder=tmp_path)
    store.add_verification(rollout_outcome("abc123", reward=0.25), SQUARE, verdict="strict")
    shown = get("rollouts/abc")
    assert (shown["rollout_id"], shown["outcome"]["reward"], shown["group"]) == ("abc123", pytest.approx(2 / 3), "g1")
    assert [(each["verdict"], each["reward"]) for each in shown["verdicts"]] == [
        ("first", pytest.approx(2 / 3)),
        ("strict", 0.25),
    ]
    assert shown["verdicts"][0]["results"][1]["note"] == "not passed: no test passed"
    assert shown["verdicts"][0]["results"][2]["run"]["stdout"] == "9\n"
    assert "turns" not in shown["outcome"]
    assert get("rollouts/abc", verdict="str")["outcome"]["reward"] == 0.25
    told = get("rollouts/abc123/transcript")
    assert [turn["branch"] for turn in told["turns"]] == ["auxiliary", "main", "retry", "main", "main"]
    tokens = get("rollouts/abc123/tokens/2")["tokens"]
    assert {token["m"] for token in tokens} == {1}
    assert "no model call 9" in get("rollouts/abc123/tokens/9", 404)["detail"]
    changes = get("rollouts/abc123/changes")
    assert [(file["path"], file["change"]) for file in changes["files"]] == [
        ("README.md", "changed"),
        ("data.bin", "added"),
        ("gone.txt", "removed"),
        ("square.py", "added"),
    ]
    log = get("rollouts/abc123/log", start=2)
    assert log["text"].startswith("begin\n")
    assert "There is no rollout 'nothing'" in get("rollouts/nothing", 404)["detail"]


def test_a_rollout_without_calls_or_files_can_be_looked_at(store: RolloutStore, get: Get) -> None:
    store.add(Outcome(rollout_id="bare", status="env_failed", reason="no"), Task(instruction="x"))
    assert get("rollouts/bare")["outcome"]["reason"] == "no"
    assert get("rollouts/bare/transcript")["turns"] == []
    assert "not kept" in get("rollouts/bare/changes")["note"]
    assert get("rollouts/bare/log")["text"] == ""


def test_a_running_rollout_is_listed_and_followed_until_it_is_stored(store: RolloutStore, get: Get) -> None:
    store.begin("live", SQUARE, about={"agent": "opencode", "model": "tiny"})
    [begun] = get("rollouts")["running"]
    assert (begun["rollout_id"], begun["task_id"], begun["is_running"]) == ("live", "square", True)
    shown = get("rollouts/live")
    assert (shown["begun"]["agent"], shown["task"]["task_id"], shown["events"]) == ("opencode", "square", [])
    event = Progress(rollout_id="live", phase="setup", message="setting up")
    Recorder(store.captures / "live" / FILE).event(event)
    store.live_file("live", "agent.log").write_text("ß first")
    talk = Talk(store.captures / "live", "live")
    talk.call([{"role": "user", "content": "go"}], [1], "half an answer", is_ended=False)
    news = get("rollouts/live/live")
    assert (news["state"], [event["phase"] for event in news["events"]]) == ("running", ["setup", "agent"])
    assert news["events"][1]["turn"] == 1
    assert news["log"]["text"] == "ß first"
    assert [(turn["number"], turn["ended"]) for turn in news["turns"]] == [(1, None)]
    again = get("rollouts/live/live", events=2, start=news["log"]["end"], size=news["size"], turn=1)
    assert (again["events"], again["log"]["text"], again["turns"]) == ([], "", [])
    store.add(rollout_outcome("live"), SQUARE)
    assert get("rollouts/live/live")["state"] == "stored"
    assert get("rollouts")["running"] == []
    assert get("rollouts/live")["events"][0]["message"] == "setting up"


def test_a_rollout_whose_engine_died_is_not_said_to_run(store: RolloutStore, get: Get) -> None:
    code = (
        "import os, sys; from openenv.rollout import RolloutStore, Task\n"
        "store = RolloutStore(sys.argv[1]); store.begin('lost', Task(instruction='x')); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(store.root)], check=False, timeout=60)
    assert [(each["rollout_id"], each["is_running"]) for each in get("rollouts")["running"]] == [("lost", False)]
    assert get("rollouts/lost/live")["state"] == "interrupted"


def test_what_is_filtered_is_exported(store: RolloutStore, serve: Serve, tmp_path: Path) -> None:
    add_square(store, "one", folder=tmp_path)
    add_square(store, "two", folder=tmp_path, status="truncated")
    server = serve(viewer_app({"store": store.root}))
    address = f"{server.url}/web/rollouts/-/export"
    answer = httpx2.get(address, params={"status": "ok"}, trust_env=False)
    assert answer.headers["content-disposition"].endswith('.jsonl"')
    [line] = [json.loads(line) for line in answer.text.splitlines()]
    assert (line["rollout_id"], line["group"]) == ("one", "g1")
    assert "messages" not in str(line["capture"]["turns"][0].keys())
    whole = httpx2.get(address, params={"status": "ok", "messages": 1}, trust_env=False).text
    assert json.loads(whole)["capture"]["turns"][0]["request"]["messages"]
    rows = httpx2.get(address, params={"format": "parquet", "status": "truncated"}, trust_env=False)
    assert rows.content[:4] == b"PAR1"
    assert httpx2.get(address, params={"format": "csv"}, trust_env=False).status_code == 422


def test_texts_that_utf8_does_not_have_and_numbers_that_json_does_not_have_are_sent(
    store: RolloutStore, get: Get
) -> None:
    talk = Talk(store.captures / "odd", "odd")
    talk.call([{"role": "user", "content": "half \ud83d of it <script>alert(1)</script>"}], [1], "x")
    store.add(rollout_outcome("odd", metadata={"x": 1.5}), SQUARE)
    text = get("rollouts/odd/transcript")["turns"][0]["messages"][0]["parts"][0]["text"]
    assert text == "half \ud83d of it <script>alert(1)</script>"


def test_answers_are_data_and_the_page_runs_scripts_of_its_own_only(store: RolloutStore, serve: Serve) -> None:
    server = serve(viewer_app({"store": store.root}))
    answer = httpx2.get(f"{server.url}/web/rollouts", trust_env=False)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = httpx2.get(f"{server.url}/", follow_redirects=True, trust_env=False)
    assert "static/viewer.js" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "script-src" not in policy  # so the default counts: no inline scripts, none from elsewhere


def test_a_token_is_asked_for_and_agents_may_not_look(store: RolloutStore, serve: Serve) -> None:
    access = AccessPolicy(orchestrator="all", agent="tools", observer="eyes")
    server = serve(viewer_app({"store": store.root}, access))
    address = f"{server.url}/web/rollouts"

    def status(token: str | None) -> int:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx2.get(address, headers=headers, trust_env=False).status_code

    assert [status(token) for token in (None, "wrong", "tools", "eyes", "all")] == [401, 401, 403, 200, 200]
    with httpx2.Client(trust_env=False) as browser:
        assert browser.post(f"{server.url}/web/login", json={"token": "eyes"}).json() == {"role": "observer"}
        assert browser.get(address).status_code == 200
        browser.post(f"{server.url}/web/logout")
        assert browser.get(address).status_code == 401
    rebound = {"Host": "evil.example", "Accept-Language": "en", "Authorization": "Bearer all"}
    assert httpx2.get(address, headers=rebound, trust_env=False).status_code == 403


def test_several_stores_are_told_apart_and_found_by_id(tmp_path: Path, serve: Serve) -> None:
    for name in ("one", "two"):
        with RolloutStore(tmp_path / name) as store:
            store.add(rollout_outcome(f"in-{name}"), SQUARE)
    folders = {"one": tmp_path / "one", "two": tmp_path / "two", "later": tmp_path / "later"}
    server = serve(viewer_app(folders))
    with httpx2.Client(base_url=f"{server.url}/web/", trust_env=False) as client:
        assert client.get("rollouts").json()["rows"][0]["rollout_id"] == "in-one"
        assert client.get("rollouts", params={"store": "two"}).json()["rows"][0]["rollout_id"] == "in-two"
        assert client.get("rollouts/in-two").json()["store"] == "two"
        assert client.get("rollouts", params={"store": "later"}).json()["total"] == 0
        with RolloutStore(tmp_path / "later") as store:
            store.add(rollout_outcome("new"), SQUARE)
        assert client.get("rollouts", params={"store": "later"}).json()["total"] == 1


@pytest.mark.slow
def test_a_hundred_thousand_rollouts_are_listed_and_filtered(tmp_path: Path, serve: Serve) -> None:
    fill_store(tmp_path / "store", 100_000)
    server = serve(viewer_app({"store": tmp_path / "store"}))
    with httpx2.Client(base_url=f"{server.url}/web/", trust_env=False, timeout=120) as client:
        assert client.get("rollouts").json()["total"] == 100_000
        last = client.get("rollouts", params={"offset": 99_990, "limit": 100}).json()["rows"]
        assert (len(last), last[-1]["rollout_id"]) == (10, f"{0:016x}")
        assert client.get("rollouts", params={"task": "task-007", "status": "ok"}).json()["total"] > 0
        assert len(client.get("rollouts/-/stats", params={"by": "task"}).json()["rows"]) == 200


@pytest.mark.slow
def test_view_serves_a_store_and_says_where(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "store") as store:
        store.add(rollout_outcome("one"), SQUARE)
    command = [sys.executable, "-m", "openenv", "view", str(tmp_path / "store"), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = next(line.strip() for line in process.stderr if line.startswith("http"))
        assert address.endswith("/web/")
        assert httpx2.get(f"{address}rollouts", trust_env=False, timeout=30).json()["total"] == 1
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{folder}"], "it is no store of rollouts"),
        (["{folder}", "--token", "x", "--no-token"], "contradicts"),
    ],
)
def test_what_cannot_be_viewed_is_an_error_in_one_line(tmp_path: Path, arguments: list[str], problem: str) -> None:
    (tmp_path / "notes.txt").write_text("not a rollout")
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "openenv", "view", *filled],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode != 0
    assert problem in done.stderr
