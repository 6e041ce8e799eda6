"""Contract checks of isolation, limits, exposed ports, and what remains after a sandbox."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone
from openenv.sandboxes import seccomp
from openenv.sandboxes.base import Limits, Mount, Sandbox, SandboxSpec
from openenv.sandboxes.checks.bench import CheckBench, CheckGroup, eventually, holds, raises, same

# Programs that run inside. If the sandbox refuses, they end with an exception and print nothing.
_CONNECT = "import socket; s = socket.socket({family}); s.settimeout(3); s.connect({address!r}); print('REACHED')"
_SEND = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'HELLO', {address!r})"
_RESOLVE = "import socket; socket.getaddrinfo('example.com', 443); print('RESOLVED')"
_FORBIDDEN = """
import ctypes, errno, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {machines!r}.get(platform.machine(), {{}}).items():
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print(name)
for name, family, kind in (("packet", 17, 3), ("alg", 38, 5), ("vsock", 40, 1), ("xdp", 44, 3), ("bluetooth", 31, 3)):
    try:
        socket.socket(family, kind)
        print(name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EAFNOSUPPORT): print(name, error)
print("tried")
"""

ISOLATION = CheckGroup("isolation")


@ISOLATION.check("isolation.tcp", "No address outside can be connected to.")
def _tcp(bench: CheckBench) -> None:
    for address in (("1.1.1.1", 443), ("8.8.8.8", 53), (_own_address(), 22)):
        _cannot_reach(bench, bench.box, address)


@ISOLATION.check("isolation.udp", "No datagram gets out.")
def _udp(bench: CheckBench) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("0.0.0.0", 0))
        listener.settimeout(0.3)
        bench.python(bench.box, _SEND.format(address=(_own_address(), listener.getsockname()[1])))
        with raises(TimeoutError):  # nothing arrives
            listener.recv(100)


@ISOLATION.check("isolation.dns", "No name is resolved.")
def _dns(bench: CheckBench) -> None:
    holds("RESOLVED" not in bench.python(bench.box, _RESOLVE).stdout, "a name was resolved")


@ISOLATION.check("isolation.loopback", "The host's own servers cannot be reached.")
def _host_loopback(bench: CheckBench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _cannot_reach(bench, bench.box, listener.getsockname()[:2])


@ISOLATION.check("isolation.sockets", "Unix sockets of the host cannot be reached, by name or path.")
def _host_sockets(bench: CheckBench) -> None:
    name = f"\0openenv-check-{secrets.token_hex(8)}"
    path = str(bench.folder() / "socket")
    for address in (name, path):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(1)
            if address == path:
                os.chmod(path, 0o777)
            _cannot_reach(bench, bench.box, address)


@ISOLATION.check("isolation.processes", "The host's processes cannot be seen or killed.")
def _host_processes(bench: CheckBench) -> None:
    with _host_process() as (pid, word):
        visible = bench.box.exec("cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'").stdout
        holds(word not in visible, "a process of the host is visible")
        bench.box.exec(f"kill -9 {pid}")
        holds(Path(f"/proc/{pid}").exists(), "a process of the host was killed")


@ISOLATION.check("isolation.environment", "The host's variables are not inside.")
def _host_environment(bench: CheckBench) -> None:
    environment = bench.box.exec("env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'").stdout
    own = Path("/proc/self/environ").read_bytes().split(b"\0")
    for entry in own:
        name, _, value = entry.partition(b"=")
        if len(value) >= 16 and b"/" not in value and name not in (b"PATH", b"LANG"):
            holds(value.decode("utf-8", "replace") not in environment, f"the host's variable {name!r} is inside")


@ISOLATION.check("isolation.secrets", "The host's files cannot be read.")
def _host_secrets(bench: CheckBench) -> None:
    secret = bench.folder() / "secret.txt"
    word = secrets.token_hex(16)
    secret.write_text(word)
    secret.chmod(0o644)
    root = os.path.join("/proc/1/root", str(secret).lstrip("/"))
    paths = [str(secret), root, f"/proc/self/root{secret}", f"/proc/{os.getpid()}/root{secret}"]
    for path in paths:
        holds(word not in bench.box.exec(["cat", path]).stdout, f"{path} was read")
    for path in ("/etc/shadow", "/root/.ssh", str(Path.home() / ".ssh"), "/var/run/docker.sock", "/proc/kcore"):
        result = bench.box.exec(["head", "-c", "10", path])
        holds(result.exit_code != 0, f"{path} can be read")


@ISOLATION.check("isolation.files", "The host's files cannot be written to.")
def _host_files(bench: CheckBench) -> None:
    word = f"openenv-check-{secrets.token_hex(8)}"
    folders = ["/usr", "/usr/bin", "/bin", "/etc", "/lib", "/var", "/opt", "/", str(bench.folder())]
    for folder in folders:
        bench.box.exec(["/bin/sh", "-c", 'touch "$1/$2"', "sh", folder, word])
        holds(not Path(folder, word).exists(), f"a file was made in the host's {folder}")
    result = bench.box.exec("test -w /bin/sh || test -w /usr/bin/env || test -w /etc/passwd || test -w /usr/lib")
    holds(result.exit_code != 0, "a file of the system can be written to")


@ISOLATION.check("isolation.user", "Commands do not run as root and have no capabilities.")
def _user(bench: CheckBench) -> None:
    status = bench.box.exec("cat /proc/self/status").stdout
    uids = re.search(r"^Uid:\s+(.*)$", status, re.MULTILINE)
    holds(uids is not None and "0" not in uids[1].split(), f"commands run as root: {uids and uids[1]}")
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        match = re.search(rf"^{name}:\s+(\w+)$", status, re.MULTILINE)
        holds(match is not None and int(match[1], 16) == 0, f"{name} is {match and match[1]}")


@ISOLATION.check("isolation.no-gain", "No program gives more rights.")
def _no_gain(bench: CheckBench) -> None:
    status = bench.box.exec("cat /proc/self/status").stdout
    holds(re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE), "programs may gain privileges")
    for command in ("su -c id", "sudo -n id", "mount -t tmpfs none /mnt"):
        holds("uid=0" not in bench.box.exec(command, stdin=b"").stdout, f"{command} became root")


@ISOLATION.check("isolation.kernel", "Dangerous functions of the kernel are refused.")
def _kernel(bench: CheckBench) -> None:
    attempts = (
        "unshare -Ur true", "unshare -n true", "mount -t tmpfs none /tmp", "mknod dev b 1 1", "chroot / true", "dmesg",
        "hostname changed", "head -c 1 /dev/mem", "test -w /proc/sys/kernel/panic", "test -w /proc/sysrq-trigger",
        "test -w /proc/sys/kernel/core_pattern",
    )  # fmt: skip
    for attempt in attempts:
        holds(bench.box.exec(attempt).exit_code != 0, f"{attempt!r} was allowed")


@ISOLATION.check("isolation.calls", "System calls and sockets that give access to more of the kernel are refused.")
def _calls(bench: CheckBench) -> None:
    machines = {machine: seccomp.forbidden(machine) for machine in ("x86_64", "aarch64")}
    result = bench.python(bench.box, _FORBIDDEN.format(machines=machines))
    same((result.exit_code, result.stdout), (0, "tried\n"), "the exit code, and what was not refused")


@ISOLATION.check("isolation.first-process", "What runs the sandbox cannot be harmed from inside.")
def _first_process(bench: CheckBench) -> None:
    box = bench.open()
    inside = box.exec(["readlink", "/proc/self/ns/pid"]).stdout.strip()
    holds(inside and inside != os.readlink("/proc/self/ns/pid"), "processes are the host's own")  # or it would be hit
    box.exec("kill -9 1; kill -STOP 1; kill -TERM 1; kill -9 -1", timeout=10)
    same(box.exec("echo on", timeout=20).stdout, "on\n", "the next command's output")
    result = box.exec("head -c 1 /proc/1/mem; ls /proc/1/fd/ && cat /proc/1/fd/3; cat /proc/1/environ", timeout=10)
    holds(result.timed_out or result.exit_code != 0, "the first process can be read")


@ISOLATION.check("isolation.devices", "There are no disks.")
def _devices(bench: CheckBench) -> None:
    devices = bench.box.exec("find /dev -type b").stdout
    same(devices, "", "the block devices")


@ISOLATION.check("isolation.mounts", "Mounts can be read and not written to.", feature="mounts")
def _mounts(bench: CheckBench) -> None:
    folder = bench.folder()
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("mounted")
    (folder / "sub").chmod(0o777)
    (folder / "sub" / "file").chmod(0o666)
    mounts = (Mount(folder / "sub", "/opt/tools"), Mount(folder / "sub" / "file", "/opt/single"))
    box = bench.open(SandboxSpec(mounts=mounts))
    same(box.exec("cat /opt/tools/file /opt/single").stdout, "mountedmounted", "what is seen of the mounts")
    result = box.exec("echo x > /opt/tools/file || touch /opt/tools/new || echo x > /opt/single || rm /opt/tools/file")
    holds(result.exit_code != 0, "a mount can be written to")
    same((folder / "sub" / "file").read_text(), "mounted", "the host's file")
    same([path.name for path in (folder / "sub").iterdir()], ["file"], "the host's folder")


@ISOLATION.check("isolation.two", "Two sandboxes see nothing of each other.")
def _two_sandboxes(bench: CheckBench) -> None:
    one, two = bench.open(), bench.open()
    word = f"word{secrets.token_hex(8)}"
    one.exec(f"echo {word} | tee /tmp/{word} /dev/shm/{word} $HOME/{word} >/dev/null")
    job = one.start_bg(["/bin/sh", "-c", "sleep 100; :", word])
    bench.python(one, "1")
    server = one.start_bg(["python3", "-m", "http.server", "--bind", "127.0.0.1", "18765"])
    try:
        visible = two.exec("ls /tmp /dev/shm $HOME; cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
        holds(word not in visible, "one sandbox sees the other")
        holds(not two.exists(f"/tmp/{word}"), "one sandbox has the other's file")
        _cannot_reach(bench, two, ("127.0.0.1", 18765))  # the other's server
    finally:
        job.kill()
        server.kill()


def _cannot_reach(bench: CheckBench, box: Sandbox, address: str | tuple[str, int]) -> None:
    code = _CONNECT.format(family="socket.AF_UNIX" if isinstance(address, str) else "socket.AF_INET", address=address)
    holds("REACHED" not in bench.python(box, code).stdout, f"{address!r} was reached")


@contextmanager
def _host_process() -> Iterator[tuple[int, str]]:
    """Run a process on the host with a word in its command line that nothing else has."""
    word = f"host{secrets.token_hex(8)}"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", word]) as process:
        try:
            yield process.pid, word
        finally:
            process.kill()


def _own_address() -> str:
    """Return an address of this host that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


# ---- limits; a sandbox survives an attempt to use more ----

_BOMB = """
import os, time
end = time.monotonic() + 10
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
_FORKS = """
import os, time
count = 0
try:
    while count < 500:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
"""
_BURN = """
import os, time
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        end = time.monotonic() + 1.5
        while time.monotonic() < end: pass
        os._exit(0)
    children.append(pid)
for pid in children: os.waitpid(pid, 0)
print(os.times().children_user + os.times().children_system)
"""

LIMITS = CheckGroup("limits")


@LIMITS.check("limit.memory", "A process that uses up the memory is ended, and the sandbox lives.")
def _memory(bench: CheckBench) -> None:
    box = bench.open(SandboxSpec(limits=Limits(memory_mb=128, disk_mb=64)))
    result = bench.python(box, "x = [bytearray(10_000_000) for _ in range(300)]", timeout=60)
    holds(result.exit_code != 0 and not result.timed_out, "nothing stopped it")
    same(box.exec("echo on").stdout, "on\n", "the next command's output")
    result = bench.python(box, "x = bytearray(2_000_000_000); print('GOT IT')", timeout=60)
    holds("GOT IT" not in result.stdout, "2 GB were available")


@LIMITS.check("limit.processes", "There is a limit to the number of processes.")
def _processes(bench: CheckBench) -> None:
    box = bench.open(SandboxSpec(limits=Limits(pids=64)))
    result = bench.python(box, _FORKS, timeout=60)
    holds(0 < int(result.stdout) <= 64, f"{result.stdout.strip()} processes could be started")
    box.stop_processes()
    same(box.exec("echo on").stdout, "on\n", "the next command's output")


@LIMITS.check("limit.fork-bomb", "A fork bomb can be ended, and the sandbox lives.")
def _fork_bomb(bench: CheckBench) -> None:
    box = bench.open(SandboxSpec(limits=Limits(pids=100, cpus=1.0)))
    holds(int(bench.python(box, _FORKS, timeout=60).stdout) <= 100, "there is no limit")  # or the host would be hit
    box.stop_processes()
    result = bench.python(box, _BOMB, timeout=2)
    same(result.timed_out, True, "timed_out")
    same(box.exec("echo on", timeout=30).stdout, "on\n", "the next command's output")
    job = box.start_bg(["python3", "-c", _BOMB])
    box.stop_processes()
    same(job.wait(30), 137, "the exit code of the bomb")
    same(box.exec("echo on", timeout=30).stdout, "on\n", "the next command's output")


@LIMITS.check("limit.cpu", "There is a limit to processor time.")
def _cpu(bench: CheckBench) -> None:
    box = bench.open(SandboxSpec(limits=Limits(cpus=0.5)))
    used = float(bench.python(box, _BURN, timeout=60).stdout)
    holds(used < 1.3, f"1.5 s took {used:.2f} s of processor time")


@LIMITS.check("limit.disk", "A full disk is an error of the writer.")
def _disk(bench: CheckBench) -> None:
    box = bench.open(SandboxSpec(limits=Limits(disk_mb=64)))
    for path in ("$HOME/full", "/tmp/full", "/dev/shm/full"):
        result = box.exec(f"head -c 200000000 /dev/zero > {path}", timeout=60)
        holds(result.exit_code != 0, f"200 MB fit into {path}")
    same(box.exec("echo on").stdout, "on\n", "the next command's output")
    same(box.exec("rm -f $HOME/full /tmp/full; echo x > $HOME/again").exit_code, 0, "writing after making room")


@LIMITS.check("limit.disk-and-memory", "Filling the disk does not end the sandbox.")
def _disk_default(bench: CheckBench) -> None:
    box = bench.open(SandboxSpec(limits=Limits(memory_mb=96, disk_mb=96)))
    result = box.exec("head -c 500000000 /dev/zero > $HOME/full; head -c 500000000 /dev/zero > /tmp/full", timeout=60)
    holds(result.exit_code != 0, "500 MB fit into 96 MB")
    same(box.exec("echo on").stdout, "on\n", "the next command's output")


# ---- exposed sockets of the host ----

_CLIENT = """
import hashlib, socket, threading, time

def ask(data, timeout=30):
    # Send everything, end that half, and return the parts of the answer with the times of their arrival.
    s = socket.create_connection(("127.0.0.1", {port}), timeout)
    def send():
        s.sendall(data)
        s.shutdown(socket.SHUT_WR)
    threading.Thread(target=send).start()
    return [(time.monotonic(), part) for part in iter(lambda: s.recv(1 << 20), b"")]

def answer(data):
    return b"".join(part for _, part in ask(data))
"""
_ASK = (
    _CLIENT
    + """
print(answer(b"question").decode())
"""
)
_MANY = (
    _CLIENT
    + """
wrong = []
def check(word):
    if answer(word) != b"<" + word + b">": wrong.append(word)
threads = [threading.Thread(target=check, args=(b"w%d" % n,)) for n in range(100)]
for t in threads: t.start()
for t in threads: t.join()
print(len(wrong))
"""
)
_FLOOD = """
import socket, time
held = [socket.socket() for _ in range(400)]
for s in held:
    s.setblocking(False)
    s.connect_ex(("127.0.0.1", {port}))
print("flooded", flush=True)
time.sleep(60)
"""
_STREAM = (
    _CLIENT
    + """
times = [at for at, _ in ask(b"go")]
print(len(times), times[-1] - times[0])
"""
)
_LARGE = (
    _CLIENT
    + """
sent = bytes(range(256)) * 80_000
got = answer(sent)
print(len(got), hashlib.sha256(got).hexdigest() == hashlib.sha256(sent).hexdigest())
"""
)

PORTS = CheckGroup()


@PORTS.check("port.ask", "A port inside reaches a socket of the host; a half-closed connection still answers.")
def _ask(bench: CheckBench) -> None:
    with _served(bench, _answer) as (box, port):
        same(bench.python(box, _ASK.format(port=port)).stdout, "<question>\n", "the answer")


@PORTS.check("port.url", "The URL of a port is on the loopback address.")
def _url(bench: CheckBench) -> None:
    with _serving(bench.folder() / "s", _answer) as path:
        port = _free_port()
        same(bench.open().expose(path, port=port), f"http://127.0.0.1:{port}", "the URL")


@PORTS.check("port.stream", "Bytes are passed on as they come.")
def _streaming(bench: CheckBench) -> None:
    with _served(bench, _drip) as (box, port):
        count, seconds = bench.python(box, _STREAM.format(port=port)).stdout.split()
        holds(int(count) >= 5 and float(seconds) > 0.3, f"{count} parts within {seconds} s: they were held back")


@PORTS.check("port.many", "100 connections at once get their own answers.")
def _many(bench: CheckBench) -> None:
    with _served(bench, _answer) as (box, port):
        same(bench.python(box, _MANY.format(port=port), timeout=60).stdout, "0\n", "the number of wrong answers")


@PORTS.check("port.flood", "A sandbox that opens hundreds of connections and keeps them keeps no other out.")
def _flood(bench: CheckBench) -> None:
    with _served(bench, _answer) as (neighbour, port), _serving(bench.folder() / "s", _answer) as path:
        greedy, own_port = bench.open(), _free_port()
        greedy.expose(path, port=own_port)
        bench.python(greedy, "")
        output: list[bytes] = []
        code = _FLOOD.format(port=own_port)
        job = greedy.start_bg(["python3", "-c", code], on_output=lambda _, data: output.append(data))
        eventually(lambda: b"flooded" in b"".join(output), "the connections were not made", 30)
        same(bench.python(neighbour, _ASK.format(port=port)).stdout, "<question>\n", "the neighbour's answer")
        job.kill()
        same(bench.python(greedy, _ASK.format(port=own_port)).stdout, "<question>\n", "the answer after the flood")


@PORTS.check("port.large", "20 MB go both ways at once.")
def _large(bench: CheckBench) -> None:
    with _served(bench, _echo) as (box, port):
        same(bench.python(box, _LARGE.format(port=port), timeout=60).stdout, "20480000 True\n", "size and hash")


@PORTS.check("port.nothing-else", "Other ports are closed, and one without a server ends the connection.")
def _nothing_else(bench: CheckBench) -> None:
    with _served(bench, _answer) as (box, _):
        holds(bench.python(box, _ASK.format(port=1)).exit_code != 0, "another port was open")
        silent = _free_port()
        box.expose(bench.folder() / "missing", port=silent)
        result = bench.python(box, _ASK.format(port=silent), timeout=20)
        holds("<" not in result.stdout and not result.timed_out, "a port without a server answered or hung")


@PORTS.check("port.stays", "A port outlives the processes inside.")
def _stays(bench: CheckBench) -> None:
    with _served(bench, _answer) as (box, port):
        box.stop_processes()
        same(bench.python(box, _ASK.format(port=port)).stdout, "<question>\n", "the answer")


@PORTS.check("port.two", "There can be several ports, each once.")
def _two_ports(bench: CheckBench) -> None:
    with _serving(bench.folder() / "a", _answer) as one, _serving(bench.folder() / "b", _echo) as two:
        box = bench.open()
        first, second = _free_port(), _free_port()
        box.expose(one, port=first)
        box.expose(two, port=second)
        same(bench.python(box, _ASK.format(port=first)).stdout, "<question>\n", "the first answer")
        same(bench.python(box, _ASK.format(port=second)).stdout, "question\n", "the second answer")
        with raises(SandboxError):
            box.expose(one, port=first)


@PORTS.check("port.not-outside", "The port is not open on the host.", feature="ports")
def _not_outside(bench: CheckBench) -> None:
    with _served(bench, _answer) as (_, port), raises(OSError):
        socket.create_connection(("127.0.0.1", port), 2).close()


def _free_port() -> int:
    """Return a port that is free on the host, for backends that share the host's network."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _served(bench: CheckBench, answer: Callable[[socket.socket], None]) -> Iterator[tuple[Sandbox, int]]:
    with _serving(bench.folder() / "s", answer) as path:
        box, port = bench.open(), _free_port()
        box.expose(path, port=port)
        yield box, port


class _UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def _serving(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[Path]:
    """Serve a unix socket of the host, a thread for each connection."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                answer(self.request)

    with _UnixServer(str(path), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield path
        finally:
            server.shutdown()


def _answer(connection: socket.socket) -> None:
    question = b""
    while data := connection.recv(65536):
        question += data
    connection.sendall(b"<" + question + b">")


def _drip(connection: socket.socket) -> None:
    connection.recv(100)
    for _ in range(6):
        connection.sendall(b"drop")
        time.sleep(0.1)


def _echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


# ---- what remains after a sandbox ----

ENDINGS = CheckGroup()


@ENDINGS.check("end.nothing-left", "A closed or killed sandbox leaves nothing on the host.")
def _nothing_left(bench: CheckBench) -> None:
    bench.box.exec("true")
    before = sorted(bench.backend.leftovers())
    for end in ("close", "kill"):
        box = bench.open()
        box.start_bg("(setsid sleep 600 &); sleep 600")
        box.exec("sleep 600 & (setsid sleep 600 &); echo x > $HOME/file; mkdir /tmp/folder")
        box.exec("sleep 60", timeout=0.3)
        getattr(box, end)()
        same(sorted(bench.backend.leftovers()), before, f"what is left after {end}()")


@ENDINGS.check("end.descriptors", "Open files do not grow.")
def _descriptors(bench: CheckBench) -> None:
    self_fds = "/proc/self/fd"
    if not os.path.isdir(self_fds):
        return
    counts = []
    for _ in range(3):
        box = bench.open()
        box.exec("echo x >&2", stdin=b"x")
        box.write_text("a", "b")
        box.read_text("a")
        box.close()
        counts.append(len(os.listdir(self_fds)))
    # A connection of a client's pool may close a moment after its sandbox.
    eventually(lambda: len(os.listdir(self_fds)) <= counts[0], f"open files grow: {counts}")


@ENDINGS.check("end.threads", "Threads do not grow.")
def _threads(bench: CheckBench) -> None:
    counts = []
    for _ in range(3):
        box = bench.open()
        box.start_bg("sleep 0.1; echo x", on_output=lambda stream, data: None).wait(20)
        box.exec("true")
        box.close()
        counts.append(threading.active_count())
    # A thread that reads a connection may end a moment after its sandbox.
    eventually(lambda: threading.active_count() <= counts[0] + 1, f"threads grow: {counts}")


@ENDINGS.check("end.with", "A with block closes its sandbox, whatever happens in it.")
def _context_manager(bench: CheckBench) -> None:
    box = bench.open()
    with raises(ZeroDivisionError), box as same_box:
        same(same_box, box, "what the with block gives")
        raise ZeroDivisionError
    with raises(SandboxGone):
        box.exec("true")


@ENDINGS.check("end.identity", "Every sandbox has a name of its own.")
def _identity(bench: CheckBench) -> None:
    one, two = bench.open(), bench.backend.create(timeout_s=60, envs={"A": "b"}, metadata={"who": "check"})
    with two:
        holds(one.sandbox_id and one.sandbox_id != two.sandbox_id, "two sandboxes have the same name")
        same(two.exec('printf "%s" "$A"').stdout, "b", "the variable")
