"""The first process of a cloud double's sandbox: runs commands, and passes connections on to port 8000.

`python cloud_agent.py FOLDER` listens on two sockets in that folder, `exec` and `port`. A request on the first is a
line, `{"argv": [...], "env": {...}, "cwd": ..., "timeout_s": ..., "user": ..., "stdin": base64}`; so is its answer.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Serve both sockets, and collect the children that others left."""
    for name, answer in (("port", forward), ("exec", execute)):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(folder / f"{name}.new"))
        listening.listen(64)
        threading.Thread(target=accept, args=(listening, answer), daemon=True).start()
        (folder / f"{name}.new").rename(folder / name)
    while True:
        signal.pause()


def accept(listening: socket.socket, answer: Any) -> None:
    """Answer each connection in a thread."""
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def execute(connection: socket.socket) -> None:
    """Run one command to its end, or to the end of its time."""
    with connection, connection.makefile("rwb") as stream:
        request = json.loads(stream.readline())
        user = request.get("user")
        who = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        process = subprocess.Popen(
            request["argv"],
            **who,
            env={**os.environ, **request.get("env", {})},
            cwd=request.get("cwd") or "/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        timed_out = False
        try:
            out, err = process.communicate(base64.b64decode(request.get("stdin", "")), request.get("timeout_s"))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            timed_out = True
        code = process.returncode
        answer = {
            "code": 128 - code if code < 0 else code,
            "stdout": base64.b64encode(out).decode(),
            "stderr": base64.b64encode(err).decode(),
            "timed_out": timed_out,
        }
        stream.write(json.dumps(answer).encode() + b"\n")


def forward(connection: socket.socket) -> None:
    """Pass a connection on to the server inside."""
    try:
        server = socket.create_connection(("127.0.0.1", 8000), timeout=5)
    except OSError:
        connection.close()
        return
    server.settimeout(None)
    threading.Thread(target=pump, args=(server, connection), daemon=True).start()
    pump(connection, server)


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until one side ends."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


if __name__ == "__main__":
    main(Path(sys.argv[1]))
