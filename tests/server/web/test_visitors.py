"""Visitors are soft sessions: one each, counted, the first to go, and their end is reported, never hidden."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from websockets.sync.client import connect

from openenv.client.env_client import GenericEnvClient
from openenv.server.sessions import slots
from openenv.server.sessions.session import SessionKind
from openenv.server.web import visitors as visitors_module
from servers import Serve


def test_every_browser_has_its_own_episode_and_programs_share_one(
    serve: Serve, visit: Callable[..., Any], make_app: Any
) -> None:
    server = serve(make_app())
    one, other = visit(server.url), visit(server.url)
    program, another = visit(server.url, cookie=False), visit(server.url, cookie=False)
    for player in (one, other, program):
        player.post("/web/reset")
    one.step()
    program.step(paces=2)
    places = [player.get("/web/state").json()["place"] for player in (one, other, program, another)]
    assert places == [1, 0, 2, 2]
    assert server.manager.active == 3
    assert {session.kind for session in server.manager.sessions()} == {SessionKind.SOFT}


def test_a_trainer_gets_the_slot_of_a_visitor_who_gets_an_error_and_no_new_episode(
    serve: Serve, visit: Callable[..., Any], make_app: Any
) -> None:
    server = serve(make_app(max_concurrent_envs=1))
    browser = visit(server.url)
    with browser.live() as live:
        assert live.until("hello")["session"] == {"state": "none", "reason": None}
        browser.post("/web/reset")
        browser.step()
        with GenericEnvClient(server.url).sync() as trainer:
            trainer.reset()
            frame = live.until("session", state="lost")
            assert frame["reason"] == "evicted"
            for lost in (browser.step(), browser.step(), browser.get("/web/state")):
                assert (lost.status_code, lost.json()["code"], lost.json()["reason"]) == (
                    410,
                    "SESSION_LOST",
                    "evicted",
                )
            refused = browser.post("/web/reset")
            assert (refused.status_code, refused.json()["code"]) == (503, "CAPACITY_REACHED")
            assert int(refused.headers["retry-after"]) >= 1
            assert browser.step().status_code == 410  # still: the episode was not replaced
            assert trainer.step({"direction": "right"}).observation["place"] == 1
        server.wait_for(lambda: server.manager.active == 0)
        assert browser.post("/web/reset").status_code == 200
        assert live.until("session", state="ready")["reason"] is None
        assert browser.step().json()["observation"]["place"] == 1


def test_a_visitor_does_not_put_out_another_who_is_there_but_one_who_has_left(
    serve: Serve, visit: Callable[..., Any], make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_LEFT_AFTER_S", 1000.0)
    server = serve(make_app(max_concurrent_envs=1))
    first, second = visit(server.url), visit(server.url)
    first.post("/web/reset")
    refused = second.post("/web/reset")
    assert (refused.status_code, refused.json()["code"]) == (503, "CAPACITY_REACHED")
    assert first.step().status_code == 200
    monkeypatch.setattr(slots, "_LEFT_AFTER_S", 0.0)
    assert second.post("/web/reset").status_code == 200
    assert first.step().json()["reason"] == "evicted"


def test_an_open_page_keeps_a_session_that_would_expire(
    serve: Serve, visit: Callable[..., Any], make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "_KEEP_PERIOD_S", 0.05)
    # Less than the 5 s after which the server closes an idle connection of the browser's.
    monkeypatch.setenv("OPENENV_SESSION_TIMEOUT", "2.5")
    server = serve(make_app())
    with_page, without = visit(server.url), visit(server.url)
    with with_page.live() as live:
        live.until("hello")
        with_page.post("/web/reset")
        without.post("/web/reset")
        server.wait_for(lambda: server.manager.active == 1)
        assert without.step().json()["reason"] == "expired"
        assert with_page.step().status_code == 200
    server.wait_for(lambda: server.manager.active == 0)
    assert with_page.step().json()["reason"] == "expired"


def test_an_open_page_does_not_keep_the_session_of_an_idle_visitor(
    serve: Serve, visit: Callable[..., Any], make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "_KEEP_PERIOD_S", 0.05)
    monkeypatch.setattr(visitors_module, "_KEPT_S", 0.0)
    monkeypatch.setenv("OPENENV_SESSION_TIMEOUT", "0.5")
    browser = visit(serve(make_app()).url)
    with browser.live() as live:
        browser.post("/web/reset")
        assert live.until("session", state="lost")["reason"] == "expired"


def test_ending_the_session_frees_its_slot_and_begins_afresh(
    serve: Serve, visit: Callable[..., Any], make_app: Any
) -> None:
    server = serve(make_app())
    browser = visit(server.url)
    assert browser.post("/web/close").json() == {"closed": False}
    browser.post("/web/reset")
    browser.step()
    with browser.live() as live:
        assert len(live.until("hello")["log"]) == 1
        assert browser.post("/web/close").json() == {"closed": True}
        assert live.until("session")["state"] == "none"
    server.wait_for(lambda: server.manager.active == 0)
    with browser.live() as live:
        assert live.until("hello")["log"] == []
    assert browser.step().json()["observation"]["place"] == 1


def test_a_session_that_is_ended_while_a_step_runs_is_lost_for_that_step(
    serve: Serve, visit: Callable[..., Any], make_app: Any, envs: dict[str, Any]
) -> None:
    slow = envs["Slow"]
    slow.gate.clear()
    browser = visit(serve(make_app(slow)).url)
    answers: list[Any] = []
    try:
        with browser.live() as live:
            browser.post("/web/reset")
            live.until("session", state="ready")
            stepping = threading.Thread(target=lambda: answers.append(browser.step()))
            stepping.start()
            live.until("session", state="busy")
            assert browser.post("/web/close").json() == {"closed": True}
            slow.gate.set()
            stepping.join(30)
    finally:
        slow.gate.set()
    assert (answers[0].status_code, answers[0].json()["reason"]) == (410, "closed")


def test_operators_see_all_sessions_and_can_end_each(serve: Serve, visit: Callable[..., Any], make_app: Any) -> None:
    server = serve(make_app())
    mine, other = visit(server.url), visit(server.url)
    mine.post("/web/reset", {"episode_id": "mine"})
    mine.step()
    with connect(f"ws://127.0.0.1:{server.port}/ws", proxy=None) as trainer:
        trainer.send('{"type": "reset"}')
        trainer.recv(timeout=30)
        shown = mine.get("/web/sessions").json()
        assert shown["capacity"] == {"max": 8, "active": 2, "queued": 0, "draining": False}
        by_kind = {session["kind"]: session for session in shown["sessions"]}
        assert set(by_kind) == {"page", "socket"}
        assert (by_kind["page"]["is_mine"], by_kind["page"]["episode_id"], by_kind["page"]["step_count"]) == (
            True,
            "mine",
            1,
        )
        assert (by_kind["socket"]["is_mine"], by_kind["socket"]["state"]) == (False, "ready")
        assert all(session["age_s"] >= 0 and session["idle_s"] >= 0 for session in shown["sessions"])
        assert not any(session["is_mine"] for session in other.get("/web/sessions").json()["sessions"])
        for session in shown["sessions"]:
            ended = other.client.delete(f"/web/sessions/{session['session_id']}")
            assert ended.json() == {"session_id": session["session_id"], "closed": True}
        trainer.send('{"type": "reset"}')
        assert "SESSION_ERROR" in str(trainer.recv(timeout=30))
    server.wait_for(lambda: server.manager.active == 0)
    assert mine.step().json()["reason"] == "ended by an operator"
    missing = other.client.delete("/web/sessions/none")
    assert (missing.status_code, missing.json()["code"]) == (404, "SESSION_NOT_FOUND")


def test_visitors_who_have_left_are_forgotten(
    serve: Serve, visit: Callable[..., Any], make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "_MAX_VISITORS", 3)
    server = serve(make_app())
    visitors = server.app.state.openenv_web.visitors
    browsers = [visit(server.url) for _ in range(6)]
    with browsers[0].live() as live:
        live.until("hello")
        for browser in browsers:
            browser.post("/web/reset")
            if browser is not browsers[0]:
                browser.post("/web/close")
        assert len(visitors.all()) <= 5
        assert browsers[0].step().status_code == 200  # a visitor whose page is open is not forgotten
    server.wait_for(lambda: server.manager.active <= 4)


def test_sessions_of_visitors_are_closed_with_the_server(
    serve: Serve, visit: Callable[..., Any], make_app: Any
) -> None:
    server = serve(make_app())
    browser = visit(server.url)
    with browser.live() as live:
        browser.post("/web/reset")
        live.until("session", state="ready")
        server.server.should_exit = True
        with pytest.raises(Exception, match="1012"):
            while True:
                live.next()
    server.wait_for(lambda: server.manager.active == 0)
