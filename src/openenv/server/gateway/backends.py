"""The servers behind a gateway: their addresses, sessions and loads.

A source lists the addresses. `GET /ready` of a server returns its name (`server`), its number of sessions and whether
it admits more. Session IDs begin with that name (`sessions.peers`), so a gateway that has just started routes as well
as an old one. Must not know connections.

    listed, answers 200 on /ready      gets new sessions
    answers 503 on /ready              drains: gets requests of its sessions, and no new sessions
    silent for up to 15 s              requests of its sessions get 503, and clients try again
    silent for longer                  gone: another server reports the sessions as lost
    not listed and silent              gone at once
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import ssl
import zlib
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import httpx2

from openenv.errors import message_of
from openenv.sandboxes.cluster import Cluster, ClusterAddress, PodWatch

from ..sessions.peers import boot_of
from ..workers.routing import GONE, Destination

logger = logging.getLogger(__name__)

ANY: Final = -2
"""Any server that admits new sessions."""
GONE_S: Final = 15.0
_POLL_S: Final = 1.0
_POLL_EACH_S: Final = 0.01  # poll many servers less often: each poll costs about 1 ms of CPU
_EARLIEST_S: Final = 0.2  # the shortest time between two rounds, even if clients wait for one
_ANSWER_S: Final = 2.0
_AT_ONCE: Final = 64
_MOST_KEYS: Final = 32_768
_MANY: Final = 1_000_000


class BackendUnavailable(Exception):
    """No server can take a request now. The client gets `code` and the text, and may try again."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class UnknownBoot(Exception):
    """A session name belongs to a server that is not discovered yet."""


class BackendSource(Protocol):
    """Knows the addresses of servers."""

    async def urls(self) -> list[str]:
        """Return the addresses; raise OSError or RuntimeError if they cannot be listed now."""

    def close(self) -> None:
        """Free all resources."""


class ListedBackends:
    """Addresses that do not change."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(dict.fromkeys(urls))

    async def urls(self) -> list[str]:
        return self._urls

    def close(self) -> None:
        return None

    def __str__(self) -> str:
        return ", ".join(self._urls)


class DnsBackends:
    """All addresses of a host name, such as a headless Kubernetes Service.

    Args:
        host: The host name.
        port: The port of every server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def urls(self) -> list[str]:
        records = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        hosts = dict.fromkeys(str(address[0]) for *_, address in records)
        return [_url(host, self._port) for host in hosts]

    def close(self) -> None:
        return None

    def __str__(self) -> str:
        return f"all addresses of {self._host}"


class PodBackends:
    """The running pods of a selector, including terminating ones, because their sessions may continue.

    Args:
        address: The cluster.
        labels: The labels that select them.
        port: The port of every server.

    Raises:
        SandboxUnavailable: No cluster is configured, or lightkube is not installed.
    """

    def __init__(self, address: ClusterAddress, labels: Mapping[str, str], port: int) -> None:
        self._labels = dict(labels)
        self._port = port
        self._watch = PodWatch(Cluster(address), labels)

    async def urls(self) -> list[str]:
        def look(pods: list[Any]) -> list[Any]:
            return pods

        # Returns at once, except the first time and while the cluster refuses requests.
        pods = await asyncio.to_thread(self._watch.wait, look, 10.0)
        if pods is None:
            raise TimeoutError("the cluster has not listed its pods")
        hosts = [pod.ip for pod in pods if pod.ip and pod.is_running]
        return [_url(host, self._port) for host in hosts]

    def close(self) -> None:
        self._watch.close()

    def __str__(self) -> str:
        return f"pods with {','.join(f'{key}={value}' for key, value in self._labels.items())}"


@dataclass(eq=False, slots=True)
class Backend:
    """A server.

    Args:
        number: Its number for routing.
        url: Its address.
    """

    number: int
    url: str
    host: str = ""
    port: int = 0
    tls: ssl.SSLContext | None = None
    boot: str | None = None
    active: int = 0
    most: int = 1
    workers: int = 1
    admits: bool = False
    is_listed: bool = True
    failing_since: float | None = None
    guarded_boot: str | None = None
    """The name of the server when it last refused a request without a token."""
    sockets: int = 0
    """WebSockets that this gateway relays to the server."""
    placed: deque[tuple[float, int]] = field(default_factory=deque)
    """Sessions sent there since its last poll began: (time, count)."""

    @property
    def load(self) -> int:
        """The number of its sessions, including new ones that it has not counted yet."""
        return self.active + sum(count for _, count in self.placed)

    @property
    def order(self) -> tuple[bool, float, int]:
        """The sort key among all servers: the first one gets the next session."""
        load = self.load
        return load >= self.most, load / max(1, self.most), load


class Backends:
    """The servers of one gateway: a context manager. `refresh` returns once all of them were polled.

    Args:
        source: Lists the addresses.
        probes_tokens: Whether to find out which servers ask for a token, and so check roles.

    Raises:
        ValueError: An address is invalid.
    """

    def __init__(self, source: BackendSource, *, probes_tokens: bool = False) -> None:
        self._source = source
        self._probes_tokens = probes_tokens
        self._by_number: dict[int, Backend] = {}
        self._by_boot: dict[str, Backend] = {}
        self._absent: set[str] = set()  # names that the last round did not find
        self._keys: OrderedDict[bytes, str] = OrderedDict()
        self._last_number = 0
        self._begun = 0
        self._done = 0
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._http = httpx2.AsyncClient(
            timeout=httpx2.Timeout(_ANSWER_S, pool=None),
            limits=httpx2.Limits(max_connections=_AT_ONCE),
            trust_env=False,
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Backends:
        self._task = asyncio.create_task(self._follow())
        await self.refresh()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._http.aclose()
        self._source.close()

    def get(self, number: int) -> Backend | None:
        """Return the server with a number, if it still exists."""
        return self._by_number.get(number)

    def all(self) -> list[Backend]:
        """Return all servers, sorted by address."""
        return sorted(self._by_number.values(), key=lambda backend: backend.url)

    def admitting(self) -> list[Backend]:
        """Return the servers that admit new sessions."""
        return [backend for backend in self.all() if backend.admits]

    def unguarded(self) -> list[Backend]:
        """Return the servers that are not known to check roles."""
        return [one for one in self.all() if one.guarded_boot is None or one.guarded_boot != one.boot]

    # -- choosing (`routing.Places`) ------------------------------------------------------------------------------

    def find(self, name: str) -> int | None:
        boot = boot_of(name)
        if boot is None:
            return None
        backend = self._by_boot.get(boot)
        if backend is not None:
            return backend.number
        if boot in self._absent:
            return GONE
        raise UnknownBoot(boot)

    def place(self, here: int, key: bytes | None = None, sessions: int = 1) -> Destination:
        earlier = None if key is None else self.known(key)
        if earlier is not None:
            return Destination(earlier)
        backend = self.least_loaded()
        self.count(backend, sessions)
        if key is not None:
            self.remember(key, backend)
        return Destination(backend.number, sessions)

    def least_loaded(self) -> Backend:
        """Return the server for the next session.

        Raises:
            BackendUnavailable: No server admits new sessions.
        """
        admitting = [one for one in self._by_number.values() if one.admits]
        if not admitting:
            raise BackendUnavailable(
                "NO_BACKEND", f"None of the {len(self._by_number)} servers behind this gateway takes new sessions now."
            )
        return min(admitting, key=lambda backend: backend.order)

    def count(self, backend: Backend, sessions: int) -> None:
        """Count new sessions as load until the server counts them itself; a negative number takes some back."""
        if sessions:
            backend.placed.append((asyncio.get_running_loop().time(), sessions))

    def shared(self, here: int) -> int:
        admitting = self.admitting()
        return admitting[0].number if admitting else here

    def of_visitor(self, name: str, here: int) -> int:
        number = self.find(name)
        if number is not None and number != GONE:
            return number
        backends = self.admitting() or self.all()
        if not backends:
            return here
        return backends[zlib.crc32(name.encode("latin-1", "replace")) % len(backends)].number

    def remember(self, key: bytes, backend: Backend) -> None:
        """Send a repeated request with this key to the same server."""
        if backend.boot is not None:
            self._keys[_digest(key)] = backend.boot
            while len(self._keys) > _MOST_KEYS:
                self._keys.popitem(last=False)

    def known(self, key: bytes) -> int | None:
        """Return the server that an earlier request with this key went to."""
        backend = self._by_boot.get(self._keys.get(_digest(key), ""))
        return None if backend is None else backend.number

    # -- asking ---------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Wait for a round that begins after this call."""
        wanted = self._begun + 1
        self._wake.set()
        async with self._changed:
            await self._changed.wait_for(lambda: self._done >= wanted)

    async def look_for(self, boot: str) -> None:
        """Find out whether a server with that name exists.

        Raises:
            BackendUnavailable: A server does not answer, and it may have that name.
        """
        await self.refresh()
        if boot in self._by_boot:
            return
        if any(one.failing_since is not None and not self._is_given_up(one) for one in self._by_number.values()):
            text = "The session's server is unknown. It may be one of the servers that do not answer now; try again."
            raise BackendUnavailable("BACKEND_UNREACHABLE", text)
        self._absent.add(boot)

    def _is_given_up(self, backend: Backend) -> bool:
        since = backend.failing_since
        return since is not None and asyncio.get_running_loop().time() - since > GONE_S

    async def _follow(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._wake.clear()
            self._begun += 1
            began = clock()
            try:
                await self._round()
            except Exception:  # the boundary of a task that must continue
                logger.exception("the servers behind the gateway could not be asked")
            self._absent.clear()
            self._done = self._begun
            async with self._changed:
                self._changed.notify_all()
            each_s = _POLL_EACH_S * len(self._by_number)
            await asyncio.sleep(max(_EARLIEST_S, each_s) - (clock() - began))
            pause_s = max(_POLL_S, each_s) - (clock() - began)
            try:
                await asyncio.wait_for(self._wake.wait(), max(0.0, pause_s))
            except asyncio.TimeoutError:
                pass

    async def _round(self) -> None:
        try:
            listed: list[str] | None = await self._source.urls()
        except (OSError, RuntimeError) as exc:
            logger.warning("the servers behind the gateway could not be listed: %s", message_of(exc))
            listed = None  # keep the known servers
        if listed is not None:
            self._list(listed)
        await asyncio.gather(*(self._ask(backend) for backend in self.all()))
        for backend in self.all():
            if not backend.is_listed and backend.failing_since is not None:
                logger.info("%s is gone", backend.url)
                del self._by_number[backend.number]
        self._by_boot = {one.boot: one for one in self._by_number.values() if one.boot is not None}

    def _list(self, urls: Sequence[str]) -> None:
        known = {backend.url: backend for backend in self._by_number.values()}
        for url in urls:
            if url not in known:
                self._last_number += 1
                known[url] = self._by_number[self._last_number] = backend_at(url, self._last_number)
        for url, backend in known.items():
            backend.is_listed = url in urls

    async def _ask(self, backend: Backend) -> None:
        began = asyncio.get_running_loop().time()
        try:
            answer = await self._http.get(f"{backend.url}/ready")
            shown = answer.json() if answer.status_code in (200, 503) else {}
        except (httpx2.HTTPError, ValueError) as exc:
            self._fail(backend, message_of(exc))
            return
        if answer.status_code not in (200, 503, 404) or not isinstance(shown, dict):
            self._fail(backend, f"/ready was answered with {answer.status_code}")
            return
        if backend.failing_since is not None:
            logger.info("%s answers again", backend.url)
        backend.failing_since = None
        boot = shown.get("server")
        backend.boot = boot if isinstance(boot, str) else None
        if self._probes_tokens and (backend.boot is None or backend.guarded_boot != backend.boot):
            await self._probe_token(backend)
        backend.admits = answer.status_code != 503
        # The published package has no `/ready`, and one session per connection.
        backend.active = _count(shown, "active_sessions", backend.sockets)
        backend.most = _count(shown, "max_sessions", _MANY)
        backend.workers = _count(shown, "workers", 1)
        while backend.placed and backend.placed[0][0] <= began:
            backend.placed.popleft()

    async def _probe_token(self, backend: Backend) -> None:
        """Find out whether a server refuses a request without a token."""
        try:
            is_guarded = (await self._http.get(f"{backend.url}/schema")).status_code == 401
        except httpx2.HTTPError:
            is_guarded = False
        backend.guarded_boot = backend.boot if is_guarded else None

    def _fail(self, backend: Backend, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if backend.failing_since is None:
            logger.warning("%s does not answer: %s", backend.url, why)
            backend.failing_since = now
        backend.admits = False
        if self._is_given_up(backend) or not backend.is_listed:
            backend.boot = None

    async def fetch(self, backend: Backend, path: str, headers: Mapping[str, str]) -> httpx2.Response:
        """Send a GET request to one server.

        Raises:
            httpx2.HTTPError: The server does not answer.
        """
        return await self._http.get(backend.url + path, headers=dict(headers))


def backend_at(url: str, number: int = 0) -> Backend:
    """Return the server at an address.

    Raises:
        ValueError: The address is invalid.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path.strip("/"):
        raise ValueError(f"{url!r} is not a server address; write http://HOST:PORT, without a path")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Backend(number, url.rstrip("/"), parts.hostname, port or (443 if tls else 80), tls)


def _count(shown: Mapping[str, Any], key: str, default: int) -> int:
    value = shown.get(key, default)
    return value if isinstance(value, int) and value >= 0 else default


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()
