"""Bounded waits: every test that waits for another thread, task or process does it with these functions.

They look at something observable again and again, and fail with a message when the time is over. A test that expects
*nothing* to happen looks at the observable for a while with `holds_for`, which fails as soon as it changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx2

T = TypeVar("T")
LOOK_S = 0.005
PATIENCE_S = 30.0
"""Long enough for a busy machine; a test that passes never waits so long."""
Message = str | Callable[[], object]


def _failure(message: Message, timeout_s: float) -> AssertionError:
    return AssertionError(f"{message if isinstance(message, str) else message()} (waited {timeout_s:g} s)")


def wait_until(
    condition: Callable[[], T],
    timeout_s: float = PATIENCE_S,
    message: Message = "the condition did not come true in time",
    *,
    every_s: float = LOOK_S,
) -> T:
    """Wait until a condition is true and return its value. `message` may be a function, called when the wait fails."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise _failure(message, timeout_s)
        time.sleep(every_s)
    return value


async def wait_until_async(
    condition: Callable[[], T],
    timeout_s: float = PATIENCE_S,
    message: Message = "the condition did not come true in time",
) -> T:
    """Wait as `wait_until` does, without blocking the event loop."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise _failure(message, timeout_s)
        await asyncio.sleep(LOOK_S)
    return value


def wait_until_healthy(
    url: str, process: subprocess.Popen[Any], log: Path | None = None, *, timeout_s: float = 240.0
) -> None:
    """Wait until the server in a process answers `/health`; fail with its log if the process ends first."""

    def printed() -> str:
        return "the server did not start" if log is None else log.read_text(encoding="utf-8", errors="replace")

    def is_healthy() -> bool:
        assert process.poll() is None, printed()
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200
        return False

    wait_until(is_healthy, timeout_s, printed, every_s=0.02)


def comes_true(condition: Callable[[], object], timeout_s: float = PATIENCE_S, *, every_s: float = LOOK_S) -> bool:
    """Wait for a condition; return whether it came true in time."""
    try:
        wait_until(condition, timeout_s, every_s=every_s)
    except AssertionError:
        return bool(condition())
    return True


def holds_for(seconds: float, condition: Callable[[], object], message: Message = "it did not stay so") -> None:
    """Fail if a condition is false at any look during so many seconds."""
    over = time.monotonic() + seconds
    while time.monotonic() < over:
        if not condition():
            raise _failure(message, seconds)
        time.sleep(LOOK_S)
    assert condition(), message if isinstance(message, str) else message()


async def holds_for_async(
    seconds: float, condition: Callable[[], object], message: Message = "it did not stay so"
) -> None:
    """Look as `holds_for` does, without blocking the event loop."""
    over = time.monotonic() + seconds
    while time.monotonic() < over:
        if not condition():
            raise _failure(message, seconds)
        await asyncio.sleep(LOOK_S)
    assert condition(), message if isinstance(message, str) else message()


def in_background(function: Callable[[], T], timeout_s: float = PATIENCE_S) -> Callable[[], T]:
    """Call a function in a thread at once; the returned function waits for its result."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()

    def wait() -> T:
        thread.join(timeout_s)
        assert results, f"no result (waited {timeout_s:g} s)"
        return results[0]

    return wait
