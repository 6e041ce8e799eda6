"""The backend `e2b`: sandboxes in E2B's cloud, through the `e2b` package, which is imported when a backend is made.

`E2BSandboxBackend` is also the name that existing code imports. `RemoteSandbox` does everything inside.
"""

from __future__ import annotations

import codecs
import inspect
import logging
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any

from openenv import settings
from openenv.errors import SandboxError, SandboxUnavailable, SandboxUnsupported, message_of
from openenv.sandboxes.base import Limits, Sandboxes, SandboxSpec, Stream, refuse_image, refuse_snapshot
from openenv.sandboxes.host import ConnectionQuota
from openenv.sandboxes.remote import QueueChannel, RemoteSandbox
from openenv.sandboxes.shell_command import READ_SCRIPT, Channel, framed
from openenv.sandboxes.streams import slices

if TYPE_CHECKING:
    from e2b import Sandbox as PackageSandbox

_log = logging.getLogger(__name__)
_KILLED = 137
_INLINE = 60_000
_PROBE_S = 15.0


class E2BSandboxBackend(Sandboxes):
    """Starts sandboxes at E2B.

    Args:
        api_key: The account's key; by default `E2B_API_KEY`.
        template: Name or id of the template; by default E2B's own.
        sandbox_kwargs: More arguments of `e2b.Sandbox.create`; they override ours.

    Raises:
        ImportError: the `e2b` package is not installed.
        RuntimeError: the key is missing.
    """

    name = "e2b"
    features = frozenset({"trees", "ports", "expiry"})

    def __init__(
        self,
        *,
        api_key: str | None = None,
        template: str | None = None,
        sandbox_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import e2b
        except ImportError as error:
            raise ImportError("E2B sandboxes need the package `e2b`. Install it: pip install e2b") from error
        key = api_key or settings.e2b_api_key()
        if not key:
            raise RuntimeError("E2B sandboxes need a key: pass api_key=, or set E2B_API_KEY.")
        self._sdk = e2b
        self._key = key
        self._template = template
        self._kwargs = dict(sandbox_kwargs or {})
        self._quota = ConnectionQuota()

    def check(self) -> None:
        """Return if E2B accepts the account; raise `SandboxUnavailable` with its message if not."""
        options = {name: value for name, value in self._kwargs.items() if name in _CONNECTION}
        try:
            self._sdk.Sandbox.list(api_key=self._key, limit=1, **options).next_items()
        except Exception as error:  # the errors of the package have no common base class
            raise SandboxUnavailable(f"E2B does not answer: {message_of(error)}") from error

    def open(self, spec: SandboxSpec | None = None) -> E2BSandbox:
        """Start a sandbox without a network except exposed ports; `sandbox_kwargs` can override that."""
        closed = {"allow_internet_access": False, "network": {"allow_public_traffic": False}}
        spec = spec or SandboxSpec()
        refuse_snapshot(spec, self.name)
        refuse_image(spec, self.name)
        return self._open(spec, closed)

    def create(
        self, *, timeout_s: int = 900, envs: Mapping[str, str] | None = None, metadata: Mapping[str, str] | None = None
    ) -> E2BSandbox:
        """Start a sandbox with E2B's own defaults, also for the network: the call of `SandboxBackend`."""
        return self._open(SandboxSpec(timeout_s=timeout_s, envs=dict(envs or {}), metadata=dict(metadata or {})), {})

    def _open(self, spec: SandboxSpec, defaults: Mapping[str, Any]) -> E2BSandbox:
        if spec.mounts:
            raise SandboxUnsupported("E2B sandboxes cannot mount folders of this machine: bake them into a template.")
        if spec.limits != Limits():
            raise SandboxUnsupported("An E2B sandbox has the limits of its template; leave limits out.")
        arguments = {
            "template": self._template,
            "timeout": max(1, math.ceil(spec.timeout_s)),
            "envs": dict(spec.envs),
            "metadata": dict(spec.metadata),
            "api_key": self._key,
            **defaults,
            **self._kwargs,
        }
        try:
            remote = self._sdk.Sandbox.create(**arguments)
        except Exception as error:  # the errors of the package have no common base class
            raise SandboxUnavailable(f"E2B started no sandbox: {message_of(error)}") from error
        return E2BSandbox(remote, spec, self._quota)


_CONNECTION = frozenset({"domain", "api_url", "debug", "proxy", "headers", "http_version", "request_timeout"})


def _unretained(run: Callable[..., Any]) -> dict[str, Any]:
    """Return the option that keeps the package from storing all output; its last version for Python 3.10 lacks it."""
    return {"retain_output": False} if "retain_output" in inspect.signature(run).parameters else {}


class E2BSandbox(RemoteSandbox):
    """One sandbox at E2B."""

    cloud = "E2B"
    oom_counters = ("/proc/vmstat",)

    def __init__(self, remote: PackageSandbox, spec: SandboxSpec, quota: ConnectionQuota) -> None:
        super().__init__(remote.sandbox_id, spec, quota=quota)
        self.remote = remote
        """The package's own object, for features that this protocol does not have."""
        self._expires = time.monotonic() + spec.timeout_s

    def _channel(self, script: str, *, has_input: bool) -> Channel:
        long = len(script) > _INLINE  # Linux limits a single argument to 128 KB
        command = f"exec /bin/sh -c {shlex.quote(READ_SCRIPT if long else script)}"
        with self._asking("started no command in"):
            # Without E2B's time limit: the caller enforces ours, and background jobs have none.
            run = self.remote.commands.run
            handle = run(command, background=True, stdin=long or has_input, timeout=0, cwd="/", **_unretained(run))
        channel = CommandChannel(handle, has_input=long or has_input)
        if long:
            channel.send(framed(script))
        return channel

    def _why_gone(self) -> str | None:
        try:
            if self.remote.is_running(request_timeout=_PROBE_S):
                return None
        except Exception as error:  # unknown; the operation failed all the same
            return f"E2B does not answer: {message_of(error)}"
        return "expired" if time.monotonic() > self._expires - 2 else "ended by E2B"

    def _destroy(self) -> None:
        try:
            self.remote.kill()
        except Exception as error:  # it ends when its time is over
            if self._ended == "closed" and self._why_gone() is None:
                raise SandboxError(f"Sandbox '{self.sandbox_id}' could not be ended: {message_of(error)}") from error

    def _send_file(self, place: str, file: IO[bytes]) -> None:
        self.remote.files.write(place, file)

    def _fetch_file(self, place: str) -> Iterable[bytes]:
        return self.remote.files.read(place, format="stream")


class CommandChannel(QueueChannel):
    """A command at E2B; a thread takes its events from the package, in their order."""

    def __init__(self, handle: Any, *, has_input: bool) -> None:
        super().__init__()
        self._handle = handle
        self._has_input = has_input
        self._encoding = _keep_bytes(handle)
        threading.Thread(target=self._follow, name=f"e2b-{handle.pid}", daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        """The exit code of the shell; E2B reports no number for a signal."""
        self._over.wait(10)
        return _KILLED if self._exit_code is not None and self._exit_code < 0 else self._exit_code

    def send(self, data: bytes) -> None:
        for part in slices(data):
            if self._over.is_set() or self._closed.is_set():
                return
            try:
                self._handle.send_stdin(part)
            except Exception:  # the command or the sandbox has ended: the reader finds out which
                return

    def end_input(self) -> None:
        if self._has_input and not self._over.is_set() and not self._closed.is_set():
            self._has_input = False
            try:
                self._handle.close_stdin()
            except Exception:  # the command or the sandbox has ended
                _log.debug("close_stdin", exc_info=True)

    def _follow(self) -> None:
        try:
            for out, err, _ in self._handle:
                if self._closed.is_set():
                    self._handle.disconnect()
                    return
                texts: tuple[tuple[Stream, str | None], ...] = (("stdout", out), ("stderr", err))
                for stream, text in texts:
                    if text:
                        self._put((stream, text.encode(self._encoding, "replace")))
            self._exit_code = _exit_code(self._handle)
        except Exception:  # the stream broke; `_why_gone` finds out whether the sandbox is gone
            _log.debug("e2b events", exc_info=True)
        finally:
            self._over.set()
            self._put(None)


def _keep_bytes(handle: Any) -> str:
    """Make the package pass bytes on unchanged where possible; return the encoding that turns its text back into bytes.

    It decodes output as UTF-8 and loses every other byte. Latin-1 has a character for each byte.
    """
    if not (hasattr(handle, "_stdout_decoder") and hasattr(handle, "_stderr_decoder")):
        return "utf-8"
    decoder = codecs.getincrementaldecoder("latin-1")
    handle._stdout_decoder, handle._stderr_decoder = decoder(), decoder()
    return "latin-1"


def _exit_code(handle: Any) -> int | None:
    try:
        return int(handle.wait().exit_code)
    except Exception as error:  # the package raises for every exit code except 0, and the exception has it
        code = getattr(error, "exit_code", None)
        return code if isinstance(code, int) else None
