"""Build and run a package in a container, and measure its network isolation: the provider `docker`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from openenv.env.manifest import ExecutionDeclaration
from openenv.errors import ProviderError, ProviderUnavailable, SandboxUnavailable, message_of
from openenv.providers.health import quoted, wait_for_ready
from openenv.providers.local_docker import INNER_PORT, EngineWatch, Variables, new_name, options_of, owner_labels
from openenv.providers.own_wheel import add_wheels
from openenv.sandboxes.base import ExecResult
from openenv.sandboxes.container_cli import ContainerCli, failure_of, find_engine

from .recording import LaunchSpec, NetworkEvidence, abort_socket
from .rules import ProviderCapability
from .served_package import StartupError, UnsupportedCapability

# The small official image with Python: helpers use nothing but the standard library.
HELPER_IMAGE = "python:3.12-slim"
SINK_TCP_PORT = 8080
SINK_UDP_PORT = 8081
HARDENING = [
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", "64", "--memory", "128m"),
    *("--read-only", "--user", "65532:65532", "--entrypoint", "python3"),
]
"""How helpers run: they need no rights, no files and little memory."""
# The package under test loses all capabilities too. Its limit of processes is higher: servers start workers.
_SUBJECT = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", "4096"]
# Removing may wait for the kernel to end processes.
_REMOVE_S = 20.0
# Output of a command beyond this size is cut off, because the package is untrusted.
_EXEC_BYTES = 1 << 20
_CHUNK = 1 << 16
_GREETING = b"sink\n"

# A container without a network has no port to publish. A helper joins its network namespace, and a relay process in
# the helper copies bytes between its standard streams and the server:
#
#   this process ── docker exec (stdin, stdout) ── _RELAY in the helper ── 127.0.0.1:8000 of the package
_IDLE = "import time\nwhile True: time.sleep(3600)"
_RELAY = f"""
import os, socket, threading
server = socket.create_connection(("127.0.0.1", {INNER_PORT}), 10)
server.settimeout(None)
def upwards():
    while data := os.read(0, {_CHUNK}):
        server.sendall(data)
    server.shutdown(socket.SHUT_WR)
threading.Thread(target=upwards, daemon=True).start()
while data := server.recv({_CHUNK}):
    while data:
        data = data[os.write(1, data):]
"""
# The sink answers TCP and UDP in a container with a network. If the package reaches it, isolation has failed.
_SINK = f"""
import socket, threading
def answer_datagrams():
    with socket.socket(type=socket.SOCK_DGRAM) as box:
        box.bind(("0.0.0.0", {SINK_UDP_PORT}))
        while True:
            box.sendto({_GREETING!r}, box.recvfrom(64)[1])
threading.Thread(target=answer_datagrams, daemon=True).start()
with socket.create_server(("0.0.0.0", {SINK_TCP_PORT})) as listener:
    while True:
        with listener.accept()[0] as client:
            client.sendall({_GREETING!r})
"""
# In: the sink's address. Out: interfaces, routes and reach of the namespace, as JSON. An ICMP echo needs a capability
# that helpers may lack, so a refusal for that reason proves nothing.
_MEASURE = f"""
import errno, json, os, socket, struct, sys
def attempt(action):
    try:
        return {{"result": "reachable" if action() else "inconclusive"}}
    # Only "no route" proves a denial. A timeout or a refusal could have other causes.
    except OSError as error:
        no_route = error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
        return {{"result": "denied" if no_route else "inconclusive", "errno": error.errno}}
def tcp():
    with socket.create_connection((sink, {SINK_TCP_PORT}), 3) as client:
        return client.recv(16) == {_GREETING!r}
def udp():
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.settimeout(3)
        client.sendto(b"?", (sink, {SINK_UDP_PORT}))
        return client.recv(16) == {_GREETING!r}
def icmp():
    with socket.socket(type=socket.SOCK_DGRAM, proto=socket.IPPROTO_ICMP) as client:
        client.settimeout(3)
        client.sendto(struct.pack("!BBHHH", 8, 0, 0xF7FF, 0, 0), (sink, 0))
        return bool(client.recv(64))
def lines(path):
    try:
        with open(path) as file:
            return [line.split() for line in file]
    except OSError:
        return []
sink = sys.argv[1] if len(sys.argv) > 1 else None
# 0A is TCP's state LISTEN in /proc/net/tcp; addresses there are hexadecimal.
listening = [line[1] for kind in ("tcp", "tcp6") for line in lines("/proc/net/" + kind)[1:] if line[3] == "0A"]
print(json.dumps({{
    "namespace": {{
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "default_route": any(line[1] == "00000000" for line in lines("/proc/net/route")[1:]),
        "ipv6_non_loopback": sum(line[5] != "lo" for line in lines("/proc/net/if_inet6")),
        "listening_ports": sorted({{int(address.rpartition(":")[2], 16) for address in listening}}),
    }},
    "probes": {{}} if sink is None else {{"tcp": attempt(tcp), "udp": attempt(udp), "icmp": attempt(icmp)}},
}}))
"""


class DockerValidationProvider:
    """Builds the image of a package and runs it with the network, memory and processors that it declares.

    Args:
        build_timeout_s: How long a build may take.
        max_context_bytes: How large the files of a build may be.
        helper_image: An image with `python3`, for packages without a network; it is pulled if it is missing.

    Raises:
        ProviderUnavailable: Docker is not installed, or does not answer.
    """

    name = "docker-local"
    capabilities = frozenset(
        {ProviderCapability.IMAGE_BUILD, ProviderCapability.EXEC, ProviderCapability.NETWORK_POLICY}
    )
    supported_network_modes = frozenset({"public", "no-network"})

    def __init__(
        self, *, build_timeout_s: float = 600, max_context_bytes: int = 1 << 30, helper_image: str = HELPER_IMAGE
    ) -> None:
        self._build_timeout_s = build_timeout_s
        self._max_context_bytes = max_context_bytes
        self._helper_image = helper_image
        self._engine = _docker()

    def build(self, root: Path, execution: ExecutionDeclaration) -> str:
        """Build the image of a package and return its digest.

        Raises:
            ProviderError: The files are too large or missing, or the build failed; the text has its end.
        """
        context, dockerfile = root / execution.context, root / execution.dockerfile
        if not dockerfile.is_file():
            raise ProviderError(f"{dockerfile} is missing: validation.execution.dockerfile names it")
        # Measured before the build: the engine would copy the whole context first.
        size = sum(path.lstat().st_size for path in context.rglob("*") if not path.is_dir())
        if size > self._max_context_bytes:
            text = f"{context} holds {size} bytes, and {self._max_context_bytes} may be sent to the engine"
            raise ProviderError(f"{text}. Leave files out by a .dockerignore in a smaller context")
        # `--iidfile` returns the digest. A tag could be moved by another build meanwhile.
        with tempfile.TemporaryDirectory(prefix="openenv-build-") as folder:
            digest, copy, recipe = Path(folder, "digest"), Path(folder, "context"), Path(folder, "Dockerfile")
            # A copy, so that the image has this version of openenv, as an image of `openenv build`.
            shutil.copytree(context, copy, symlinks=True)
            shutil.copyfile(dockerfile, recipe)
            add_wheels(copy, recipe)
            arguments = ["build", "--quiet", "--iidfile", str(digest), "--file", str(recipe), str(copy)]
            done = self._engine.run(*arguments, timeout=self._build_timeout_s)
            if done.returncode != 0:
                log = failure_of(done)[-4000:]
                raise ProviderError(f"the image of {root.name} cannot be built:\n{log}", log=log)
            return digest.read_text(encoding="ascii").strip()

    def start(self, spec: LaunchSpec) -> DockerRunningSubject:
        """Run an image, and return when its server answers.

        Raises:
            UnsupportedCapability: It declares a list of hosts or graphics processors.
            StartupError: Its server ended, or did not answer in time; the text has the end of its log.
            ProviderError: The engine could not run it.
        """
        # Refuse what cannot be enforced; running it with more network would make the report wrong.
        if spec.network.mode not in self.supported_network_modes:
            raise UnsupportedCapability(
                f"network mode {spec.network.mode} cannot be kept by Docker; it has {' and '.join(self._modes())}"
            )
        if spec.resources.gpus:
            raise UnsupportedCapability("this provider gives no graphics processors")
        with contextlib.suppress(ProviderError):  # sweeping is a courtesy: its failure must not stop this start
            self._engine.sweep()
        subject = DockerRunningSubject(new_name(f"openenv-{spec.run_id}"), spec, self._helper_image)
        try:
            subject.launch()
        # BaseException: Ctrl-C during the start must not leave a container behind either.
        except BaseException:
            subject.stop()
            raise
        return subject

    def _modes(self) -> list[str]:
        return sorted(self.supported_network_modes)


class DockerRunningSubject:
    """A package in a container; made by `DockerValidationProvider.start`.

    Args:
        name: The container's name.
        spec: How it is run.
        helper_image: An image with `python3`.
    """

    def __init__(self, name: str, spec: LaunchSpec, helper_image: str = HELPER_IMAGE) -> None:
        self.base_url = ""
        self._name = name
        self._spec = spec
        self._helper_image = helper_image
        self._engine = _docker()
        self._containers: list[str] = []  # oldest first
        self._bridge: ExecRelayBridge | None = None

    def launch(self) -> None:
        """Create and start the container, and wait for its server."""
        spec = self._spec
        has_network = spec.network.mode == "public"
        # Variables travel in a file or the environment, so secrets do not appear in the process list.
        variables = Variables.of(spec.env_vars)
        limits = {"--cpus": spec.resources.cpu, "--memory": f"{spec.resources.memory_mb}m"}
        # With a network, publish on loopback only. Without one, the container has just `lo`.
        reach = ["--publish", f"127.0.0.1::{INNER_PORT}"] if has_network else ["--network", "none"]
        options = [*reach, *_SUBJECT, *options_of(limits), *owner_labels("validation"), *variables.options]
        command = ["create", "--name", self._name, *options, spec.image_ref]
        # Noted before it exists, so that `stop` removes it even if creating it fails halfway.
        self._containers.append(self._name)
        self._engine.output(*command, data=variables.file, environ=variables.environ)
        self._engine.output("start", self._name)
        if has_network:
            self.base_url = f"http://127.0.0.1:{self._published()}"
        else:
            self._helper("helper", f"container:{self._name}", _IDLE)
            self._bridge = ExecRelayBridge(self._helper_name("helper"))
            self.base_url = self._bridge.url
        # The watch ends the wait early if the container has ended, and adds its log to the error.
        watch = EngineWatch(self._ended, self.logs)
        try:
            wait_for_ready(self.base_url, spec.startup_timeout_s, what=f"Container {self._name}", watch=watch)
        except ProviderError as error:
            raise StartupError(message_of(error), log=error.log) from error

    def measure_network(self, timeout_s: float = 120) -> dict[str, Any]:
        """Measure the interfaces and the reach of the package's network namespace, as fields of `NetworkEvidence`.

        Without a network, a sink is reached from a container with one and must not be reached from here.

        Raises:
            ProviderError: A helper cannot be run, or the time is over.
        """
        # One deadline for all helpers together.
        deadline = time.monotonic() + timeout_s
        mode = self._spec.network.mode
        with contextlib.ExitStack() as stack:
            sink: list[str] = []
            controls: dict[str, Any] = {}
            # control: a container with a network reaches the sink, which proves that the sink works.
            # subject: the package's namespace must not reach it.
            if mode == "no-network":
                stack.enter_context(self._running("sink", "bridge", _SINK))
                sink = [self._address_of("sink")]
                stack.enter_context(self._running("control", "bridge", _IDLE))
                controls = self._measured("control", sink, deadline)["probes"]
            else:
                stack.enter_context(self._running("helper", f"container:{self._name}", _IDLE))
            measurement = self._measured("helper", sink, deadline)
        evidence = NetworkEvidence.model_validate(
            {
                "requested_mode": mode,
                "subject_network_mode": self._inspected("{{.HostConfig.NetworkMode}}"),
                "namespace": measurement["namespace"],
                "probes": [
                    {"kind": kind, "control": controls[kind], "subject": outcome}
                    for kind, outcome in measurement["probes"].items()
                ],
            }
        )
        return evidence.model_dump(mode="json")

    def inspect(self) -> dict[str, Any]:
        """Return the container's state, and the parts of the host that it can reach."""
        config: dict[str, Any] = json.loads(self._inspected("{{json .}}"))
        state, host = config["State"], config["HostConfig"]
        return {
            "container": self._name,
            "image_ref": self._spec.image_ref,
            "status": state["Status"],
            "exit_code": state["ExitCode"],
            "oom_killed": state["OOMKilled"],
            "network_mode": host["NetworkMode"],
            "privileged": host["Privileged"],
            # Named volumes are the engine's; only bind mounts show folders of the host.
            "mounts": [mount["Source"] for mount in config.get("Mounts", ()) if mount.get("Type") == "bind"],
            "host_namespaces": [name for name in ("PidMode", "IpcMode", "UTSMode") if host.get(name) == "host"],
        }

    def logs(self, max_bytes: int = 65536) -> str:
        """Return the end of the server's output."""
        done = self._engine.run("logs", "--tail", "1000", self._name, timeout=20)
        return (done.stdout + done.stderr)[-max_bytes:].decode("utf-8", "replace")

    def exec(self, argv: list[str], timeout_s: float) -> ExecResult:
        """Run a command in the package's container; one that takes too long is left to the container's end."""
        # `docker exec` has no time limit, so the client is ended here. The command itself ends with the container.
        started = time.monotonic()
        try:
            done = subprocess.run(
                self._engine.argv("exec", self._name, *argv),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            # 124 is the exit code of `timeout`.
            duration_s = time.monotonic() - started
            return ExecResult(124, "", f"no end within {timeout_s:g} s", timed_out=True, duration_s=duration_s)
        stdout, stderr = (stream[:_EXEC_BYTES].decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
        is_cut = max(len(done.stdout), len(done.stderr)) > _EXEC_BYTES
        duration_s = time.monotonic() - started
        return ExecResult(done.returncode, stdout, stderr, truncated=is_cut, duration_s=duration_s)

    def stop(self) -> None:
        """Remove the container and its helpers; harmless when that was done.

        Raises:
            ProviderError: One is still there; the text has its name.
        """
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None
        left = []
        for name in [*reversed(self._containers)]:
            if (problem := self._engine.remove(name, within_s=_REMOVE_S)) is None:
                self._containers.remove(name)
            else:
                left.append(f"container {name} is left: {problem}. Remove it: docker rm -f {name}")
        if left:
            raise ProviderError("; ".join(left))

    def _published(self) -> str:
        done = self._engine.run("port", self._name, f"{INNER_PORT}/tcp")
        if done.returncode == 0:
            return done.stdout.decode().splitlines()[0].rpartition(":")[2]
        how = self._ended(0.0) or failure_of(done)
        raise StartupError(f"Container {self._name} has no port: {how}.{quoted(self.logs())}", log=self.logs())

    def _ended(self, within_s: float) -> str | None:
        form = "{{.State.Running}} {{.State.ExitCode}} {{.State.OOMKilled}}"
        running, code, oom = self._inspected(form).split()
        if running == "true":
            time.sleep(within_s)
            return None
        return "it ran out of memory" if oom == "true" else f"it ended with exit code {code}"

    def _inspected(self, form: str) -> str:
        return self._engine.output("inspect", "--type", "container", "--format", form, self._name)

    def _helper_name(self, role: str) -> str:
        return f"{self._name}-{role}"

    def _helper(self, role: str, network: str, script: str) -> None:
        """Start a container that runs a script of ours."""
        if not self._engine.has_image(self._helper_image):
            problem = self._engine.pull(self._helper_image, timeout=600)
            if problem is not None:
                raise ProviderError(f"{problem} Or give helper_image= another one that has python3.")
        name = self._helper_name(role)
        self._containers.append(name)
        labels = owner_labels("validation")
        command = ["run", "--detach", "--name", name, "--network", network, *HARDENING, *labels, self._helper_image]
        self._engine.output(*command, "-c", script)

    @contextlib.contextmanager
    def _running(self, role: str, network: str, script: str) -> Iterator[None]:
        try:
            self._helper(role, network, script)
            yield
        finally:
            name = self._helper_name(role)
            if self._engine.remove(name, within_s=_REMOVE_S) is None:
                self._containers.remove(name)

    def _address_of(self, role: str) -> str:
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
        addresses = self._engine.output("inspect", "--format", form, self._helper_name(role)).split()
        if not addresses:
            raise ProviderError("the engine's bridge network gives containers no addresses, so nothing can be measured")
        return addresses[0]

    def _measured(self, role: str, sink: list[str], deadline: float) -> dict[str, Any]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ProviderError("the network could not be measured in time")
        arguments = ["exec", self._helper_name(role), "python3", "-c", _MEASURE, *sink]
        measured: dict[str, Any] = json.loads(self._engine.output(*arguments, timeout=left_s))
        return measured


class ExecRelayBridge:
    """A loopback port of this machine that leads to the server in the network namespace of a helper container.

    Args:
        helper: The container's name; it has `python3`.
    """

    def __init__(self, helper: str) -> None:
        self._command = _docker().argv("exec", "--interactive", helper, "python3", "-c", _RELAY)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, subprocess.Popen[bytes]] = {}
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def close(self) -> None:
        """End the port and every connection."""
        with self._lock:
            self._is_closed = True
            connections = [*self._open.items()]
        abort_socket(self._listener)
        for client, process in connections:
            abort_socket(client)
            process.kill()
            process.wait()

    def _start(self, function: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments, daemon=True, name="openenv-relay")
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._carry, client)

    def _carry(self, client: socket.socket) -> None:
        """Carry one connection until both of its directions have ended."""
        pipe = subprocess.PIPE
        with self._lock:
            if self._is_closed:
                abort_socket(client)
                return
            process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            self._open[client] = process
        assert process.stdin is not None
        assert process.stdout is not None
        upwards = self._start(_pump_up, client, process.stdin.fileno())
        try:
            while data := os.read(process.stdout.fileno(), _CHUNK):
                client.sendall(data)
        except OSError:
            pass
        finally:
            abort_socket(client)
            upwards.join()
            process.kill()
            process.communicate()
            with self._lock:
                del self._open[client]


def _pump_up(client: socket.socket, pipe: int) -> None:
    with contextlib.suppress(OSError):
        while data := client.recv(_CHUNK):
            while data:
                data = data[os.write(pipe, data) :]


def _docker() -> ContainerCli:
    try:
        engine = find_engine("docker", None)
    except SandboxUnavailable as error:
        raise ProviderUnavailable(f"Docker is not available: {error}") from error
    return replace(engine, error=ProviderError, unavailable=ProviderUnavailable)
