"""Servers in Daytona's cloud: `DaytonaProvider`, through the `daytona` package, which is imported when one is made."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from openenv import settings
from openenv.errors import ProviderError, ProviderUnavailable, message_of
from openenv.providers.cloud import (
    PORT,
    START_LABEL,
    BuildingProvider,
    CloudSandbox,
    StartPlan,
    import_package,
    require_https,
)
from openenv.providers.dockerfiles import DockerfileSource, strip_mounts
from openenv.sandboxes.daytona import USE_LABEL
from openenv.sandboxes.host import CLOUD_OWNER_LABEL, ProcessOwner

if TYPE_CHECKING:
    from daytona import Image, Resources, Sandbox

_SNAPSHOT = "snapshot:"
_SIGNED_S = 86_400  # what Daytona allows at most


class DaytonaProvider(BuildingProvider["Sandbox"]):
    """Starts a server in a Daytona sandbox and returns a signed address of it, which holds for 24 hours.

    An image is a name in a registry, `snapshot:NAME`, or `dockerfile:PATH`, as `image_from_dockerfile` returns it.

    Args:
        image: The default image of `start_container`.
        env_vars: The default variables of the server.
        api_key: The account's key; by default `DAYTONA_API_KEY`.
        public: Whether the sandbox can be reached without a signed address.
        resources: `daytona.Resources`, for images that Daytona builds; a snapshot has its own.
        auto_stop_interval: Minutes without use after which Daytona stops and deletes the sandbox; 0 for never.
        target: The region.
        on_snapshot_create_logs: Called with the lines that building an image writes.
        cmd: The command that starts the server.
        create_timeout: Seconds that the sandbox may take to start.

    Raises:
        ProviderUnavailable: The package is not installed, or the key is missing.
    """

    _cloud = "Daytona"
    _place = "daytona"
    _options = ("cmd", "on_snapshot_create_logs")

    def __init__(
        self,
        *,
        image: str | None = None,
        env_vars: dict[str, str] | None = None,
        api_key: str | None = None,
        public: bool = False,
        resources: Resources | None = None,
        auto_stop_interval: int = 15,
        target: str | None = None,
        on_snapshot_create_logs: Callable[[str], None] | None = None,
        cmd: str | None = None,
        create_timeout: float = 300,
    ) -> None:
        super().__init__(image=image, env_vars=env_vars, cmd=cmd)
        self._sdk: Any = import_package("daytona", "daytona")
        key = api_key or settings.daytona_api_key()
        self._redact.add(key)
        self._public = public
        self._resources = resources
        self._auto_stop_interval = auto_stop_interval
        self._on_logs = on_snapshot_create_logs
        self._create_timeout = create_timeout
        try:
            self._daytona = self._sdk.Daytona(self._sdk.DaytonaConfig(api_key=key, target=target))
        except self._sdk.DaytonaError as error:
            raise ProviderUnavailable(
                f"Daytona accepts no request: {self._redact(message_of(error))}. Pass api_key=, or set DAYTONA_API_KEY."
            ) from None

    @staticmethod
    def strip_buildkit_syntax(dockerfile_content: str) -> str:
        """Return a Dockerfile without BuildKit's `--mount` flags, which Daytona's builder does not know."""
        return strip_mounts(dockerfile_content)

    def refresh_preview_url(self) -> str:
        """Return a new signed address of the same sandbox: one holds for 24 hours at most.

        Raises:
            RuntimeError: Nothing runs.
        """
        if self._box is None:
            raise ProviderError("No active sandbox to refresh the address of: start_container() first")
        self._base_url = self._address(self._box)
        self._redact.add(self._base_url)
        return self._base_url

    def _create(self, plan: StartPlan) -> Sandbox:
        arguments: dict[str, Any] = {
            "env_vars": plan.env_vars or None,
            "labels": plan.labels,
            "public": self._public,
            "auto_stop_interval": self._auto_stop_interval,
            # Deleted as soon as it is stopped: otherwise the sandbox of a killed process stays, and costs.
            "auto_delete_interval": 0,
        }
        options: dict[str, Any] = {}
        on_logs = plan.options.get("on_snapshot_create_logs") or self._on_logs
        if plan.image.startswith(_SNAPSHOT):
            snapshot = plan.image[len(_SNAPSHOT) :]
            params = self._sdk.CreateSandboxFromSnapshotParams(snapshot=snapshot, **arguments)
        else:
            dockerfile = self._dockerfile(plan.image)
            image = plan.image if dockerfile is None else self._build(dockerfile)
            if on_logs is not None:
                options["on_snapshot_create_logs"] = on_logs
            params = self._sdk.CreateSandboxFromImageParams(image=image, resources=self._resources, **arguments)
        box: Sandbox = self._daytona.create(params, timeout=self._create_timeout, **options)
        return box

    def _build(self, source: DockerfileSource) -> Image:
        """Return the image of a Dockerfile. The package resolves copied files relative to the file that it reads."""
        file = source.context / f".daytona-{secrets.token_hex(4)}.dockerfile"
        try:
            file.write_text(strip_mounts(source.text))
            image: Image = self._sdk.Image.from_dockerfile(str(file))
        finally:
            file.unlink(missing_ok=True)
        return image

    def _run(self, box: Sandbox, command: str, timeout_s: float) -> str:
        return box.process.exec(command, timeout=round(timeout_s)).result or ""

    def _address(self, box: Sandbox) -> str:
        return require_https(box.create_signed_preview_url(PORT, expires_in_seconds=_SIGNED_S).url, self._cloud)

    def _delete(self, box: Sandbox) -> None:
        try:
            self._daytona.delete(box, timeout=60, wait=True)
        except self._sdk.DaytonaNotFoundError:
            pass

    def _labelled(self, start_id: str | None = None) -> Iterable[CloudSandbox]:
        labels = {} if start_id is None else {START_LABEL: start_id}
        for box in self._daytona.list(self._sdk.ListSandboxesQuery(labels=labels or None)):
            if CLOUD_OWNER_LABEL in box.labels:
                owner = ProcessOwner.parse_short(box.labels[CLOUD_OWNER_LABEL])
                use: Literal["server", "sandbox"] = "sandbox" if USE_LABEL in box.labels else "server"
                yield CloudSandbox(box.id, box.snapshot or "", owner, partial(self._delete, box), box.created_at, use)
