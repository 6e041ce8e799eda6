"""`openenv gateway`: one address in front of many servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from openenv.sandboxes.cluster import ClusterAddress

from .command import check_choice, failure
from .ps import CONTEXT, KUBECONFIG, NAMESPACE

if TYPE_CHECKING:
    from openenv.server.gateway.backends import BackendSource


def gateway(
    servers: list[str] = typer.Argument(None, metavar="URL", help="Addresses of servers."),
    dns: str | None = typer.Option(
        None, metavar="HOST:PORT", help="All addresses of a host name, such as that of a headless Service."
    ),
    pods: str | None = typer.Option(
        None, metavar="LABELS", help="The pods of a cluster with these labels, as in kubectl: app=maze,stage=test."
    ),
    pod_port: int = typer.Option(8000, metavar="PORT", min=1, max=65535, help="With --pods: the port of the servers."),
    kubeconfig: Path | None = KUBECONFIG,
    context: str | None = CONTEXT,
    namespace: str | None = NAMESPACE,
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="The address to listen on; 0.0.0.0 for all."),
    port: int = typer.Option(8000, metavar="PORT", min=0, max=65535, help="The port; 0 takes a free one."),
    drain_timeout: float = typer.Option(
        15.0,
        metavar="SECONDS",
        min=0.0,
        help="How long requests and v1 sessions may go on after SIGTERM; v2 clients go on through another gateway.",
    ),
    log_level: str = typer.Option("info", metavar="LEVEL", help="error, warning, info or debug."),
) -> None:
    """Route clients to the server that has their session, where they cannot reach the servers themselves.

      openenv gateway http://a:8000 http://b:8000
      openenv gateway --dns maze.default.svc:8000          a headless Service
      openenv gateway --pods app=maze --host 0.0.0.0       pods of a cluster

    New sessions go to the least loaded server. Sessions are named after their server, so the gateway keeps nothing:
    it may be restarted, and there may be several. Tokens are checked by the servers. `/ready` and `/metrics` are those
    of all servers together.
    """
    import logging

    from openenv.server.gateway.gateway import Gateway, serve_gateway  # servers load only for this command

    check_choice("--log-level", log_level, ("error", "warning", "info", "debug"))
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s")
    for chatty in ("httpx2", "httpcore2"):
        logging.getLogger(chatty).setLevel("WARNING")

    def announce(gateway: Gateway, actual: int) -> None:
        place = f"[{host}]:{actual}" if ":" in host else f"{host}:{actual}"
        count = len(gateway.backends.admitting())
        typer.echo(f"Gateway at http://{place} for {source}; {count} take sessions now. Ctrl-C stops.", err=True)

    try:
        source = _source(servers or [], dns, pods, pod_port, ClusterAddress(kubeconfig, context, namespace))
        serve_gateway(source, host, port, drain_s=drain_timeout, on_started=announce)
    except (OSError, RuntimeError, ValueError) as exc:
        raise failure(exc) from None


def _source(
    urls: list[str], dns: str | None, pods: str | None, pod_port: int, cluster: ClusterAddress
) -> BackendSource:
    """Return what finds the servers.

    Raises:
        ValueError: An address or a selector cannot be read.
        RuntimeError: There is no cluster.
    """
    from openenv.server.gateway.backends import DnsBackends, ListedBackends, PodBackends, backend_at

    if (bool(urls), dns is not None, pods is not None).count(True) != 1:
        raise typer.BadParameter("name the servers in one way: by their URLs, by --dns, or by --pods")
    if pods is not None:
        labels = dict(part.strip().partition("=")[::2] for part in pods.split(","))
        if not all(key and value for key, value in labels.items()):
            raise ValueError(f"--pods: {pods!r} is no list of labels: expected KEY=VALUE,KEY=VALUE")
        return PodBackends(cluster, labels, pod_port)
    if dns is not None:
        name = backend_at(f"http://{dns}")
        return DnsBackends(name.host, name.port)
    return ListedBackends([backend_at(url).url for url in urls])
