"""Structured logs: each line is one JSON object, and names the session and request it is about, never another's."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from environments import Idle
from openenv import Action, Observation
from openenv.server.sessions.events import RequestOrigin
from openenv.server.sessions.manager import SessionLimits, SessionManager
from openenv.server.sessions.operations import CALL, build_operations
from openenv.server.sessions.session import Session, SessionKind
from openenv.server.telemetry.logs import JsonFormatter
from openenv.server.telemetry.watched_calls import CURRENT, CallWatch

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OPERATIONS = build_operations(lambda observation: observation, lambda state: state)


class Talker(Idle):
    def reset(self, **kwargs: Any) -> Observation:
        logging.getLogger("talker").info("reset in %s", threading.current_thread().name)
        return Observation()

    def step(self, action: Action, **kwargs: Any) -> Observation:
        raise RuntimeError("it does not work")


class AsyncTalker(Talker):
    async def reset_async(self, **kwargs: Any) -> Observation:
        await asyncio.sleep(0)
        return self.reset(**kwargs)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        assert "\n" not in text
        self.lines.append(json.loads(text))


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    handler, logger = Lines(), logging.getLogger("talker")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.lines
    logger.removeHandler(handler)


def watched(factory: type[Any] = Talker, runner: str = "auto") -> SessionManager:
    manager = SessionManager(factory, SessionLimits(sessions=100), runner=runner)
    CallWatch(manager).name_calls()
    return manager


@pytest.mark.anyio
@pytest.mark.parametrize("runner", ["thread", "inline"])
@pytest.mark.parametrize("factory", [Talker, AsyncTalker])
async def test_what_an_environment_logs_names_its_session_and_request(
    lines: list[dict[str, Any]], factory: type[Any], runner: str
) -> None:
    manager = watched(factory, runner)
    sessions = [await manager.open(SessionKind.HTTP) for _ in range(20)]

    async def reset(session: Session, number: int) -> None:
        await session.run(OPERATIONS.reset, {}, origin=RequestOrigin(f"request {number}", PARENT))

    for _ in range(5):
        await asyncio.gather(*(reset(session, number) for number, session in enumerate(sessions)))
    await manager.drain()
    expected = [(session.id, f"request {number}") for number, session in enumerate(sessions)]
    assert sorted((line["session"], line["request"]) for line in lines) == sorted(expected * 5)
    assert {line["trace_id"] for line in lines} == {PARENT.split("-")[1]}
    assert {line["operation"] for line in lines} == {"reset"}


@pytest.mark.anyio
@pytest.mark.parametrize("runner", ["thread", "inline"])
async def test_an_answer_is_given_in_the_name_of_its_own_call_and_nothing_stays_behind(runner: str) -> None:
    manager = watched(runner=runner)
    sessions = [await manager.open(SessionKind.HTTP) for _ in range(20)]
    hub = asyncio.get_running_loop()
    named: list[tuple[str, str | None]] = []
    after: list[Any] = []

    def answered(session: Session) -> Any:
        def done(result: Any, error: BaseException | None) -> None:
            call = CURRENT.get()
            named.append((session.id, call.session_id if call is not None else None))
            hub.call_soon(lambda: None)

        return done

    from openenv.server.runners import current_dispatcher

    current_dispatcher().after_delivery = lambda: after.append(CURRENT.get())
    for _ in range(10):
        for session in sessions:
            session.submit(CALL, lambda env: None, answered(session), current_dispatcher())
    for session in sessions:
        await session.run(CALL, lambda env: None)
    assert len(named) == 200
    assert all(of == by for of, by in named)
    assert not any(after)
    assert CURRENT.get() is None
    current_dispatcher().after_delivery = None
    await manager.drain()


def test_a_line_has_time_level_logger_message_error_and_extras() -> None:
    try:
        raise ValueError("bad\nnews")
    except ValueError as exc:
        record = logging.LogRecord("some.where", logging.ERROR, "file.py", 3, "it %s", ("failed",), None)
        record.exc_info = (type(exc), exc, exc.__traceback__)
    record.url, record.strange = "http://x", {1, 2} - {2}  # type: ignore[attr-defined]
    shown = json.loads(JsonFormatter().format(record))
    assert shown["time"].endswith("+00:00")
    assert (shown["level"], shown["logger"], shown["message"]) == ("error", "some.where", "it failed")
    assert (shown["error"]["type"], shown["error"]["message"]) == ("ValueError", "bad\nnews")
    assert "test_logs.py" in shown["error"]["traceback"]
    assert (shown["url"], shown["strange"]) == ("http://x", "{1}")
    assert "session" not in shown
