"""`CassetteRecorder` and `CassettePlayer`: the two applications behind ports of their own.

Knows how they are served. Must not know HTTP.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import Self

from ..serving import ThreadServer
from .app import PlayerApp, RecorderApp
from .cassette import Cassette, CassetteMiss
from .matching import Mode


class _Served:
    """A context manager around a server."""

    def __init__(self, app: Any, cassette: Cassette, *, prefix: str, host: str, port: int) -> None:
        self.cassette = cassette
        self._prefix = prefix
        self._server = ThreadServer(app, host=host, port=port, lifespan=True)

    @property
    def url(self) -> str:
        """The address to use in place of the endpoint's own."""
        return self._server.url + self._prefix

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class CassetteRecorder(_Served):
    """Records the calls of a real endpoint: give `url` to whoever calls it. Use it as a context manager.

    Args:
        upstream: The endpoint's address, such as `https://api.openai.com/v1`.
        path: The cassette; recordings are added to its end.
        api_key: The endpoint's key; None sends the one that a request brings. Neither is ever written down.
        timeout_s: How long the endpoint may be silent.
        host: The address to bind.
        port: The port to bind; 0 is any free one.

    Raises:
        CassetteError: The file is there and no cassette.
    """

    def __init__(
        self,
        upstream: str,
        path: str | Path,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        parts = urlsplit(upstream)
        cassette = Cassette(path)
        app = RecorderApp(cassette, f"{parts.scheme}://{parts.netloc}", api_key=api_key, timeout_s=timeout_s)
        super().__init__(app, cassette, prefix=parts.path.rstrip("/"), host=host, port=port)


class CassettePlayer(_Served):
    """Plays a cassette in place of the endpoint that it was recorded from. Use it as a context manager.

    A request that was not recorded is answered with 404 and kept in `misses`; `check` raises it.

    Args:
        path: The cassette.
        mode: `strict` compares whole requests, `loose` only what was said (see `matching`).
        speed: 1.0 keeps the recorded times, 2.0 halves them, 0 does not wait at all.
        prefix: The path that `url` ends in.
        host: The address to bind.
        port: The port to bind; 0 is any free one.

    Raises:
        CassetteError: The file is no cassette.
        FileNotFoundError: There is no such file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mode: Mode = "strict",
        speed: float = 0.0,
        prefix: str = "/v1",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if not Path(path).exists():
            raise FileNotFoundError(f"no cassette is at {path}")
        cassette = Cassette(path, mode=mode)
        self._app = PlayerApp(cassette, speed=speed)
        super().__init__(self._app, cassette, prefix=prefix, host=host, port=port)

    @property
    def misses(self) -> list[CassetteMiss]:
        """The requests that were not recorded."""
        return list(self._app.misses)

    @property
    def played(self) -> int:
        """How many requests were answered from the cassette."""
        return self._app.played

    def check(self) -> None:
        """Raise the first request that was not recorded, if there was one.

        Raises:
            CassetteMiss: There was one.
        """
        if self._app.misses:
            raise self._app.misses[0]
