"""A server as a Docker Swarm service: several containers of an image behind one port.

Knows Swarm's command line. Swarm publishes on every address of the machine; it cannot be told otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openenv.errors import ProviderError
from openenv.providers.health import quoted, wait_for_ready
from openenv.providers.local_docker import (
    INNER_PORT,
    LOG_LINES,
    ProviderEngine,
    Variables,
    new_name,
    output_of,
    owner_labels,
    words_of,
)
from openenv.providers.provider import READY_S, ContainerProvider, refuse_unknown
from openenv.sandboxes.docker import OWNER_LABEL
from openenv.sandboxes.owners import Owner

logger = logging.getLogger(__name__)

PublishMode = Literal["ingress", "host"]
_OPTIONS = (
    "port", "env_vars", "replicas", "cpu_limit", "memory_limit", "constraints", "labels", "command", "container_port",
)  # fmt: skip
_SCHEDULED_S = 60.0
_APPEAR_S = 3.0
_REMOVED_S = 30.0
_LOOK_S = 0.1
_TASKS_S = 0.5
_OVER = ("failed", "rejected", "complete", "shutdown", "orphaned", "remove")


class DockerSwarmProvider(ContainerProvider):
    """Starts a replicated service; one at a time.

    Args:
        auto_init_swarm: Whether to make this engine a swarm of its own, on loopback, where it is in none.
        overlay_network: A network for the service; made if it is missing, and then removed by `close`.
        publish_mode: `ingress` spreads requests over the replicas; with `host`, each replica has a port of its own, and
            `urls` lists them.
        host: The engine's address, as `docker --host` takes it; by default what its own settings say.
        ready_timeout_s: How long the first replica may take to answer, where `wait_for_ready` is told nothing else.

    Raises:
        ProviderUnavailable: Docker is not installed, or does not answer.
        ProviderError: There is no swarm, and none can be made.
    """

    def __init__(
        self,
        *,
        auto_init_swarm: bool = True,
        overlay_network: str | None = None,
        publish_mode: PublishMode = "ingress",
        host: str | None = None,
        ready_timeout_s: float = READY_S,
    ) -> None:
        if publish_mode not in ("ingress", "host"):
            raise ValueError(f"publish_mode must be 'ingress' or 'host', not {publish_mode!r}")
        self._engine = ProviderEngine("docker", host)
        self.ready_timeout_s = ready_timeout_s
        self._network = overlay_network
        self._made_network = False
        self._mode: PublishMode = publish_mode
        self._name: str | None = None
        self._replicas = 0
        self._container_port = INNER_PORT
        self._owner = os.getpid()
        self._ensure_swarm(auto_init_swarm)
        self._ensure_network()

    @property
    def service_name(self) -> str | None:
        """The name of the service, None when there is none."""
        return self._name

    @property
    def urls(self) -> list[str]:
        """Where the service is to be reached now: one address, or with `publish_mode="host"` one of each replica."""
        return [f"http://localhost:{port}" for port in self._ports()]

    def start_container(
        self,
        image: str,
        port: int | None = None,
        env_vars: dict[str, str] | None = None,
        *,
        replicas: int = 2,
        cpu_limit: float | str | None = None,
        memory_limit: str | None = None,
        constraints: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        command: str | Sequence[str] | None = None,
        container_port: int = INNER_PORT,
        **kwargs: Any,
    ) -> str:
        """Start a service and return its address.

        Args:
            image: Name of the image; one that is not here is looked up in its registry by the swarm.
            port: Where the service is to be reached; by default the swarm chooses.
            env_vars: Variables of the containers; they are in no argument list.
            replicas: How many containers to run.
            cpu_limit: How many processors each may use.
            memory_limit: How much memory each may use.
            constraints: Where they may run, as Swarm takes it: `node.role==worker`.
            labels: More labels of the service.
            command: What to run in place of the image's command.
            container_port: Where the server listens inside.
            kwargs: No others are known.

        Raises:
            ValueError: An option is none.
            RuntimeError: It could not be started; nothing is left of it.
        """
        refuse_unknown(type(self).__name__, kwargs, _OPTIONS)
        if self._name is not None:
            raise ProviderError(f"{type(self).__name__} is already running {self._name}; stop_container() first")
        self._replicas, self._container_port = max(1, int(replicas)), container_port
        variables = Variables.of(env_vars)
        publish = f"mode={self._mode},target={container_port}" + ("" if port is None else f",published={port}")
        given = {"--limit-cpu": cpu_limit, "--limit-memory": memory_limit, "--network": self._network}
        words = shlex.split(command) if isinstance(command, str) else command or ()
        options = [
            *("--detach", "--replicas", str(self._replicas), "--publish", publish),
            *variables.options,
            *(word for option, value in given.items() if value is not None for word in (option, str(value))),
            *(word for constraint in constraints or () for word in ("--constraint", constraint)),
            *owner_labels("swarm", labels),
            *(("--no-resolve-image",) if self._engine.has_image(image) else ()),
            *(image, *words),
        ]
        self._sweep()
        self._ensure_network()
        self._name, self._owner = new_name(image, "swarm-"), os.getpid()
        atexit.register(self.stop_container)
        try:
            self._engine.tell("service", "create", "--name", self._name, *options, variables=variables)
            return f"http://localhost:{self._await_port() if port is None else port}"
        except BaseException as error:
            log = self._log() if isinstance(error, ProviderError) else ""
            self._remove(may_appear=not isinstance(error, ProviderError))
            if isinstance(error, ProviderError):
                raise ProviderError(
                    f"Failed to start Docker Swarm service of '{image}': {error}{quoted(log)}", log=log
                ) from error
            raise

    def stop_container(self) -> None:
        """Remove the service and wait until its containers are gone; the swarm stays. Harmless when there is none."""
        self._remove()

    def _remove(self, *, may_appear: bool = False) -> None:
        """Remove the service; one that is being made is waited for."""
        name, self._name = self._name, None
        atexit.unregister(self.stop_container)
        if name is None or self._owner != os.getpid():  # a forked process leaves it to its parent
            return
        try:
            appears = time.monotonic() + (_APPEAR_S if may_appear else 0.0)
            while (done := self._engine.ask("service", "rm", name)).returncode != 0 and time.monotonic() < appears:
                time.sleep(_LOOK_S)
            if done.returncode != 0 and "not found" not in words_of(done):
                raise ProviderError(words_of(done))
            label = f"label=com.docker.swarm.service.name={name}"
            deadline = time.monotonic() + _REMOVED_S
            while self._engine.tell("ps", "--all", "--quiet", "--filter", label):
                if time.monotonic() > deadline:
                    raise ProviderError("its containers are still there")
                time.sleep(_LOOK_S)
        except ProviderError as error:
            logger.warning("service %s may be left: %s. Remove it: docker service rm %s", name, error, name)

    def close(self) -> None:
        """Remove the network, if this provider has made it."""
        if self._made_network and self._network is not None and self._owner == os.getpid():
            self._made_network = False
            deadline = time.monotonic() + _REMOVED_S / 3
            with contextlib.suppress(ProviderError):  # the last container has left it only just now
                while self._engine.ask("network", "rm", self._network).returncode != 0 and time.monotonic() < deadline:
                    time.sleep(_LOOK_S)

    def wait_for_ready(self, base_url: str, timeout_s: float | None = None) -> None:
        """Return as soon as one replica answers; others may still be starting. A service that does not is removed.

        Raises:
            ServerDied: Every replica has ended; the text has the end of their logs.
            ServerNotReady: None answered in time, by default `ready_timeout_s`.
        """
        timeout_s = self.ready_timeout_s if timeout_s is None else timeout_s
        if self._name is None:
            wait_for_ready(base_url, timeout_s, what="Swarm service")
            return
        try:
            what = f"Swarm service {self._name}"
            wait_for_ready(base_url, timeout_s, what=what, watch=ServiceWatch(self), advice=self._advice_when_late)
        except BaseException:
            self.stop_container()
            raise

    def log(self) -> str:
        """Return the end of what the containers have written; nothing when there are none."""
        return self._log()

    def _ensure_swarm(self, may_init: bool) -> None:
        state = self._swarm_state()
        if state == "active":
            return
        if not may_init:
            raise ProviderError(
                f"Docker Swarm is not active (state={state}). Run `docker swarm init`, or pass auto_init_swarm=True."
            )
        here = "127.0.0.1"
        done = self._engine.ask(
            "swarm", "init", "--advertise-addr", here, "--listen-addr", f"{here}:2377", "--data-path-addr", here
        )
        if done.returncode != 0 and self._swarm_state() != "active":  # somebody else may have been quicker
            raise ProviderError(f"Failed to initialize Docker Swarm: {words_of(done)}. Do it with: docker swarm init")

    def _swarm_state(self) -> str:
        form = "{{.Swarm.LocalNodeState}}|{{.Swarm.ControlAvailable}}"
        state, _, is_manager = self._engine.tell("info", "--format", form).partition("|")
        if state == "active" and is_manager != "true":
            raise ProviderError("This engine is a worker of its swarm; services are made by managers: use one's host.")
        return state

    def _ensure_network(self) -> None:
        network = self._network
        if network is None or self._engine.ask("network", "inspect", network).returncode == 0:
            return
        done = self._engine.ask("network", "create", "--driver", "overlay", "--attachable", network)
        if done.returncode != 0:
            raise ProviderError(f"Failed to create overlay network '{network}': {words_of(done)}")
        self._made_network = True

    def _await_port(self) -> int:
        deadline = time.monotonic() + _SCHEDULED_S
        while True:
            ports = self._ports()
            if ports:
                return ports[0]
            if (how := self._how_it_ended()) is not None:
                raise ProviderError(how)
            if time.monotonic() > deadline:
                raise ProviderError(f"the swarm has scheduled nothing within {_SCHEDULED_S:g} s{self._pending()}")
            time.sleep(_LOOK_S)

    def _ports(self) -> list[int]:
        """Ask the swarm which ports it has published."""
        if self._name is None:
            return []
        if self._mode == "ingress":
            told = self._engine.tell("service", "inspect", "--format", "{{json .Endpoint.Ports}}", self._name)
            return [port["PublishedPort"] for port in json.loads(told) or () if "PublishedPort" in port]
        running = [task.id for task in self._tasks() if task.state == "running"]
        if not running:
            return []
        done = self._engine.ask("inspect", "--type", "task", "--format", "{{json .Status.PortStatus}}", *running)
        found = [json.loads(line) or {} for line in done.stdout.decode().splitlines()]
        return list(dict.fromkeys(port["PublishedPort"] for status in found for port in status.get("Ports", ())))

    def _tasks(self) -> list[Task]:
        form = "{{.ID}}|{{.CurrentState}}|{{.Error}}"
        told = self._engine.tell("service", "ps", "--no-trunc", "--format", form, str(self._name))
        tasks = []
        for line in told.splitlines():
            number, state, error = line.split("|", 2)
            tasks.append(Task(number, state.split(" ")[0].lower(), error.strip('"')))
        return tasks

    def _how_it_ended(self) -> str | None:
        """Say how the replicas ended, when all have and none is running again."""
        tasks = self._tasks()
        over = [task for task in tasks if task.state in _OVER]
        if len(over) < self._replicas or any(task.state == "running" for task in tasks):
            return None
        reasons = dict.fromkeys(task.error or task.state for task in over)
        return f"every replica has ended ({'; '.join(reasons)})"

    def _pending(self) -> str:
        reasons = dict.fromkeys(task.error for task in self._tasks() if task.error)
        return f" ({'; '.join(reasons)})" if reasons else ""

    def _log(self) -> str:
        if self._name is None:
            return ""
        with contextlib.suppress(ProviderError):
            done = self._engine.ask("service", "logs", "--raw", "--tail", str(LOG_LINES), self._name, timeout=20)
            return output_of(done) if done.returncode == 0 else ""
        return ""

    def _advice_when_late(self) -> str:
        with contextlib.suppress(ProviderError):
            pending = self._pending()
            if pending:
                return f"Swarm says{pending}."
        if self._mode == "ingress":
            return "Where the kernel has no IP_VS, Swarm cannot spread requests: try publish_mode='host'."
        return ""

    def _sweep(self) -> None:
        """Remove the services of processes that were killed; those of others stay."""
        with contextlib.suppress(ProviderError):
            names = self._engine.tell(
                "service", "ls", "--filter", f"label={OWNER_LABEL}", "--format", "{{.Name}}"
            ).split()
            form = '{{.Spec.Name}} {{index .Spec.Labels "' + OWNER_LABEL + '"}}'
            listed = self._engine.tell("service", "inspect", "--format", form, *names) if names else ""
            for line in listed.splitlines():
                name, _, label = line.partition(" ")
                owner = Owner.parse(label.strip())
                if owner is not None and owner.is_dead():
                    self._engine.ask("service", "rm", name)


@dataclass(frozen=True, slots=True)
class Task:
    """One container of a service, as the swarm tells of it."""

    id: str
    state: str
    error: str


class ServiceWatch:
    """A service seen from outside."""

    def __init__(self, provider: DockerSwarmProvider) -> None:
        self._provider = provider
        self._next = time.monotonic()

    def ended(self, within_s: float) -> str | None:
        """Wait that long; return how all replicas ended, or None while one may yet answer."""
        time.sleep(within_s)
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _TASKS_S
        return self._provider._how_it_ended()

    def log(self) -> str:
        """Return the end of what its containers have written."""
        return self._provider._log()
