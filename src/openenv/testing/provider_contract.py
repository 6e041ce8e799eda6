"""The contract of providers as a test: start a server, use it, stop it, and look for remains.

Knows the two provider interfaces and `/health`. It cannot see processes or containers: "stopped" means that the
address no longer answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from openenv.providers.health import ask_health
from openenv.providers.provider import ContainerProvider, RuntimeProvider

_STOPPED_S = 10.0
_PAUSE_S = 0.05
Provider = ContainerProvider | RuntimeProvider


class _StopEarlyError(Exception):
    """Leaves a provider's block as an error of the user's code does."""


def check_provider(make: Callable[[], Provider], *, image: str | None = None, ready_timeout_s: float = 60.0) -> None:
    """Check a provider against its contract. Starts two servers, one after the other.

    1. `start` returns an address, and `wait_for_ready` returns when `/health` answers there.
    2. After `stop`, the address does not answer. A second `stop` does nothing.
    3. An error in the provider's `with` block stops the server, too.
    4. An unknown option raises ValueError or TypeError; ignoring it would start a different server.

    Args:
        make: Creates a provider: its class, or a function without parameters.
        image: The image of a server. A `ContainerProvider` requires it.
        ready_timeout_s: The longest time that a start may take.

    Raises:
        AssertionError: The provider violates the contract.
        ValueError: The provider requires an image.
    """
    provider = make()
    if isinstance(provider, ContainerProvider) and image is None:
        raise ValueError(f"{type(provider).__name__} starts images; pass image=")
    url = _start(provider, image)
    try:
        _wait(provider, url, ready_timeout_s)
        reply = ask_health(url, 5.0)
        assert reply is None, f"wait_for_ready returned, but {reply}"
    finally:
        _stop(provider)
    _assert_silent(url, "stop")
    _stop(provider)

    provider = make()
    try:
        with provider:
            # A RuntimeProvider starts with its block. Stop first, because its address is known only to `start`.
            if isinstance(provider, RuntimeProvider):
                provider.stop()
            url = _start(provider, image)
            _wait(provider, url, ready_timeout_s)
            raise _StopEarlyError
    except _StopEarlyError:
        pass
    _assert_silent(url, "an error in the block")

    provider = make()
    try:
        _start(provider, image, no_provider_has_this_option=True)
    except (TypeError, ValueError):
        return
    finally:
        _stop(provider)
    raise AssertionError("start ignores unknown options; raise ValueError and name the supported options")


def _start(provider: Provider, image: str | None, **options: Any) -> str:
    if isinstance(provider, ContainerProvider):
        url = provider.start_container(image or "", **options)
    else:
        url = provider.start(**options)
    assert url.startswith(("http://", "https://")), f"start returned {url!r}; return an http:// or https:// address"
    return url


def _wait(provider: Provider, url: str, timeout_s: float) -> None:
    if isinstance(provider, ContainerProvider):
        provider.wait_for_ready(url, timeout_s=timeout_s)
    else:
        provider.wait_for_ready(timeout_s=timeout_s)


def _stop(provider: Provider) -> None:
    if isinstance(provider, ContainerProvider):
        provider.stop_container()
    else:
        provider.stop()


def _assert_silent(url: str, event: str) -> None:
    deadline = time.monotonic() + _STOPPED_S
    while ask_health(url, 2.0) is None:
        assert time.monotonic() < deadline, f"{url} still answers {_STOPPED_S:g} s after {event}"
        time.sleep(_PAUSE_S)
