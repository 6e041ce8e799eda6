#!/usr/bin/env python3
"""A proxy that only copies bytes between its clients and a server: the least that a proxy in front of workers costs.

  byte_proxy.py PORT SERVER_PORT COMMAND...

Starts the server, so that the CPU of both is that of one process tree, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import cast


class BytePipe(asyncio.Protocol):
    """One side of a connection; what it receives goes out on the other side."""

    def __init__(self, other: BytePipe | None = None) -> None:
        self.other = other
        self.transport: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what came before."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its type
        if self.other is not None:
            self.other.join(self)

    def join(self, other: BytePipe) -> None:
        """Copy to another side from now on."""
        self.other = other
        assert other.transport is not None
        for data in self._early:
            other.transport.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        """Copy."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
        else:
            self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other side, too."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def proxy(port: int, server_port: int, command: list[str]) -> int:
    """Serve until the server ends; return its exit status."""
    loop = asyncio.get_running_loop()
    connecting: set[asyncio.Task[object]] = set()

    class Accepted(BytePipe):
        """A client's side, which connects to the server."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            """Connect."""
            super().connection_made(transport)
            task = loop.create_task(loop.create_connection(lambda: BytePipe(self), "127.0.0.1", server_port))
            connecting.add(task)
            task.add_done_callback(self._connected)

        def _connected(self, task: asyncio.Task[object]) -> None:
            connecting.discard(task)
            if not task.cancelled() and task.exception() is not None and self.transport is not None:
                self.transport.close()  # the server is not there yet

    process = await asyncio.create_subprocess_exec(*command)
    loop.add_signal_handler(signal.SIGTERM, process.terminate)
    async with await loop.create_server(Accepted, "127.0.0.1", port, backlog=2048):
        return await process.wait()


def main() -> None:
    """Proxy what the command line says."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    sys.exit(asyncio.run(proxy(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))


if __name__ == "__main__":
    main()
