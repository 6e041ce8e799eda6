"""The servers behind a gateway: which there are, which one has a session, which one is the least loaded.

A source lists their addresses; `GET /ready` of each says under which name it has started (`server`), how many sessions
it has, and whether it takes more. Ids of sessions begin with that name (`sessions.peers`), so a gateway that has just
started routes as well as one that has opened every session itself. Must not know connections.

    listed, answers 200 on /ready      gets new sessions
    answers 503 on /ready              drains: gets the requests of its sessions, and no new ones
    does not answer, for 15 s          requests of its sessions are answered with 503, and clients try again
    does not answer, for longer        gone: another server says that the sessions are lost
    not listed, does not answer        gone at once
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
"""Stands for whichever server takes new sessions."""
GONE_S: Final = 15.0
_POLL_S: Final = 1.0
_POLL_EACH_S: Final = 0.01  # with many servers less often: asking one costs about 1 ms of CPU
_EARLIEST_S: Final = 0.2  # between the begins of two rounds, whatever clients ask for
_ANSWER_S: Final = 2.0
_AT_ONCE: Final = 64
_MOST_KEYS: Final = 32_768
_MANY: Final = 1_000_000


class BackendUnavailable(Exception):
    """No server can take a request now; `code` and the text are for the client, which may try again."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class UnknownBoot(Exception):
    """A name is that of a server which no round has found yet."""


class BackendSource(Protocol):
    """Knows the addresses of servers."""

    async def urls(self) -> list[str]:
        """Return them; raise OSError or RuntimeError where they cannot be found out now."""

    def close(self) -> None:
        """Free what it holds."""


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
    """All addresses of a host name, as a headless Service of Kubernetes has them.

    Args:
        host: The name.
        port: The port of every server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def urls(self) -> list[str]:
        found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        hosts = dict.fromkeys(str(address[0]) for *_, address in found)
        return [f"http://{f'[{host}]' if ':' in host else host}:{self._port}" for host in hosts]

    def close(self) -> None:
        return None

    def __str__(self) -> str:
        return f"all addresses of {self._host}"


class PodBackends:
    """The running pods of a selector, those that are about to end included: their sessions may go on.

    Args:
        address: The cluster.
        labels: The labels that select them.
        port: The port of every server.

    Raises:
        SandboxUnavailable: There is no configuration of a cluster, or lightkube is not installed.
    """

    def __init__(self, address: ClusterAddress, labels: Mapping[str, str], port: int) -> None:
        self._labels = dict(labels)
        self._port = port
        self._watch = PodWatch(Cluster(address), labels)

    async def urls(self) -> list[str]:
        def look(pods: list[Any]) -> list[Any]:
            return pods

        # At once, but for the first time and where the cluster refuses.
        pods = await asyncio.to_thread(self._watch.wait, look, 10.0)
        if pods is None:
            raise TimeoutError("the cluster has not listed its pods")
        hosts = [pod.ip for pod in pods if pod.ip and pod.is_running]
        return [f"http://{f'[{host}]' if ':' in host else host}:{self._port}" for host in hosts]

    def close(self) -> None:
        self._watch.close()

    def __str__(self) -> str:
        return f"pods with {','.join(f'{key}={value}' for key, value in self._labels.items())}"


@dataclass(eq=False, slots=True)
class Backend:
    """A server.

    Args:
        number: What routing calls it.
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
    sockets: int = 0
    """WebSockets of this gateway's clients."""
    placed: deque[tuple[float, int]] = field(default_factory=deque)
    """Sessions that were sent there after its last answer began, and when."""

    @property
    def load(self) -> int:
        """Its sessions, and those that were sent there and that it has not counted yet."""
        return self.active + sum(count for _, count in self.placed)

    @property
    def order(self) -> tuple[bool, float, int]:
        """Its place among the others: the first gets the next session."""
        load = self.load
        return load >= self.most, load / max(1, self.most), load


class Backends:
    """The servers of one gateway. A context manager; `refresh` returns once all of them were asked.

    Args:
        source: Lists their addresses.

    Raises:
        ValueError: An address is none of a server.
    """

    def __init__(self, source: BackendSource) -> None:
        self._source = source
        self._by_number: dict[int, Backend] = {}
        self._by_boot: dict[str, Backend] = {}
        self._absent: set[str] = set()  # names that the last round has not found
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
        """Return the server of a number, if it is still there."""
        return self._by_number.get(number)

    def all(self) -> list[Backend]:
        """Return them in the order of their addresses."""
        return sorted(self._by_number.values(), key=lambda backend: backend.url)

    def admitting(self) -> list[Backend]:
        """Return those that take new sessions."""
        return [backend for backend in self.all() if backend.admits]

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
        known = None if key is None else self.known(key)
        if known is not None:
            return Destination(known)
        backend = self.least_loaded()
        self.count(backend, sessions)
        if key is not None:
            self.remember(key, backend)
        return Destination(backend.number, sessions)

    def least_loaded(self) -> Backend:
        """Return the server for the next session.

        Raises:
            BackendUnavailable: There is none.
        """
        able = [one for one in self._by_number.values() if one.admits]
        if not able:
            raise BackendUnavailable(
                "NO_BACKEND", f"None of the {len(self._by_number)} servers behind this gateway takes new sessions now."
            )
        return min(able, key=lambda backend: backend.order)

    def count(self, backend: Backend, sessions: int) -> None:
        """Count sessions as the load of a server until it counts them itself; negative for those that do not come."""
        if sessions:
            backend.placed.append((asyncio.get_running_loop().time(), sessions))

    def first_serving(self, here: int) -> int:
        admitting = self.admitting()
        return admitting[0].number if admitting else here

    def spread(self, name: str, here: int) -> int:
        backends = self.all()
        if not backends:
            return here
        return backends[zlib.crc32(name.encode("latin-1", "replace")) % len(backends)].number

    def remember(self, key: bytes, backend: Backend) -> None:
        """Send the request with this key there, should it come again."""
        if backend.boot is not None:
            self._keys[_digest(key)] = backend.boot
            while len(self._keys) > _MOST_KEYS:
                self._keys.popitem(last=False)

    def known(self, key: bytes) -> int | None:
        """Return the server that the request with this key was sent to before."""
        backend = self._by_boot.get(self._keys.get(_digest(key), ""))
        return None if backend is None else backend.number

    # -- asking ---------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Return after a round that has begun after this call."""
        wanted = self._begun + 1
        self._wake.set()
        async with self._changed:
            await self._changed.wait_for(lambda: self._done >= wanted)

    async def look_for(self, boot: str) -> None:
        """Find out whether there is a server of that name.

        Raises:
            BackendUnavailable: A server does not answer, and it may be that one.
        """
        await self.refresh()
        if boot in self._by_boot:
            return
        if any(one.failing_since is not None and not self._is_given_up(one) for one in self._by_number.values()):
            text = "The server of the session is not known, and one that does not answer now may be it."
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
            except Exception:  # a task of its own: it must go on
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
            listed = None  # those that are known go on
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
        backend.admits = answer.status_code != 503
        # A server of the published package has no `/ready`, and a session for each connection.
        backend.active = _count(shown, "active_sessions", backend.sockets)
        backend.most = _count(shown, "max_sessions", _MANY)
        backend.workers = _count(shown, "workers", 1)
        while backend.placed and backend.placed[0][0] <= began:
            backend.placed.popleft()

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
            httpx2.HTTPError: It does not answer.
        """
        return await self._http.get(backend.url + path, headers=dict(headers))


def backend_at(url: str, number: int = 0) -> Backend:
    """Return the server at an address.

    Raises:
        ValueError: It is none of a server.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path.strip("/"):
        raise ValueError(f"{url!r} is no address of a server: expected http://HOST:PORT, without a path")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Backend(number, url.rstrip("/"), parts.hostname, port or (443 if tls else 80), tls)


def _count(shown: Mapping[str, Any], key: str, default: int) -> int:
    value = shown.get(key, default)
    return value if isinstance(value, int) and value >= 0 else default


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()
