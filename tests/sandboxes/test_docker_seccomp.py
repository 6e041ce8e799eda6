"""The system call filter of containers, as the kernel has it: read from a container's first process with ptrace."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenv.sandboxes import DockerSandboxes, Sandbox, seccomp
from openenv.sandboxes.container_cli import ContainerCli, bind_option
from openenv.sandboxes.docker import ensure_host_image, host_mounts

pytestmark = pytest.mark.slow

_SEIZE, _INTERRUPT, _DETACH, _GET_FILTER = 0x4206, 0x4207, 17, 0x420C
_WALL = 0x40000000
_ALLOW = 0x7FFF0000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, X32 = 0x40000003, 0x40000000
BY_ARGUMENT = {"x86_64": (41, 56, 135), "aarch64": (198, 220, 92)}
"""socket, clone, personality: allowed with some arguments."""


class Filter:
    """The filters of a process."""

    def __init__(self, pid: int) -> None:
        self._programs: list[list[tuple[int, int, int, int]]] = []
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.restype = ctypes.c_long
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

        def ptrace(request: int, address: int | None = None, data: object = None) -> int:
            answer = libc.ptrace(request, pid, address, data)
            if answer < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            return int(answer)

        ptrace(_SEIZE)
        try:
            ptrace(_INTERRUPT)
            os.waitpid(pid, _WALL)
            while True:
                try:
                    length = ptrace(_GET_FILTER, len(self._programs))
                except OSError as error:
                    if error.errno == errno.ENOENT:  # there are no more
                        break
                    if error.errno in (errno.EINVAL, errno.EACCES, errno.EIO):
                        pytest.skip("this kernel shows no filters")
                    raise
                code = ctypes.create_string_buffer(length * 8)
                ptrace(_GET_FILTER, len(self._programs), code)
                self._programs.append([struct.unpack_from("<HBBI", code.raw, at) for at in range(0, length * 8, 8)])
        finally:
            ptrace(_DETACH)

    def allows(self, number: int, *arguments: int, audit: int = AUDIT.get(platform.machine(), 0)) -> bool:
        data = struct.pack("<IIQ6Q", number, audit, 0, *arguments, *(0,) * (6 - len(arguments)))
        return all(_run(program, data) == _ALLOW for program in self._programs)


def _run(program: list[tuple[int, int, int, int]], data: bytes) -> int:
    at, accumulator, memory = 0, 0, [0] * 16
    while True:
        operation, then, otherwise, value = program[at]
        at += 1
        match operation:
            case 0x20:
                accumulator = int(struct.unpack_from("<I", data, value)[0])
            case 0x06:
                return value
            case 0x05:
                at += value
            case 0x54:
                accumulator &= value
            case 0x02:
                memory[value] = accumulator
            case 0x60:
                accumulator = memory[value]
            case _:
                holds = {
                    0x15: accumulator == value,
                    0x25: accumulator > value,
                    0x35: accumulator >= value,
                    0x45: bool(accumulator & value),
                }[operation]
                at += then if holds else otherwise


@pytest.fixture(scope="module")
def engine(docker_host: str) -> ContainerCli:
    program = shutil.which("docker")
    assert program is not None
    return ContainerCli("docker", program, docker_host)


@pytest.fixture(scope="module")
def box(docker: DockerSandboxes) -> Iterator[Sandbox]:
    with docker.open() as box:
        yield box


@pytest.fixture(scope="module")
def ours(box: Sandbox, engine: ContainerCli) -> Filter:
    """The filter of a sandbox."""
    return _filter_of(engine, box.sandbox_id)


@pytest.fixture(scope="module")
def engines_own(engine: ContainerCli) -> Iterator[Filter]:
    """The engine's filter of a container without capabilities."""
    mounts = [word for mount in host_mounts() for word in ("--mount", bind_option(mount))]
    options = ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", *mounts]
    name = engine.output("run", "--detach", "--rm", *options, ensure_host_image(engine), "/bin/sleep", "300")
    yield _filter_of(engine, name)
    engine.run("rm", "--force", name)


def _filter_of(engine: ContainerCli, name: str) -> Filter:
    return Filter(int(engine.output("inspect", "--format", "{{.State.Pid}}", name)))


def test_nothing_is_allowed_that_the_engine_itself_refuses(ours: Filter, engines_own: Filter) -> None:
    calls = [(number, value) for number in range(600) for value in (0, 17, 0xFFFFFFFF)]
    calls += [(X32 | number, 0) for number in range(600)]
    values = [*range(64), *(1 << bit | 17 for bit in range(32)), *(1 << bit for bit in range(32))]
    calls += [(number, value) for number in BY_ARGUMENT[platform.machine()] for value in values]
    gained = {call for call in calls if ours.allows(*call) and not engines_own.allows(*call)}
    assert not gained
    assert ours.allows(0)
    assert not any(ours.allows(number, audit=I386) for number in range(500))


def test_forbidden_calls_and_sockets_are_refused(ours: Filter) -> None:
    numbers = seccomp.forbidden(platform.machine())
    assert [name for name, number in numbers.items() if ours.allows(number)] == []
    socket = BY_ARGUMENT[platform.machine()][0]
    families = [family for family in range(64) if ours.allows(socket, family, 1, 0)]
    assert families == [1, 2, 10, 16]
    assert not ours.allows(socket, 16, 3, 9)
    assert not ours.allows(socket, 40 | 1 << 32, 1, 0)


PROGRAMS = {
    "gcc": "echo 'int puts(const char*); int main(void) { return puts(\"built\") < 0; }' | gcc -xc - -o a && ./a",
    "node": 'node -e \'require("worker_threads"); setTimeout(() => console.log("ran"), 5)\'',
    "git": "git init -q r && cd r && git -c user.name=a -c user.email=a@b commit --allow-empty -m x",
    "make": "printf 'all:\\n\\techo made\\n' > Makefile && make -s -j4 all",
    "perl": "perl -e 'print fork ? (wait, 1)[1] : exit 0'",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_ordinary_programs_run(box: Sandbox, program: str) -> None:
    if not Path("/usr/bin", program).exists():
        pytest.skip(f"{program} is not installed in /usr/bin")
    done = box.exec(PROGRAMS[program])
    assert (done.exit_code, bool(done.stdout)) == (0, True), done.stderr


PYTHON = """
import asyncio, concurrent.futures, multiprocessing, os, socket, sqlite3, subprocess, tempfile, threading

async def serve():
    server = await asyncio.start_server(lambda r, w: (w.write(b"hello"), w.close()), "127.0.0.1", 0)
    reader, _ = await asyncio.open_connection(*server.sockets[0].getsockname())
    return await reader.read()

if __name__ == "__main__":
    assert asyncio.run(serve()) == b"hello"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(str, range(4))) == list("0123")
    with multiprocessing.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    assert subprocess.run(["sh", "-c", "ls / | wc -l"], capture_output=True).returncode == 0
    sqlite3.connect("x.db").execute("create table t (a)")
    print("fine")
"""


def test_python_runs_with_threads_processes_and_sockets(box: Sandbox) -> None:
    box.write_text("program.py", PYTHON)
    done = box.exec(["python3", "program.py"])
    assert done.stdout == "fine\n", done.stderr
