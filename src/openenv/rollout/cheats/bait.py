"""Bait on the host: a port, an abstract socket, a file and a process's argument that no sandbox may reach.

Knows sockets and files. What touched the bait is noted, so that a cheat cannot hide that it got out.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

_MARK = "openenv-cheat"


class Bait:
    """What lies out while cheats run. Only `lay_out` makes one."""

    def __init__(self, folder: Path) -> None:
        self.secret = f"{_MARK}-{secrets.token_hex(16)}"
        self.file = folder / f"{_MARK}-secret-{secrets.token_hex(4)}"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        self.abstract = f"{_MARK}-{secrets.token_hex(8)}"
        self.touched: list[str] = []
        self.port = 0

    def tampered(self) -> bool:
        """Say whether the file was changed."""
        return self.file.read_text() != self.secret

    def listen(self, stack: contextlib.ExitStack) -> None:
        """Listen on the port and, where there are such, on the abstract socket."""
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = tcp.getsockname()[1]
        self._serve(tcp, "the host's port", stack)
        if sys.platform == "linux":
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind("\0" + self.abstract)
            unix.listen()
            self._serve(unix, "the host's abstract socket", stack)

    def _serve(self, listener: socket.socket, what: str, stack: contextlib.ExitStack) -> None:
        listener.settimeout(0.1)
        over = threading.Event()

        def accept() -> None:
            while not over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    return
                self.touched.append(what)
                with connection, contextlib.suppress(OSError):
                    connection.sendall(self.secret.encode())

        thread = threading.Thread(target=accept, name="openenv-bait", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)


@contextlib.contextmanager
def lay_out() -> Iterator[Bait]:
    """Lay out bait, and take it away in the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{_MARK}-")))
        folder.chmod(0o755)
        bait = Bait(folder)
        bait.listen(stack)
        yield bait
