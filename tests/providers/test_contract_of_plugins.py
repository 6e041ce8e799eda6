"""`check_provider` accepts a provider of ours, and finds violations of the contract."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openenv.providers import ContainerProvider, ProcessProvider
from openenv.testing import check_provider

ECHO = Path(__file__).parents[2] / "envs" / "echo_env"
make = partial(ProcessProvider, ECHO)


class Ignoring(ProcessProvider):
    """Ignores options that it does not know."""

    def start(self, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any) -> str:
        return super().start(port, env_vars)


class Leaking(ProcessProvider):
    """Forgets its server instead of stopping it."""

    def stop(self) -> None:
        pass


@pytest.mark.slow
def test_our_own_provider_keeps_the_contract() -> None:
    check_provider(make)


@pytest.mark.slow
def test_an_ignored_option_is_a_violation() -> None:
    with pytest.raises(AssertionError, match="ignores unknown options"):
        check_provider(lambda: Ignoring(ECHO))


def test_a_server_that_goes_on_after_stop_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv.testing.provider_contract._STOPPED_S", 0.2)
    provider = Leaking(ECHO)
    try:
        with pytest.raises(AssertionError, match=r"still answers 0\.2 s after stop"):
            check_provider(lambda: provider)
    finally:
        ProcessProvider.stop(provider)


def test_a_container_provider_requires_an_image() -> None:
    class Containers(ContainerProvider):
        def start_container(self, image: str, port: int | None = None, env_vars: Any = None, **kwargs: Any) -> str:
            raise AssertionError("nothing is started without an image")

        def stop_container(self) -> None: ...
        def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None: ...

    with pytest.raises(ValueError, match="pass image="):
        check_provider(Containers)
