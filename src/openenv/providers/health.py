"""How every provider waits for its server: asks `/health` until it answers, and fails at once when the server ends.

Knows HTTP. Callers provide a watch on the server and advice for errors.
"""

from __future__ import annotations

import http.client
import itertools
import time
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

from openenv.errors import ServerDied, ServerNotReady
from openenv.protocol.backoff import Backoff

_PAUSES = Backoff(first_pause_s=0.02, longest_pause_s=0.5)
_ANSWER_S = 2.0
_SILENT = "/health gave no answer in time"


class ServerWatch(Protocol):
    """A watch on the process, container or service that runs a server."""

    def ended(self, within_s: float, /) -> str | None:
        """Wait at most that long for its end; return how it ended, or None while it runs."""

    def log(self) -> str:
        """Return the end of the server's output."""


def wait_for_ready(
    base_url: str,
    timeout_s: float,
    *,
    what: str = "Server",
    watch: ServerWatch | None = None,
    advice: Callable[[], str] = str,
    shown_url: str | None = None,
) -> None:
    """Return when `GET base_url/health` answers 200.

    Args:
        base_url: The address of the server.
        timeout_s: How long to wait for it at most.
        what: The name of the server in errors.
        watch: A watch on the server; without one, its end is not noticed.
        advice: Called for one more sentence when the time is over.
        shown_url: A text for errors instead of the address, if the address itself grants access.

    Raises:
        ServerDied: It has ended; the text has the end of its log.
        ServerNotReady: It did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    reason = _SILENT
    for attempt in itertools.count():
        left = deadline - time.monotonic()
        refusal = ask_health(base_url, min(_ANSWER_S, max(left, _PAUSES.first_pause_s)))
        if refusal is None:
            return
        reason = reason if refusal == _SILENT else refusal  # the last try may have had no time
        left = deadline - time.monotonic()
        within = max(0.0, min(_PAUSES.pause_s(attempt), left))
        if watch is None:
            time.sleep(within)
        elif (how := watch.ended(within)) is not None:
            log = watch.log()
            raise ServerDied(f"{what} ended before it was ready: {how}.{quoted(log)}", log=log)
        if time.monotonic() >= deadline:
            break
    log = "" if watch is None else watch.log()
    hint = advice()
    raise ServerNotReady(
        f"{what} at {shown_url or base_url} did not become ready within {timeout_s:g} s ({reason}). "
        f"Allow it more time: timeout_s here, ready_timeout_s of a provider.{' ' + hint if hint else ''}{quoted(log)}",
        log=log,
    )


def ask_health(base_url: str, timeout_s: float) -> str | None:
    """Ask a server once, past any proxy; return None if it is healthy, and why not otherwise."""
    parts = urlsplit(base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "localhost", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health", headers={"Connection": "close"})
        status = connection.getresponse().status
    except TimeoutError:
        return _SILENT
    except http.client.HTTPException as error:
        return f"/health gave no answer: {error or type(error).__name__}"
    except OSError as error:
        return f"/health cannot be reached: {error.strerror or error}"
    finally:
        connection.close()
    return None if status == 200 else f"/health answered {status}"


def quoted(log: str) -> str:
    """Return the end of a log as it is put below an error's first line."""
    return f"\nThe end of its log:\n{log}" if log.strip() else "\nIt has written nothing."
