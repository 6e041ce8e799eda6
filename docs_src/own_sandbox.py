from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time

from openenv.errors import SandboxUnavailable, SandboxUnsupported
from openenv.sandboxes import Sandboxes, SandboxSpec
from openenv.sandboxes.base import HOME, Limits
from openenv.sandboxes.shell import ShellSandbox
from openenv.sandboxes.shell_command import READ_SCRIPT, ProcessChannel, framed

START = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--ipc", "--uts")
FIRST = """mount -t tmpfs tmpfs /home && mkdir -p /home/user/workdir && chown -R 1000:1000 /home/user || exit 1
mount -t tmpfs -o mode=1777 tmpfs /tmp && ip link set lo up && echo ready || exit 1
sleep "$1" & wait $!"""
USER = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--no-new-privs", "--bounding-set=-all")
ENVS = ("env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "USER=user", "TMPDIR=/tmp")


class NamespaceSandboxes(Sandboxes):
    """Sandboxes made of `unshare` and `nsenter`: separate processes, network and home. Needs root."""

    name = "namespaces"
    features = frozenset({"trees", "ports", "expiry"})  # no isolation: the host's files can be read

    def check(self) -> None:
        if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "setpriv", "ip"))):
            raise SandboxUnavailable("This needs root, and: apt-get install -y util-linux iproute2")

    def open(self, spec: SandboxSpec | None = None) -> NamespaceSandbox:
        spec = spec or SandboxSpec()
        self.check()
        if spec.mounts or spec.limits != Limits() or spec.home != HOME:
            raise SandboxUnsupported("These sandboxes do not support mounts, limits or another home.")
        command = [*START, "sh", "-c", FIRST, "first", str(spec.timeout_s)]
        first = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert first.stdout is not None
        with first.stdout:
            reply = first.stdout.readline().decode().strip()
        if reply != "ready":
            first.kill()
            raise SandboxUnavailable(f"No sandbox could be started: {reply}")
        return NamespaceSandbox(first, spec)


class NamespaceSandbox(ShellSandbox):
    """One sandbox. It adds the start of a shell, a liveness check, and the end."""

    def __init__(self, first: subprocess.Popen[bytes], spec: SandboxSpec) -> None:
        super().__init__(f"namespaces-{secrets.token_hex(6)}", spec)
        self._first = first
        self._expires = time.monotonic() + spec.timeout_s
        place = f"/proc/{first.pid}/ns"
        kinds = {"pid": "pid_for_children", "mount": "mnt", "net": "net", "ipc": "ipc", "uts": "uts"}
        self._enter = ["nsenter", *(f"--{kind}={place}/{file}" for kind, file in kinds.items()), *USER, *ENVS]

    def _channel(self, script: str, *, has_input: bool) -> ProcessChannel:
        channel = ProcessChannel([*self._enter, "/bin/sh", "-c", READ_SCRIPT])
        channel.send(framed(script))  # not as an argument: other users could read it
        return channel

    def _why_gone(self) -> str | None:
        if self._control_once(":").endswith("done"):
            return None  # a shell still starts
        return "expired" if time.monotonic() > self._expires - 1 else "its first process ended"

    def _destroy(self) -> None:
        self._first.kill()  # with --kill-child, everything inside dies too
        self._first.wait()
