"""Recorded episodes: what is kept of sessions on every surface, within which bounds, and what failures cost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openenv import GenericEnvClient, VectorEnv
from openenv.server.access import AccessPolicy
from openenv.server.app import create_fastapi_app
from openenv.server.sessions.session import SessionKind
from openenv.server.web.episode_files import (
    ENDING,
    EpisodeError,
    EpisodeFiles,
    EpisodeSummary,
    is_id,
    new_id,
    read_rows,
    summarise,
)
from openenv.server.web.episode_recorder import EpisodeWriter, LiveEpisode, RawRow
from servers import Serve
from waiting import wait_until

MISSING = "20260101-000000-00000000"


def rows_of(browser: Any, episode: dict[str, Any]) -> list[dict[str, Any]]:
    text = browser.get(f"/web/episodes/{episode['id']}/download").text
    return [json.loads(line) for line in text.splitlines()]


def episodes_of(browser: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = browser.get("/web/episodes").json()["episodes"]
    return found


@pytest.fixture
def recorded(serve: Serve, make_app: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Serve the street, with a folder of its own for what it records."""

    def start(*arguments: Any, **options: Any) -> Any:
        return serve(make_app(*arguments, **{"record_dir": tmp_path, **options}))

    return start


def test_a_reset_does_not_lose_the_episode_before_it(recorded: Callable[..., Any], visit: Callable[..., Any]) -> None:
    browser = visit(recorded().url)
    browser.post("/web/reset", {"seed": 3, "start": 1})
    browser.step()
    browser.step("left", paces=5)  # fails
    browser.step()
    browser.post("/web/reset", {"seed": 4})

    [episode] = episodes_of(browser)  # a reset alone is no episode yet
    expected = {"seed": 3, "steps": 2, "errors": 1, "return": 1.0, "reason": "reset", "opened_by": "page"}
    assert {name: episode[name] for name in expected} == {**expected, "return": episode["return"]}
    assert episode["arguments"] == {"seed": 3, "start": 1}
    kinds = [row["kind"] for row in rows_of(browser, episode)]
    assert kinds[:3] == ["episode", "reset", "picture"]
    assert kinds[-1] == "end"


def test_a_failed_step_is_a_row_with_its_error_and_the_author_s_traceback(
    recorded: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    server = recorded()
    browser = visit(server.url)
    browser.post("/web/reset", {})
    browser.step("left", paces=5)
    [episode] = episodes_of(browser)

    [failed] = [row for row in rows_of(browser, episode) if "error" in row]
    assert failed["action"] == {"direction": "left", "paces": 5}
    assert failed["error"]["type"] == "ValueError"
    assert "no road there" in failed["error"]["message"]
    assert 'raise ValueError("there is no road' in failed["error"]["traceback"]
    assert "page_routes.py" not in failed["error"]["traceback"]

    elsewhere = {"X-Forwarded-For": "203.0.113.9"}
    shown = browser.get(f"/web/episodes/{episode['id']}", headers=elsewhere).json()["rows"]
    assert [row["error"].keys() & {"traceback"} for row in shown if "error" in row] == [set()]


def test_pictures_of_the_environment_are_kept_with_their_step(
    recorded: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    browser = visit(recorded().url)
    browser.post("/web/reset", {})
    browser.step()
    [episode] = episodes_of(browser)
    pictures = {row["n"]: row["html"] for row in rows_of(browser, episode) if row["kind"] == "picture"}
    assert pictures[0].startswith("<b style='color:red'>0")
    assert pictures[1].startswith("<b style='color:red'>1 1.0")


def test_only_visitors_are_recorded_unless_all_are(recorded: Callable[..., Any], visit: Callable[..., Any]) -> None:
    server = recorded()
    with GenericEnvClient(server.url).sync() as env:
        env.reset()
        env.step({"direction": "right"})
    assert episodes_of(visit(server.url)) == []


@pytest.mark.parametrize("options", [{}, {"runner": "inline"}], ids=["thread", "inline"])
def test_all_surfaces_are_recorded_alike(
    recorded: Callable[..., Any], visit: Callable[..., Any], options: dict[str, Any]
) -> None:
    server = recorded(record="all", **options)
    browser = visit(server.url)
    action = {"direction": "right", "paces": 3}
    with GenericEnvClient(server.url).sync() as env:
        env.reset(seed=1)
        env.step(action)
    browser.client.cookies.clear()
    name = browser.post("/reset", {"seed": 1}, headers={"X-OpenEnv-Session": "new"}).headers["X-OpenEnv-Session"]
    browser.post("/step", {"action": action}, headers={"X-OpenEnv-Session": name})
    browser.client.delete(f"/sessions/{name}")
    browser.post("/reset", {"seed": 1})  # with the cookie that this returns
    browser.post("/step", {"action": action})

    wait_until(lambda: len([each for each in episodes_of(browser) if each["outcome"]]) >= 3, 10)
    found = [each for each in episodes_of(browser) if each["outcome"]]
    assert {each["opened_by"] for each in found} == {"WebSocket client at 127.0.0.1", "HTTP client"}
    assert {(each["seed"], each["steps"], each["return"], each["outcome"]) for each in found} == {(1, 1, 3.0, "done")}
    steps = [next(row for row in rows_of(browser, each) if row["kind"] == "step") for each in found]
    assert steps[0]["observation"] == steps[1]["observation"] == steps[2]["observation"]
    assert steps[0]["action"] == action


def test_steps_of_a_vector_still_run_in_groups_and_are_recorded(
    recorded: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    server = recorded(record="all")
    browser = visit(server.url)
    with VectorEnv(server.url, 4) as envs:
        envs.reset(seed=list(range(4)))
        envs.step([{"direction": "right"}] * 4)
        envs.step([{"direction": "right"}] * 4)
    episodes = episodes_of(browser)
    assert sorted(each["seed"] for each in episodes) == [0, 1, 2, 3]
    assert {(each["steps"], each["return"]) for each in episodes} == {(2, 3.0)}


def test_metrics_that_begin_later_do_not_end_a_recording(
    recorded: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    browser = visit(recorded().url)
    browser.post("/web/reset", {})
    browser.step()
    browser.get("/metrics")
    browser.step()
    assert [each["steps"] for each in episodes_of(browser)] == [2]


def test_production_mode_records_nothing_and_refuses_to(
    serve: Serve, make_app: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    server = serve(make_app(mode="production"))
    assert visit(server.url).get("/web/episodes").status_code == 404
    with pytest.raises(ValueError, match="production"):
        make_app(mode="production", record="all")


async def _start(app: Any) -> None:
    async with app.router.lifespan_context(app):
        pass


def test_a_recording_without_the_page_is_refused(envs: dict[str, type[Any]]) -> None:
    app = create_fastapi_app(envs["Street"], envs["Walk"], envs["View"], record="all")
    with pytest.raises(ValueError, match="needs the web page"):
        asyncio.run(_start(app))
    with pytest.raises(ValueError, match="one of page, all, off"):
        create_fastapi_app(envs["Street"], envs["Walk"], envs["View"], record="some")


def test_an_unknown_name_never_reaches_the_disk(recorded: Callable[..., Any], visit: Callable[..., Any]) -> None:
    browser = visit(recorded().url)
    for name in (MISSING, "..%2f..%2fetc%2fpasswd", "x", "a" * 5000):
        assert browser.get(f"/web/episodes/{name}").status_code == 404
    assert browser.get("/web/episodes?limit=many").status_code == 422


def test_only_orchestrators_read_episodes_and_watch_unless_the_policy_admits_observers(
    recorded: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    server = recorded(access=AccessPolicy(orchestrator="boss-token", observer="eye-token", agent="tool-token"))
    boss = visit(server.url, token="boss-token")
    boss.post("/web/reset", {})
    [session] = boss.get("/web/sessions").json()["sessions"]
    watch = f"/web/sessions/{session['session_id']}/watch"
    assert boss.get(watch).status_code == 200
    for path in ("/web/episodes", "/web/episodes/none", "/web/episodes/none/download"):
        assert visit(server.url, token="eye-token").get(path).status_code == 403
    assert visit(server.url, token="eye-token").get(watch).status_code == 403
    assert visit(server.url, token="tool-token").get("/web/episodes").status_code == 403
    assert visit(server.url).get("/web/episodes").status_code == 401
    policy = AccessPolicy(orchestrator="boss-token", observer="eye-token", observers_see_episodes=True)
    eye = visit(recorded(access=policy).url, token="eye-token")
    assert eye.get("/web/episodes").status_code == 200
    assert eye.get("/web/episodes/none/download").status_code == 404


def test_a_session_that_is_not_recorded_can_be_watched(
    recorded: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    server = recorded()
    browser = visit(server.url)
    with GenericEnvClient(server.url).sync() as env:
        env.reset()
        [session] = browser.get("/web/sessions").json()["sessions"]
        path = f"/web/sessions/{session['session_id']}/watch"
        first = browser.get(path).json()
        assert (first["last"], first["is_recorded"]) == (None, False)
        assert first["opened_by"] == "WebSocket client at 127.0.0.1"
        env.step({"direction": "right"})
        env.step({"direction": "right"})
        seen = browser.get(path).json()
    assert seen["last"]["observation"]["place"] == 2
    assert (seen["episode"]["return"], seen["step_count"]) == (3.0, 2)
    assert list(tmp_path.iterdir()) == []  # only looked at


def test_a_result_that_cannot_be_recorded_does_not_harm_its_session(
    make_app: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(record="all", record_dir=tmp_path)

    async def play() -> int:
        async with app.router.lifespan_context(app):
            service, recorder = app.state.openenv_server.service, app.state.openenv_web.recorder
            session = await service.manager.open(SessionKind.HTTP)
            strange = replace(service.frame_operations.reset, in_lane=lambda env, _: object())
            await session.run(strange, {})
            await session.run(service.frame_operations.reset, {"seed": 2})
            await session.run(service.frame_operations.step, service.action_cls(direction="right"))
            assert session.id in recorder.taps
            return int(session.step_count)

    assert asyncio.run(play()) == 1
    assert "is not recorded" in caplog.text
    assert [summarise(read_rows(path)).seed for path in tmp_path.iterdir()] == [2]


# -- files ------------------------------------------------------------------------------------------------------------


def write(files: EpisodeFiles, seed: int, *, ends: bool = True, size: int = 0, name: str = "") -> str:
    """Write an episode as a server does."""
    episode_id = name or new_id(time.time())
    rows: list[dict[str, Any]] = [
        {"kind": "episode", "version": 1, "id": episode_id, "env": "street"},
        {"kind": "reset", "arguments": {"seed": seed}, "observation": {}, "reward": None, "done": False},
        {"kind": "step", "n": 1, "action": {"x": "y" * size}, "observation": {}, "reward": 2.0, "done": True},
    ]
    summary = summarise(rows)
    if ends:
        rows.append({"kind": "end", "reason": "done", "summary": {**summary.document(), "reason": "done"}})
        del rows[-1]["summary"]["return"]
    files.append(episode_id, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return episode_id


def test_a_torn_last_line_costs_that_line_only(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, most=10, most_bytes=10**6)
    episode_id = write(files, 5, ends=False)
    with files.path(episode_id).open("ab") as file:
        file.write(b'{"kind":"step","n":2,"act')
    summary = files.summary(episode_id)
    assert (summary.steps, summary.seed, summary.reason) == (1, 5, None)
    assert [row["kind"] for row in files.rows(episode_id)] == ["episode", "reset", "step"]


def test_the_folder_is_bounded_in_number_and_bytes(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, most=3, most_bytes=10**6)
    names = [write(files, seed, name=f"20260101-00000{seed}-00000000") for seed in range(6)]
    assert files.evict(frozenset(), time.time()) == 3
    assert [each.id for each in files.summaries(10)] == names[:2:-1]

    small = EpisodeFiles(tmp_path, most=100, most_bytes=20_000)
    big = write(small, 9, size=30_000, name="20260102-000000-00000000")
    assert small.evict(frozenset({big}), time.time()) == 3  # the one that runs stays
    assert [each.id for each in small.summaries(10)] == [big]


def test_an_episode_that_another_process_still_writes_is_not_deleted(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, most=1, most_bytes=10**6)
    running = write(files, 1, ends=False, name="20260101-000001-00000000")
    ended = write(files, 2, name="20260101-000002-00000000")
    write(files, 3, name="20260101-000003-00000000")
    files.evict(frozenset(), time.time())
    assert files.path(running).exists()
    assert not files.path(ended).exists()
    write(files, 4, name="20260101-000004-00000000")
    files.evict(frozenset(), time.time() + 3600)  # its process must have died
    assert not files.path(running).exists()


def test_names_sort_as_episodes_begin(tmp_path: Path) -> None:
    names = [new_id(1_000_000 + n / 100) for n in range(200)]
    assert names == sorted(names)
    assert all(is_id(name) for name in names)


def test_files_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"notes{ENDING}").write_text("mine\n")
    files = EpisodeFiles(tmp_path, most=1, most_bytes=1)
    write(files, 1, name="20260101-000001-00000000")
    files.evict(frozenset(), time.time())
    assert [path.name for path in tmp_path.iterdir()] == [f"notes{ENDING}"]
    assert files.summaries(5) == []


def test_a_summary_whose_end_row_is_from_elsewhere_is_computed(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, most=10, most_bytes=10**6)
    episode_id = write(files, 5, ends=False)
    files.append(episode_id, b'{"kind":"end","reason":"done","summary":{"unknown":1}}\n')
    assert (files.summary(episode_id).steps, files.summary(episode_id).reason) == (1, "done")


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match="cannot be read"):
        list(read_rows(tmp_path))


def test_a_folder_that_cannot_be_written_to_costs_the_recording_and_nothing_else(
    serve: Serve, make_app: Callable[..., Any], visit: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    browser = visit(serve(make_app(record_dir=tmp_path / "file" / "episodes")).url)
    browser.post("/web/reset", {})
    assert browser.step().status_code == 200
    answer = browser.get("/web/episodes").json()
    assert answer["episodes"] == []
    assert "cannot be written" in answer["recording"]["problem"]
    assert browser.step().status_code == 200


def test_a_writer_that_is_behind_drops_rows_and_never_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv.server.web.episode_recorder._MOST_WAITING", 100)
    files = EpisodeFiles(tmp_path, most=10, most_bytes=10**9)
    writer = EpisodeWriter(files, frozenset, time.time, redacts=False)
    summary = EpisodeSummary(new_id(time.time()))
    episode = LiveEpisode(summary, True)
    result = b'{"observation":{},"reward":1.0,"done":false}'
    for n in range(5000):
        writer.put(RawRow(episode, "step", n, b'{"action":{}}', result, None, 0.0, 0.0))
    assert writer.is_behind
    writer.put(RawRow(episode, "end", 0, "closed", None, None, 0.0, 0.0))
    writer.close()
    assert (files.summary(summary.id).is_whole, files.summary(summary.id).reason) == (False, "closed")
    assert 0 < files.summary(summary.id).steps < 5000


def test_recording_stops_when_an_episode_exceeds_its_limit_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = EpisodeFiles(tmp_path, most=10, most_bytes=40_000)
    writer = EpisodeWriter(files, frozenset, time.time, redacts=False)
    summary = EpisodeSummary(new_id(time.time()))
    episode = LiveEpisode(summary, True)
    sizes = (1_000, 4_000, 50_000_000, 100, 4_000)  # one row alone may exceed the limit; nothing follows it
    for n, size in enumerate(sizes):
        result = b'{"observation":{"text":"%s"},"reward":1.0,"done":false}' % (b"x" * size)
        writer.put(RawRow(episode, "step", n, b'{"action":{}}', result, None, 0.0, 0.0))
    writer.put(RawRow(episode, "end", 0, "closed", None, None, 0.0, 0.0))
    writer.close()
    rows = files.rows(summary.id)
    assert [row["n"] for row in rows if row["kind"] == "step"] == [0, 1]
    stored = files.summary(summary.id)
    assert (stored.is_whole, stored.reason) == (False, "closed")
    assert files.path(summary.id).stat().st_size < 10_500
    assert len([one for one in caplog.records if "recording stops at row 2" in one.getMessage()]) == 1


def test_an_episode_that_was_deleted_meanwhile_is_not_made_again_without_its_head(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, most=10, most_bytes=10**9)
    episode_id = write(files, 1, ends=False)
    files.path(episode_id).unlink()
    with pytest.raises(FileNotFoundError):
        files.append(episode_id, b"{}\n", is_first=False)
    assert list(tmp_path.iterdir()) == []


def test_redacted_errors_are_redacted_in_files_too(recorded: Callable[..., Any], visit: Callable[..., Any]) -> None:
    browser = visit(recorded(redact_errors=True).url)
    browser.post("/web/reset", {})
    browser.step("left", paces=5)
    [episode] = episodes_of(browser)
    assert "secret-map" not in browser.get(f"/web/episodes/{episode['id']}/download").text


def test_a_running_step_can_be_given_up_and_the_next_comes_after_it(
    recorded: Callable[..., Any], visit: Callable[..., Any], envs: dict[str, type[Any]]
) -> None:
    slow: Any = envs["Slow"]
    slow.gate.clear()
    browser = visit(recorded(slow).url)
    browser.post("/web/reset", {})
    with ThreadPoolExecutor(1) as pool:
        try:
            step = pool.submit(browser.step)
            wait_until(lambda: browser.post("/web/cancel").json()["cancelled"], 20)
            answer = step.result(20)
        finally:
            slow.gate.set()
    assert (answer.status_code, answer.json()["code"]) == (409, "CANCELLED")
    assert browser.step().json()["observation"]["place"] == 2  # the first ran to its end: its code is not interruptible


@pytest.mark.slow
def test_a_full_disk_leaves_whole_lines_and_the_server_running(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        files = EpisodeFiles(tmp_path, most=100, most_bytes=10**9)
        episode_id = write(files, 1, ends=False)
        row = json.dumps({"kind": "step", "n": 2, "action": "x" * 6000, "reward": 1.0, "done": False}).encode() + b"\n"
        with pytest.raises(OSError, match="space"):
            for _ in range(100):
                files.append(episode_id, row)
        assert files.path(episode_id).read_bytes().endswith(b"\n")
        assert all(json.loads(line) for line in files.path(episode_id).read_bytes().splitlines())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.slow
def test_a_killed_server_leaves_its_episode_to_the_next_one(tmp_path: Path, visit: Callable[..., Any]) -> None:
    script = Path(__file__).with_name("conftest.py")
    support = Path(__file__).parents[2] / "support"
    folder = tmp_path / "episodes"
    code = (
        "import importlib.util, sys\n"
        f"sys.path.append({str(support)!r})\n"
        f"spec = importlib.util.spec_from_file_location('street', {str(script)!r})\n"
        "sys.modules['street'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "Street, Walk, View = module.Street, module.Walk, module.View\n"
        "from openenv.server.app import create_app\n"
        "app = create_app(Street, Walk, View, max_concurrent_envs=8)\n"
    )
    (tmp_path / "served.py").write_text(code)

    def start(*options: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "openenv.cli", "serve", str(tmp_path / "served.py:app"), "--port", "0"]
        process = subprocess.Popen(
            [*command, "--log-level", "warning", "--record-dir", str(folder), *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stderr is not None
        return process, process.stderr.readline().strip()

    process, url = start()
    try:
        browser = visit(url)
        browser.post("/web/reset", {"seed": 7})
        browser.step()
        assert [each["is_running"] for each in episodes_of(browser)] == [True]
    finally:
        process.kill()
        process.communicate()
    process, url = start("--workers", "2")
    try:
        browser = visit(url)
        [episode] = episodes_of(browser)
        assert (episode["seed"], episode["steps"], episode["reason"]) == (7, 1, "the server stopped")
        others = [visit(url) for _ in range(4)]  # on both workers
        for other in others:
            other.post("/web/reset", {})
            other.step()
        wait_until(lambda: len(episodes_of(browser)) == 5, 20)  # the other worker writes when it comes to it
        assert sorted(each["is_running"] for each in episodes_of(browser)) == [False, True, True, True, True]
    finally:
        process.terminate()
        process.communicate(timeout=60)
    ended = [summarise(read_rows(path)) for path in folder.iterdir()]
    assert sum(each.reason is not None for each in ended) == 4
