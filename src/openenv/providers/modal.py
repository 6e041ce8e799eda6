"""Servers in Modal's cloud: `ModalProvider`, through the `modal` package, which is imported when one is made."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from openenv.errors import ProviderUnavailable
from openenv.providers.cloud import (
    PORT,
    START_LABEL,
    BuildingProvider,
    CloudSandbox,
    StartPlan,
    import_package,
    require_https,
)
from openenv.sandboxes.host import CLOUD_OWNER_LABEL, ProcessOwner

if TYPE_CHECKING:
    from modal import Image, Sandbox

# Limits are given with what Modal reserves by default, so that a high limit is not paid for.
_RESERVED_CPU = 0.125
_RESERVED_MB = 128
_OWN_OPTIONS = frozenset({"args", "app", "image", "env", "tags", "timeout", "encrypted_ports", "client"})


class ModalProvider(BuildingProvider["Sandbox"]):
    """Starts a server in a Modal sandbox and returns the address of an encrypted tunnel to it.

    An image is a name in a registry, or `dockerfile:PATH`, as `image_from_dockerfile` returns it. The account is what
    `modal setup` or the variables `MODAL_TOKEN_ID` and `MODAL_TOKEN_SECRET` name.

    Args:
        image: The default image of `start_container`.
        env_vars: The default variables of the server.
        app_name: The Modal app of the sandboxes; it is created if it does not exist.
        use_sandbox_v2: Whether to use Modal's second kind of sandboxes, which an account has to be admitted to.
        timeout: Seconds after which Modal ends the sandbox, even while it is used.
        cmd: The command that starts the server.
        cpu: Processors that it may use.
        memory: Memory that it may use, in MiB.
        surface_server_logs: Whether errors show the end of the server's log, with known secrets redacted.

    Raises:
        ProviderUnavailable: The package is not installed, or has no second kind of sandboxes.
    """

    _cloud = "Modal"
    _place = "modal"

    def __init__(
        self,
        *,
        image: str | None = None,
        env_vars: dict[str, str] | None = None,
        app_name: str = "openenv",
        use_sandbox_v2: bool = False,
        timeout: int = 300,
        cmd: str | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        surface_server_logs: bool = False,
    ) -> None:
        super().__init__(image=image, env_vars=env_vars, cmd=cmd, surface_server_logs=surface_server_logs)
        self._sdk: Any = import_package("modal", "modal")
        config = import_package("modal.config", "modal").config
        self._redact.add(config.get("token_id"), config.get("token_secret"))
        sandboxes = self._sdk.Sandbox
        if use_sandbox_v2 and not hasattr(sandboxes, "_experimental_create"):
            raise ProviderUnavailable(
                f"modal {self._sdk.__version__} has no second kind of sandboxes. Update it, or leave use_sandbox_v2."
            )
        self._app_name = app_name
        self._make = sandboxes._experimental_create if use_sandbox_v2 else sandboxes.create
        self._list = sandboxes._experimental_list if use_sandbox_v2 else sandboxes.list
        self._timeout = timeout
        self._limits: dict[str, Any] = {}
        if cpu is not None:
            self._limits["cpu"] = (min(_RESERVED_CPU, cpu), cpu)
        if memory is not None:
            self._limits["memory"] = (min(_RESERVED_MB, memory), memory)
        more = sorted(set(inspect.signature(self._make).parameters) - _OWN_OPTIONS)
        self._options = ("cmd", *(name for name in more if not name.startswith("_")))

    def _create(self, plan: StartPlan) -> Sandbox:
        dockerfile = self._dockerfile(plan.image)
        images = self._sdk.Image
        image: Image
        if dockerfile is None:
            image = images.from_registry(plan.image)
        else:
            image = images.from_dockerfile(str(dockerfile.path), context_dir=str(dockerfile.context))
        # The sandbox only waits: the server is started in it afterwards, so that its command can be looked for.
        box: Sandbox = self._make(
            "sleep",
            "infinity",
            app=self._sdk.App.lookup(self._app_name, create_if_missing=True),
            image=image,
            env=plan.env_vars or None,
            tags=plan.labels,
            timeout=self._timeout,
            encrypted_ports=[PORT],
            **{**self._limits, **plan.options},
        )
        return box

    def _run(self, box: Sandbox, command: str, timeout_s: float) -> str:
        process = box.exec("sh", "-c", command, timeout=round(timeout_s))
        output = process.stdout.read()
        process.wait()
        return str(output)

    def _address(self, box: Sandbox) -> str:
        return require_https(box.tunnels()[PORT].url, self._cloud)

    def _name(self, box: Sandbox) -> str:
        return str(box.object_id)

    def _delete(self, box: Sandbox) -> None:
        try:
            box.terminate()
        except self._sdk.exception.NotFoundError:
            pass

    def _labelled(self, start_id: str | None = None) -> Iterable[CloudSandbox]:
        try:
            app = self._sdk.App.lookup(self._app_name)
        except self._sdk.exception.NotFoundError:
            return
        tags = None if start_id is None else {START_LABEL: start_id}
        for box in self._list(app_id=app.app_id, tags=tags):
            labels = box.get_tags()
            if CLOUD_OWNER_LABEL in labels:
                owner = ProcessOwner.parse_short(labels[CLOUD_OWNER_LABEL])
                yield CloudSandbox(box.object_id, self._app_name, owner, partial(self._delete, box))
