"""The backend `local`: starts sandboxes on this machine, without a service, an image or an account.

Knows who the sandbox's user is, where limits come from and what a crashed owner left behind.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

from openenv.errors import SandboxUnavailable
from openenv.sandboxes.base import FEATURES, Sandboxes, SandboxSpec
from openenv.sandboxes.local import bubblewrap, cgroups
from openenv.sandboxes.local.bubblewrap import Kit, Person, launch
from openenv.sandboxes.local.cgroups import Group, Hierarchy
from openenv.sandboxes.local.sandbox import LocalSandbox
from openenv.sandboxes.owners import Owner
from openenv.sandboxes.relay import Relay


class LocalSandboxes(Sandboxes):
    """Sandboxes made with bubblewrap: private namespaces, limits, an unprivileged user and no network.

    Args:
        require_cgroup: Refuse to start sandboxes without limits for memory, processes and cpu. Without them, a
            sandbox can use all that the machine has.
        uid: The user's number inside; the group's is the same.
    """

    name = "local"

    def __init__(self, *, require_cgroup: bool = True, uid: int = 1000) -> None:
        if uid <= 0:
            raise ValueError("the user inside a sandbox must not be root")
        self._require_cgroup = require_cgroup
        self._uid = uid
        self._lock = threading.Lock()
        self._kit: Kit | None = None
        self._hierarchy: Hierarchy | None = None
        self._owner: Owner | None = None
        self._serial = itertools.count(1)
        self._tail = secrets.token_hex(3)
        self._relay = Relay()
        self._open: weakref.WeakSet[LocalSandbox] = weakref.WeakSet()
        forget = weakref.WeakMethod(self._forget)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _call(forget))

    def check(self) -> None:
        """Start a sandbox and end it again; raise `SandboxUnavailable` with what is missing."""
        with self.open() as sandbox:
            if sandbox.exec(["true"]).exit_code != 0:
                raise SandboxUnavailable("A local sandbox starts, but cannot run a command.")

    def open(self, spec: SandboxSpec | None = None) -> LocalSandbox:
        """Start a sandbox."""
        spec = spec or SandboxSpec()
        kit = self._prepared()
        person = Person(self._uid, self._uid, bubblewrap.checked_home(spec.home), bubblewrap.is_privileged())
        name = f"{self._tail}x{next(self._serial)}"
        group = self._group(name, spec)
        try:
            processes = launch(kit, spec, person, group)
        except BaseException:
            if group is not None:
                group.remove()
            raise
        spec = replace(spec, home=person.home)
        sandbox = LocalSandbox(f"local-{os.getpid()}-{name}", spec, processes, kit.interpreter.search_path, self._relay)
        self._open.add(sandbox)
        return sandbox

    def leftovers(self) -> list[str]:
        """List the control groups of ended sandboxes of this backend that are still there."""
        if self._hierarchy is None:
            return []
        living = {sandbox.sandbox_id.rpartition("-")[2] for sandbox in self._open if sandbox.is_alive()}
        own = [name for name, owner in self._hierarchy.names() if owner == self._owner and f"~{self._tail}x" in name]
        return [name for name in own if name.rpartition("~")[2] not in living]

    def abandoned(self) -> list[str]:
        """List the control groups whose owners have crashed; the next backend that starts removes them."""
        if self._hierarchy is None:
            return []
        return [name for name, owner in self._hierarchy.names() if owner.is_dead()]

    def _forget(self) -> None:
        """Let go of sandboxes in a forked child: they are its parent's, and have to end when the parent does."""
        self._lock = threading.Lock()
        self._relay = Relay()
        for sandbox in list(self._open):
            sandbox.abandon()

    def _prepared(self) -> Kit:
        with self._lock:
            if self._kit is None or self._owner is None or self._owner.pid != os.getpid():
                self._kit = Kit.prepare()
                self._owner = Owner.current()
                self._hierarchy = self._found_hierarchy()
                if self._hierarchy is not None:
                    self._hierarchy.sweep()
                else:
                    self.features = FEATURES - {"limits"}
            return self._kit

    def _found_hierarchy(self) -> Hierarchy | None:
        try:
            return cgroups.find()
        except SandboxUnavailable:
            if self._require_cgroup:
                raise
            return None

    def _group(self, name: str, spec: SandboxSpec) -> Group | None:
        if self._hierarchy is None or self._owner is None:
            return None
        return self._hierarchy.create(self._owner, name, spec.limits)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    living = method()
    if living is not None:
        living()
