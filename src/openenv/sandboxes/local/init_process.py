"""PID 1 of a local sandbox: takes requests from the host over one socket and runs each in a new process.

Loaded at every start of a sandbox, so it imports next to nothing (hence the private C modules) and nothing of this
project. Runs as the sandbox's user, like everything below it. Processes inside cannot trace it (not dumpable), and
cannot kill or stop it: it ignores all signals that it can (`handle_signals`; Python alone would end at SIGINT), and the
kernel protects PID 1 from the other processes in its namespace.

    PID 1 ─┬─ supervisor (child subreaper) ── command ── its children
           │        └─ orphans: daemons, double forks; the supervisor adopts them
           ├─ supervisor ── ...
           └─ worker for one file request (read, write, pack, unpack), then gone

So "all processes of a command" is the tree below its supervisor, which no daemon can leave. If a process inside kills a
supervisor, its orphans fall to PID 1, which kills them; PID 1 adopts nothing else.

A request is one packet: a marshalled dict and file descriptors. The first descriptor is the channel for the replies.
`s<pid>` started, `x<wait status>` exited, `o<bytes>` ok, `e<errno> <text>` error. EOF on the socket ends the sandbox.
"""

from __future__ import annotations

import _ctypes
import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import select
import sys
import time

TYPE_CHECKING = False  # the name that type checkers know; importing it from typing would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Request = dict[str, Any]

PACKET = 160 * 1024
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 4, 24, 36
_LAST_CAPABILITY = 63
_CHUNK = 256 * 1024


_LIBC = _ctypes.dlopen(None, 2)  # type: ignore[arg-type]
_PRCTL = _ctypes.dlsym(_LIBC, "prctl")


def prctl(option: int, value: int) -> None:
    """Call prctl(2)."""
    _ctypes.call_function(_PRCTL, (option, value, 0, 0, 0))


def prepare(config: Request) -> None:
    """Make home and work folder, become the sandbox's user, drop every capability, forbid tracing."""
    os.umask(0o022)
    home, workdir = config["home"], config["workdir"]
    if config["drop"]:
        # In this order: each step takes rights away that the ones before it need. The bounding set must go while we
        # have CAP_SETPCAP, the groups while we are root.
        os.makedirs(workdir, 0o755, exist_ok=True)
        for folder in (home, workdir):
            os.chown(folder, config["uid"], config["gid"])
        for capability in range(_LAST_CAPABILITY + 1):
            prctl(_PR_CAPBSET_DROP, capability)
        os.setgroups([])
        os.setresgid(config["gid"], config["gid"], config["gid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
    # capset(2) with _LINUX_CAPABILITY_VERSION_3 (0x20080522), for this process (pid 0): effective, permitted and
    # inheritable, twice 32 bits each, all zero.
    header = b"\x22\x05\x08\x20" if sys.byteorder == "little" else b"\x20\x08\x05\x22"
    _ctypes.call_function(_ctypes.dlsym(_LIBC, "capset"), (header + bytes(4), bytes(24)))
    # Commands run as the same user: without this they could trace PID 1, read its memory and use its control socket.
    prctl(_PR_SET_DUMPABLE, 0)
    if config["processes"]:
        import resource

        resource.setrlimit(resource.RLIMIT_NPROC, (config["processes"], config["processes"]))
    os.chmod(home, 0o755)
    os.makedirs(workdir, 0o755, exist_ok=True)
    os.chdir(workdir)


# Processes


def processes() -> dict[int, tuple[int, bytes]]:
    """Map each process id to its parent and state."""
    table: dict[int, tuple[int, bytes]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fd = os.open("/proc/" + name + "/stat", os.O_RDONLY)
        except OSError:
            continue
        try:
            # "12 (a (b) c) S 1 ...": a process chooses its name, so look for the last parenthesis
            fields = os.read(fd, 4096).rpartition(b")")[2].split()
        except OSError:
            continue
        finally:
            os.close(fd)
        table[int(name)] = (int(fields[1]), fields[0])
    return table


def alive_below(roots: Iterable[int], table: dict[int, tuple[int, bytes]]) -> list[int]:
    """List `roots` and the processes below them that are not dead."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    alive, queue = [], list(roots)
    while queue:
        pid = queue.pop()
        queue.extend(children.get(pid, ()))
        if pid in table and table[pid][1] not in (b"Z", b"X"):
            alive.append(pid)
    return alive


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def kill_trees(roots: list[int], deadline: float) -> None:
    """Kill whole trees: first stop everything, so that nothing forks; the roots die last, because they adopt orphans.

    A process with a pending stop signal cannot fork, even if it does not stop yet (as the parent of a vfork).
    """
    stopped = set(roots)
    # Until a look finds nothing new: a process forked between a look and its SIGSTOP shows up in the next look.
    while time.monotonic() < deadline:
        running = [pid for pid in alive_below(roots, processes()) if pid not in stopped]
        if not running:
            break
        signal_all(running, _signal.SIGSTOP)
        stopped.update(running)
    while time.monotonic() < deadline:
        living = [pid for pid in alive_below(roots, processes()) if pid not in roots]
        if not living:
            break
        signal_all(living, _signal.SIGKILL)
        time.sleep(0.0005)
    signal_all(roots, _signal.SIGKILL)


# Requests that run in a separate process


def handle_signals(action: int) -> None:
    """Ignore every signal that can be ignored, or give each its default action back."""
    for number in range(1, _signal.NSIG):
        try:
            _signal.signal(number, action)
        except OSError:
            pass  # SIGKILL, SIGSTOP, and the two that libc keeps for itself


def offer_to_oom_killer(score: bytes) -> None:
    """Let the kernel kill this process before others when memory runs out."""
    prctl(_PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(fd, score)
    os.close(fd)


def start(request: Request, fds: list[int]) -> None:
    """Become the command. Does not return."""
    try:
        os.setsid()  # a command that signals its own process group must not hit its supervisor
        null = os.open("/dev/null", os.O_RDWR)
        ends = list(fds)
        for number, wanted in enumerate(request["stdio"]):
            os.dup2(ends.pop(0) if wanted else null, number)
        handle_signals(_signal.SIG_DFL)  # a new program would inherit which signals are ignored
        offer_to_oom_killer(b"500")
        environment = request["env"]
        try:
            os.chdir(request["cwd"])
        except OSError as error:
            refuse(126, b"cannot start in " + request["cwd"], error)
        run(request["argv"], environment)
    finally:
        os._exit(126)  # on every error: a copy of this process must not continue the supervisor's work


def run(argv: list[bytes], environment: dict[bytes, bytes]) -> None:
    """Replace this process by a program, looked up in PATH like a shell does."""
    program = argv[0]
    if b"/" in program:
        places = [program]
    else:
        places = [folder + b"/" + program for folder in environment.get(b"PATH", b"/usr/bin:/bin").split(b":")]
    failure = OSError(2, "No such file or directory")
    for place in places:
        try:
            os.execve(place, argv, environment)
        except OSError as error:
            if failure.errno == 2:  # "found, but not executable" in one folder says more than "not found" in the next
                failure = error
    refuse(127 if failure.errno == 2 else 126, program, failure)


def refuse(code: int, what: bytes, error: OSError) -> None:
    """Write to stderr why the command cannot run, and exit as a shell would."""
    os.write(2, what + b": " + os.strerror(error.errno or 0).encode() + b"\n")
    os._exit(code)


def supervise(channel: _socket.socket, request: Request, fds: list[int]) -> None:
    """Run a command, report its end, and stay as long as any of its processes lives."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        main = os.fork()
    except OSError as error:
        reply(channel, b"e%d %s" % (error.errno or 5, str(error).encode()))
        return
    if main == 0:
        channel.close()
        start(request, fds)
    for fd in fds:
        os.close(fd)
    reply(channel, b"s%d" % main)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if pid == main:
            # The result goes out now. This process stays as the root of the remaining tree, so that `kill` finds
            # it, and ends with the last of its processes.
            reply(channel, b"x%d" % status)
            channel.close()


def reply(channel: _socket.socket, message: bytes) -> None:
    """Send a reply; the host may have stopped waiting for it."""
    try:
        channel.send(message)
    except OSError:
        pass


def read(channel: _socket.socket, request: Request, fds: list[int]) -> bytes:
    """Copy a regular file to a pipe."""
    # O_NONBLOCK: to open a pipe would wait for its writer. O_NOCTTY: a terminal must not become ours.
    fd = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    kind = os.fstat(fd).st_mode & 0o170000
    if kind != 0o100000:
        raise OSError(21 if kind == 0o040000 else 22, "")  # EISDIR, EINVAL
    left = request["limit"]
    while left > 0:
        data = os.read(fd, min(left, _CHUNK))
        if not data:
            break
        left -= len(data)
        write_all(fds[0], data)
    return b""


def write(channel: _socket.socket, request: Request, fds: list[int]) -> bytes:
    """Copy a pipe to a file."""
    path = request["path"]
    os.makedirs(os.path.dirname(os.path.abspath(path)), 0o755, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, request["mode"])
    if os.fstat(fd).st_mode & 0o170000 != 0o100000:
        raise OSError(22, "")
    os.ftruncate(fd, 0)  # not O_TRUNC: first we had to know that it is a regular file
    while True:
        data = os.read(fds[0], _CHUNK)
        if not data:
            break
        write_all(fd, data)
    os.fchmod(fd, request["mode"])
    os.close(fd)  # before the reply: nobody can execute a file that is open for writing
    return b""


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def kind(channel: _socket.socket, request: Request, fds: list[int]) -> bytes:
    """Return the kind of file at a path: f(ile), d(irectory), o(ther)."""
    return {0o100000: b"f", 0o040000: b"d"}.get(os.stat(request["path"]).st_mode & 0o170000, b"o")


def pack(channel: _socket.socket, request: Request, fds: list[int]) -> bytes:
    """Write a tree as a tar stream into a pipe."""
    import trees  # type: ignore[import-not-found]

    with open(fds.pop(), "wb") as stream:
        trees.pack(os.fsdecode(request["path"]), stream, force=True)
    return b""


def unpack(channel: _socket.socket, request: Request, fds: list[int]) -> bytes:
    """Unpack a tar stream from a pipe below a folder."""
    import trees

    with open(fds.pop(), "rb") as stream:
        trees.unpack(stream, os.fsdecode(request["path"]))
        while stream.read(_CHUNK):
            pass  # the padding at the end: its writer must not get a broken pipe
    return b""


def count(channel: _socket.socket, request: Request, fds: list[int]) -> bytes:
    """Restore access to the home and a folder in it, and return the number of entries below the folder."""
    for folder in (request["home"], request["path"]):
        mode = os.lstat(folder).st_mode
        if mode & 0o170000 != 0o040000:
            raise OSError(20, "")  # ENOTDIR, for a link, too
        os.chmod(folder, mode & 0o7777 | 0o700)
    number, most, pending = 0, request["most"], [request["path"]]
    while pending and number <= most:
        try:
            listing = os.scandir(pending.pop())
        except OSError:
            continue
        with listing:
            for entry in listing:
                number += 1
                if number > most:
                    break
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return b"%d" % number


OPERATIONS = {"read": read, "write": write, "kind": kind, "count": count, "pack": pack, "unpack": unpack}


def work(channel: _socket.socket, request: Request, fds: list[int]) -> None:
    """Do one request in this process and reply to it."""
    if request["op"] == "exec":
        supervise(channel, request, fds)
        return
    try:
        message = b"o" + OPERATIONS[request["op"]](channel, request, fds)
    except OSError as error:
        message = b"e%d %s" % (error.errno or 5, str(error).encode("utf-8", "replace")[:1000])
    except ValueError as error:  # of `trees`; e0 stands for its errors, which have no number
        message = b"e0 %s" % str(error).encode("utf-8", "replace")[:1000]
    except Exception as error:
        message = b"e0 %s" % repr(error).encode("utf-8", "replace")[:1000]
    for fd in fds:
        os.close(fd)
    reply(channel, message)


# The main loop


class Init:
    """The main loop: takes requests, forks a process for each, reaps what ends."""

    def __init__(self, control: _socket.socket, lifetime: float) -> None:
        self.control = control
        self.deadline = time.monotonic() + lifetime
        self.jobs: dict[int, int] = {}
        # Signals as events: the interpreter writes a byte for each SIGCHLD, and poll() sees it. A handler alone would
        # race with poll, which is restarted after a signal.
        self.wake, self.woken = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.woken, False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(self.woken, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the owner is gone or the lifetime is over; then everything inside ends, because PID 1 does."""
        poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                reply(self.control, b"expired")
                return
            events = poll.poll(min(left, 3600) * 1000 + 1)  # it takes milliseconds that fit into an int
            for fd, _ in events:
                if fd == self.wake:
                    self.reap()
                elif not self.serve():
                    return

    def reap(self) -> None:
        """Reap what ended; a supervisor with a status other than 0 was killed from inside."""
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        was_killed = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            for job, supervisor in list(self.jobs.items()):
                if supervisor == pid:
                    del self.jobs[job]
                    was_killed = was_killed or status != 0
        if was_killed:
            self.kill_strays()

    def kill_strays(self) -> None:
        """Kill the processes that PID 1 adopted from a killed supervisor, and their new children."""
        deadline = time.monotonic() + 10
        known = set(self.jobs.values())
        while time.monotonic() < deadline:
            table = processes()
            strays = [pid for pid in alive_below([1], table) if table[pid][0] == 1 and pid not in known]
            if not strays:
                return
            signal_all(strays, _signal.SIGSTOP)  # otherwise PID 1 would adopt the processes that they fork now
            kill_trees(strays, deadline)
            time.sleep(0.0005)

    def serve(self) -> bool:
        """Handle one request; False when the owner is gone."""
        room = _socket.CMSG_SPACE(5 * 4)
        # The descriptors: the channel of the replies, the pipes or the socket of the request, a large request itself.
        data, ancillary, _, _ = self.control.recvmsg(PACKET, room, _socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        raw = b"".join(part[2] for part in ancillary)
        fds = [int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, len(raw), 4)]
        if data == b"large":  # a packet must fit into the socket's buffer, so the host wrote it into a memory file
            with open(fds.pop(), "rb") as file:
                data = file.read()
        request = marshal.loads(data)
        channel = _socket.socket(fileno=fds.pop(0))
        try:
            if request["op"] == "stop":
                self.stop()
                reply(channel, b"o")
            elif request["op"] == "kill":
                self.kill(request["job"])
                reply(channel, b"o")
            elif request["op"] == "listen":
                self.listen(channel, request["port"])
            else:
                self.fork(channel, request, fds)
        except OSError as error:
            reply(channel, b"e%d %s" % (error.errno or 5, str(error).encode()))
        finally:
            channel.close()
            for fd in fds:
                os.close(fd)
        return True

    def fork(self, channel: _socket.socket, request: Request, fds: list[int]) -> None:
        """Do a request in a new process."""
        pid = os.fork()
        if pid:
            self.jobs[request["job"]] = pid
            return
        code = 1
        try:
            # Nothing of PID 1 may stay with the child: its signals would wake PID 1, and the control socket is the
            # way to the host.
            _signal.set_wakeup_fd(-1)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            os.close(self.wake)
            os.close(self.woken)
            self.control.close()
            offer_to_oom_killer(b"250")
            prctl(_PR_SET_DUMPABLE, 0)
            work(channel, request, list(fds))
            code = 0
        finally:
            os._exit(code)

    def kill(self, job: int) -> None:
        """Kill one command and everything that it started."""
        supervisor = self.jobs.get(job)
        if supervisor is not None:
            kill_trees([supervisor], time.monotonic() + 20)

    def stop(self) -> None:
        """Kill every other process, and wait until they are gone."""
        # kill(-1) reaches everything but PID 1 in one system call, so that nothing can fork in between.
        while True:
            try:
                os.kill(-1, _signal.SIGKILL)
            except ProcessLookupError:
                break
            try:
                while True:
                    os.waitpid(-1, 0)
            except ChildProcessError:
                pass
        self.jobs.clear()

    def listen(self, channel: _socket.socket, port: int) -> None:
        """Open a port in this network namespace and pass the listener to the host, which accepts on it."""
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        try:
            listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(256)
            rights = listener.fileno().to_bytes(4, sys.byteorder)
            channel.sendmsg([b"o"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        finally:
            listener.close()


def main() -> None:
    """Prepare the sandbox, report that it is ready, and serve."""
    if os.getpid() != 1:
        raise SystemExit("this kills every process that it can see: it may run only as PID 1 of a sandbox")
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    control = _socket.socket(fileno=fd)
    data = control.recv(PACKET)
    if not data:
        return
    config = marshal.loads(data)
    prepare(config)
    sys.path.insert(0, os.path.dirname(__file__))
    handle_signals(_signal.SIG_IGN)
    control.send(b"ready")
    Init(control, config["lifetime"]).run()


if __name__ == "__main__":
    main()
