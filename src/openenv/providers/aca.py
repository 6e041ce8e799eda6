"""Servers in Azure Container Apps sandboxes: `ACASandboxProvider`, through the packages of the extra `aca`.

The package is a preview. Only this file uses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from openenv import settings
from openenv.errors import ProviderError, ProviderUnavailable
from openenv.providers.cloud import (
    PORT,
    START_LABEL,
    CloudProvider,
    CloudSandbox,
    StartPlan,
    import_package,
    require_https,
)
from openenv.sandboxes.host import CLOUD_OWNER_LABEL, ProcessOwner

if TYPE_CHECKING:
    from azure.containerapps.sandbox import EgressPolicy, SandboxClient

_PACKAGE = "azure.containerapps.sandbox"


class ACASandboxProvider(CloudProvider["SandboxClient"]):
    """Starts a server in an Azure Container Apps sandbox and returns its public address.
    The image is a sandbox disk, not an image of a registry: `disk:NAME` or NAME for a public disk, `disk-id:ID` for a
    private disk. Without a command, the disk must start the server itself.

    Args:
        subscription_id: By default `AZURE_SUBSCRIPTION_ID`.
        resource_group: By default `AZURE_RESOURCE_GROUP`.
        sandbox_group: By default `AZURE_SANDBOX_GROUP`.
        region: By default `AZURE_REGION`; not needed with `endpoint`.
        endpoint: The address of the service; by default the region's.
        credential: A credential of `azure-identity`; by default `DefaultAzureCredential()`.
        cpu: The processor, such as `1000m`.
        memory: The memory, such as `2048Mi`.
        disk_size: The disk, such as `20Gi`.
        auto_suspend_seconds: Seconds without use after which the sandbox is suspended.
        auto_suspend_mode: The state to keep then: `Memory` or `Disk`.
        labels: More labels of the sandbox.
        egress_policy: The allowed connections; see `deny_all_egress`. Without a policy, all are allowed.
        anonymous_port: Must be True, because the server is public and you have to confirm that.
        image: The default image of `start_container`.
        env_vars: The default variables of the server.
        cmd: The command that starts the server.
        working_directory: The folder to run it in.
        surface_server_logs: Whether errors show the end of the server's log, with known secrets redacted.
        create_timeout: Seconds that the sandbox may take to start.
        polling_interval: Seconds between two requests for its state.
        sdk_kwargs: More arguments of `SandboxGroupClient`.

    Raises:
        ValueError: An argument is invalid.
        ProviderUnavailable: A package is not installed, or the account is not named.
    """

    _cloud = "Azure Container Apps"
    _place = "aca"
    _options = ("cmd", "labels", "egress_policy", "anonymous_port")

    def __init__(
        self,
        *,
        subscription_id: str | None = None,
        resource_group: str | None = None,
        sandbox_group: str | None = None,
        region: str | None = None,
        endpoint: str | None = None,
        credential: Any = None,
        cpu: str = "1000m",
        memory: str = "2048Mi",
        disk_size: str | None = None,
        auto_suspend_seconds: int = 900,
        auto_suspend_mode: Literal["Memory", "Disk"] = "Memory",
        labels: dict[str, str] | None = None,
        egress_policy: EgressPolicy | None = None,
        anonymous_port: Literal[True] | None = None,
        image: str | None = None,
        env_vars: dict[str, str] | None = None,
        cmd: str | None = None,
        working_directory: str | None = None,
        surface_server_logs: bool = False,
        create_timeout: int = 300,
        polling_interval: int = 3,
        sdk_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            image=image,
            env_vars=env_vars,
            cmd=cmd,
            working_directory=working_directory,
            surface_server_logs=surface_server_logs,
        )
        if auto_suspend_mode not in ("Memory", "Disk"):
            raise ValueError("auto_suspend_mode must be 'Memory' or 'Disk'")
        _require_public(anonymous_port)
        self._sdk: Any = import_package(_PACKAGE, "aca")
        account = {
            "subscription_id": subscription_id or settings.azure_subscription_id(),
            "resource_group": resource_group or settings.azure_resource_group(),
            "sandbox_group": sandbox_group or settings.azure_sandbox_group(),
        }
        missing = [name for name, value in account.items() if not value]
        region = region or settings.azure_region()
        if endpoint is None and region is None:
            missing.append("region")
        if missing:
            variables = ", ".join(f"AZURE_{name.upper()}" for name in missing)
            raise ProviderUnavailable(f"{', '.join(missing)} is required. Pass it, or set {variables}.")
        self._resources = {"cpu": cpu, "memory": memory, "disk_size": disk_size}
        self._suspend = {"auto_suspend_seconds": auto_suspend_seconds, "auto_suspend_mode": auto_suspend_mode}
        self._labels = dict(labels or {})
        self._egress_policy = egress_policy
        self._polling = {"polling_timeout": create_timeout, "polling_interval": polling_interval}
        credential = credential or import_package("azure.identity", "aca").DefaultAzureCredential()
        address = endpoint or self._sdk.endpoint_for_region(region)
        self._client = self._sdk.SandboxGroupClient(address, credential, **account, **(sdk_kwargs or {}))

    @staticmethod
    def deny_all_egress(allow: list[str] | None = None) -> EgressPolicy:
        """Return a policy that lets a sandbox connect to the hosts in `allow` and to nothing else."""
        sdk: Any = import_package(_PACKAGE, "aca")
        rules = [sdk.EgressHostRule(pattern=pattern, action="Allow") for pattern in allow or []]
        policy: EgressPolicy = sdk.EgressPolicy(default_action="Deny", host_rules=rules)
        return policy

    @classmethod
    def for_account(cls) -> Self:
        return cls(anonymous_port=True)

    def close(self) -> None:
        """Delete the sandbox and close the connections to the service."""
        try:
            self.stop_container()
        finally:
            self._client.close()

    def _source(self, image: str) -> str:
        kind, _, name = image.partition(":")
        if kind in ("disk", "disk-id") and name.strip():
            return image
        if ":" in image or "/" in image:
            raise ValueError(
                f"{image!r} is not a disk of Azure Container Apps sandboxes. Use disk:NAME for a public disk, or "
                "disk-id:ID for a private disk; make a disk of a registry's image first."
            )
        return f"disk:{image}"

    def _plan(
        self, image: str | None, port: int | None, env_vars: Mapping[str, str] | None, kwargs: Mapping[str, Any]
    ) -> StartPlan:
        _require_public(kwargs.get("anonymous_port", True))
        return super()._plan(image, port, env_vars, kwargs)

    def _create(self, plan: StartPlan) -> SandboxClient:
        policy = plan.options.get("egress_policy", self._egress_policy)
        if policy is None:
            warnings.warn(
                "This sandbox may connect to everything, also to the metadata service of the cloud. Pass "
                "egress_policy=ACASandboxProvider.deny_all_egress(allow=[...]).",
                stacklevel=5,
            )
        kind, _, name = plan.image.partition(":")
        source = {"disk": name.strip()} if kind == "disk" else {"disk": None, "disk_id": name.strip()}
        labels = {**self._labels, **(plan.options.get("labels") or {}), **plan.labels}
        arguments: dict[str, Any] = {**source, **self._resources, **self._suspend, **self._polling}
        arguments |= {"labels": labels, "environment": plan.env_vars or None, "egress_policy": policy}
        box: SandboxClient = self._client.begin_create_sandbox(**arguments).result()
        return box

    def _begun_by_image(self, plan: StartPlan) -> bool:
        return True

    def _run(self, box: SandboxClient, command: str, timeout_s: float) -> str:
        return str(box.exec(command).stdout)

    def _address(self, box: SandboxClient) -> str:
        url = box.add_port(PORT, anonymous=True).url
        if not url:
            raise ProviderError("Azure Container Apps gave the port of the server no address.")
        return require_https(url, self._cloud)

    def _name(self, box: SandboxClient) -> str:
        return str(box.sandbox_id)

    def _delete(self, box: SandboxClient) -> None:
        self._delete_by_id(box.sandbox_id)

    def _delete_by_id(self, name: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            self._client.begin_delete_sandbox(name, polling_interval=self._polling["polling_interval"]).result()
        except ResourceNotFoundError:
            pass

    def _labelled(self, start_id: str | None = None) -> Iterable[CloudSandbox]:
        labels = None if start_id is None else {START_LABEL: start_id}
        for box in self._client.list_sandboxes(labels=labels):
            if CLOUD_OWNER_LABEL in box.labels and (start_id is None or box.labels.get(START_LABEL) == start_id):
                owner = ProcessOwner.parse_short(box.labels[CLOUD_OWNER_LABEL])
                disk = box.sources_ref.disk_image if box.sources_ref else None
                what = (disk.name or disk.id or "") if disk else ""
                yield CloudSandbox(box.id, what, owner, partial(self._delete_by_id, box.id), box.created_at)


def _require_public(anonymous_port: bool | None) -> None:
    if anonymous_port is None:
        raise ValueError("The server is public on this cloud, which has to be said: anonymous_port=True.")
    if not anonymous_port:
        raise ValueError("authenticated ports are not supported: clients have no credential for them.")
