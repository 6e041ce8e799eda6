"""The start and the end of a worker process.

main ──> reads WorkerSetup ──> loads the factory ──> SessionHost.run ──> ends with the server, or at EXIT
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.util
import io
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Final

from ....module_finder import ModuleTableFinder
from ..messages import HEADER, MAIN_MODULE, MessageKind, WorkerSetup, pack_error, unpack
from .host import SessionHost
from .server_link import ForwardedLog, ReplySender, ServerHandle

_EXIT_S: Final = 3.0


def main() -> None:
    """Run a worker; the last argument is the number of its socket."""
    sock = socket.socket(fileno=int(sys.argv[-1]))
    sock.set_inheritable(False)
    # The server ends its workers itself. Install handlers: programs started by an environment would inherit SIG_IGN.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    faulthandler.enable()  # print the stack after a crash
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a crash must not lose output
    setup = _read_setup(sock)
    if setup is None:
        return
    replies = ReplySender(sock)
    logging.getLogger().addHandler(ForwardedLog(replies))
    for name, level in setup.levels.items():
        logging.getLogger(name or None).setLevel(level)
    try:
        sys.path[:] = setup.path
        sys.argv[:] = ["openenv-worker"]
        install(setup.files, setup.main)
        factory = unpack(setup.factory)
    except BaseException as exc:
        replies.send(MessageKind.FAILED, payload=pack_error(exc))
        sys.exit(1)
    server = ServerHandle.open(setup.parent)
    if setup.vector is None:
        asyncio.run(SessionHost(sock, factory, server=server).run())
    else:
        from ....vectors.host import VectorHost  # needs NumPy, which is optional

        replies.send(MessageKind.READY)
        VectorHost(factory, unpack(setup.vector), server).run()
    # A thread left behind by an environment must not keep the process alive.
    threading.Thread(target=_exit_anyway, daemon=True).start()


def _exit_anyway() -> None:
    time.sleep(_EXIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _read_setup(sock: socket.socket) -> WorkerSetup | None:
    header = _read(sock, HEADER.size)
    if header is None:
        return None
    size, kind, _ = HEADER.unpack(header)
    payload = _read(sock, size)
    if payload is None or kind != MessageKind.SETUP:
        return None
    setup: WorkerSetup = unpack(payload)
    return setup


def _read(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return None
        data += more
    return bytes(data)


def install(files: Mapping[str, str], main: str | None) -> None:
    """Make modules importable, and load the program's file by the names used in pickles."""
    if files:
        sys.meta_path.insert(0, ModuleTableFinder(files, yields=True))
    if main is not None:
        # Use the names of multiprocessing, so that the program's `if __name__ == "__main__"` guard holds.
        spec = importlib.util.spec_from_file_location(MAIN_MODULE, main)
        if spec is None or spec.loader is None:
            raise ImportError(f"{main} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["__main__"] = sys.modules[MAIN_MODULE] = module
        spec.loader.exec_module(module)
