"""A Ray cluster, and the resources of our processes in it. Shared by `RayProvider` and rollouts on Ray.

Ray is imported when a cluster is used. This module must not know servers or rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openenv.errors import OpenEnvError, install_command

_CLIENT_SCHEME = "ray://"


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A running cluster, and the resources that each server or worker process reserves.

    Args:
        address: As `ray.init` takes it: `HOST:PORT` of the head, or `auto` for `RAY_ADDRESS` and else the cluster that
            this machine belongs to. A process that is connected already stays so.
        cpus: Processors that a process reserves; a fraction lets more of them on a node.
        resources: Further resources that it reserves, such as `{"sandboxes": 1}`: it runs on nodes that have them.
        runtime_env: What Ray prepares for it, as in `ray.init`: `{"working_dir": "."}`, `{"env_vars": {...}}`.
        start_timeout_s: The longest time until the cluster has placed it, including the time to add a node.

    Raises:
        ValueError: An option is invalid.
    """

    address: str = "auto"
    cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = None
    start_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.address:
            raise ValueError("address must be HOST:PORT of a Ray cluster, or 'auto'")
        if self.address.startswith(_CLIENT_SCHEME):
            raise ValueError(
                f"{self.address} is Ray Client, which cannot stream results: run this on a machine of the cluster "
                "(`ray job submit` does so) with 'auto', or with HOST:PORT of the head"
            )
        if not (math.isfinite(self.cpus) and self.cpus >= 0):
            raise ValueError(f"cpus must be 0 or more, not {self.cpus}")
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s must be greater than 0, not {self.start_timeout_s}")

    def connect(self, unavailable: type[OpenEnvError]) -> Any:
        """Connect this process, unless it is, and return the module `ray`; the connection stays, as Ray's own do.

        Raises:
            ValueError: This process is connected to another cluster.
            OpenEnvError: As `unavailable`: Ray is not installed, or the cluster does not answer.
        """
        try:
            import ray
        except ImportError:
            raise unavailable(f"Ray is not installed: {install_command('ray')}") from None
        if not ray.is_initialized():
            try:
                ray.init(address=self.address, configure_logging=False, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as exc:
                raise unavailable(
                    f"cannot connect to a Ray cluster at {self.address!r}: {exc}. Start one with `ray start --head`, "
                    "join it from this machine with `ray start --address=HOST:PORT`, and pass HOST:PORT or 'auto'."
                ) from exc
        connected = ray.get_runtime_context().gcs_address
        if self.address not in ("auto", "local", connected):
            raise ValueError(f"This process is connected to the Ray cluster at {connected}, not to {self.address}")
        return ray

    def actor_options(self) -> dict[str, Any]:
        """Return the resources of each of our processes, as options of a Ray actor."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "resources": dict(self.resources)}
        return options if self.runtime_env is None else {**options, "runtime_env": dict(self.runtime_env)}

    def demand(self) -> dict[str, float]:
        """Return the resources of each of our processes by the cluster's names."""
        return {name: amount for name, amount in {"CPU": self.cpus, **self.resources}.items() if amount > 0}

    def fits(self, resources: Mapping[str, float]) -> int:
        """Return how many of our processes fit into these resources; a process without reservations counts as one."""
        demand = self.demand()
        return min((int(resources.get(name, 0.0) / amount) for name, amount in demand.items()), default=1)
