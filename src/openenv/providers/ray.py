"""Servers on a Ray cluster: `RayProvider` runs one per node, each a child process of a Ray actor there.

    RayProvider ──> ServerActor on a node ──> `openenv serve`, as a child process
                         │ its process or its node dies, or the server ends
                         └ Ray runs the constructor again on a node with room: a new server, at a new address

The actors belong to the program that started them: they end with it, however it ends, and the servers with them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv import settings
from openenv.errors import ProviderError, ProviderUnavailable, Unschedulable
from openenv.providers.health import ask_health
from openenv.providers.provider import READY_S, RuntimeProvider, announce_if_slow, refuse_unknown
from openenv.providers.server_process import ProcessProvider

from .ray_cluster import RayCluster

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
_LOOK_S = 0.2
_STOP_S = 15.0
_WATCH_S = 3600.0
_BOUND = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
    if os.getppid() == 1:
        sys.exit(1)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that ends with its parent, the guardian: Ray kills the children of a process that it ends, and so the
guardian before it can end the server."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The server of each actor."""

    target: str | None
    command: tuple[str, ...] | None
    host: str | None
    port: int | None
    cwd: str | None
    env_vars: Mapping[str, str]
    ready_timeout_s: float


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of an actor's server."""

    url: str
    node_id: str
    failure: ProviderError | None
    """Why it did not start; the actor stays to say so."""


class ServerActor:
    """A server and the process of the cluster that it belongs to.

    Args:
        plan: The server to run.
    """

    def __init__(self, plan: ServerPlan) -> None:
        import ray

        self._node_id = ray.get_runtime_context().get_node_id()
        self._failure: ProviderError | None = None
        self._is_stopping = False
        serve = (sys.executable, "-m", "openenv", "serve", plan.target or "", "--host", "{host}", "--port", "{port}")
        self._provider = ProcessProvider(
            command=[sys.executable, "-c", _BOUND, *(plan.command or serve)],
            host=plan.host or ray.util.get_node_ip_address(),
            cwd=plan.cwd,
            env_vars=plan.env_vars,
            ready_timeout_s=plan.ready_timeout_s,
        )
        self._url = ""
        try:
            self._url = self._provider.start(plan.port)
            self._provider.wait_for_ready()
        except ProviderError as exc:
            self._failure = exc
        else:
            threading.Thread(target=self._watch, name="openenv-server-watch", daemon=True).start()

    def state(self) -> ServerState:
        """Return the server's address, or why it failed."""
        return ServerState(self._url, self._node_id, self._failure)

    def log(self) -> str:
        """Return the end of the server's output."""
        return self._provider.log()

    def stop(self) -> None:
        """Stop the server; nothing takes its place."""
        self._is_stopping = True
        self._provider.stop()

    def _watch(self) -> None:
        """End this process when the server has ended: Ray starts both again."""
        while (how := self._provider.ended(_WATCH_S)) is None:
            pass
        if not self._is_stopping:
            sys.stderr.write(f"The server {how}.\n{self._provider.log()}\n")
            sys.stderr.flush()
            os._exit(1)


class RayProvider(RuntimeProvider):
    """Serves an environment on the nodes of a Ray cluster; as a context manager it waits until all servers answer.

    If a server ends or its node is lost, Ray starts it again on a node with room, now or when one joins. Its sessions
    are lost with a typed error. Its new address appears in `urls`. Pass `urls` to `VectorEnv` in place of addresses,
    and slots without a session find it.

    Args:
        target: What `openenv serve` serves: a folder, a file or a module that the nodes have.
        command: A command to run instead, as in `ProcessProvider`.
        cluster: The cluster and the resources of a server in it, or only the cluster's address.
        servers: The number of servers; by default one for each node that has the resources.
        host: The address that servers listen on; by default that of their node in the cluster.
        cwd: The folder to run in.
        env_vars: Variables to add to those of the node's processes.
        token: What clients have to send; by default `OPENENV_TOKEN` of this process, else a random one.
        ready_timeout_s: The longest time until a server answers.

    Raises:
        ValueError: An option is invalid.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        command: Sequence[str] | None = None,
        cluster: RayCluster | str = "auto",
        servers: int | None = None,
        host: str | None = None,
        cwd: str | Path | None = None,
        env_vars: Mapping[str, str] | None = None,
        token: str | None = None,
        ready_timeout_s: float = READY_S,
    ) -> None:
        ProcessProvider(target, command=command)  # raises for a target and a command, and for neither
        if servers is not None and servers < 1:
            raise ValueError(f"servers must be at least 1, not {servers}")
        self._target = None if target is None else str(target)
        self._command = None if command is None else tuple(command)
        self._cluster = RayCluster(cluster) if isinstance(cluster, str) else cluster
        self._servers = servers
        self._host = host
        self._cwd = None if cwd is None else str(cwd)
        self._env_vars = dict(env_vars or {})
        known = token or settings.client_token(self._env_vars) or settings.client_token()
        self.token = known or secrets.token_urlsafe(24)
        """What clients have to send."""
        self.ready_timeout_s = ready_timeout_s
        self._ray: Any = None
        self._actors: list[Any] = []
        self._placed: set[int] = set()  # actors that have answered; calls of the others would block

    def start(self, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any) -> str:
        """Start the servers, wait until they answer, and return the address of the first; `urls` has all.

        Args:
            port: The port on each node; by default any free one.
            env_vars: More variables.
            kwargs: None are accepted.

        Raises:
            ValueError: An option is unknown.
            ProviderUnavailable: Ray is not installed, or the cluster does not answer.
            ServerDied: A server ended before it answered; the text has the end of its log.
            ServerNotReady: One did not answer in time.
            Unschedulable: The cluster found no place for one in time.
        """
        refuse_unknown(self, kwargs, RayProvider.start)
        if self._actors:
            raise ProviderError(f"{type(self).__name__} is already running; stop() it first")
        self._ray = self._cluster.connect(ProviderUnavailable)
        plan = ServerPlan(
            target=self._target,
            command=self._command,
            host=self._host,
            port=port,
            cwd=self._cwd,
            env_vars={**self._env_vars, **(env_vars or {}), "OPENENV_TOKEN": self.token},
            ready_timeout_s=self.ready_timeout_s,
        )
        try:
            self._start(plan)
            with announce_if_slow(f"Ray starts {len(self._actors)} servers"):
                self.wait_for_ready()
            return self.urls()[0]
        except BaseException:
            self.stop()
            raise

    def _start(self, plan: ServerPlan) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in self._ray.nodes() if node["Alive"] and self._cluster.fits(node["Resources"]) > 0]
        if not nodes:
            raise Unschedulable(f"no node of the Ray cluster has the resources of a server: {self._cluster.demand()}")
        # In the order of their ids, which is stable; the node is a wish, so that the server can move when it is lost.
        ids = sorted(node["NodeID"] for node in nodes)
        remote = self._ray.remote(ServerActor)
        for number in range(self._servers or len(ids)):
            node = NodeAffinitySchedulingStrategy(ids[number % len(ids)], soft=True)
            options = {**self._cluster.actor_options(), "max_restarts": -1, "scheduling_strategy": node}
            self._actors.append(remote.options(max_concurrency=4, **options).remote(plan))

    def urls(self) -> list[str]:
        """Return the addresses of the servers that answer now, for `VectorEnv`. A restarting server is left out.

        A session lives on the server that opened it: a client that lost its connection resumes at the same address.
        """
        return [state.url for state in self._states(_ANSWER_S).values() if state.failure is None]

    def wait_for_ready(self, timeout_s: float | None = None) -> None:
        """Return as soon as all servers answer, also after one was lost.

        Raises:
            ServerDied: A server ended before it answered; the text has the end of its log.
            ServerNotReady: One did not answer in time.
            Unschedulable: The cluster found no place for one within `timeout_s`, by default the time that `RayCluster`
                and this provider allow.
        """
        if not self._actors:
            raise ProviderError(f"{type(self).__name__} has not been started")
        allowed_s = self._cluster.start_timeout_s + self.ready_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + allowed_s
        while True:
            states = self._states(max(_LOOK_S, min(_ANSWER_S, deadline - time.monotonic())))
            for state in states.values():
                if state.failure is not None:
                    raise state.failure
            if len(states) == len(self._actors) and all(_is_healthy(state) for state in states.values()):
                return
            if time.monotonic() >= deadline:
                count = len(self._actors) - len(states)
                raise Unschedulable(
                    f"{count} of {len(self._actors)} servers have found no place in the Ray cluster within "
                    f"{allowed_s:g} s. One reserves {self._cluster.demand()}; free are "
                    f"{self._ray.available_resources()}. Add a node, or ask for less (cpus, resources of RayCluster)."
                )
            time.sleep(_LOOK_S)

    def log(self) -> str:
        """Return the end of the servers' output; an empty text if none runs."""
        parts = self._ask("log", _ANSWER_S, of=self._placed)
        if len(parts) == 1:
            return str(next(iter(parts.values())))
        return "\n".join(f"== server {number}\n{text}" for number, text in parts.items())

    def stop(self) -> None:
        """Stop all servers; do nothing if none runs."""
        try:
            self._ask("stop", _STOP_S, of=self._placed)
        finally:
            actors, self._actors, self._placed = self._actors, [], set()
            for actor in actors:
                with contextlib.suppress(Exception):  # Ray raises various errors for a lost actor
                    self._ray.kill(actor)

    def _states(self, timeout_s: float) -> dict[int, ServerState]:
        return self._ask("state", timeout_s)

    def _ask(self, method: str, timeout_s: float, *, of: Collection[int] | None = None) -> dict[int, Any]:
        """Call a method of all actors, or of some; return what those answer in time that run, by their number."""
        numbers = range(len(self._actors)) if of is None else sorted(of)
        if not numbers:
            return {}
        from ray.exceptions import RayError

        calls = {getattr(self._actors[number], method).remote(): number for number in numbers}
        ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
        answers: dict[int, Any] = {}
        for call in ready:
            try:
                answers[calls[call]] = self._ray.get(call)
            except RayError as exc:
                logger.info("server %s does not answer: %s", calls[call], type(exc).__name__)
        self._placed |= set(answers)
        return dict(sorted(answers.items()))


def _is_healthy(state: ServerState) -> bool:
    return ask_health(state.url, _ANSWER_S) is None
