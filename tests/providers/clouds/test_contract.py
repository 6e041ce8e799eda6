"""What holds for every cloud provider: each with its cloud's real package, against a double that runs real servers."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from cloud_boxes import Boxes
from openenv import GenericEnvClient
from openenv.errors import ProviderError, ServerDied, ServerNotReady
from openenv.providers.cloud import CloudProvider
from openenv.providers.inventory import take_inventory
from openenv.sandboxes.host import CLOUD_OWNER_LABEL
from openenv.server.thread_server import ThreadServer
from servers import running_server

pytestmark = pytest.mark.slow
SECRET = "s3cr3t-value-of-a-variable"
CLOUDS = ("daytona", "aca", "huggingface", "novita", "modal")


@dataclass
class Cloud:
    """A cloud provider and the double of its cloud."""

    name: str
    double: Any
    make: Callable[..., CloudProvider[Any]]
    image: str
    key: str
    """What must never be shown."""
    asks_for_address: bool = True


@contextlib.contextmanager
def daytona(boxes: Boxes, patch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Daytona's API, told by a variable."""
    pytest.importorskip("daytona")
    import daytona_double
    from openenv.providers.daytona import DaytonaProvider

    double = daytona_double.DaytonaDouble(boxes)
    with running_server(double.app, lifespan="off") as server:
        double.url = server.url
        patch.setenv("DAYTONA_API_URL", f"{server.url}/api")
        patch.setenv("DAYTONA_API_KEY", daytona_double.KEY)
        yield Cloud("daytona", double, DaytonaProvider, "snapshot:sums", daytona_double.KEY)


@contextlib.contextmanager
def aca(boxes: Boxes, patch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Azure's data plane, told by an argument, with a credential of our own."""
    pytest.importorskip("azure.containerapps.sandbox")
    import aca_double
    from openenv.providers.aca import ACASandboxProvider

    double = aca_double.ACADouble(boxes)
    for name, value in aca_double.ACCOUNT.items():
        patch.setenv(f"AZURE_{name.upper()}", value)
    with running_server(double.app, lifespan="off", http="h11", **boxes.server_settings()) as server:
        endpoint = f"https://localhost:{server.port}"
        own = {"endpoint": endpoint, "credential": aca_double.Credential(), "polling_interval": 1}
        patch.setattr(ACASandboxProvider, "for_account", lambda: ACASandboxProvider(anonymous_port=True, **own))

        def make(**options: Any) -> ACASandboxProvider:
            options.setdefault("cmd", "cd /app/env && python -m uvicorn sum_app:app --port 8000")
            return ACASandboxProvider(anonymous_port=True, **own, **options)

        yield Cloud("aca", double, make, "disk:sums", aca_double.TOKEN)


@contextlib.contextmanager
def huggingface(boxes: Boxes, patch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """The Hub's Jobs, found by a setting of the package."""
    pytest.importorskip("huggingface_hub._sandbox")
    import hub_jobs_double
    from openenv.providers.hf_sandbox import HFSandboxProvider

    double = hub_jobs_double.HubJobsDouble(boxes)
    with running_server(double.app, lifespan="off") as server:
        patch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        patch.setenv("HF_TOKEN", hub_jobs_double.TOKEN)
        patch.setattr("openenv.providers.hf_sandbox._START_S", 3.0)
        # uvloop resolves names itself, and knows nothing of those that the sandboxes have here.
        patch.setattr("openenv.providers.hf_sandbox.ThreadServer", partial(ThreadServer, loop="asyncio"))

        def make(cmd: str | None = None, create_timeout: float = 0, **options: Any) -> HFSandboxProvider:
            provider = HFSandboxProvider(image="sums", **options)
            provider._cmd = cmd
            return provider

        yield Cloud("huggingface", double, make, "sums", hub_jobs_double.TOKEN, asks_for_address=False)


@contextlib.contextmanager
def novita(boxes: Boxes, patch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Novita's API, told by a variable; sandboxes have names of their own."""
    pytest.importorskip("novita_sandbox")
    import novita_double
    from openenv.providers.novita import NovitaSandboxProvider

    double = novita_double.NovitaDouble(boxes)
    with running_server(double.app, lifespan="off") as server:
        patch.setenv("NOVITA_API_URL", server.url)
        patch.setenv("NOVITA_API_KEY", novita_double.KEY)

        def make(create_timeout: float = 0, **options: Any) -> NovitaSandboxProvider:
            return NovitaSandboxProvider(**options)

        yield Cloud("novita", double, make, "sums", novita_double.KEY, asks_for_address=False)


@contextlib.contextmanager
def modal(boxes: Boxes, patch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Modal's services, told by a variable."""
    pytest.importorskip("modal")
    import modal_double
    from openenv.providers.modal import ModalProvider

    double = modal_double.ModalDouble(boxes)
    with double.serving() as url:
        patch.setenv("MODAL_SERVER_URL", url)
        patch.setenv("MODAL_TOKEN_ID", modal_double.TOKEN_ID)
        patch.setenv("MODAL_TOKEN_SECRET", modal_double.TOKEN_SECRET)

        def make(create_timeout: float = 0, **options: Any) -> ModalProvider:
            return ModalProvider(**options)

        yield Cloud("modal", double, make, "sums", modal_double.TOKEN_SECRET)


@pytest.fixture(scope="module", params=CLOUDS)
def cloud_of_module(request: pytest.FixtureRequest, boxes: Boxes) -> Iterator[Cloud]:
    with pytest.MonkeyPatch.context() as patch, globals()[request.param](boxes, patch) as cloud:
        yield cloud


@pytest.fixture
def cloud(cloud_of_module: Cloud) -> Iterator[Cloud]:
    """A cloud in which nothing is left when the test ends."""
    cloud_of_module.double.fails.clear()
    cloud_of_module.double.never_starts = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield cloud_of_module
    assert cloud_of_module.double.boxes.alive == [], "a sandbox is left"


def test_a_server_starts_and_is_played(cloud: Cloud) -> None:
    with cloud.make(env_vars={"API_TOKEN": SECRET}) as provider:
        url = provider.start_container(cloud.image)
        assert provider.base_url == url
        provider.wait_for_ready(url, timeout_s=60)
        with GenericEnvClient(base_url=url).sync() as env:
            env.reset(seed=3)
            assert [env.step({"text": "x"}).reward for _ in range(3)] == [3.0, 30.0, 300.0]
        assert SECRET not in repr(provider)
        assert provider._run(provider._box, "echo $API_TOKEN", 10).strip() == SECRET
    with pytest.raises(ProviderError, match="no active sandbox"):
        _ = provider.base_url


def test_a_server_that_dies_is_reported_without_secrets(cloud: Cloud) -> None:
    provider = cloud.make(env_vars={"API_TOKEN": SECRET}, cmd='echo "my token is $API_TOKEN"; exit 3')
    provider.surface_server_logs = True
    url = provider.start_container(cloud.image)
    with pytest.raises(ServerDied, match="Server process died: it ended with exit code 3") as caught:
        provider.wait_for_ready(url, timeout_s=60)
    assert "my token is ***" in str(caught.value)
    assert SECRET not in str(caught.value) + caught.value.log


def test_the_log_is_withheld_unless_it_is_asked_for(cloud: Cloud) -> None:
    provider = cloud.make(cmd="echo whatever an agent wrote; exit 3")
    provider.surface_server_logs = False
    url = provider.start_container(cloud.image)
    with pytest.raises(ServerDied, match="surface_server_logs=True") as caught:
        provider.wait_for_ready(url, timeout_s=60)
    assert "whatever an agent wrote" not in str(caught.value) + caught.value.log


def test_a_server_that_does_not_answer_is_deleted_and_its_address_is_not_shown(cloud: Cloud) -> None:
    provider = cloud.make(cmd="sleep 600")
    url = provider.start_container(cloud.image)
    with pytest.raises(ServerNotReady, match="did not become ready") as caught:
        provider.wait_for_ready(url, timeout_s=1)
    assert url not in str(caught.value)


def test_a_second_start_is_refused_and_the_first_server_stays(cloud: Cloud) -> None:
    with cloud.make(cmd="sleep 600") as provider:
        provider.start_container(cloud.image)
        with pytest.raises(ProviderError, match="already has an active sandbox"):
            provider.start_container(cloud.image)
        assert len(cloud.double.boxes.alive) == 1


@pytest.mark.parametrize("operation", ["execute", "address"])
def test_a_failure_after_the_creation_deletes_the_sandbox(cloud: Cloud, operation: str) -> None:
    if operation == "address" and not cloud.asks_for_address:
        pytest.skip("the address of a sandbox follows from its name")
    cloud.double.fails[operation] = f"broken, key {cloud.key}"
    provider = cloud.make(env_vars={"KEY": cloud.key})
    with pytest.raises(ProviderError, match="broken") as caught:
        provider.start_container(cloud.image)
    assert cloud.key not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_sandbox_that_never_starts_is_deleted(cloud: Cloud) -> None:
    cloud.double.never_starts = True
    with pytest.raises(ProviderError):
        cloud.make(create_timeout=1).start_container(cloud.image)


def test_an_interrupt_after_the_creation_deletes_the_sandbox(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = cloud.make()
    create = provider._create

    def interrupt(plan: Any) -> Any:
        create(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr(provider, "_create", interrupt)
    with pytest.raises(KeyboardInterrupt):
        provider.start_container(cloud.image)


def test_a_sandbox_that_cannot_be_deleted_is_reported_and_the_next_stop_tries_again(cloud: Cloud) -> None:
    provider = cloud.make(cmd="sleep 600")
    provider.start_container(cloud.image)
    cloud.double.fails["delete"] = "try later"
    with pytest.raises(ProviderError, match=r"could not delete sandbox .*try later"):
        provider.stop_container()
    cloud.double.fails.clear()
    provider.stop_container()
    provider.stop_container()


def test_a_failed_start_says_when_a_sandbox_may_be_left(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    cloud.double.fails |= {"execute": "broken", "delete": "try later"}
    provider = cloud.make()
    with caplog.at_level(logging.WARNING), pytest.raises(ProviderError, match="broken"):
        provider.start_container(cloud.image)
    assert "try later" in caplog.text
    cloud.double.fails.clear()
    (left,) = cloud.make().labelled()
    assert left.owner is not None
    assert not left.owner.is_dead()
    left.delete()


def test_an_image_that_does_not_exist_is_reported(cloud: Cloud) -> None:
    with pytest.raises(ProviderError, match="missing-image"):
        cloud.make().start_container(cloud.image.replace("sums", "missing-image"))


def test_what_a_dead_process_left_is_listed_and_removed(cloud: Cloud) -> None:
    provider = cloud.make(cmd="sleep 600")
    provider.start_container(cloud.image)
    (labels,) = cloud.double.labels()
    (item,) = take_inventory((cloud.name,)).items
    assert (item.place, item.use, item.is_leftover) == (cloud.name, "server", False)
    place, _, _ = labels[CLOUD_OWNER_LABEL].split("-")
    labels[CLOUD_OWNER_LABEL] = f"{place}-4194303-1"
    (item,) = take_inventory((cloud.name,)).items
    assert item.is_leftover
    item.remove()
    assert cloud.double.boxes.alive == []
    provider.stop_container()  # it is gone, which is no error


def test_the_published_module_exports_the_provider(cloud: Cloud) -> None:
    provider = cloud.make()
    names = {"aca": "aca_provider", "huggingface": "hf_sandbox_provider"}
    module = f"openenv.core.containers.runtime.{names.get(cloud.name, f'{cloud.name}_provider')}"
    assert getattr(importlib.import_module(module), type(provider).__name__) is type(provider)
