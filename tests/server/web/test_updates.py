"""The live socket: increments for the page, the contract's frames for others; slow readers delay no other client."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from openenv.server.web import visitors as visitors_module
from servers import Serve


def test_the_page_gets_increments_that_are_counted(street: Any, visit: Callable[..., Any]) -> None:
    browser = visit(street.url)
    with browser.live() as live:
        assert live.socket.subprotocol == "openenv.ui.v1"
        hello = live.next()
        assert hello["episode"] == {
            "episode_id": None,
            "step_count": 0,
            "seed": None,
            "is_reset": False,
            "current_observation": None,
            "reward": None,
            "done": False,
        }
        assert (hello["log"], hello["render"]) == ([], {"html": None, "actions": []})
        browser.post("/web/reset", {"episode_id": "one"})
        browser.step()
        browser.step()
        browser.step()
        browser.step("left", paces=5)
        browser.step("left")
        frames = [live.next() for _ in range(18)]
    assert [frame["n"] for frame in frames] == [hello["n"] + 1 + i for i in range(18)]
    kinds = [frame["state"] if frame["type"] == "session" else frame["type"] for frame in frames]
    turns = [["busy", kind, "ready"] for kind in ("reset", "step", "step", "step", "step", "error")]
    assert kinds == [kind for turn in turns for kind in turn]
    reset, first, painted, last = frames[1], frames[4], frames[7], frames[10]
    assert (reset["episode_id"], reset["observation"]["text"], reset["reward"], reset["done"]) == (
        "one",
        "hello",
        None,
        False,
    )
    assert reset["render"] == {
        "html": "<b style='color:red'>0 None False</b>",
        "actions": [{"label": "To the right", "action": {"direction": "right"}}],
    }
    entry = first["entry"]
    assert set(entry) == {"timestamp", "action", "observation", "reward", "done", "step_count", "duration_ms"}
    assert (entry["action"], entry["step_count"], entry["reward"]) == ({"direction": "right", "paces": 1}, 1, 1.0)
    assert painted["render"]["html"] is None  # render_web has failed there, and the step has not
    assert painted["render"]["actions"]
    assert (last["entry"]["done"], last["render"]["actions"]) == (True, [])
    assert frames[16]["code"] == "EXECUTION_ERROR"


def test_a_later_watcher_sees_the_whole_episode(street: Any, visit: Callable[..., Any]) -> None:
    browser = visit(street.url)
    browser.post("/web/reset")
    for _ in range(3):
        browser.step()
    with browser.live() as live, browser.live() as twin:
        for hello in (live.next(), twin.next()):
            assert [entry["step_count"] for entry in hello["log"]] == [1, 2, 3]
            assert (hello["episode"]["step_count"], hello["episode"]["done"], hello["episode"]["is_reset"]) == (
                3,
                True,
                True,
            )
            assert hello["session"] == {"state": "ready", "reason": None}
        browser.post("/web/reset")
        assert live.until("reset")["n"] == twin.until("reset")["n"]


def test_plain_clients_get_the_contracts_frames(street: Any, visit: Callable[..., Any]) -> None:
    browser = visit(street.url)
    with browser.live(page=False) as live:
        assert live.socket.subprotocol is None
        state = live.next()
        assert state == {
            "type": "state_update",
            "episode_state": {
                "episode_id": None,
                "step_count": 0,
                "current_observation": None,
                "action_logs": [],
                "is_reset": True,
            },
        }
        live.socket.send("what comes in is of no interest")
        browser.post("/web/reset", {"episode_id": "two"})
        assert live.next()["episode_state"]["episode_id"] == "two"
        browser.step()
        state = live.next()["episode_state"]
        assert (state["step_count"], state["is_reset"], state["current_observation"]["place"]) == (1, False, 1)
        visitors_module.EpisodeState.model_validate(state)
        assert set(state["action_logs"][0]) == {"timestamp", "action", "observation", "reward", "done", "step_count"}


def test_programs_without_a_cookie_look_on_at_the_shared_episode(street: Any, visit: Callable[..., Any]) -> None:
    program = visit(street.url, cookie=False)
    with connect(f"ws://127.0.0.1:{street.port}/ws/ui", proxy=None) as looking:
        json.loads(looking.recv(timeout=30))
        program.post("/web/reset", {"episode_id": "shared"})
        assert json.loads(looking.recv(timeout=30))["episode_state"]["episode_id"] == "shared"


def test_the_log_holds_the_newest_thousand(
    serve: Serve, visit: Callable[..., Any], make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert visitors_module.MAX_ENTRIES == 1000
    monkeypatch.setattr(visitors_module, "MAX_ENTRIES", 5)
    browser = visit(serve(make_app()).url)
    browser.post("/web/reset")
    for turn in range(8):
        browser.step("left" if turn % 2 else "right")
    with browser.live() as live, browser.live(page=False) as whole:
        assert [entry["step_count"] for entry in live.next()["log"]] == [4, 5, 6, 7, 8]
        assert len(whole.next()["episode_state"]["action_logs"]) == 5


def test_a_log_of_large_observations_is_bounded_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors_module, "_MAX_BYTES", 1000)
    episode = visitors_module.VisitorEpisode()
    for number in range(50):
        episode.add(visitors_module.HistoryEntry(b'{"n":%d,"x":"%s"' % (number, b"x" * 100), 1.0))
    kept = json.loads(episode.log())
    assert kept[-1]["n"] == 49
    assert len(kept) < 10


@pytest.mark.slow_but_for("serve")
@pytest.mark.parametrize("way", ["serve", "plain uvicorn"])
def test_a_slow_reader_delays_no_other_and_gets_the_whole_in_the_end(
    serve: Serve, visit: Callable[..., Any], make_app: Any, way: str
) -> None:
    settings = {} if way == "serve" else {"ws": "websockets-sansio", "http": "auto"}
    browser = visit(serve(make_app(), **settings).url)
    large = secrets.token_hex(500_000)  # does not get smaller by compression
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # no room to buffer much
    raw.connect(("127.0.0.1", int(browser.url.rsplit(":", 1)[1])))
    with browser.live(sock=raw, max_queue=1) as slow, browser.live() as quick:
        quick.until("hello")
        for turn in range(40):  # and the client reads nothing meanwhile
            assert browser.post("/web/reset", {"greeting": large, "start": turn % 2}).status_code == 200
            quick.until("reset")
        assert browser.step().status_code == 200
        assert quick.until("step")["entry"]["step_count"] == 1
        frames = [slow.until("hello")]
        while not (frames[-1]["type"] == "step" or (frames[-1]["type"] == "hello" and frames[-1]["log"])):
            frames.append(slow.next())
    assert len(frames) < 100  # of 123: the rest was not kept for it
    assert any(frame["type"] == "hello" for frame in frames[1:])


def test_a_watcher_that_left_is_dropped(serve: Serve, visit: Callable[..., Any], make_app: Any) -> None:
    server = serve(make_app())
    browser = visit(server.url)
    shared = server.app.state.openenv_web.visitors
    with browser.live() as live:
        live.until("hello")
        assert sum(len(visitor.watchers) for visitor in shared.all()) == 1
        live.socket.socket.shutdown(socket.SHUT_RDWR)
    server.wait_for(lambda: not any(visitor.watchers for visitor in shared.all()))
    assert browser.post("/web/reset").status_code == 200


def test_foreign_pages_cannot_look_on(street: Any) -> None:
    with pytest.raises(InvalidStatus) as caught:
        connect(f"ws://127.0.0.1:{street.port}/ws/ui", proxy=None, origin="http://evil.example").__enter__()  # type: ignore[arg-type]
    assert caught.value.response.status_code == 403


def test_a_long_step_is_shown_as_busy_and_others_go_on(
    serve: Serve, visit: Callable[..., Any], make_app: Any, envs: dict[str, Any]
) -> None:
    slow = envs["Slow"]
    slow.gate.clear()
    server = serve(make_app(slow))
    one, other = visit(server.url), visit(server.url)
    one.post("/web/reset")
    answers: list[Any] = []
    try:
        with one.live() as live:
            live.until("hello")
            stepping = threading.Thread(target=lambda: answers.append(one.step()))
            stepping.start()
            live.until("session", state="busy")
            assert other.post("/web/reset").status_code == 200
            with one.live() as late:
                assert late.next()["session"]["state"] == "busy"
            slow.gate.set()
            stepping.join(30)
            assert live.until("step")["entry"]["duration_ms"] > 0
            assert live.until("session")["state"] == "ready"
    finally:
        slow.gate.set()
    assert answers[0].status_code == 200
