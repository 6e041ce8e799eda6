"""Checks: what a sandbox must not reach. Each is a small attack, with the host as the witness."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openenv.sandboxes.base import Mount
from openenv.sandboxes.checks.bench import Bench, Check, holds, same

_CONNECT = """
import socket, sys
family, address = {family}, {address!r}
try:
    s = socket.socket(family, socket.SOCK_STREAM)
    s.settimeout(3)
    s.connect(address)
    print("REACHED")
except OSError as error:
    print("refused", error)
"""
_UDP = """
import socket
for address in (("1.1.1.1", 53), ("8.8.8.8", 53), ({host!r}, {port})):
    try:
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.settimeout(1)
        s.sendto(b"HELLO", address)
        print("SENT", address)
    except OSError as error:
        print("refused", error)
"""
_DNS = """
import socket
try:
    print("FOUND", socket.getaddrinfo("example.com", 443))
except OSError as error:
    print("refused", error)
"""


def tcp(bench: Bench) -> None:
    """Connect to addresses outside."""
    for address in (("1.1.1.1", 443), ("8.8.8.8", 53), (_own_address(), 22)):
        code = _CONNECT.format(family="socket.AF_INET", address=address)
        holds("REACHED" not in bench.python(bench.box, code).stdout, f"{address} was reached")


def udp(bench: Bench) -> None:
    """Send datagrams outside and to the host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("0.0.0.0", 0))
        listener.settimeout(0.3)
        bench.python(bench.box, _UDP.format(host=_own_address(), port=listener.getsockname()[1]))
        try:
            data = listener.recv(100)
        except TimeoutError:
            data = b""
        same(data, b"", "what the host received")


def dns(bench: Bench) -> None:
    """Resolve a name."""
    holds("FOUND" not in bench.python(bench.box, _DNS).stdout, "a name was resolved")


def host_loopback(bench: Bench) -> None:
    """Connect to a server that listens on the host's loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = _CONNECT.format(family="socket.AF_INET", address=listener.getsockname()[:2])
        holds("REACHED" not in bench.python(bench.box, code).stdout, "the host's loopback was reached")


def host_sockets(bench: Bench) -> None:
    """Connect to unix sockets of the host, by name and by path."""
    name = f"\0openenv-check-{secrets.token_hex(8)}"
    path = str(bench.folder() / "socket")
    for address in (name, path):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(1)
            if address == path:
                os.chmod(path, 0o777)
            code = _CONNECT.format(family="socket.AF_UNIX", address=address)
            holds("REACHED" not in bench.python(bench.box, code).stdout, f"{address!r} was reached")


def host_processes(bench: Bench) -> None:
    """Look for a process of the host, and send it a signal."""
    with _host_process() as (pid, word):
        found = bench.box.exec("cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'").stdout
        holds(word not in found, "a process of the host is visible")
        bench.box.exec(f"kill -9 {pid}")
        holds(Path(f"/proc/{pid}").exists(), "a process of the host was killed")


def host_environment(bench: Bench) -> None:
    """Look for the environment of the process that started the sandbox."""
    found = bench.box.exec("env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'").stdout
    own = Path("/proc/self/environ").read_bytes().split(b"\0")
    for entry in own:
        name, _, value = entry.partition(b"=")
        if len(value) >= 16 and b"/" not in value and name not in (b"PATH", b"LANG"):
            holds(value.decode("utf-8", "replace") not in found, f"the host's variable {name!r} is inside")


def host_secrets(bench: Bench) -> None:
    """Read files of the host."""
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


def host_files(bench: Bench) -> None:
    """Write to the system and to the host's folders."""
    word = f"openenv-check-{secrets.token_hex(8)}"
    folders = ["/usr", "/usr/bin", "/bin", "/etc", "/lib", "/var", "/opt", "/", str(bench.folder())]
    for folder in folders:
        bench.box.exec(["/bin/sh", "-c", 'touch "$1/$2"', "sh", folder, word])
        holds(not Path(folder, word).exists(), f"a file was made in the host's {folder}")
    result = bench.box.exec("test -w /bin/sh || test -w /usr/bin/env || test -w /etc/passwd || test -w /usr/lib")
    holds(result.exit_code != 0, "a file of the system can be written to")


def user(bench: Bench) -> None:
    """Ask who commands run as, and with which capabilities."""
    status = bench.box.exec("cat /proc/self/status").stdout
    uids = re.search(r"^Uid:\s+(.*)$", status, re.MULTILINE)
    holds(uids is not None and "0" not in uids[1].split(), f"commands run as root: {uids and uids[1]}")
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        found = re.search(rf"^{name}:\s+(\w+)$", status, re.MULTILINE)
        holds(found is not None and int(found[1], 16) == 0, f"{name} is {found and found[1]}")


def no_gain(bench: Bench) -> None:
    """Try to become root through set-id programs."""
    status = bench.box.exec("cat /proc/self/status").stdout
    holds(re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE), "programs may gain privileges")
    for command in ("su -c id", "sudo -n id", "mount -t tmpfs none /mnt"):
        holds("uid=0" not in bench.box.exec(command, stdin=b"").stdout, f"{command} became root")


def kernel(bench: Bench) -> None:
    """Make namespaces, mount, and find settings of the kernel that could be changed."""
    attempts = (
        "unshare -Ur true", "unshare -n true", "mount -t tmpfs none /tmp", "mknod dev b 1 1", "chroot / true", "dmesg",
        "hostname changed", "head -c 1 /dev/mem", "test -w /proc/sys/kernel/panic", "test -w /proc/sysrq-trigger",
        "test -w /proc/sys/kernel/core_pattern",
    )  # fmt: skip
    for attempt in attempts:
        holds(bench.box.exec(attempt).exit_code != 0, f"{attempt!r} was allowed")


def first_process(bench: Bench) -> None:
    """Kill, stop and look into the first process inside."""
    box = bench.open()
    inside = box.exec(["readlink", "/proc/self/ns/pid"]).stdout.strip()
    holds(inside and inside != os.readlink("/proc/self/ns/pid"), "processes are the host's own")  # or it would be hit
    box.exec("kill -9 1; kill -STOP 1; kill -TERM 1; kill -9 -1", timeout=10)
    same(box.exec("echo on", timeout=20).stdout, "on\n", "the next command's output")
    result = box.exec("head -c 1 /proc/1/mem; ls /proc/1/fd/ && cat /proc/1/fd/3; cat /proc/1/environ", timeout=10)
    holds(result.timed_out or result.exit_code != 0, "the first process can be read")


def devices(bench: Bench) -> None:
    """List devices."""
    found = bench.box.exec("find /dev -type b").stdout
    same(found, "", "the block devices")


def mounts(bench: Bench) -> None:
    """Read and write what was mounted."""
    folder = bench.folder()
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("mounted")
    (folder / "sub").chmod(0o777)
    (folder / "sub" / "file").chmod(0o666)
    box = bench.open(mounts=(Mount(folder / "sub", "/opt/tools"), Mount(folder / "sub" / "file", "/opt/single")))
    same(box.exec("cat /opt/tools/file /opt/single").stdout, "mountedmounted", "what is seen of the mounts")
    result = box.exec("echo x > /opt/tools/file || touch /opt/tools/new || echo x > /opt/single || rm /opt/tools/file")
    holds(result.exit_code != 0, "a mount can be written to")
    same((folder / "sub" / "file").read_text(), "mounted", "the host's file")
    same([path.name for path in (folder / "sub").iterdir()], ["file"], "the host's folder")


def two_sandboxes(bench: Bench) -> None:
    """Look for one sandbox from within another one."""
    one, two = bench.open(), bench.open()
    word = f"word{secrets.token_hex(8)}"
    one.exec(f"echo {word} | tee /tmp/{word} /dev/shm/{word} $HOME/{word} >/dev/null")
    job = one.start_bg(["/bin/sh", "-c", "sleep 100; :", word])
    bench.python(one, "1")
    server = one.start_bg(["python3", "-m", "http.server", "--bind", "127.0.0.1", "18765"])
    try:
        found = two.exec("ls /tmp /dev/shm $HOME; cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
        holds(word not in found, "one sandbox sees the other")
        holds(not two.exists(f"/tmp/{word}"), "one sandbox has the other's file")
        code = _CONNECT.format(family="socket.AF_INET", address=("127.0.0.1", 18765))
        holds("REACHED" not in bench.python(two, code).stdout, "one sandbox reaches the other's port")
    finally:
        job.kill()
        server.kill()


@contextmanager
def _host_process() -> Iterator[tuple[int, str]]:
    """Run a process on the host with a word in its command line that nothing else has."""
    word = f"host{secrets.token_hex(8)}"
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", word])
    try:
        yield process.pid, word
    finally:
        process.kill()
        process.wait()


def _own_address() -> str:
    """Return an address of this host that is not loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


_FEATURE = "isolation"
CHECKS = (
    Check("isolation.tcp", "No address outside can be connected to.", tcp, _FEATURE),
    Check("isolation.udp", "No datagram gets out.", udp, _FEATURE),
    Check("isolation.dns", "No name is resolved.", dns, _FEATURE),
    Check("isolation.loopback", "The host's own servers cannot be reached.", host_loopback, _FEATURE),
    Check("isolation.sockets", "Unix sockets of the host cannot be reached, by name or path.", host_sockets, _FEATURE),
    Check("isolation.processes", "The host's processes cannot be seen or killed.", host_processes, _FEATURE),
    Check("isolation.environment", "The host's variables are not inside.", host_environment, _FEATURE),
    Check("isolation.secrets", "The host's files cannot be read.", host_secrets, _FEATURE),
    Check("isolation.files", "The host's files cannot be written to.", host_files, _FEATURE),
    Check("isolation.user", "Commands do not run as root and have no capabilities.", user, _FEATURE),
    Check("isolation.no-gain", "No program gives more rights.", no_gain, _FEATURE),
    Check("isolation.kernel", "The kernel's dangerous doors are shut.", kernel, _FEATURE),
    Check("isolation.first-process", "What runs the sandbox cannot be harmed from inside.", first_process, _FEATURE),
    Check("isolation.devices", "There are no disks.", devices, _FEATURE),
    Check("isolation.mounts", "Mounts can be read and not written to.", mounts, "mounts"),
    Check("isolation.two", "Two sandboxes see nothing of each other.", two_sandboxes, _FEATURE),
)
