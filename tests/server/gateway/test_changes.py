"""Servers come, drain and go, the gateway itself is restarted: what clients see of it."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import http_calls
from gateways import ChangingBackends, CuttableLink, RunningGateway, counting_app
from http_calls import open_session
from openenv import GenericEnvClient
from openenv.cli.__main__ import build
from openenv.errors import AccessDenied, ConnectFailed, SessionLost
from openenv.server.access import AccessPolicy
from openenv.server.gateway import backends as backends_module
from openenv.server.gateway.backends import DnsBackends, PodBackends, backend_at
from openenv.server.sessions.peers import new_boot
from servers import RunningServer, running_server
from waiting import wait_until

# Answers /health, /ready and /name as a server does, and starts quickly.
TINY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        ready = '{"active_sessions": 0, "max_sessions": 1}'
        body = {"/health": "{}", "/ready": ready, "/name": sys.argv[1]}[self.path].encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""

Start = Callable[..., RunningGateway]
Serve = Callable[..., RunningServer]


def client_at(url: str, **options: Any) -> Any:
    return GenericEnvClient(url, **options).sync()


def test_sessions_survive_a_restart_of_the_gateway(serve: Serve, start: Start) -> None:
    servers = [serve(counting_app(name)) for name in ("red", "blue")]
    urls = [server.url for server in servers]
    first = start(*urls)
    clients = [client_at(first.url, reconnect_timeout_s=60.0) for _ in range(4)]
    homes = [client.reset().observation["server"] for client in clients]
    assert sorted(homes) == ["blue", "blue", "red", "red"]
    with http_calls.Client(base_url=first.url) as http:
        name = open_session(http)
        http.post("/step", json={"action": {"by": 3}}, headers={"X-OpenEnv-Session": name})
    for client in clients:
        client.step({"by": 1})
    first.stop()
    second = start(*reversed(urls), port=first.port)
    for client, home in zip(clients, homes, strict=True):
        seen = client.step({"by": 1}).observation
        assert (seen["total"], seen["server"]) == (2, home)
        client.close()
    with http_calls.Client(base_url=second.url) as http:
        seen = http.post("/step", json={"action": {"by": 4}}, headers={"X-OpenEnv-Session": name}).json()
        assert seen["observation"]["total"] == 7
        assert http.delete(f"/sessions/{name}").status_code == 200


def test_a_server_that_drains_keeps_its_sessions_and_gets_no_new_ones(serve: Serve, start: Start) -> None:
    servers = [serve(counting_app(name)) for name in ("red", "blue")]
    gateway = start(*(server.url for server in servers))
    with http_calls.Client(base_url=gateway.url) as http:
        names = [open_session(http) for _ in range(2)]
        servers[0].manager.stop_admitting()
        gateway.refresh()
        assert http.get("/ready").json()["servers"] == {"ready": 1, "draining": 1, "unreachable": 0}
        names += [open_session(http) for _ in range(3)]
        homes = []
        for name in names:
            seen = http.post("/step", json={"action": {}}, headers={"X-OpenEnv-Session": name}).json()
            homes.append(seen["observation"]["server"])
        assert sorted(homes) == ["blue"] * 4 + ["red"]
        servers[1].manager.stop_admitting()
        gateway.refresh()
        refused = http_calls.post(f"{gateway.url}/sessions", json={})
        assert (refused.status_code, refused.json()["code"]) == (503, "NO_BACKEND")
        assert http_calls.get(f"{gateway.url}/ready").status_code == 503


def test_sessions_of_a_server_that_is_gone_are_lost_with_a_typed_error_and_others_go_on(
    serve: Serve, start: Start
) -> None:
    staying = serve(counting_app("blue"))
    with running_server(counting_app("red")) as going:
        source = ChangingBackends([staying.url, going.url])
        gateway = start(source=source)
        clients = [client_at(gateway.url, reconnect_timeout_s=60.0) for _ in range(2)]
        homes = [client.reset().observation["server"] for client in clients]
        assert sorted(homes) == ["blue", "red"]
    lost, other = sorted(clients, key=lambda client: homes[clients.index(client)], reverse=True)
    source.listed = [staying.url]  # as a cluster does that has noticed it
    assert other.step({"by": 1}).observation["total"] == 1
    with pytest.raises(SessionLost):
        lost.step({"by": 1})
    assert lost.reset().observation["server"] == "blue"
    lost.close()
    other.close()


@pytest.mark.slow
def test_a_server_that_cannot_be_reached_is_waited_for_and_then_given_up(
    serve: Serve, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = CuttableLink(serve(counting_app("red")).url)
    gateway = start(link.url, serve(counting_app("blue")).url)
    clients = [client_at(gateway.url, reconnect_timeout_s=60.0) for _ in range(2)]
    homes = [client.reset().observation["server"] for client in clients]
    far, near = (clients[homes.index(name)] for name in ("red", "blue"))
    with http_calls.Client(base_url=link.url) as http:
        name = open_session(http)
    link.cut()
    gateway.refresh()
    for named in (name, f"{new_boot()}-4444-8888-123456789012"):  # that may be a session of the one that is silent
        waiting = http_calls.post(f"{gateway.url}/step", json={"action": {}}, headers={"X-OpenEnv-Session": named})
        assert (waiting.status_code, waiting.json()["code"]) == (503, "BACKEND_UNREACHABLE")
        assert waiting.headers["retry-after"] == "1"
    threading.Timer(0.5, link.mend).start()
    assert far.step({"by": 1}).observation["total"] == 1  # it has tried again and again
    link.cut()
    threading.Timer(0.5, monkeypatch.setattr, (backends_module, "GONE_S", 0.0)).start()
    with pytest.raises(SessionLost, match="server restarted"):
        far.step({"by": 1})
    gone = http_calls.post(f"{gateway.url}/step", json={"action": {}}, headers={"X-OpenEnv-Session": name})
    assert (gone.status_code, gone.json()["code"]) == (404, "SESSION_NOT_FOUND")
    assert near.step({"by": 1}).observation["total"] == 1
    for client in clients:
        client.close()


def test_a_server_that_is_found_after_the_last_round_is_known_by_the_names_of_its_sessions(
    serve: Serve, start: Start
) -> None:
    source = ChangingBackends([serve(counting_app("red")).url])
    gateway = start(source=source)
    late = serve(counting_app("blue"))
    with http_calls.Client(base_url=late.url) as http:
        name = open_session(http)
    source.listed.append(late.url)
    seen = http_calls.post(f"{gateway.url}/step", json={"action": {}}, headers={"X-OpenEnv-Session": name})
    assert seen.json()["observation"]["server"] == "blue"


def test_a_server_that_refuses_connections_is_passed_over(serve: Serve, start: Start) -> None:
    with running_server(counting_app("red")) as going:
        gateway = start(going.url, serve(counting_app("blue")).url)
    for _ in range(4):  # the gateway has not asked it since
        with client_at(gateway.url) as client:
            assert client.reset().observation["server"] == "blue"
    assert {open_session(http_calls.Client(base_url=gateway.url)) for _ in range(2)}


def test_tokens_are_those_of_the_servers(serve: Serve, start: Start) -> None:
    access = AccessPolicy(orchestrator="boss", observer="guest")
    gateway = start(*(serve(counting_app(name, access=access)).url for name in ("red", "blue")))
    with client_at(gateway.url, token="boss") as client:
        assert client.reset().observation["total"] == 0
    for protocol in ("v1", "v2"):
        with pytest.raises(AccessDenied):
            client_at(gateway.url, token="wrong", protocol=protocol).reset()
    assert http_calls.get(f"{gateway.url}/metrics").status_code == 401
    guest = {"authorization": "Bearer guest"}
    assert "openenv_gateway_servers" in http_calls.get(f"{gateway.url}/metrics", headers=guest).text
    assert http_calls.post(f"{gateway.url}/sessions", json={}, headers=guest).status_code == 403
    assert http_calls.get(f"{gateway.url}/ready").status_code == 200


def test_a_gateway_without_servers_says_so(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    gateway = start(f"http://127.0.0.1:{port}")
    assert http_calls.get(f"{gateway.url}/health").status_code == 200
    ready = http_calls.get(f"{gateway.url}/ready")
    assert (ready.status_code, ready.json()["servers"]["unreachable"]) == (503, 1)
    for path in ("/schema", "/metrics", "/web/sessions"):
        refused = http_calls.get(gateway.url + path)
        assert (refused.status_code, refused.json()["code"]) == (503, "NO_BACKEND")
    with pytest.raises(ConnectFailed, match="503"):
        client_at(gateway.url, connect_timeout_s=1.0).reset()


def test_names_in_dns_and_addresses_are_read() -> None:
    found = asyncio.run(DnsBackends("localhost", 8000).urls())
    assert "http://127.0.0.1:8000" in found
    assert backend_at("http://a:81/").port == 81
    assert backend_at("https://a").port == 443
    assert backend_at("http://[::1]:8000").host == "::1"
    for wrong in ("a:8000", "ws://a:8000", "http://a:port", "http://", "http://a:8000/maze"):
        with pytest.raises(ValueError, match="is not a server address"):
            backend_at(wrong)


@pytest.mark.slow
def test_pods_of_a_cluster_are_found_and_followed(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("lightkube")
    pytest.importorskip("kubernetes_validate")
    from kubernetes_double import Image, KubernetesDouble
    from openenv.sandboxes.cluster import Cluster, ClusterAddress

    with KubernetesDouble({"tiny": Image([sys.executable, "-c", TINY, "{ip}"])}) as double:
        address = ClusterAddress(double.kubeconfig(tmp_path / "config"))
        cluster = Cluster(address)
        for name in ("maze-0", "maze-1", "other"):
            container = {"name": "server", "image": "tiny"}
            metadata = {"name": name, "labels": {"app": name.partition("-")[0]}}
            cluster.create(
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
            )
        gateway = start(source=PodBackends(address, {"app": "maze"}, 8000))
        backends = gateway.gateway.backends
        wait_until(lambda: len(backends.admitting()) == 2)
        names = {one.host for one in backends.all()}
        assert http_calls.get(f"{gateway.url}/name").text in names
        double.kill_pod("maze-0")
        wait_until(lambda: len(backends.all()) == 1)
        cluster.close()


@pytest.mark.slow
def test_the_command_serves_until_sigterm_and_cuts_only_what_can_be_resumed(serve: Serve) -> None:
    servers = [serve(counting_app(name)) for name in ("red", "blue")]
    command = [sys.executable, "-m", "openenv", "gateway", *(server.url for server in servers), "--port", "0"]
    with subprocess.Popen([*command, "--drain-timeout", "30"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if (found := re.search(r"http://127\.0\.0\.1:\d+(?= for )", line)) is not None:
                url = found[0]
                break
        old, new = client_at(url, protocol="v1"), client_at(url, reconnect_timeout_s=60.0)
        old.reset()
        new.reset()
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: sum(server.manager.is_quiet for server in servers) == 2)
        assert old.step({"by": 2}).observation["total"] == 2  # it would lose its session
        old.close()
        assert process.wait(30) == 0
    gateway = RunningGateway(ChangingBackends([server.url for server in servers]), port=int(url.rpartition(":")[2]))
    assert new.step({"by": 3}).observation["total"] == 3
    new.close()
    gateway.stop()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name the servers in one way"),
        (("http://a:1", "--dns", "b:2"), "name the servers in one way"),
        (("maze",), "is not a server address"),
        (("--dns", "maze:port"), "is not a server address"),
        (("--pods", "app"), "must be KEY=VALUE,KEY=VALUE"),
        (("--pods", "app=maze", "--kubeconfig", "/nowhere"), "no usable Kubernetes configuration"),
        (("http://a:1", "--log-level", "loud"), "is not one of"),
    ],
)
def test_a_wrong_option_is_refused(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(build(("gateway",)), ["gateway", *arguments])
    assert result.exit_code in (1, 2)
    assert words in " ".join(result.output.split())
