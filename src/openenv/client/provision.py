"""Starting a server for a client: containers and Spaces, through whatever provider is given.

Knows the providers' interface; the providers themselves load only when one is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from .url import hf_space_subdomain

ClientT = TypeVar("ClientT")


@dataclass(frozen=True, slots=True)
class Provided:
    """A running server and what stops it."""

    base_url: str
    provider: Any


class Bootstrap(Coroutine[Any, Any, ClientT]):
    """A client in the making: await it, or call `sync()`, to have the server started and connected.

    A coroutine to whoever asks for one: `asyncio.run` and `create_task` take it too.
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
        client = self._client_cls_for(self._provide()).sync()
        return client.connect()

    async def _start(self) -> ClientT:
        import asyncio  # only those who start servers from a loop need it here

        provided = await asyncio.get_running_loop().run_in_executor(None, self._provide)
        client = self._client_cls_for(provided)
        await client.connect()
        connected: ClientT = client
        return connected

    def _client_cls_for(self, provided: Provided) -> Any:
        return self._client_cls(base_url=provided.base_url, provider=provided.provider)


def provide_container(image: str, provider: Any, kwargs: dict[str, Any]) -> Provided:
    """Start a container and wait until it answers; a start that fails leaves no container behind."""
    if provider is None:
        provider = load_provider("LocalDockerProvider")()
    try:
        base_url = provider.start_container(image, **kwargs)
        provider.wait_for_ready(base_url)
    except BaseException:
        stop_provider(provider)
        raise
    return Provided(base_url, provider)


def provide_space(repo_id: str, *, use_docker: bool, provider: Any, kwargs: dict[str, Any]) -> Provided:
    """Start a Space: its image, or its code under uv."""
    if use_docker:
        tag = kwargs.pop("tag", "latest")
        return provide_container(f"registry.hf.space/{hf_space_subdomain(repo_id)}:{tag}", provider, kwargs)
    if provider is None:
        project = kwargs.pop("project_path", f"git+https://huggingface.co/spaces/{repo_id}")
        provider = load_provider("UVProvider")(project_path=project)
    try:
        base_url = provider.start(**kwargs)
        provider.wait_for_ready()
    except BaseException:
        stop_provider(provider)
        raise
    return Provided(base_url, provider)


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


def stop_provider(provider: Any) -> None:
    """Stop what a provider has started, whichever kind it is."""
    stop = getattr(provider, "stop_container", None) or getattr(provider, "stop", None)
    if callable(stop):
        stop()
    close = getattr(provider, "close", None)
    if callable(close):
        close()
