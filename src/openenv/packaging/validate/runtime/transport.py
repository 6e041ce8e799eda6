"""Deadlines of HTTP requests and sockets to servers that are not trusted to end a reply."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any


def abort_socket(transport_socket: socket.socket | None) -> None:
    """Wake every thread that reads or writes a socket, and close it; harmless where that was done before."""
    if transport_socket is None:
        return
    with contextlib.suppress(OSError):
        transport_socket.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        transport_socket.close()


@contextlib.contextmanager
def http_deadline(timeout_s: float) -> Iterator[dict[str, Any]]:
    """Give the `extensions` of one HTTPX request whose connection is aborted when the time is over.

    A timeout of HTTPX begins again with every byte; this one is for the whole reply. The request must open a connection
    of its own, so that its socket is seen.

    Raises:
        TimeoutError: The time was over before the request had ended.
    """
    sockets: list[socket.socket] = []
    is_over = threading.Event()

    def trace(event: str, info: dict[str, Any]) -> None:
        if event.endswith("connect_tcp.complete"):
            opened = info["return_value"].get_extra_info("socket")
            sockets.append(opened)
            if is_over.is_set():
                abort_socket(opened)

    def end() -> None:
        is_over.set()
        for opened in sockets:
            abort_socket(opened)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield {"trace": trace}
    except Exception as error:
        if is_over.is_set():
            raise TimeoutError(f"no complete reply within {timeout_s:g} s") from error
        raise
    finally:
        timer.cancel()
