"""`openenv gateway`: one address in front of many servers."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated

import typer

from openenv import settings
from openenv.protocol.redaction import redact_handlers

from .command import check_choice, failure
from .options import AccessFlags, ClusterFlags, Panel, flags_class, options_of

if TYPE_CHECKING:
    from openenv.server.gateway.backends import BackendSource
    from openenv.server.gateway.guard import GatewayGuard


#   clients ──> openenv gateway ──┬──> server a
#                                 ├──> server b
#                                 └──> server c
#
# The servers come from one source: a fixed list, a host name with several addresses, or the pods of a cluster.
@flags_class
class GatewayFlags:
    """Options of `openenv gateway`."""

    servers: Annotated[list[str], typer.Argument(metavar="URL", help="Addresses of servers.")] = field(
        default_factory=list
    )
    dns: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="All addresses of a host name, such as a headless Service's."),
    ] = None
    pods: Annotated[
        str | None,
        typer.Option(metavar="LABELS", help="A cluster's pods with these labels, as in kubectl: app=maze,stage=test."),
    ] = None
    pod_port: Annotated[int, typer.Option(metavar="PORT", min=1, max=65535, help="With --pods: the servers' port.")] = (
        8000
    )
    cluster: ClusterFlags
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Port; 0 takes any free one.")] = 8000
    drain_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="How long requests and v1 sessions may continue after SIGTERM; v2 clients continue through another "
            "gateway.",
        ),
    ] = 15.0
    access: Annotated[AccessFlags, Panel("Access")]
    trusted_proxies: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESSES",
            help="Proxies in front of the gateway whose X-Forwarded-For is passed on, separated by commas: "
            "10.0.0.7,10.1.0.0/16.",
            rich_help_panel="Access",
        ),
    ] = None
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="error, warning, info or debug.")] = "info"

    def source(self) -> BackendSource:
        """Return the source of the servers' addresses.

        Raises:
            BadParameter: The options do not name the servers in exactly one way.
            ValueError: An address or a selector is malformed.
            RuntimeError: No cluster is configured.
        """
        from openenv.server.gateway.backends import DnsBackends, ListedBackends, PodBackends, backend_at

        # None or two sources: in both cases the user's intention is unclear.
        if (bool(self.servers), self.dns is not None, self.pods is not None).count(True) != 1:
            raise typer.BadParameter("name the servers in one way: by their URLs, by --dns, or by --pods")
        if self.pods is not None:
            # `app=maze,stage=test` as in kubectl, but only with = : an empty key or value is refused.
            labels = dict(part.strip().partition("=")[::2] for part in self.pods.split(","))
            if not all(key and value for key, value in labels.items()):
                raise ValueError(f"--pods must be KEY=VALUE,KEY=VALUE, not {self.pods!r}")
            return PodBackends(self.cluster.address(), labels, self.pod_port)
        if self.dns is not None:
            # Checks host and port in the same way as an address from the command line.
            name = backend_at(f"http://{self.dns}")
            return DnsBackends(name.host, name.port)
        return ListedBackends([backend_at(url).url for url in self.servers])

    def guard(self, spare_token: str | None) -> GatewayGuard:
        """Return the checks of requests.

        Raises:
            ValueError: A token or an address is malformed.
        """
        from openenv.server.access import AccessPolicy, OriginPolicy
        from openenv.server.gateway.guard import GatewayGuard, networks
        from openenv.server.run import AccessOptions

        own = AccessPolicy.from_settings()
        flags = self.access
        policy = AccessOptions(flags.token, flags.agent_token, flags.observer_token, spare_token).policy(own)
        trusted = settings.trusted_proxies() if self.trusted_proxies is None else self.trusted_proxies.split(",")
        return GatewayGuard(policy or own, OriginPolicy(settings.allowed_origins()), networks(map(str.strip, trusted)))


@options_of(GatewayFlags)
def gateway(flags: GatewayFlags) -> None:
    """Route clients that cannot reach the servers themselves to the server of their session.

      openenv gateway http://a:8000 http://b:8000
      openenv gateway --dns maze.default.svc:8000          a headless Service
      openenv gateway --pods app=maze --host 0.0.0.0       pods of a cluster

    New sessions go to the least loaded server. A session's name contains its server, so the gateway stores nothing: you
    may restart it or run several. `/ready` and `/metrics` cover all servers together.

    On an address that others can reach, the gateway requires a token, which it creates and prints. If the servers have
    tokens, set the same OPENENV_TOKEN for the gateway.
    """
    import logging

    from openenv.server.access import Role  # servers load only for this command
    from openenv.server.gateway.gateway import Gateway, GatewayOptions, serve_gateway
    from openenv.server.run import AccessOptions

    check_choice("--log-level", flags.log_level, ("error", "warning", "info", "debug"))
    logging.basicConfig(level=flags.log_level.upper(), format="%(levelname)s: %(message)s")
    own_tokens = AccessOptions(flags.access.token, flags.access.agent_token, flags.access.observer_token).values()
    redact_handlers([""], [*own_tokens, *settings.secret_values()])
    # HTTP libraries log every request to a server at level INFO.
    for chatty in ("httpx2", "httpcore2"):
        logging.getLogger(chatty).setLevel("WARNING")

    def announce(gateway: Gateway, actual: int) -> None:
        # The actual port, because of --port 0.
        place = f"[{flags.host}]:{actual}" if ":" in flags.host else f"{flags.host}:{actual}"
        count = len(gateway.backends.admitting())
        typer.echo(f"Gateway at http://{place} for {source}; {count} accept sessions now. Ctrl-C stops.", err=True)
        if spare is not None and guard.access.role(spare) is Role.ORCHESTRATOR:
            typer.echo(f"token: {spare}", err=True)

    try:
        source = flags.source()
        spare = flags.access.spare_token(flags.host)
        guard = flags.guard(spare)
        serve_gateway(source, GatewayOptions(flags.host, flags.port, flags.drain_timeout, guard), announce)
    # OSError: the port is taken. RuntimeError: no cluster is configured. ValueError: a malformed address.
    except (OSError, RuntimeError, ValueError) as exc:
        raise failure(exc) from None
