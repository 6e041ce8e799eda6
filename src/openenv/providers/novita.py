"""Servers in Novita's cloud: `NovitaSandboxProvider`, through `novita-sandbox`, which is imported when one is made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from openenv.providers.dockerfiles import DockerfileSource, flatten, instructions
from openenv.sandboxes.host import CLOUD_OWNER_LABEL, ProcessOwner

if TYPE_CHECKING:
    from novita_sandbox import Sandbox

_TEMPLATE = "template:"
# The image's own command would take port 8000 before the server that this provider starts and watches.
_KEEP_ALIVE = "sleep infinity"
_SETTLED_MS = 5_000
_ROOT = "root"


class NovitaSandboxProvider(BuildingProvider["Sandbox"]):
    """Starts a server in a Novita sandbox and returns its address.

    An image is a name in a registry; `template:ID`, a template of the account; or `template:PATH`, a Dockerfile, as
    `image_from_dockerfile` returns it. Novita makes a template of each image, once.

    Args:
        image: The default image of `start_container`.
        env_vars: The default variables of the server.
        api_key: The account's key; by default `NOVITA_API_KEY`.
        domain: The region; by default `NOVITA_DOMAIN`, else Novita's own choice.
        timeout: Seconds after which Novita deletes the sandbox, even while it is used.
        metadata: More labels of the sandbox.
        secure: Whether commands need the sandbox's own token; by default Novita decides.
        cmd: The command that starts the server.
        working_directory: The folder to run it in.
        surface_server_logs: Whether errors show the end of the server's log, with known secrets redacted.
        cpu_count: The processors of a template that is built from a Dockerfile.
        memory_mb: The memory of such a template.
        template_name: The name of such a template; by default a name that depends on the Dockerfile.
        on_build_logs: Called with what building one writes.

    Raises:
        ProviderUnavailable: The package is not installed, or the key is missing.
    """

    _cloud = "Novita"
    _place = "novita"
    _prefix = _TEMPLATE

    def __init__(
        self,
        *,
        image: str | None = None,
        env_vars: dict[str, str] | None = None,
        api_key: str | None = None,
        domain: str | None = None,
        timeout: int = 3600,
        metadata: dict[str, str] | None = None,
        secure: bool | None = None,
        cmd: str | None = None,
        working_directory: str | None = None,
        surface_server_logs: bool = False,
        cpu_count: int = 2,
        memory_mb: int = 1024,
        template_name: str | None = None,
        on_build_logs: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(
            image=image,
            env_vars=env_vars,
            cmd=cmd,
            working_directory=working_directory,
            surface_server_logs=surface_server_logs,
        )
        self._sdk: Any = import_package("novita_sandbox", "novita")
        key = api_key or settings.novita_api_key()
        if not key:
            raise ProviderUnavailable("Novita needs a key: pass api_key=, or set NOVITA_API_KEY.")
        self._redact.add(key)
        self._timeout = timeout
        self._metadata = dict(metadata or {})
        self._secure = secure
        self._resources = {"cpu_count": cpu_count, "memory_mb": memory_mb}
        self._template_name = template_name
        self._on_build_logs = on_build_logs
        self._user: str | None = None
        try:
            self._novita = self._sdk.Novita(api_key=key, domain=domain or settings.novita_domain())
        except Exception as error:  # the errors of the package have no common base class
            raise ProviderUnavailable(f"Novita accepts no request: {self._redact(message_of(error))}") from None

    @classmethod
    def _check_dockerfile(cls, source: DockerfileSource) -> None:
        # Novita builds single stages: one of several stages that begin from the same image is rewritten as one.
        flatten(source.text)

    @classmethod
    def _dockerfile(cls, image: str) -> DockerfileSource | None:
        return super()._dockerfile(image) if "/" in image else None  # otherwise it is the id of a template

    def _create(self, plan: StartPlan) -> Sandbox:
        arguments: dict[str, Any] = {
            "timeout": self._timeout,
            "metadata": {**self._metadata, **plan.labels},
            "envs": plan.env_vars or None,
            "secure": self._secure,
        }
        # A template keeps its own user. What Novita makes of an image loses it, and the owners of its files.
        self._user = None if plan.image.startswith(_TEMPLATE) else _ROOT
        source = self._dockerfile(plan.image)
        if source is not None:
            arguments["template"] = self._build(source)
        elif plan.image.startswith(_TEMPLATE):
            arguments["template"] = plan.image[len(_TEMPLATE) :]
        else:
            ready = self._sdk.wait_for_timeout(_SETTLED_MS).get_cmd()
            logs = self._on_build_logs or _ignore  # without one, the package prints them
            arguments |= {
                "image": plan.image,
                "build": {"cmd": _KEEP_ALIVE, "ready_cmd": ready, "on_build_logs": logs},
            }
        box: Sandbox = self._novita.sandbox.create(**arguments)
        return box

    def _build(self, source: DockerfileSource) -> str:
        """Build the template of a Dockerfile and return its ID. Novita reuses unchanged layers."""
        text = flatten(source.text)
        builder = self._sdk.Template(file_context_path=str(source.context)).from_dockerfile(text)
        if not any(one.keyword == "USER" for one in instructions(text)):
            builder.set_user(_ROOT)  # as Docker has it; the package would take a user that may not write to /app
        builder.set_start_cmd(_KEEP_ALIVE, self._sdk.wait_for_timeout(_SETTLED_MS))
        name = self._template_name or _template_name(source)
        logs = self._on_build_logs
        info = self._novita.template.build(builder, name, on_build_logs=logs, **self._resources)
        return str(info.template_id)

    def _run(self, box: Sandbox, command: str, timeout_s: float) -> str:
        try:
            return str(box.commands.run(command, user=self._user, timeout=timeout_s).stdout)
        except self._sdk.CommandExitException as ended:
            return ended.stdout or ""

    def _address(self, box: Sandbox) -> str:
        host = box.get_host(PORT)
        if host.partition(":")[0] in ("localhost", "127.0.0.1"):
            raise ProviderError("NOVITA_DEBUG is set: the package returned an address of this machine. Unset it.")
        return require_https(f"https://{host}", self._cloud)

    def _name(self, box: Sandbox) -> str:
        return str(box.sandbox_id)

    def _delete(self, box: Sandbox) -> None:
        self._kill(box.sandbox_id)

    def _kill(self, name: str) -> None:
        self._novita.sandbox.kill(name)  # returns False if it no longer exists

    def _labelled(self, start_id: str | None = None) -> Iterable[CloudSandbox]:
        query = None if start_id is None else self._sdk.SandboxQuery(metadata={START_LABEL: start_id})
        listing = self._novita.sandbox.list(query=query)
        while listing.has_next:
            for box in listing.next_items():
                if CLOUD_OWNER_LABEL in (box.metadata or {}):
                    owner = ProcessOwner.parse_short(box.metadata[CLOUD_OWNER_LABEL])
                    what = box.name or box.template_id
                    name, began = box.sandbox_id, box.started_at.isoformat()
                    yield CloudSandbox(name, what, owner, partial(self._kill, name), began)


def _template_name(source: DockerfileSource) -> str:
    folder = re.sub(r"[^a-z0-9]+", "-", source.context.name.lower()).strip("-") or "env"
    return f"openenv-{folder}-{hashlib.sha256(Path(source.path).read_bytes()).hexdigest()[:8]}"


def _ignore(entry: object) -> None:
    pass
