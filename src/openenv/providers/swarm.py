"""A server as a Docker Swarm service: several containers of an image behind one port.

Swarm publishes the port on every address of the machine; it has no option for loopback only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openenv.errors import ProviderError
from openenv.providers.local_docker import (
    APPEAR_S,
    INNER_PORT,
    LOOK_S,
    EngineProvider,
    Variables,
    new_name,
    options_of,
    owner_labels,
    words_of,
)
from openenv.providers.provider import READY_S, refuse_unknown
from openenv.sandboxes.container_cli import failure_of

logger = logging.getLogger(__name__)

PublishMode = Literal["ingress", "host"]
_SCHEDULED_S = 60.0
_REMOVED_S = 30.0
_TASKS_S = 0.5
_OVER = ("failed", "rejected", "complete", "shutdown", "orphaned", "remove")


class DockerSwarmProvider(EngineProvider):
    """Starts a replicated service; one at a time.

    Args:
        auto_init_swarm: Whether to create a swarm on loopback if this engine is in none.
        overlay_network: A network for the service; made if it is missing, and then removed by `close`.
        publish_mode: `ingress` spreads requests over the replicas; with `host`, each replica has a separate port, and
            `urls` lists them.
        host: The engine's address, as for `docker --host`; by default the engine's settings decide.
        ready_timeout_s: The longest time until the first replica answers; `wait_for_ready` can set another time.

    Raises:
        ProviderUnavailable: Docker is not installed, or does not answer.
        ProviderError: The engine is not in a swarm, and a swarm cannot be created.
    """

    _noun = "Docker Swarm service"
    _title = "Swarm service"
    _log_command = ("service", "logs", "--raw")

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
        super().__init__("docker", host, ready_timeout_s)
        self._network = overlay_network
        self._made_network = False
        self._mode: PublishMode = publish_mode
        self._replicas = 0
        self._ensure_swarm(auto_init_swarm)
        self._ensure_network()

    @property
    def service_name(self) -> str | None:
        """The name of the service; None if nothing runs."""
        return self._name

    @property
    def urls(self) -> list[str]:
        """The addresses of the service: one, or with `publish_mode="host"` one per replica."""
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
            image: Name of the image; the swarm pulls a missing image.
            port: The port of the service; by default the swarm chooses.
            env_vars: Variables of the containers; kept out of argument lists.
            replicas: The number of containers.
            cpu_limit: Processors that each may use.
            memory_limit: Memory that each may use.
            constraints: Placement constraints in Swarm's syntax: `node.role==worker`.
            labels: More labels of the service.
            command: Replaces the image's command.
            container_port: The port that the server listens on inside.
            kwargs: None are accepted.

        Raises:
            ValueError: An option is unknown or invalid.
            RuntimeError: The start failed; everything it created was removed.
        """
        refuse_unknown(self, kwargs, DockerSwarmProvider.start_container)
        self._require_none()
        self._replicas = max(1, int(replicas))
        variables = Variables.of(env_vars)
        publish = f"mode={self._mode},target={container_port}" + ("" if port is None else f",published={port}")
        limits = {"--limit-cpu": cpu_limit, "--limit-memory": memory_limit, "--network": self._network}
        options = [
            *("--detach", "--replicas", str(self._replicas), "--publish", publish),
            *variables.options,
            *options_of(limits),
            *(word for constraint in constraints or () for word in ("--constraint", constraint)),
            *owner_labels("swarm", labels),
            *(("--no-resolve-image",) if self._engine.has_image(image) else ()),
            *(image, *words_of(command)),
        ]
        with contextlib.suppress(ProviderError):  # sweeping is a courtesy: its failure must not stop this start
            self._engine.sweep_services()
        self._ensure_network()
        name = new_name(image, "swarm-")

        def create() -> str:
            self._engine.output(
                "service", "create", "--name", name, *options, data=variables.file, environ=variables.environ
            )
            return f"http://localhost:{self._await_port() if port is None else port}"

        return self._start(image, name, create)

    def stop_container(self) -> None:
        """Remove the service and wait until its containers are gone; the swarm stays. Do nothing if there is none."""
        self._remove()

    def _remove(self, *, may_appear: bool = False) -> None:
        name = self._take_name()
        if name is None:
            return
        try:
            appears = time.monotonic() + (APPEAR_S if may_appear else 0.0)
            while (done := self._engine.run("service", "rm", name)).returncode != 0 and time.monotonic() < appears:
                time.sleep(LOOK_S)
            if done.returncode != 0 and "not found" not in failure_of(done):
                raise ProviderError(failure_of(done))
            label = f"label=com.docker.swarm.service.name={name}"
            deadline = time.monotonic() + _REMOVED_S
            while self._engine.output("ps", "--all", "--quiet", "--filter", label):
                if time.monotonic() > deadline:
                    raise ProviderError("its containers are still there")
                time.sleep(LOOK_S)
        except ProviderError as error:
            logger.warning("service %s may be left: %s. Remove it: docker service rm %s", name, error, name)

    def close(self) -> None:
        """Remove the network, if this provider has made it."""
        if self._made_network and self._network is not None and self._owner == os.getpid():
            self._made_network = False
            deadline = time.monotonic() + _REMOVED_S / 3
            with contextlib.suppress(ProviderError):  # the last container has left it only just now
                while self._engine.run("network", "rm", self._network).returncode != 0 and time.monotonic() < deadline:
                    time.sleep(LOOK_S)

    @contextlib.contextmanager
    def _watch(self, name: str) -> Iterator[Callable[[float], str | None]]:
        """Look at the replicas from time to time, because the engine has no command that waits for a service's end."""
        due = time.monotonic()

        def ended(within_s: float) -> str | None:
            nonlocal due
            time.sleep(within_s)
            if time.monotonic() < due:
                return None
            due = time.monotonic() + _TASKS_S
            return self._how_it_ended()

        yield ended

    def _ensure_swarm(self, may_init: bool) -> None:
        state = self._swarm_state()
        if state == "active":
            return
        if not may_init:
            raise ProviderError(
                f"Docker Swarm is not active (state={state}). Run `docker swarm init`, or pass auto_init_swarm=True."
            )
        here = "127.0.0.1"
        done = self._engine.run(
            "swarm", "init", "--advertise-addr", here, "--listen-addr", f"{here}:2377", "--data-path-addr", here
        )
        if done.returncode != 0 and self._swarm_state() != "active":  # another process may have been quicker
            raise ProviderError(f"Failed to initialize Docker Swarm: {failure_of(done)}. Do it with: docker swarm init")

    def _swarm_state(self) -> str:
        form = "{{.Swarm.LocalNodeState}}|{{.Swarm.ControlAvailable}}"
        state, _, is_manager = self._engine.output("info", "--format", form).partition("|")
        if state == "active" and is_manager != "true":
            raise ProviderError("This engine is a worker of its swarm; services are made by managers: use one's host.")
        return state

    def _ensure_network(self) -> None:
        network = self._network
        if network is None or self._engine.run("network", "inspect", network).returncode == 0:
            return
        done = self._engine.run("network", "create", "--driver", "overlay", "--attachable", network)
        if done.returncode != 0:
            raise ProviderError(f"Failed to create overlay network '{network}': {failure_of(done)}")
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
            time.sleep(LOOK_S)

    def _ports(self) -> list[int]:
        """Return the ports that the swarm has published."""
        if self._name is None:
            return []
        if self._mode == "ingress":
            listed = self._engine.output("service", "inspect", "--format", "{{json .Endpoint.Ports}}", self._name)
            return [port["PublishedPort"] for port in json.loads(listed) or () if "PublishedPort" in port]
        running = [task.id for task in self._tasks() if task.state == "running"]
        if not running:
            return []
        done = self._engine.run("inspect", "--type", "task", "--format", "{{json .Status.PortStatus}}", *running)
        statuses = [json.loads(line) or {} for line in done.stdout.decode().splitlines()]
        return list(dict.fromkeys(port["PublishedPort"] for status in statuses for port in status.get("Ports", ())))

    def _tasks(self) -> list[SwarmTask]:
        form = "{{.ID}}|{{.CurrentState}}|{{.Error}}"
        listed = self._engine.output("service", "ps", "--no-trunc", "--format", form, str(self._name))
        tasks = []
        for line in listed.splitlines():
            number, state, error = line.split("|", 2)
            tasks.append(SwarmTask(number, state.split(" ")[0].lower(), error.strip('"')))
        return tasks

    def _how_it_ended(self) -> str | None:
        """Return how the replicas ended, if all have and none runs again."""
        tasks = self._tasks()
        over = [task for task in tasks if task.state in _OVER]
        if len(over) < self._replicas or any(task.state == "running" for task in tasks):
            return None
        reasons = dict.fromkeys(task.error or task.state for task in over)
        return f"every replica has ended ({'; '.join(reasons)})"

    def _pending(self) -> str:
        reasons = dict.fromkeys(task.error for task in self._tasks() if task.error)
        return f" ({'; '.join(reasons)})" if reasons else ""

    def _advice_when_late(self) -> str:
        with contextlib.suppress(ProviderError):
            pending = self._pending()
            if pending:
                return f"Swarm says{pending}."
        if self._mode == "ingress":
            return "Where the kernel has no IP_VS, Swarm cannot spread requests: try publish_mode='host'."
        return ""


@dataclass(frozen=True, slots=True)
class SwarmTask:
    """One container of a service, as `docker service ps` lists it."""

    id: str
    state: str
    error: str
