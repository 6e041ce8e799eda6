"""What the kernel has once for the whole machine: no sandbox that root starts can use it up."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from openenv.sandboxes import DockerSandboxes, Limits, LocalSandboxes, Sandbox, Sandboxes, SandboxSpec, host
from openenv.sandboxes.host import limit_terminals
from openenv.sandboxes.local import bubblewrap

pytestmark = pytest.mark.skipif(not bubblewrap.is_privileged(), reason="only root can set these limits")
Open = Callable[..., Sandbox]


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.slow)])
def open_box(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open sandboxes of a backend."""
    backend: LocalSandboxes | DockerSandboxes = request.getfixturevalue(request.param)
    with ExitStack() as stack:
        yield lambda **spec: stack.enter_context(_opened(backend, **spec))


def _opened(backend: Sandboxes, **spec: object) -> Sandbox:
    return backend.open(SandboxSpec(**spec))  # type: ignore[arg-type]


TERMINALS = """
import os, signal
count = 0
try:
    while count < 900:
        os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        count += 1
except OSError:
    pass
print(count, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("system_call", [host._FSPICK, pytest.param(9999, id="older kernels")])
def test_no_sandbox_has_more_than_some_terminals(
    open_box: Open, monkeypatch: pytest.MonkeyPatch, system_call: int
) -> None:
    monkeypatch.setattr(host, "_FSPICK", system_call)
    greedy, neighbour = open_box(), open_box()
    output: queue.Queue[bytes] = queue.Queue()
    greedy.start_bg(["python3", "-c", TERMINALS], on_output=lambda _, data: output.put(data))
    assert int(output.get(timeout=60)) <= 64
    code = "import os, pty; os.write(pty.openpty()[1], b'x'); pty.spawn(['tty'])"
    assert "/dev/pts/" in neighbour.exec(["python3", "-c", code]).stdout


def test_a_process_without_terminals_has_none_to_limit() -> None:
    with pytest.raises(OSError):
        limit_terminals(2**22 + 1)


SOCKETS = """
import socket
listener = socket.create_server(("127.0.0.1", 0), backlog=500)
held, total = [], 0
for _ in range(250):
    client = socket.create_connection(listener.getsockname())
    held += [client, listener.accept()[0]]
    client.setblocking(False)
    try:
        while True:
            total += client.send(bytes(1 << 20))
    except BlockingIOError:
        pass
print(total >> 20)
"""


def test_what_lies_in_sockets_has_a_limit(open_box: Open) -> None:
    box = open_box(limits=Limits(memory_mb=64, disk_mb=16))
    result = box.exec(["python3", "-c", SOCKETS], timeout=60)
    assert result.oom or int(result.stdout) < 400


def test_asynchronous_io_whose_contexts_all_share_is_not_there(open_box: Open) -> None:
    code = """
import ctypes, platform
number = {"x86_64": 206, "aarch64": 0}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(number, 1, ctypes.byref(ctypes.c_ulong(0))), ctypes.get_errno())
"""
    assert open_box().exec(["python3", "-c", code]).stdout == "-1 38\n"


def test_the_processes_of_a_sandbox_cannot_use_up_the_files_of_the_machine(open_box: Open) -> None:
    soft, hard = map(int, open_box().exec("ulimit -Sn; ulimit -Hn").stdout.split())
    machine = int(Path("/proc/sys/fs/file-max").read_text())
    assert soft in (1024, hard)  # runc sometimes raises it
    assert hard == 1024 or hard * Limits().pids <= machine // 4
