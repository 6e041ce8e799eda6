"""The backend `daytona`: sandboxes in Daytona's cloud, through the `daytona` package, imported when a backend is made.

Daytona runs a command to its end and returns its output as text. `FifoChannel` builds a shell on top of that:

    launch ──> a folder with named pipes, and a holder that runs the shell between them and keeps their ends open
    read   ──> `dd | base64` of one pipe, which returns as soon as there is something; one call follows the other
    write  ──> `base64 -d` into the pipe that is the shell's standard input
"""

from __future__ import annotations

import base64
import logging
import math
import re
import secrets
import shlex
import threading
import time
from collections.abc import Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any, Protocol

from openenv import settings
from openenv.errors import SandboxError, SandboxUnavailable, SandboxUnsupported, install_command, message_of
from openenv.protocol.backoff import Backoff
from openenv.sandboxes import shell_command
from openenv.sandboxes.base import Limits, Sandboxes, SandboxSpec, Stream, refuse_image, refuse_snapshot
from openenv.sandboxes.host import CLOUD_OWNER_LABEL, ConnectionQuota, ProcessOwner
from openenv.sandboxes.remote import QueueChannel, RemoteSandbox
from openenv.sandboxes.shell_command import Channel

if TYPE_CHECKING:
    from daytona import Sandbox as PackageSandbox

_log = logging.getLogger(__name__)

USE_LABEL = "openenv-use"
START_LABEL = "openenv-start"
_SNAPSHOT = "snapshot:"
_CREATE_S = 300.0
_CALL_S = 30
_READ_S = 50
_FAILURES = 3
_PAUSES = Backoff(first_pause_s=0.3, longest_pause_s=1.5)
_INLINE = 40_000
_EDGE = b"\x1d"  # differs from `shell_command`'s, because its marks must be passed on at once
_ENDED = 44


class DaytonaSandboxes(Sandboxes):
    """Starts sandboxes at Daytona.

    Args:
        api_key: The account's key; by default `DAYTONA_API_KEY`.
        image: A name in a registry, or `snapshot:NAME`; by default Daytona's own snapshot. Its user must not be root.
        sandbox_kwargs: More parameters of the sandbox, as `daytona.CreateSandboxFromImageParams` has them; they
            override ours.

    Raises:
        SandboxUnavailable: The package is not installed, or the key is missing.
    """

    name = "daytona"
    features = frozenset({"trees", "ports", "expiry"})

    def __init__(
        self,
        *,
        api_key: str | None = None,
        image: str | None = None,
        sandbox_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import daytona
        except ImportError as error:
            raise SandboxUnavailable(
                f"The package 'daytona' is not installed. Install it: {install_command('daytona')}"
            ) from error
        self._sdk: Any = daytona
        self._key = api_key or settings.daytona_api_key() or ""
        self._image = image
        self._kwargs = dict(sandbox_kwargs or {})
        self._quota = ConnectionQuota()
        try:
            self._daytona = daytona.Daytona(daytona.DaytonaConfig(api_key=self._key or None))
        except daytona.DaytonaError as error:
            raise SandboxUnavailable(
                f"Daytona accepts no request: {self._text(error)}. Pass api_key=, or set DAYTONA_API_KEY."
            ) from None

    def check(self) -> None:
        """Return if Daytona accepts the account; raise `SandboxUnavailable` with its message if not."""
        try:
            next(iter(self._daytona.list(self._sdk.ListSandboxesQuery(limit=1))), None)
        except self._sdk.DaytonaError as error:
            raise SandboxUnavailable(f"Daytona does not answer: {self._text(error)}") from None

    def open(self, spec: SandboxSpec | None = None) -> DaytonaSandbox:
        """Start a sandbox without a network except exposed ports; `sandbox_kwargs` can override that."""
        return self._open(spec or SandboxSpec(), {"network_block_all": True})

    def create(
        self, *, timeout_s: int = 900, envs: Mapping[str, str] | None = None, metadata: Mapping[str, str] | None = None
    ) -> DaytonaSandbox:
        """Start a sandbox with Daytona's own defaults, also for the network: the call of `SandboxBackend`."""
        return self._open(SandboxSpec(timeout_s=timeout_s, envs=dict(envs or {}), metadata=dict(metadata or {})), {})

    def _open(self, spec: SandboxSpec, defaults: Mapping[str, Any]) -> DaytonaSandbox:
        refuse_snapshot(spec, self.name)
        refuse_image(spec, self.name)
        if spec.mounts:
            raise SandboxUnsupported("Daytona sandboxes cannot mount folders of this machine: bake them into an image.")
        if spec.limits != Limits():
            raise SandboxUnsupported(
                "A Daytona sandbox has the limits of its snapshot; set them by sandbox_kwargs={'resources': ...}."
            )
        start_id = secrets.token_hex(8)
        labels = {CLOUD_OWNER_LABEL: ProcessOwner.current().short, START_LABEL: start_id, USE_LABEL: "sandbox"}
        arguments: dict[str, Any] = {
            "env_vars": dict(spec.envs) or None,
            "labels": {**spec.metadata, **labels},
            # Daytona counts in minutes, and does so also when this process is gone; a timer here is exact.
            "ttl_minutes": max(1, math.ceil(spec.timeout_s / 60)),
            "auto_stop_interval": 0,
            "auto_delete_interval": 0,
            **defaults,
            **self._kwargs,
        }
        try:
            remote = self._daytona.create(self._params(arguments), timeout=_CREATE_S)
            return DaytonaSandbox(remote, spec, self._quota)
        except BaseException as error:
            self._delete_unfinished(start_id)
            if isinstance(error, SandboxError) or not isinstance(error, Exception):
                raise
            raise SandboxUnavailable(f"Daytona started no sandbox: {self._text(error)}") from None

    def _params(self, arguments: dict[str, Any]) -> Any:
        if self._image is None:
            return self._sdk.CreateSandboxFromSnapshotParams(**arguments)
        if self._image.startswith(_SNAPSHOT):
            snapshot = self._image[len(_SNAPSHOT) :]
            return self._sdk.CreateSandboxFromSnapshotParams(snapshot=snapshot, **arguments)
        return self._sdk.CreateSandboxFromImageParams(image=self._image, **arguments)

    def _delete_unfinished(self, start_id: str) -> None:
        """Delete a sandbox that exists although its start failed."""
        try:
            for left in self._daytona.list(self._sdk.ListSandboxesQuery(labels={START_LABEL: start_id})):
                left.delete()
        except Exception as error:  # the caller has to see why the start failed, not this error
            _log.warning("a sandbox of Daytona may be left until its time is over: %s", self._text(error))

    def _text(self, error: BaseException) -> str:
        return message_of(error).replace(self._key, "***") if self._key else message_of(error)


class DaytonaSandbox(RemoteSandbox):
    """One sandbox at Daytona."""

    cloud = "Daytona"
    oom_counters = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")

    def __init__(self, remote: PackageSandbox, spec: SandboxSpec, quota: ConnectionQuota) -> None:
        super().__init__(remote.id, spec, quota=quota)
        self.remote = remote
        """The package's own object, for features that this protocol does not have."""
        self._expires = time.monotonic() + spec.timeout_s
        self._is_expired = False
        self._make_home()
        self._timer = threading.Timer(spec.timeout_s, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _make_home(self) -> None:
        home = shlex.quote(self.home)
        script = f"mkdir -p {home} 2>/dev/null || sudo -n install -d -o $(id -u) {home} 2>/dev/null; [ -w {home} ]"
        if self.remote.process.exec(script, cwd="/", timeout=_CALL_S).exit_code != 0:
            raise SandboxUnavailable(
                f"The user of this Daytona image cannot write to {self.home}: give SandboxSpec(home=...), or an image "
                "that has this folder."
            )

    def _expire(self) -> None:
        self._is_expired = True
        try:
            self.remote.delete()
        except Exception as error:  # Daytona deletes it within a minute
            _log.debug("expiry: %s", type(error).__name__)

    def _channel(self, script: str, *, has_input: bool) -> Channel:
        command = f"/bin/sh -c {shlex.quote(script)}"
        with self._asking("started no command in"):
            if len(command) > _INLINE:  # Linux limits a single argument to 128 KB
                place = f"/tmp/.openenv-{secrets.token_hex(8)}.sh"
                self.remote.fs.upload_file(script.encode(), place)
                command = f'/bin/sh -c \'s=$(cat "$0"); rm -f "$0"; eval "$s"\' {place}'
            return FifoChannel(self.remote.process, command, has_input=has_input)

    def _kill_all(self) -> None:
        # By their marks, which all commands have: Daytona's daemon and the holders of pipes may run as the same user.
        self._control(shell_command.kill_marked(shell_command.mark_kb(0), shell_command.mark_kb(0)))

    def _why_gone(self) -> str | None:
        try:
            self.remote.refresh_data()
        except Exception as error:  # the package is imported only by the backend
            if type(error).__name__ != "DaytonaNotFoundError":
                return f"Daytona does not answer: {message_of(error)}"
        else:
            if str(getattr(self.remote.state, "value", self.remote.state)) == "started":
                return None
        is_over = self._is_expired or time.monotonic() > self._expires - 2
        return "expired" if is_over else "ended by Daytona"

    def _destroy(self) -> None:
        self._timer.cancel()
        try:
            self.remote.delete(wait=True)
        except Exception as error:  # it ends when its time is over
            if self._ended == "closed" and self._why_gone() is None:
                raise SandboxError(f"Sandbox '{self.sandbox_id}' could not be ended: {message_of(error)}") from error

    def _send_file(self, place: str, file: IO[bytes]) -> None:
        self.remote.fs.upload_file_stream(file, place)

    def _fetch_file(self, place: str) -> Iterable[bytes]:
        yield from self.remote.fs.download_file_stream(place)


class Executor(Protocol):
    """The part of the package that runs a command to its end: `Sandbox.process`."""

    def exec(self, command: str, /, *, cwd: str | None, timeout: int | None) -> Any:
        """Run a command; the result has `exit_code` and `result`, its output."""


class FifoChannel(QueueChannel):
    """A shell inside, between named pipes; two threads read them, call after call."""

    def __init__(self, executor: Executor, command: str, *, has_input: bool) -> None:
        super().__init__()
        self._executor = executor
        self._has_input = has_input
        self._folder = f"/tmp/.openenv-{secrets.token_hex(8)}"
        self._nonce = secrets.token_hex(8)
        self._left = 2
        self._lock = threading.Lock()
        done = self._call(self._launch_script(command))
        if done.exit_code != 0:
            raise SandboxError(f"Daytona started no shell: {done.result}")
        for stream, pipe in (("stdout", "o"), ("stderr", "e")):
            threading.Thread(target=self._follow, args=(stream, pipe), name=f"daytona-{pipe}", daemon=True).start()

    def _launch_script(self, command: str) -> str:
        # The shell that opens the pipes passes their ends on to the holder, so that no writer or reader is missing at
        # any time. A shell lets background commands ignore SIGINT and SIGQUIT; `env` undoes that if it can.
        end = rf"\035{self._nonce} %d\035"
        source = f"{self._folder}/i" if self._has_input else "/dev/null"
        feed = "( exec 5>i 6>&- 7>&- 8>&-; read -r x <&9 ) &" if self._has_input else ":"
        return f"""umask 077; mkdir {self._folder} && cd {self._folder} && mkfifo i o e k q || exit 1
exec 6<>o 7<>e 8<>k 9<>q
r=; env --default-signal=INT,QUIT true 2>/dev/null && r='env --default-signal=INT,QUIT'
( {feed}
cd /; $r {command} <{source} >{self._folder}/o 2>{self._folder}/e 6>&- 7>&- 8>&- 9>&-
c=$?; cd {self._folder}; : >ended; printf '{end}' $c >&6; printf '{end}' $c >&7; echo >&9; read -r x <&8
rm -rf {self._folder} ) </dev/null >/dev/null 2>&1 &
echo $! >pid"""

    def _call(self, script: str, timeout_s: int = _CALL_S) -> Any:
        # Daytona takes the first of zsh, bash and sh; the scripts are written for sh.
        return self._executor.exec(f"/bin/sh -c {shlex.quote(script)}", cwd="/", timeout=timeout_s)

    def _inside(self, script: str) -> str:
        """Return a script that runs in the folder, while the holder lives."""
        return f"cd {self._folder} 2>/dev/null && kill -0 $(cat pid) 2>/dev/null || exit {_ENDED}\n{script}"

    @property
    def exit_code(self) -> int | None:
        self._over.wait(10)
        return self._exit_code

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), _INLINE):
            if self._over.is_set() or self._closed.is_set():
                return
            text = base64.b64encode(data[start : start + _INLINE]).decode()
            try:
                self._call(self._inside(f"[ -e ended ] || printf %s {text} | base64 -d >i"), 600)
            except Exception:  # the command or the sandbox has ended: the readers find out which
                return

    def end_input(self) -> None:
        if self._has_input and not self._over.is_set() and not self._closed.is_set():
            self._has_input = False
            try:
                self._call(self._inside("echo 1<>q"))
            except Exception:  # the command or the sandbox has ended
                _log.debug("end of input", exc_info=True)

    def close(self) -> None:
        """Close the channel: further output is dropped, and the pipes disappear when the shell ends."""
        if self._closed.is_set():
            return
        super().close()
        threading.Thread(target=self._release, name="daytona-release", daemon=True).start()

    def _release(self) -> None:
        drain = "" if self._over.is_set() else "cat <o >/dev/null 2>&1 & cat <e >/dev/null 2>&1 &\n"
        try:
            self._call(self._inside(f"{drain}echo 1<>q; echo 1<>k"))
        except Exception:  # the sandbox has ended, and everything with it
            _log.debug("release", exc_info=True)

    def _follow(self, stream: Stream, pipe: str) -> None:
        end = re.compile(_EDGE + self._nonce.encode() + rb" (\d+)" + _EDGE)
        # The first waits for data, the second takes the rest if `dd` supports it: up to a megabyte per call.
        more = f"dd bs=65536 count=15 iflag=nonblock <>{pipe}"
        read = self._inside(f"{{ timeout {_READ_S} dd bs=65536 count=1 <>{pipe}; {more}; }} 2>/dev/null | base64")
        held, failures = b"", 0
        while not self._closed.is_set():
            try:
                done = self._call(read, _READ_S + 10)
            except Exception:  # a lost connection, or the sandbox has ended
                failures += 1
                if failures == _FAILURES:
                    break
                time.sleep(_PAUSES.pause_s(failures - 1))
                continue
            failures = 0
            if done.exit_code == _ENDED:
                break
            held += base64.b64decode(done.result or "")
            found = end.search(held)
            if found is not None:
                self._exit_code = int(found[1])
                held = held[: found.start()]
                break
            keep = self._unfinished(held)
            self._put((stream, held[:keep]))
            held = held[keep:]
        self._put((stream, held))
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._over.set()
            self._put(None)

    def _unfinished(self, data: bytes) -> int:
        """Return the first position at which an incomplete end mark may start."""
        mark = _EDGE + self._nonce.encode()
        edge = data.rfind(_EDGE, max(0, len(data) - len(mark) - 8))
        while edge > 0 and not mark.startswith(data[edge : edge + len(mark)]):
            edge = data.rfind(_EDGE, max(0, len(data) - len(mark) - 8), edge)
        return edge if edge >= 0 and mark.startswith(data[edge : edge + len(mark)]) else len(data)
