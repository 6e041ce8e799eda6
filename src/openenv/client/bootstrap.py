"""Starting a server for a client: containers and Spaces, through whatever provider is given.

Knows the providers' interface; the providers themselves load only when one is needed.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from .network import hf_space_subdomain

logger = logging.getLogger(__name__)

ClientT = TypeVar("ClientT")
_START_OPTIONS = ("port", "env_vars", "workers")


@dataclass(frozen=True, slots=True)
class Provided:
    """A running server and what stops it."""

    base_url: str
    provider: Any


class Bootstrap(Coroutine[Any, Any, ClientT]):
    """A client in the making: await it, or call `sync()`, to have the server started and connected.

    It is a coroutine: `asyncio.run` and `create_task` take it too.
    """

    def __init__(self, client_cls: type[ClientT], provide: Callable[[], Provided]) -> None:
        self._client_cls: Any = client_cls
        self._provide = provide
        self._driven: Coroutine[Any, Any, ClientT] | None = None

    def __await__(self) -> Generator[Any, None, ClientT]:
        """Start, connect, return the client."""
        return self._start().__await__()

    def send(self, value: Any, /) -> Any:
        """Go on, as a coroutine does."""
        if self._driven is None:
            self._driven = self._start()
        return self._driven.send(value)

    def throw(self, *error: Any) -> Any:
        """Fail, as a coroutine does."""
        if self._driven is None:
            self._driven = self._start()
        return self._driven.throw(*error)

    def close(self) -> None:
        """Give up, as a coroutine does; a server that was started and reached belongs to its client."""
        if self._driven is not None:
            self._driven.close()

    def sync(self) -> Any:
        """Start, connect, return the blocking twin of the client."""
        provided = self._provide()
        client = None
        try:
            client = self._client_cls_for(provided)
            return client.sync().connect()
        except BaseException:
            _stop_unless_stopped(client, provided)
            raise

    async def _start(self) -> ClientT:
        import asyncio  # needed only to start a server from a loop

        start = _Start(self._provide)
        try:
            provided = await asyncio.get_running_loop().run_in_executor(None, start.run)
        except asyncio.CancelledError:
            start.give_up()
            raise
        client = None
        try:
            client = self._client_cls_for(provided)
            await client.connect()
        except BaseException:
            _stop_unless_stopped(client, provided, _stop_in_thread)
            raise
        connected: ClientT = client
        return connected

    def _client_cls_for(self, provided: Provided) -> Any:
        return self._client_cls(base_url=provided.base_url, provider=provided.provider)


class _Start:
    """A start in another thread, which cannot be interrupted: a server that comes up after `give_up` is stopped."""

    def __init__(self, provide: Callable[[], Provided]) -> None:
        self._provide = provide
        self._lock = threading.Lock()
        self._provided: Provided | None = None
        self._is_given_up = False

    def run(self) -> Provided:
        """Start."""
        provided = self._provide()
        with self._lock:
            self._provided = provided
            is_wanted = not self._is_given_up
        if not is_wanted:
            stop_quietly(provided.provider)
        return provided

    def give_up(self) -> None:
        """Have what was started or is yet to come stopped."""
        with self._lock:
            self._is_given_up = True
            provided = self._provided
        if provided is not None:
            _stop_in_thread(provided.provider)


def _stop_in_thread(provider: Any) -> None:
    """Stop a provider without keeping a loop waiting; the process does not end before that is done."""
    threading.Thread(target=stop_quietly, args=(provider,), name="openenv-stop-provider").start()


def _stop_unless_stopped(client: Any, provided: Provided, stop: Callable[[Any], None] | None = None) -> None:
    """Stop a server whose client could not be made or connected, unless the client has done so."""
    if client is None or getattr(client, "_provider", provided.provider) is not None:
        if client is not None:
            client._provider = None
        (stop or stop_quietly)(provided.provider)


def provide_container(image: str, provider: Any, kwargs: dict[str, Any]) -> Provided:
    """Start a container and wait until it answers; a start that fails leaves no container behind."""
    if provider is None:
        provider = load_provider("LocalDockerProvider")()
    try:
        base_url = provider.start_container(image, **kwargs)
        provider.wait_for_ready(base_url)
    except BaseException:
        stop_quietly(provider)
        raise
    return Provided(base_url, provider)


def provide_space(repo_id: str, *, use_docker: bool, provider: Any, kwargs: dict[str, Any]) -> Provided:
    """Start a Space: its image, or its code under uv, on loopback and with whatever else the provider takes."""
    kwargs = dict(kwargs)
    if use_docker:
        tag = kwargs.pop("tag", "latest")
        return provide_container(f"registry.hf.space/{hf_space_subdomain(repo_id)}:{tag}", provider, kwargs)
    if provider is None:
        space = {"project_path": f"git+https://huggingface.co/spaces/{repo_id}", "host": "127.0.0.1"}
        own = {name: kwargs.pop(name) for name in list(kwargs) if name not in _START_OPTIONS}
        provider = load_provider("UVProvider")(**{**space, **own})
    try:
        base_url = provider.start(**kwargs)
        provider.wait_for_ready()
    except BaseException:
        stop_quietly(provider)
        raise
    return Provided(base_url, provider)


def start_provider(provider: Any) -> str:
    """Start what a provider was made for, wait until it answers, and return where it is.

    Raises:
        ValueError: The provider requires an image.
        TypeError: The object is no provider.
    """
    start_container = getattr(provider, "start_container", None)
    if callable(start_container) and not callable(getattr(provider, "start", None)):
        if _requires_image(start_container):
            raise ValueError(
                f"{type(provider).__name__} has to be told what to start: use from_docker_image(image, provider=...), "
                "or start it yourself and pass base_url"
            )
        base_url: str = start_container()
        provider.wait_for_ready(base_url)
        return base_url
    if not callable(getattr(provider, "start", None)):
        raise TypeError(f"provider must have start() or start_container(), which {type(provider).__name__} has not")
    base_url = provider.start()
    provider.wait_for_ready()
    return base_url


def _requires_image(start_container: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(start_container).parameters.values()
    except (TypeError, ValueError):  # its signature is unknown
        return False
    return any(one.default is one.empty for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))


def load_provider(name: str) -> Any:
    """Import a provider class.

    Raises:
        ImportError: This installation has no such provider.
    """
    try:
        return getattr(importlib.import_module("openenv.providers"), name)
    except (ModuleNotFoundError, AttributeError):
        raise ImportError(
            f"{name} is not part of this installation; pass provider= an object that starts the server, "
            "or start the server yourself and pass base_url="
        ) from None


def stop_quietly(provider: Any) -> None:
    """Stop a provider while another error is on its way, which says more than one of stopping."""
    try:
        stop_provider(provider)
    except Exception:
        logger.warning("a provider could not be stopped", exc_info=True)


def stop_provider(provider: Any) -> None:
    """Stop what a provider has started, whichever kind it is."""
    stop = getattr(provider, "stop_container", None) or getattr(provider, "stop", None)
    if callable(stop):
        stop()
    close = getattr(provider, "close", None)
    if callable(close):
        close()
