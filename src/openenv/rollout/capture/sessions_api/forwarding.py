"""Addresses of a capture server for sandboxes on other machines: this host, or a tunnel.

    DirectExposure        an address that the sandbox can reach anyway
    GradioForwarder       Gradio's share tunnel, or your frp server
    CloudflareForwarder   a tunnel of the program `cloudflared`

A tunnel's address is public: the keys of sessions and the admin key protect the server behind it.
"""

# From a remote sandbox to the server:
#
#   agent ---> https://name.trycloudflare.com ---> tunnel's company ---> cloudflared here ---> 127.0.0.1:8100
#
# The programs print to pipes. Threads read the pipes to their ends, because a full pipe would block the program.

from __future__ import annotations

import logging
import queue
import re
import secrets
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from typing import IO, Any

from typing_extensions import Self

from openenv.errors import install_command

log = logging.getLogger("openenv.rollout.capture")

_QUICK_TUNNEL = re.compile(r"https://[-a-z0-9]+\.trycloudflare\.com")
_STOP_S = 10.0  # from a request to end until the process is killed


class ForwardingError(RuntimeError):
    """The server could not get an address for other machines."""


class PortForwarder(ABC):
    """Gives a local port an address for other machines; as a context manager it stops at the end."""

    def __init__(self) -> None:
        self._url: str | None = None

    @classmethod
    def preflight(cls) -> None:
        """Check the requirements, before anything is started.

        Raises:
            ForwardingError: A requirement is missing.
        """
        return  # no requirements by default

    @abstractmethod
    def start(self, local_port: int, *, local_host: str = "127.0.0.1") -> str:
        """Start, and return the address of a local port.

        Raises:
            ForwardingError: The address could not be created.
        """

    @abstractmethod
    def stop(self) -> None:
        """Close the address; a second call does nothing."""

    @property
    def url(self) -> str | None:
        """Return the address; None before the start."""
        return self._url

    @property
    def name(self) -> str:
        """Return the name of the forwarder."""
        return type(self).__name__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class DirectExposure(PortForwarder):
    """An address that needs no tunnel.

    Args:
        advertise_host: The name of this machine for sandboxes.
        scheme: `http`, or `https` behind a proxy.
    """

    def __init__(self, advertise_host: str = "127.0.0.1", scheme: str = "http") -> None:
        super().__init__()
        self._host = advertise_host
        self._scheme = scheme

    def start(self, local_port: int, *, local_host: str = "127.0.0.1") -> str:
        """Return the address; nothing is started."""
        self._url = f"{self._scheme}://{self._host}:{local_port}"
        return self._url

    def stop(self) -> None:
        """Forget the address."""
        self._url = None


class GradioForwarder(PortForwarder):
    """A share tunnel of Gradio (extra `gradio`).

    Args:
        share_server_address: Your frp server; Gradio's by default.
        share_server_tls_certificate: Its certificate.
    """

    def __init__(
        self, share_server_address: str | None = None, share_server_tls_certificate: str | None = None
    ) -> None:
        super().__init__()
        self._server = share_server_address
        self._certificate = share_server_tls_certificate
        self._tunnel: Any = None

    @classmethod
    def preflight(cls) -> None:
        """Check that Gradio is installed.

        Raises:
            ForwardingError: It is missing.
        """
        try:
            import gradio.networking  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
        except ImportError as exc:
            raise ForwardingError(
                f"gradio is required for a share tunnel: {install_command('gradio')} ({exc})"
            ) from exc

    def start(self, local_port: int, *, local_host: str = "127.0.0.1") -> str:
        """Open the tunnel, and return its address.

        Raises:
            ForwardingError: The tunnel failed.
        """
        self.preflight()
        from gradio.networking import setup_tunnel
        from gradio.tunneling import CURRENT_TUNNELS  # type: ignore[import-not-found,import-untyped,unused-ignore]

        self.stop()
        token = secrets.token_hex(16)
        try:
            url = setup_tunnel(
                local_host=local_host,
                local_port=local_port,
                share_token=token,
                share_server_address=self._server,
                share_server_tls_certificate=self._certificate,
            )
        except Exception as exc:  # its download, its program or its server may fail in any way
            raise ForwardingError(f"Gradio's tunnel cannot be opened: {exc}") from exc
        # `setup_tunnel` returns the address only; find the tunnel in a global list of `gradio`, by its token.
        self._tunnel = next((tunnel for tunnel in CURRENT_TUNNELS if tunnel.share_token == token), None)
        process = getattr(self._tunnel, "proc", None)
        if process is None:
            self._tunnel = None
            raise ForwardingError("Gradio's tunnel has no process")
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                _drain(pipe)  # with a full pipe the program would wait for a reader
        self._url = str(url)
        return self._url

    def stop(self) -> None:
        """Close the tunnel."""
        tunnel, self._tunnel, self._url = self._tunnel, None, None
        if tunnel is not None:
            process = tunnel.proc
            tunnel.kill()
            _end(process)


class CloudflareForwarder(PortForwarder):
    """A tunnel of `cloudflared`: a quick one under a random name, or one of your account.

    Args:
        tunnel_name: The tunnel of your account.
        hostname: The host name of that tunnel.
        binary: The program.
        startup_timeout_s: The time limit for the address.
    """

    def __init__(
        self,
        tunnel_name: str | None = None,
        hostname: str | None = None,
        binary: str = "cloudflared",
        startup_timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        self._tunnel_name = tunnel_name
        self._hostname = hostname
        self._binary = binary
        self._timeout_s = startup_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def preflight(cls, binary: str = "cloudflared") -> None:
        """Check that the program is installed.

        Raises:
            ForwardingError: It is missing.
        """
        if shutil.which(binary) is None:
            raise ForwardingError(f"`{binary}` is not on the PATH: install it, or use another forwarder")

    def start(self, local_port: int, *, local_host: str = "127.0.0.1") -> str:
        """Start the program, and return the tunnel's address.

        Raises:
            ForwardingError: The program printed no address in time.
        """
        self.preflight(self._binary)
        self.stop()
        # cloudflared tunnel run --url URL NAME        a tunnel of your account, with a fixed host name
        # cloudflared tunnel --url URL                 a quick tunnel: prints https://word-word-word.trycloudflare.com
        target = f"http://{local_host}:{local_port}"
        named = (
            ["run", "--url", target, self._tunnel_name] if self._tunnel_name else ["--no-autoupdate", "--url", target]
        )
        command = [self._binary, "tunnel", *named]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as exc:
            raise ForwardingError(f"`{self._binary}` cannot be started: {exc}") from exc
        assert self._process.stdout is not None
        lines = _drain(self._process.stdout)
        # A named tunnel prints no address: its host name is configured at the company.
        if self._tunnel_name and self._hostname:
            self._url = f"https://{self._hostname}"
            return self._url
        url = self._printed_url(lines)
        if url is None:
            self.stop()
            raise ForwardingError(f"`{self._binary}` did not print an address within {self._timeout_s:g} s")
        self._url = url
        return url

    def _printed_url(self, lines: queue.Queue[str]) -> str | None:
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                line = lines.get(timeout=left_s)
            except queue.Empty:
                return None
            if not line:  # the program has ended
                return None
            match = _QUICK_TUNNEL.search(line)
            if match is not None:
                return match[0]
        return None

    def stop(self) -> None:
        """End the program."""
        process, self._process, self._url = self._process, None, None
        if process is not None:
            process.terminate()
            _end(process)


def _drain(pipe: IO[bytes]) -> queue.Queue[str]:
    """Read a program's output to its end, into the log and the first lines into a queue; "" is its end."""
    lines: queue.Queue[str] = queue.Queue(maxsize=1000)

    def read() -> None:
        with pipe:
            for raw in pipe:
                text = raw.decode(errors="replace").rstrip()
                log.debug("tunnel: %s", text[:1000])
                # Bounded: after the address, nobody reads the queue. "" is the end, so an empty line becomes " ".
                if not lines.full():
                    lines.put(text or " ")
        if not lines.full():
            lines.put("")

    threading.Thread(target=read, name="openenv-tunnel", daemon=True).start()
    return lines


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """Wait for a process that was asked to end; kill it after `_STOP_S`."""
    if process is None:
        return
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


FORWARDERS: dict[str, type[PortForwarder]] = {
    "direct": DirectExposure,
    "gradio": GradioForwarder,
    "cloudflare": CloudflareForwarder,
}


def make_forwarder(kind: str = "gradio", **kwargs: Any) -> PortForwarder:
    """Make a forwarder: `direct`, `gradio` or `cloudflare`.

    Args:
        kind: The name of the forwarder.
        **kwargs: Its arguments.

    Raises:
        ForwardingError: The kind is unknown.
    """
    if kind not in FORWARDERS:
        raise ForwardingError(f"unknown port forwarder {kind!r}; choose from {', '.join(sorted(FORWARDERS))}")
    return FORWARDERS[kind](**kwargs)
