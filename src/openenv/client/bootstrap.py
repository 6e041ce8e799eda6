"""Start a server for a client: containers and Spaces, through any provider.

Knows the providers' interface; the providers themselves load only when one is needed.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
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
        return self._coroutine().send(value)

    def throw(self, *error: Any) -> Any:
        """Fail, as a coroutine does."""
        return self._coroutine().throw(*error)

    def _coroutine(self) -> Coroutine[Any, Any, ClientT]:
        if self._driven is None:
            self._driven = self._start()
        return self._driven

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

        start: Future[Provided] = Future()
        start.set_running_or_notify_cancel()

        loop_thread = threading.get_ident()

        def provide() -> None:
            try:
                start.set_result(self._provide())
            except BaseException as exc:
                start.set_exception(exc)

        def stop_late(start: Future[Provided]) -> None:
            if start.exception() is None:  # called by `provide`, or at once if the server has just come up
                stop = _stop_in_thread if threading.get_ident() == loop_thread else stop_quietly
                stop(start.result().provider)

        # The loop's default executor: `asyncio.run` waits for it, so a server that comes up late is still stopped.
        asyncio.get_running_loop().run_in_executor(None, provide)
        try:
            provided = await asyncio.wrap_future(start)
        except asyncio.CancelledError:  # the thread cannot be interrupted: a server that comes up later is stopped then
            start.add_done_callback(stop_late)
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


def _stop_in_thread(provider: Any) -> None:
    """Stop a provider without keeping a loop waiting; the process does not end before that is done."""
    threading.Thread(target=stop_quietly, args=(provider,), name="openenv-stop-provider").start()


def _stop_unless_stopped(client: Any, provided: Provided, stop: Callable[[Any], None] | None = None) -> None:
    """Stop a server if its client could not be made or connected, unless the client has stopped it."""
    if client is None or getattr(client, "_provider", provided.provider) is not None:
        if client is not None:
            client._provider = None
        (stop or stop_quietly)(provided.provider)


def provide_container(
    image: str, provider: Any, kwargs: dict[str, Any], ready_timeout_s: float | None = None
) -> Provided:
    """Start a container and wait until it answers; a start that fails leaves no container behind."""
    if provider is None:
        provider = load_provider("LocalDockerProvider")()
    return _provided(provider, lambda: _start_container(provider, image, ready_timeout_s=ready_timeout_s, **kwargs))


def provide_process(target: str | Path, env_vars: dict[str, str] | None, ready_timeout_s: float) -> Provided:
    """Run `openenv serve` in a separate process and wait until it answers."""
    provider = load_provider("ProcessProvider")(target, env_vars=env_vars, ready_timeout_s=ready_timeout_s)
    return _provided(provider, lambda: _start_runtime(provider))


def provide_space(repo_id: str, *, use_docker: bool, provider: Any, kwargs: dict[str, Any]) -> Provided:
    """Start a Space on loopback, from its image or from its code under uv, with further arguments for the provider."""
    kwargs = dict(kwargs)
    if use_docker:
        tag = kwargs.pop("tag", "latest")
        return provide_container(f"registry.hf.space/{hf_space_subdomain(repo_id)}:{tag}", provider, kwargs)
    if provider is None:
        space = {"project_path": f"git+https://huggingface.co/spaces/{repo_id}", "host": "127.0.0.1"}
        own = {name: kwargs.pop(name) for name in list(kwargs) if name not in _START_OPTIONS}
        provider = load_provider("UVProvider")(**{**space, **own})
    return _provided(provider, lambda: _start_runtime(provider, **kwargs))


def _provided(provider: Any, start: Callable[[], str]) -> Provided:
    try:
        return Provided(start(), provider)
    except BaseException:
        stop_quietly(provider)
        raise


def _start_container(provider: Any, *image: str, ready_timeout_s: float | None = None, **kwargs: Any) -> str:
    base_url: str = provider.start_container(*image, **kwargs)
    provider.wait_for_ready(base_url, **({} if ready_timeout_s is None else {"timeout_s": ready_timeout_s}))
    return base_url


def _start_runtime(provider: Any, **kwargs: Any) -> str:
    base_url: str = provider.start(**kwargs)
    provider.wait_for_ready()
    return base_url


def start_provider(provider: Any) -> str:
    """Start a provider's server, wait until it answers, and return its URL.

    Raises:
        ValueError: The provider requires an image.
        TypeError: The object is not a provider.
    """
    start_container = getattr(provider, "start_container", None)
    if callable(start_container) and not callable(getattr(provider, "start", None)):
        if _requires_image(start_container):
            raise ValueError(
                f"{type(provider).__name__} needs an image: use from_docker_image(image, provider=...), "
                "or start it yourself and pass base_url"
            )
        return _start_container(provider)
    if not callable(getattr(provider, "start", None)):
        raise TypeError(f"provider must have start() or start_container(), which {type(provider).__name__} has not")
    return _start_runtime(provider)


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
    """Stop the server of any kind of provider."""
    stop = getattr(provider, "stop_container", None) or getattr(provider, "stop", None)
    if callable(stop):
        stop()
    close = getattr(provider, "close", None)
    if callable(close):
        close()
