"""The processes of a local sandbox: how bubblewrap starts them, why it may not run, and the socket to PID 1 inside.

The view inside:

    /usr /bin /lib* /nix/store   the host's, read-only             /proc /dev   private, /dev read-only
    /etc                         some of the host's files and      /tmp         tmpfs, 1/4 of disk_mb (with /dev/shm)
                                 folders; passwd, hosts and such   $HOME        tmpfs, 3/4 of disk_mb
                                 are made up                       mounts       the spec's, read-only
    /run/openenv                 init_process and trees, compiled  /            read-only in the end

Started by root, the sandbox needs no user namespace: PID 1 changes to the unprivileged user itself and drops every
capability. Otherwise bubblewrap creates a user namespace. In both cases the only network is a private loopback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import platform
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePosixPath

from openenv.errors import SandboxError, SandboxTreeError, SandboxUnavailable, SandboxUnsupported
from openenv.sandboxes import seccomp, trees
from openenv.sandboxes.base import SandboxSpec, root_of
from openenv.sandboxes.exposed_ports import Exposure
from openenv.sandboxes.host import limit_inside, limit_terminals
from openenv.sandboxes.local.cgroups import Group

with contextlib.suppress(ImportError):  # Windows does not have it, and never uses it
    import fcntl

INSIDE = "/run/openenv"
# With a merged /usr these are links such as /bin -> usr/bin, and links inside; otherwise they are mounted folders.
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC_FILES = (
    "debian_version", "ld.so.cache", "ld.so.conf", "localtime", "mime.types", "os-release", "pki/tls/cert.pem",
    "pki/tls/openssl.cnf", "protocols", "services", "shells", "ssl/cert.pem", "ssl/openssl.cnf", "timezone",
)  # fmt: skip
_ETC_FOLDERS = ("alternatives", "crypto-policies", "pki/ca-trust/extracted", "pki/tls/certs", "ssl/certs")
"""The visible part of the host's /etc; the rest may hold secrets."""
_RESERVED = ("/", "/proc", "/dev", "/sys", "/usr", "/etc", "/run", *_SYSTEM)
_INSTALL = {
    "debian": "apt-get install -y bubblewrap",
    "ubuntu": "apt-get install -y bubblewrap",
    "fedora": "dnf install -y bubblewrap",
    "rhel": "dnf install -y bubblewrap",
    "arch": "pacman -S --noconfirm bubblewrap",
    "alpine": "apk add bubblewrap",
    "suse": "zypper install -y bubblewrap",
    "opensuse": "zypper install -y bubblewrap",
}
_SYSCTLS = (
    # a patch of Debian; Ubuntu since 23.10; the kernel's own limit, which hardened machines set to 0
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
)
_NEEDED_CAPABILITIES = (0, 6, 7, 8, 12, 21)
"""CHOWN, SETGID, SETUID, SETPCAP, NET_ADMIN, SYS_ADMIN: with these no user namespace is needed."""


def find_bubblewrap() -> tuple[str, tuple[int, ...]]:
    """Return the path of bubblewrap and its version.

    Raises:
        SandboxUnavailable: It is not installed; the text names the command that installs it.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable("Local sandboxes need Linux. Use the docker backend on this system.")
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailable(
            f"Local sandboxes need bubblewrap, which is not installed. Install it with: {install_command()}"
        )
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"{path} does not run: {error}") from error
    number = re.search(r"(\d+(?:\.\d+)+)", text)
    version = tuple(int(part) for part in number[1].split(".")) if number else (0,)
    if version < (0, 5):  # the first with --perms
        raise SandboxUnavailable(f"Local sandboxes need bubblewrap 0.5 or later; {path} is {text.strip()}.")
    return path, version


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python for programs inside: this process's Python, without its virtual environment."""

    executable: str
    folders: tuple[str, ...]
    """The folders of it outside /usr, which have to be mounted."""

    @classmethod
    def current(cls) -> Interpreter:
        """Return the interpreter below this process's virtual environment."""
        # Not the virtual environment, which holds this program's packages: PID 1 does not need them.
        prefix = sys.base_prefix
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        executable = os.path.join(prefix, "bin", name)
        if not os.path.exists(executable):
            executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        folders = dict.fromkeys((prefix, os.path.realpath(prefix), os.path.dirname(os.path.dirname(executable))))
        outside = (folder for folder in folders if folder not in ("/", "/usr") and not folder.startswith("/usr/"))
        return cls(executable, tuple(outside))

    @property
    def search_path(self) -> str:
        """Return the PATH of commands."""
        system = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
        return f"{os.path.dirname(self.executable)}:{system}" if self.folders else system


@dataclass(frozen=True, slots=True)
class SandboxUser:
    """The user that commands run as inside."""

    uid: int
    gid: int
    home: str
    privileged: bool
    """Whether root starts the sandbox, and PID 1 changes to this user; otherwise a user namespace does it."""


def is_privileged() -> bool:
    """Return whether this process is root with all capabilities that replace a user namespace."""
    if os.geteuid() != 0:
        return False
    # Root in a container often has only some of root's rights, and then needs a user namespace as any user does.
    text = Path("/proc/self/status").read_text()
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)$", text, re.MULTILINE)
    effective = int(mask[1], 16) if mask else 0
    return all(effective >> bit & 1 for bit in _NEEDED_CAPABILITIES)


def compiled(source: Path) -> bytes:
    """Return a Python file as the bytes of a .pyc file, which starts faster."""
    loader = SourceFileLoader(source.stem, str(source))
    code = loader.get_code(source.stem)
    # The header: magic number, flags, time, size. Of a file that is run by its path only the first is read.
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def namespaces(user: SandboxUser) -> list[str]:
    """Return the options that separate the sandbox from the host."""
    # --as-pid-1: our own first process is the one that reaps and supervises, not bubblewrap's.
    # --unshare-cgroup-try: kernels before 4.6 lack this namespace.
    options = [
        "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        "--hostname", "sandbox", "--as-pid-1", "--cap-drop", "ALL",
    ]  # fmt: skip
    if user.privileged:
        # PID 1 needs these to hand over the home, become the user and drop the rest; it keeps none (`prepare`).
        for name in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_CHOWN"):
            options += ["--cap-add", name]
        return options
    return [*options, "--unshare-user", "--uid", str(user.uid), "--gid", str(user.gid)]


def file_system(spec: SandboxSpec, user: SandboxUser, kit: LaunchKit) -> list[str]:
    """Return the options that lay out the file system inside."""
    sizes = kit.version >= (0, 7)  # the first with --size; before that only the memory limit bounds a tmpfs
    disk = max(8, spec.limits.disk_mb)
    shared = max(1, disk // 32)
    # The order matters: every option works on what those before it have made, and may cover it.
    return [
        *kit.system,
        *("--proc", "/proc", "--dev", "/dev"),
        *_scratch("/dev/shm", "1777", shared, sizes),
        *("--remount-ro", "/dev"),  # after /dev/shm was made in it: else all of /dev could be filled
        *kit.etc,
        *("--dir", "/var", "--symlink", "../tmp", "/var/tmp"),
        *_scratch("/tmp", "1777", disk // 4 - shared, sizes),
        *_parents(user.home),
        *_scratch(user.home, "0755", disk - disk // 4, sizes),
        *(part for folder in kit.interpreter.folders for part in _bind(folder, folder)),
        *_mounts(spec, user),
    ]


def copied_etc() -> dict[str, bytes]:
    """Return the visible files of the host's /etc, by their paths."""
    paths = (Path("/etc", name) for name in _ETC_FILES)
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def own_etc(user: SandboxUser) -> dict[str, bytes]:
    """Return the files of /etc with the user of a sandbox."""
    entry = f"user:x:{user.uid}:{user.gid}:user:{user.home}:/bin/sh"
    passwd = f"root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n{entry}\nnobody:x:65534:65534::/nonexistent:/bin/false\n"
    group = f"root:x:0:\nuser:x:{user.gid}:\nnogroup:x:65534:\n"
    return {"/etc/passwd": passwd.encode(), "/etc/group": group.encode()}


def _equal_etc() -> dict[str, bytes]:
    """Return the files of /etc that are equal in all sandboxes, and say nothing about the host."""
    texts = {
        "hosts": "127.0.0.1 localhost sandbox\n",
        "hostname": "sandbox\n",
        # only files: the host's may ask daemons (sssd, avahi, systemd) that are not inside, and wait for them
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
        "resolv.conf": "",  # a lookup fails at once instead of waiting for a name server
    }
    return {f"/etc/{name}": text.encode() for name, text in texts.items()}


def checked_home(home: str) -> str:
    """Return the home folder; raise SandboxUnsupported if it cannot be there."""
    path = PurePosixPath(home)
    # A tmpfs there would cover the sandbox's own files.
    reserved = str(path) in _RESERVED or _below(home, ("/proc", "/dev", "/usr"))
    if reserved or not path.is_absolute() or ".." in path.parts:
        raise SandboxUnsupported(f"A local sandbox cannot have its home at {home!r}.")
    return str(path)


def explain(output: str) -> str:
    """Return bubblewrap's error, and the system setting that causes it, if known."""
    # For example "bwrap: setting up uid map: Permission denied": true, and no help to a user.
    text = output.strip() or "bubblewrap ended without a message"
    if not re.search(r"namespace|uid map|permission|not permitted|loopback|RTM_", text, re.IGNORECASE):
        return text
    for file, bad, good in _SYSCTLS:
        try:
            value = Path("/proc/sys", file).read_text().strip()
        except OSError:
            continue
        if value == bad and os.geteuid() != 0:
            return f"{text}. This machine forbids user namespaces; allow them with: sudo sysctl -w {good}"
    return f"{text}. In a container, start it with --privileged or with CAP_SYS_ADMIN and seccomp=unconfined."


def install_command(release: Path = Path("/etc/os-release")) -> str:
    """Return the command that installs bubblewrap on this distribution."""
    try:
        text = release.read_text()
    except OSError:
        text = ""
    words = re.findall(r"^(?:ID|ID_LIKE)=\"?([^\"\n]+)\"?$", text, re.MULTILINE)
    names = [name for line in words for name in line.split()]
    command = next((_INSTALL[name] for name in names if name in _INSTALL), None)
    if command is None:
        return "the package 'bubblewrap' of your distribution"
    return command if os.geteuid() == 0 else f"sudo {command}"


def _system() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    if os.path.isdir("/nix/store"):
        yield from ("--ro-bind", "/nix/store", "/nix/store")


def _host_etc() -> Iterator[str]:
    for name in ("/etc", "/etc/pki", "/etc/pki/tls", "/etc/ssl"):
        yield from ("--perms", "0755", "--dir", name)
    for name in _ETC_FOLDERS:
        path = f"/etc/{name}"
        if os.path.isdir(path):
            yield from _bind(os.path.realpath(path), path)


def _bind(source: str, target: str) -> list[str]:
    return [*_parents(target), "--ro-bind", source, target]


@cache
def _parents(path: str) -> tuple[str, ...]:
    """Return the options that make the folders above a path; bubblewrap would make them unreadable for the user."""
    if _below(path, ("/usr",)):
        return ()
    folders = [str(folder) for folder in PurePosixPath(path).parents][-2::-1]
    return tuple(word for folder in folders for word in ("--perms", "0755", "--dir", folder))


def _scratch(path: str, mode: str, megabytes: int, sizes: bool) -> list[str]:
    size = ["--size", str(max(1, megabytes) * 1024 * 1024)] if sizes else []
    return [*size, "--perms", mode, "--tmpfs", path]


def _mounts(spec: SandboxSpec, user: SandboxUser) -> Iterator[str]:
    for mount in spec.mounts:
        target = PurePosixPath(mount.target)
        if not target.is_absolute() or ".." in target.parts or str(target) in _RESERVED:
            raise SandboxUnsupported(f"Nothing can be mounted at {mount.target!r} in a local sandbox.")
        if not mount.source.exists():
            raise SandboxUnsupported(f"There is no {mount.source} to mount at {mount.target}.")
        if user.privileged and not _readable(mount.source, user):
            raise SandboxUnsupported(
                f"{mount.source} is mounted at {mount.target}, but the sandbox's user could not read it. Make it "
                f"readable for others: chmod -R o+rX '{mount.source}'"
            )
        yield from _bind(str(mount.source.resolve()), str(target))


def _readable(source: Path, user: SandboxUser) -> bool:
    # Only the top of the mount: a look at all of it could take minutes, and this catches the usual 0700 folder of root.
    about = source.stat()
    wanted = 0o5 if stat.S_ISDIR(about.st_mode) else 0o4
    if about.st_uid == user.uid:
        wanted <<= 6
    return about.st_mode & wanted == wanted


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path.startswith(folder + "/") for folder in folders)


# ---- the socket to PID 1 inside (`init_process`) ----
#
# Every request has a channel for its replies. A reply was written inside and is not trusted: it is a kind byte, a
# number and a text, and nothing is evaluated.

_LARGE = 128 * 1024
_REPLY = 4096
_MARSHAL = 2  # a format that every version of Python reads


@dataclass(frozen=True, slots=True)
class InitReply:
    """The reply to a request: `s`tarted, e`x`ited, `o`k or `e`rror, and its value."""

    kind: str
    value: bytes

    @property
    def number(self) -> int:
        """Return the number at the beginning of the value."""
        try:
            return int(self.value.split(b" ", 1)[0])
        except ValueError:
            raise SandboxError("The sandbox sent an invalid reply.") from None

    def raise_for_path(self, path: str) -> None:
        """Raise the OSError of a failed file operation."""
        if self.kind != "e":
            return
        text = self.value.partition(b" ")[2].decode("utf-8", "replace")
        if self.number == 0:
            raise SandboxTreeError(f"{path}: {text}")
        raise OSError(self.number, os.strerror(self.number), path)


class ReplyChannel(socket.socket):
    """The socket on which the replies to one request arrive."""

    def receive(self, timeout: float | None = None) -> InitReply | None:
        """Return the next reply; None if the other end is gone. Raise TimeoutError if none comes in time."""
        poll = select.poll()  # not `settimeout`, which is another system call
        poll.register(self.fileno(), select.POLLIN)
        try:
            if poll.poll(None if timeout is None else timeout * 1000):
                return _parsed(self.recv(_REPLY, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except ConnectionError:
            return None
        raise TimeoutError("no reply in time")

    def receive_fd(self, timeout: float) -> tuple[InitReply | None, int | None]:
        """Return the next reply with the file descriptor that comes with it."""
        self.settimeout(timeout)
        data, fds, _, _ = socket.recv_fds(self, _REPLY, 1)
        return _parsed(data), fds[0] if fds else None


def _parsed(data: bytes) -> InitReply | None:
    return InitReply(data[:1].decode("latin-1"), data[1:]) if data else None


class Control:
    """The one socket to PID 1 inside. When it closes, the sandbox ends."""

    def __init__(self) -> None:
        self._end, self.inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def configure(self, config: Mapping[str, object]) -> None:
        """Send what PID 1 needs before it can serve."""
        self._end.send(marshal.dumps(dict(config), _MARSHAL))

    def wait_ready(self, timeout: float) -> bool:
        """Wait until PID 1 serves; False when it ended or takes too long."""
        self.inner.close()
        self._end.settimeout(timeout)
        try:
            return self._end.recv(_REPLY) == b"ready"
        except (TimeoutError, ConnectionError):
            return False
        finally:
            self._end.settimeout(None)

    def call(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> ReplyChannel:
        """Send a request with file descriptors; return the channel of its replies.

        Raises:
            OSError: The sandbox is gone.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        data = marshal.dumps(dict(request), _MARSHAL)
        memory = None
        try:
            sent = [theirs.fileno(), *fds]
            if len(data) > _LARGE:
                memory = os.memfd_create("request")
                os.write(memory, data)
                os.lseek(memory, 0, os.SEEK_SET)
                sent.append(memory)
                data = b"large"
            socket.send_fds(self._end, [data], sent)
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
            if memory is not None:
                os.close(memory)
        # With its kind, or the kernel is asked for it.
        return ReplyChannel(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, mine.detach())

    def end_reason(self) -> str | None:
        """Return why PID 1 ended, empty if it did not say; None while it lives."""
        poll = select.poll()
        try:
            poll.register(self._end.fileno(), select.POLLIN)
            if not poll.poll(0):
                return None
            return self._end.recv(_REPLY).decode("latin-1")
        except (OSError, ValueError):
            return ""

    def abandon(self) -> None:
        """Close this process's copy and leave the sandbox as it is."""
        self._end.close()
        self.inner.close()

    def close(self) -> None:
        """Close the socket: the sandbox ends if it has not yet."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._end.close()
        self.inner.close()


# ---- start and end ----

_START_S = 30.0
_CHILD = re.compile(rb'"child-pid": *(\d+)')
_END_S = 20.0
_ENTER = (
    'umask 022; ulimit -c 0; { ulimit -Sn 1024; ulimit -Hn "$1"; } 2>/dev/null; shift; '
    'while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; exec "$@"'
)
"""A shell enters the control groups, then becomes bubblewrap: a process that moves itself is moved at no cost.

Descriptors have the usual limit inside, independent of this process. It can be raised as far as it harms no other."""


@dataclass(slots=True)
class Terminals:
    """The options of the file system of terminals, which are equal in all sandboxes of a backend."""

    options: str | None = None
    """None before the first start."""


@dataclass(frozen=True, slots=True)
class LaunchKit:
    """What all sandboxes of a backend share."""

    program: str
    version: tuple[int, ...]
    interpreter: Interpreter
    is_privileged: bool
    system: tuple[str, ...]
    """The options for the programs of this machine."""
    etc: tuple[str, ...]
    """The options for the visible part of this machine's /etc."""
    files: SharedFiles
    """The programs inside, the filter of system calls, and the files of /etc that are equal in all sandboxes."""
    terminals: Terminals = field(default_factory=Terminals)
    # A start has some 200 system calls, each of which gives the interpreter lock away. If several threads take turns at
    # that, each call wakes another one: on 16 cores this doubled the processor time of a start.
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while a sandbox is prepared, not while it starts."""

    @classmethod
    def prepare(cls) -> LaunchKit:
        """Find the programs and compile what goes inside."""
        program, version = find_bubblewrap()
        code, system_calls = _fixed_parts(platform.machine())
        return cls(
            program=program,
            version=version,
            interpreter=Interpreter.current(),
            files=SharedFiles({**_equal_etc(), **copied_etc(), **code}, system_calls),
            is_privileged=is_privileged(),
            system=tuple(_system()),
            etc=tuple(_host_etc()),
        )


@cache  # a process may have a backend for each of many engines
def _fixed_parts(machine: str) -> tuple[Mapping[str, bytes], bytes]:
    """Return the programs inside, compiled, and the filter of system calls."""
    if not seccomp.supported(machine):
        raise SandboxUnavailable(f"Local sandboxes have no system call filter for {machine} processors.")
    inside = {"init.pyc": Path(__file__).parent / "init_process.py", "trees.pyc": Path(trees.__file__)}
    return {f"{INSIDE}/{name}": compiled(source) for name, source in inside.items()}, seccomp.program(machine)


class Processes:
    """The processes of a sandbox and their resources on the host; freed once, from any thread."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: Control, group: Group | None, first: int | None
    ) -> None:
        self.control = control
        self.group = group
        self.exposures: list[Exposure] = []
        self.on_end: Callable[[], None] | None = None
        """Called when the last process of the sandbox has ended."""
        self._process = process
        self._first = first
        self._handle: int | None = None
        if first is not None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._handle = os.pidfd_open(first)
        self._lock = threading.Lock()
        self._freed = False
        self._owner = os.getpid()

    def open_root(self) -> int:
        """Open the root folder inside; raises as `root_of` does."""
        if self._first is None:
            raise SandboxUnsupported("the first process of the sandbox is unknown")
        return root_of(self._first)

    def end(self) -> None:
        """Kill everything inside and free its resources on the host."""
        with self._lock:
            if self._freed or os.getpid() != self._owner:
                return
            self._freed = True
            # The end of PID 1 is the end of its namespace: the kernel kills all the rest. bubblewrap, our child, waits
            # for it; only then is the control group empty and can be removed.
            self._kill()
            self.control.close()
            for exposure in self.exposures:
                exposure.close()
            _wait_for_end(self._process)
            if self._handle is not None:
                os.close(self._handle)
            try:
                if self.group is not None:
                    self.group.remove()
            finally:
                if self.on_end is not None:
                    self.on_end()

    def abandon(self) -> None:
        """Close our end in a forked child, so that the sandbox still ends with its owner."""
        self.control.abandon()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            # By its pidfd if possible: another process of the host may have got the PID.
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self._first is not None:
                os.kill(self._first, signal.SIGKILL)
            else:
                self._process.kill()


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is being killed; kill it if that takes too long."""
    with contextlib.suppress(OSError, AttributeError):  # older kernels; then `wait` looks again and again
        handle = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(_END_S * 1000)
        finally:
            os.close(handle)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# linux/fcntl.h: F_ADD_SEALS, and F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE, which are 1, 2, 4 and 8
_ADD_SEALS, _SEALS = 1033, 15
_UNUSED_SETS = 16


@dataclass(frozen=True, slots=True)
class FileSet:
    """The options for the shared files, with descriptors that no other start uses."""

    options: tuple[str, ...]
    descriptors: tuple[int, ...]


class SharedFiles:
    """Files in memory that all sandboxes of a backend read, instead of a copy for each.

    bubblewrap reads each from the position of its descriptor. So a start borrows a set of descriptors, with positions
    of their own: to open them for each start would be a fifth of its system calls.

    Args:
        files: The contents of files by their paths inside.
        system_calls: The filter of system calls.
    """

    def __init__(self, files: Mapping[str, bytes], system_calls: bytes) -> None:
        self._paths = tuple(files)
        self._unused: list[FileSet] = []
        self._contents: list[int] = []
        weakref.finalize(self, _close_all, self._contents, self._unused)
        for content in (*files.values(), system_calls):
            fd = os.memfd_create("file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._contents.append(fd)
            os.write(fd, content)
            # Whoever may get hold of a descriptor: nobody changes the files of other sandboxes.
            fcntl.fcntl(fd, _ADD_SEALS, _SEALS)

    def borrow(self) -> FileSet:
        """Return a set for one start, which gives it back or closes it."""
        with contextlib.suppress(IndexError):
            return self._unused.pop()
        descriptors: list[int] = []
        try:
            descriptors.extend(map(_opened_again, self._contents))
        except BaseException:
            _close(descriptors)
            raise
        options = [
            word
            for path, fd in zip(self._paths, descriptors, strict=False)
            for word in ("--perms", "0444", "--file", str(fd), path)
        ]
        return FileSet((*options, "--seccomp", str(descriptors[-1])), tuple(descriptors))

    def give_back(self, files: FileSet) -> None:
        """Take a set back after its sandbox has read it."""
        if len(self._unused) >= _UNUSED_SETS:
            _close(files.descriptors)
            return
        for fd in files.descriptors:
            os.lseek(fd, 0, os.SEEK_SET)
        self._unused.append(files)


def _opened_again(fd: int) -> int:
    """Return another descriptor of a file in memory, with its own position."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # without /proc
        copy = os.memfd_create("file")
        os.pwrite(copy, os.pread(fd, os.fstat(fd).st_size, 0), 0)
        return copy


def _close_all(contents: list[int], unused: list[FileSet]) -> None:
    _close(contents)
    for files in unused:
        _close(files.descriptors)


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def launch(kit: LaunchKit, spec: SandboxSpec, user: SandboxUser, group: Group | None) -> Processes:
    """Start a sandbox and wait until its PID 1 serves.

    Raises:
        SandboxUnavailable: The machine does not allow it.
        SandboxError: It did not start.
    """
    control = Control()
    errors = os.memfd_create("errors")  # a file, not a pipe: nothing reads it meanwhile, and it must not fill up
    info, files = -1, None
    try:
        with kit.turn:
            files = kit.files.borrow()
            process, info = _begin(kit, spec, user, group, (control, errors, files))
        first = _first_process(info)
        processes = Processes(process, control, group, first)
        if not control.wait_ready(_START_S):
            processes.end()
            raise _failure(errors)
        kit.files.give_back(files)
        files = None
        if user.privileged and first is not None:
            with contextlib.suppress(OSError):
                kit.terminals.options = limit_terminals(first, options=kit.terminals.options)
        return processes
    except BaseException:
        control.close()
        if files is not None:
            _close(files.descriptors)
        raise
    finally:
        os.close(errors)
        if info >= 0:
            os.close(info)


def _begin(
    kit: LaunchKit,
    spec: SandboxSpec,
    user: SandboxUser,
    group: Group | None,
    opened: tuple[Control, int, FileSet],
) -> tuple[subprocess.Popen[bytes], int]:
    """Start bubblewrap; return its process, and the pipe on which it reports the PID of the sandbox's first process."""
    control, errors, shared = opened
    info, info_end = os.pipe()
    files = [info_end]
    try:
        options = ["--info-fd", str(info_end)]
        for target, content in own_etc(user).items():
            options += ["--perms", "0444", "--file", _memory(content, files), target]
        options += [*shared.options, "--remount-ro", "/", "--chdir", "/"]
        words = [*namespaces(user), *file_system(spec, user, kit), *options]
        arguments = _memory(os.fsencode("\0".join(words)), files)  # costs less than two hundred arguments
        command = [kit.program, "--args", arguments, "--", kit.interpreter.executable]
        command += ["-I", "-S", f"{INSIDE}/init.pyc", str(control.inner.fileno())]
        passed = [control.inner.fileno(), *files, *shared.descriptors]
        process = _spawn(command, group, passed, errors, files=limit_inside(spec.limits.pids))
        control.configure(_config(spec, user, limit_processes=group is None))
        return process, info
    except BaseException:
        os.close(info)
        raise
    finally:
        # Among them the last copy outside of `info_end`: if bubblewrap ends without a word, reading `info` ends.
        _close(files)


def _memory(content: bytes, files: list[int]) -> str:
    """Return the number of a new file with a content, which is added to the files to close."""
    fd = os.memfd_create("file")
    files.append(fd)
    os.pwrite(fd, content, 0)  # and the position stays at the beginning
    return str(fd)


def _spawn(
    command: list[str], group: Group | None, passed: list[int], errors: int, *, files: int
) -> subprocess.Popen[bytes]:
    entry_files = group.entry_files() if group is not None else []
    return subprocess.Popen(
        ["/bin/sh", "-c", _ENTER, "sh", str(files), *entry_files, "--", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=passed,
        env={"LANG": "C.UTF-8"},  # PID 1 inherits it, and our variables may be secret
        cwd="/",
        start_new_session=True,  # Ctrl-C in a terminal must not end sandboxes
    )


def _config(spec: SandboxSpec, user: SandboxUser, *, limit_processes: bool) -> dict[str, object]:
    return {
        "uid": user.uid,
        "gid": user.gid,
        "home": user.home.encode(),
        "workdir": f"{user.home}/workdir".encode(),
        "drop": user.privileged,
        "lifetime": float(spec.timeout_s),
        "processes": spec.limits.pids if limit_processes else 0,  # by RLIMIT_NPROC, if no control group counts
    }


def _first_process(info: int) -> int | None:
    """Return the pid, on the host, of PID 1 inside, as bubblewrap reports it; None when it was not started."""
    poll = select.poll()
    poll.register(info, select.POLLIN)
    poll.poll(_START_S * 1000)
    # The beginning of {"child-pid": 4711, "cgroup-namespace": ..., ...}: each part is one write. The child waits until
    # all are written, so its pid still means the child.
    os.set_blocking(info, False)
    try:
        pid = _CHILD.search(os.read(info, 4096))
    except BlockingIOError:
        return None
    return None if pid is None else int(pid[1])


def _failure(errors: int) -> SandboxError:
    os.lseek(errors, 0, os.SEEK_SET)
    text = os.read(errors, 65536).decode("utf-8", "replace")
    if text.startswith("bwrap: "):
        return SandboxUnavailable(f"A local sandbox cannot be started here: {explain(text)}")
    return SandboxError(f"A local sandbox did not start: {text.strip() or 'its PID 1 ended at once'}")
