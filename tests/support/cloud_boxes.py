"""The sandboxes behind every cloud double: bubblewrap with its own processes, network and `/app`, reached over TLS.

provider ──the cloud's package──> double ──> Box ── cloud_agent.py inside: commands, and port 8000
client   ──https://localhost:N──> TLS end ──────────────┘
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from waiting import wait_until

FOLDERS = {"app": "/app", "tmp": "/tmp", "control": "/control", "home": "/home/user"}
USER = 1000
"""The user of commands in sandboxes that are no servers; root's commands must not be killed with theirs."""
AGENT = Path(__file__).with_name("cloud_agent.py")
MANIFEST = "spec_version: 1\nname: sums\ntype: space\nruntime: fastapi\napp: sum_app:app\nport: 8000\n"


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool


class Box:
    """One sandbox: a process tree that ends with its first process."""

    def __init__(self, image: Path | None, env: Mapping[str, str], tls: ssl.SSLContext) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cloud-box-"))
        for name in FOLDERS:
            (self.folder / name).mkdir()
            (self.folder / name).chmod(0o777)
        if image is not None:
            shutil.copytree(image, self.folder / "app", dirs_exist_ok=True)
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        variables = {"PATH": path, "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", **env}
        self._process = subprocess.Popen(
            [*_bubblewrap(self.folder), sys.executable, str(AGENT), "/control"], env=variables, start_new_session=True
        )
        self.end = TlsEnd(self.folder / "control" / "port", tls)
        try:
            wait_until(lambda: (self.folder / "control" / "exec").exists() or self._process.poll() is not None)
            assert self.is_alive, "bubblewrap did not start the sandbox"
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        as_user: bool = False,
    ) -> Ran:
        """Run a command inside, a text in a shell."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        request: dict[str, Any] = {"argv": argv, "env": dict(env or {}), "cwd": cwd, "timeout_s": timeout_s}
        request["user"] = USER if as_user and os.geteuid() == 0 else None
        request["stdin"] = base64.b64encode(stdin).decode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.folder / "control" / "exec"))
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()
                answer = json.loads(stream.readline() or "{}")
        if not answer:
            raise ConnectionError("the sandbox has ended")
        out, err = (base64.b64decode(answer[name]) for name in ("stdout", "stderr"))
        return Ran(answer["code"], out, err, answer["timed_out"])

    def close(self) -> None:
        """End every process in it."""
        self.end.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)


def _bubblewrap(folder: Path) -> list[str]:
    words = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent", "--tmpfs", "/"]
    words += ["--perms", "0755", "--dir", "/home"]
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            words += ["--symlink", os.readlink(entry), str(entry)]
        elif entry.is_dir() and entry.name not in {"app", "tmp", "proc", "dev", "sys", "control", "home"}:
            words += ["--ro-bind", str(entry), str(entry)]
    for name, place in FOLDERS.items():
        words += ["--bind", str(folder / name), place]
    # Installed environments bring this program; an image that has it is served by it, and these images do not have it.
    server = Path(sys.executable).with_name("server")
    if server.exists():
        words += ["--ro-bind", os.devnull, str(server)]
    return [*words, "--proc", "/proc", "--dev", "/dev", "--chdir", "/"]


class TlsEnd:
    """A loopback port that speaks TLS and passes what comes on to a unix socket, as a cloud's ingress does."""

    def __init__(self, target: Path, tls: ssl.SSLContext) -> None:
        self.target = target
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._tls = tls
        self._thread = threading.Thread(target=self._serve, name="tls-end", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"https://localhost:{self.port}"

    def close(self) -> None:
        """Close it and its connections."""
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._listener.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = asyncio.start_server(self._connected, sock=self._listener, ssl=self._tls)
        self._loop.run_until_complete(server)
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
                with contextlib.suppress(BaseException):
                    self._loop.run_until_complete(task)
            self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await splice(reader, writer, self.target)


async def splice(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Path, *, first: bytes = b""
) -> None:
    """Connect a connection with a unix socket, to which some bytes go first."""
    try:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(target))
    except OSError:
        writer.close()
        return
    inner_writer.write(first)
    await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))


async def reply(writer: asyncio.StreamWriter, status: int, body: bytes, *, kind: str = "application/json") -> None:
    """Answer one HTTP request and close the connection."""
    head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(OSError, ssl.SSLError):
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, ssl.SSLError):
        writer.close()


class Boxes:
    """Makes the sandboxes of one double, from "images" that are folders, copied to `/app`."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate = certificate
        self.key = key
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate, key)
        self.images: dict[str, Path] = {}
        self.opened: list[Box] = []

    def open(self, image: str, env: Mapping[str, str]) -> Box:
        """Start a sandbox of an image, or of none."""
        box = Box(self.images.get(image), env, self.tls)
        self.opened.append(box)
        return box

    @property
    def alive(self) -> list[Box]:
        """Those that run."""
        return [box for box in self.opened if box.is_alive]

    def close(self) -> None:
        """End them all."""
        for box in self.opened:
            box.close()

    def server_settings(self) -> dict[str, Any]:
        """Return what lets uvicorn speak TLS."""
        return {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for localhost; return it and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    if certificate.exists():
        return certificate, key
    names = "subjectAltName=DNS:localhost,DNS:*.cloud.localhost,IP:127.0.0.1"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@contextlib.contextmanager
def cloud_boxes(folder: Path, certificate_folder: Path | None = None) -> Iterator[Boxes]:
    """Provide sandboxes and three images, of which `sums` is an environment; this process trusts their certificate."""
    for tool in ("bwrap", "openssl"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    certificate, key = make_certificate(certificate_folder or folder)
    boxes = Boxes(certificate, key)
    image = folder / "sums" / "env"
    image.mkdir(parents=True)
    (image / "openenv.yaml").write_text(MANIFEST)
    for name in ("sum_app.py", "slow_steps.py"):
        shutil.copy(Path(__file__).with_name(name), image)
    boxes.images["sums"] = image.parent
    empty = folder / "empty"
    empty.mkdir()
    boxes.images["empty"] = empty
    nameless = folder / "nameless" / "env"
    nameless.mkdir(parents=True)
    (nameless / "openenv.yaml").write_text("spec_version: 1\nname: nameless\n")
    boxes.images["nameless"] = nameless.parent
    patch = pytest.MonkeyPatch()
    for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        patch.setenv(variable, str(certificate))
    resolve = socket.getaddrinfo

    def resolve_here(host: Any, *arguments: Any, **options: Any) -> Any:
        """Resolve names under localhost, as clouds have one for each sandbox; not every machine does."""
        name = host.decode() if isinstance(host, bytes) else host or ""
        is_here = name.endswith(".cloud.localhost")
        return resolve("127.0.0.1" if is_here else host, *arguments, **options)

    patch.setattr(socket, "getaddrinfo", resolve_here)
    try:
        yield boxes
    finally:
        patch.undo()
        boxes.close()
