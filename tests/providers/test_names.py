"""Names and shapes: the paths that existing code imports, the signatures it calls, and what is not in this release."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import openenv.core.containers.runtime as facade
import openenv.providers as providers
from openenv._lazy import plugin_names
from openenv.errors import OpenEnvError, ProviderError, ProviderUnavailable, ServerDied, ServerNotReady
from openenv.providers import ContainerProvider, KubernetesProvider, RuntimeProvider
from openenv.providers.provider import PROVIDERS, provider_class

OLD = ["ContainerProvider", "DockerSwarmProvider", "KubernetesProvider", "LocalDockerProvider", "RuntimeProvider"]
CLOUDS = {
    "daytona_provider": "DaytonaProvider",
    "modal_provider": "ModalProvider",
    "aca_provider": "ACASandboxProvider",
    "novita_provider": "NovitaSandboxProvider",
    "hf_sandbox_provider": "HFSandboxProvider",
}


@pytest.mark.parametrize("name", [*OLD, "UVProvider"])
def test_a_class_is_the_same_on_every_path(name: str) -> None:
    own = getattr(providers, name)
    assert getattr(facade, name) is own
    module = "uv_provider" if name == "UVProvider" else "providers"
    assert getattr(importlib.import_module(f"openenv.core.containers.runtime.{module}"), name) is own
    assert name in facade.__all__
    assert name in providers.__all__


@pytest.mark.parametrize("module", CLOUDS)
def test_a_provider_of_a_cloud_is_the_same_on_both_paths(module: str) -> None:
    name = CLOUDS[module]
    facade_module = importlib.import_module(f"openenv.core.containers.runtime.{module}")
    assert getattr(facade_module, name) is getattr(providers, name)
    assert name in facade_module.__all__


SIGNATURES = {
    ("ContainerProvider", "start_container"): "image port=None env_vars=None",
    ("ContainerProvider", "wait_for_ready"): "base_url timeout_s=30.0",
    ("ContainerProvider", "stop_container"): "",
    ("ContainerProvider", "close"): "",
    ("RuntimeProvider", "start"): "port=None env_vars=None",
    ("RuntimeProvider", "wait_for_ready"): "timeout_s=30.0",
    ("RuntimeProvider", "stop"): "",
    ("LocalDockerProvider", "start_container"): "image port=None env_vars=None",
    ("DockerSwarmProvider", "start_container"): "image port=None env_vars=None",
    ("KubernetesProvider", "start_container"): "image port=None env_vars=None",
    ("UVProvider", "start"): "port=None env_vars=None workers=1",
}
KEYWORDS = {
    ("DockerSwarmProvider", "__init__"): {"auto_init_swarm": True, "overlay_network": None},
    ("DockerSwarmProvider", "start_container"): {
        "replicas": 2, "cpu_limit": None, "memory_limit": None, "constraints": None, "labels": None, "command": None,
    },
    ("UVProvider", "__init__"): {
        "project_path": inspect.Parameter.empty, "app": "server.app:app", "host": "0.0.0.0", "reload": False,
        "env_vars": None, "context_timeout_s": 60.0,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "method"), SIGNATURES)
def test_positional_arguments_are_those_that_existing_code_gives(name: str, method: str) -> None:
    parameters = list(inspect.signature(getattr(getattr(providers, name), method)).parameters.values())[1:]
    plain = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    shown = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in plain]
    assert shown == SIGNATURES[name, method].split()


@pytest.mark.parametrize(("name", "method"), KEYWORDS)
def test_keywords_are_those_that_existing_code_gives(name: str, method: str) -> None:
    parameters = inspect.signature(getattr(getattr(providers, name), method)).parameters
    assert {key: parameters[key].default for key in KEYWORDS[name, method]} == KEYWORDS[name, method]


class Recorded(ContainerProvider):
    """A provider as existing code writes them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start_container(self, image: str, port: int | None = None, env_vars: Any = None, **kwargs: Any) -> str:
        return "http://localhost:1"

    def stop_container(self) -> None:
        self.calls.append("stop")

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        self.calls.append("ready")


def test_a_container_provider_stops_its_container_when_its_block_ends() -> None:
    with pytest.raises(KeyError), Recorded() as provider:
        provider.start_container("x")
        raise KeyError
    assert provider.calls == ["stop"]


def test_a_runtime_provider_starts_and_stops_with_its_block() -> None:
    class Runtime(RuntimeProvider):
        calls: list[str]

        def __init__(self, fails: bool = False) -> None:
            self.calls, self.fails = [], fails

        def start(self, port: int | None = None, env_vars: Any = None, **kwargs: Any) -> str:
            self.calls.append("start")
            if self.fails:
                raise RuntimeError("no")
            return "http://localhost:1"

        def stop(self) -> None:
            self.calls.append("stop")

        def wait_for_ready(self, timeout_s: float = 30.0) -> None:
            raise AssertionError("nothing waits unless it is asked to")

    with Runtime() as provider:
        assert provider.calls == ["start"]
    assert provider.calls == ["start", "stop"]
    failing = Runtime(fails=True)
    with pytest.raises(RuntimeError), failing:
        pass
    assert failing.calls == ["start", "stop"]


def test_a_subclass_of_the_kubernetes_provider_may_do_it_all_itself() -> None:
    class Own(Recorded, KubernetesProvider):
        pass

    with Own() as provider:
        assert isinstance(provider, KubernetesProvider)
        assert provider.start_container("x") == "http://localhost:1"
    assert provider.calls == ["stop"]


def test_errors_are_those_that_existing_code_catches() -> None:
    assert issubclass(ProviderUnavailable, RuntimeError)
    assert issubclass(ServerDied, RuntimeError)
    assert issubclass(ServerNotReady, TimeoutError)
    for cls in (ProviderError, ProviderUnavailable, ServerDied, ServerNotReady):
        assert issubclass(cls, OpenEnvError)
        copy = pickle.loads(pickle.dumps(cls("text", log="words")))
        assert (type(copy), str(copy), copy.log) == (cls, "text", "words")


def test_importing_the_names_loads_neither_engines_nor_servers() -> None:
    code = "import sys, openenv.providers, openenv.core.containers.runtime\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert not {"openenv.providers.local_docker", "subprocess", "fastapi", "pydantic", "asyncio"} & loaded


@pytest.mark.parametrize("name", plugin_names(PROVIDERS))
def test_every_registered_provider_can_be_loaded(name: str) -> None:
    assert issubclass(provider_class(name), (ContainerProvider, RuntimeProvider))


def test_an_installed_package_adds_a_provider_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "pond_provider-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pond-provider\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[openenv.providers]\npond = pond_provider:PondProvider\nwrong = os.path:join\n"
    )
    (tmp_path / "pond_provider.py").write_text(
        "from openenv.providers import ProcessProvider\nclass PondProvider(ProcessProvider):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    provider = providers.provider_named("pond", target="pond:app")
    assert type(provider).__name__ == "PondProvider"
    with pytest.raises(ValueError, match=r"unknown provider 'ponds' \(did you mean 'pond'\?\); choose from aca, .*uv"):
        providers.provider_named("ponds")
    with pytest.raises(TypeError, match="wrong is not a provider"):
        providers.provider_named("wrong")
