"""Cloud providers without any cloud: what is checked before one is asked, redaction, and packages that are missing."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import ProviderError, ProviderUnavailable, install_command
from openenv.providers import inventory
from openenv.providers.aca import ACASandboxProvider
from openenv.providers.cloud import (
    BuildingProvider,
    CloudProvider,
    CloudSandbox,
    SecretRedactor,
    StartPlan,
    require_https,
)
from openenv.providers.daytona import DaytonaProvider
from openenv.providers.hf_sandbox import HFSandboxProvider
from openenv.providers.modal import ModalProvider
from openenv.providers.novita import NovitaSandboxProvider
from openenv.sandboxes.host import ProcessOwner

PACKAGES: list[tuple[Any, dict[str, Any], str, str]] = [
    (DaytonaProvider, {}, "daytona", "daytona"),
    (ModalProvider, {}, "modal", "modal"),
    (NovitaSandboxProvider, {}, "novita_sandbox", "novita"),
    (ACASandboxProvider, {"anonymous_port": True}, "azure.containerapps.sandbox", "aca"),
    (HFSandboxProvider, {"image": "x"}, "huggingface_hub", "hub"),
]


@pytest.mark.parametrize(("provider", "options", "package", "extra"), PACKAGES, ids=[row[2] for row in PACKAGES])
def test_a_missing_package_is_named_with_its_extra(
    provider: Any, options: dict[str, Any], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ProviderUnavailable, match=re.escape(install_command(extra))):
        provider(**options)


@pytest.mark.parametrize(
    ("module", "name"),
    [(f"{row[0].__module__.rpartition('.')[2]}_provider", row[0].__name__) for row in PACKAGES],
)
def test_the_published_modules_export_the_providers(module: str, name: str) -> None:
    facade = importlib.import_module(f"openenv.core.containers.runtime.{module}")
    assert issubclass(getattr(facade, name), CloudProvider)
    assert all(
        parameter.kind is parameter.KEYWORD_ONLY
        for parameter in list(inspect.signature(getattr(facade, name)).parameters.values())
    )


class LocalProvider(BuildingProvider[str]):
    """A cloud that is this machine: enough for what is decided before anything is started."""

    _cloud = "Here"
    _place = "daytona"

    def __init__(self, image: str | None = None, **options: Any) -> None:
        super().__init__(image=image, env_vars=None, cmd=None, **options)
        self.plans: list[StartPlan] = []

    def _create(self, plan: StartPlan) -> str:
        self.plans.append(plan)
        return plan.start_id

    def _run(self, box: str, command: str, timeout_s: float) -> str:
        return ""

    def _address(self, box: str) -> str:
        return "https://here.example"

    def _delete(self, box: str) -> None:
        self.plans.clear()

    def _labelled(self, start_id: str | None = None) -> list[CloudSandbox]:
        return []


def test_arguments_are_checked_before_anything_is_started() -> None:
    provider = LocalProvider()
    with pytest.raises(ValueError, match=r"only supports port 8000 \(got 9000\)"):
        provider.start_container("x", port=9000)
    with pytest.raises(ValueError, match="requires an image"):
        provider.start_container()
    with pytest.raises(ValueError, match=r"start options: comand\. It takes cmd"):
        provider.start_container("x", comand="y")
    with pytest.raises(FileNotFoundError, match="Dockerfile not found"):
        provider.start_container("dockerfile:/nowhere/Dockerfile")
    assert provider.plans == []


def test_without_a_command_the_error_says_what_to_pass_and_nothing_is_left() -> None:
    provider = LocalProvider("x")
    with pytest.raises(ValueError, match=r"Could not find openenv.yaml.*Pass cmd= to LocalProvider") as caught:
        provider.start_container(port=8000)
    assert isinstance(caught.value, ProviderError)
    assert provider.plans == []


def test_secrets_are_redacted_and_ordinary_words_are_not() -> None:
    redact = SecretRedactor()
    redact.add("sk-123", None, "")
    redact.add_variables({"DEBUG": "true", "API_KEY": "abc", "URL": "http://u:p@host/long"})
    text = redact("true abc sk-123 http://u:p@host/long")
    assert text == "true *** *** ***"


def test_only_https_addresses_are_used_and_others_are_not_shown() -> None:
    assert require_https("https://a.b/c/", "X") == "https://a.b/c"
    for url in ("http://secret-token.example", "https://", None, "ws://secret-token.example"):
        with pytest.raises(ProviderError, match="not https") as caught:
            require_https(url, "X")
        assert "secret-token" not in str(caught.value)


def test_an_owner_fits_into_a_label_of_a_cloud() -> None:
    owner = ProcessOwner.current()
    assert len(owner.short) <= 63
    assert set(owner.short) <= set("0123456789abcdef-")
    assert ProcessOwner.parse_short(owner.short) == owner
    elsewhere = ProcessOwner("another boot.1", 7, "9")
    parsed = ProcessOwner.parse_short(elsewhere.short)
    assert parsed is not None
    assert not parsed.is_here
    assert not parsed.is_dead()
    assert ProcessOwner.parse_short("nonsense") is None


def test_clouds_without_an_account_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DAYTONA_API_KEY", "NOVITA_API_KEY", "AZURE_SANDBOX_GROUP"):
        monkeypatch.delenv(name, raising=False)
    for package in ("daytona", "novita_sandbox", "modal", "azure.containerapps.sandbox"):
        monkeypatch.setitem(sys.modules, package, None)
    for cloud in inventory.CLOUDS:
        assert list(inventory._cloud_sandboxes(cloud, False)) == []
    named = inventory.take_inventory(("daytona",))
    assert named.items == []
    assert "pip install 'daytona>=" in named.notes[0]


def test_acas_rules_about_disks_and_public_ports() -> None:
    with pytest.raises(ValueError, match="anonymous_port=True"):
        ACASandboxProvider()
    provider = ACASandboxProvider.__new__(ACASandboxProvider)
    assert provider._source("ubuntu") == "disk:ubuntu"
    assert provider._source("disk-id:7") == "disk-id:7"
    for image in ("ghcr.io/org/env", "env:latest", "disk:"):
        with pytest.raises(ValueError, match="disk:NAME"):
            provider._source(image)


def test_a_dockerfile_of_several_images_is_refused_for_novita(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    file = tmp_path / "server" / "Dockerfile"
    file.write_text("FROM a AS x\nFROM b\n")
    with pytest.raises(ValueError, match="different images"):
        NovitaSandboxProvider.image_from_dockerfile(str(file))
    assert ModalProvider.image_from_dockerfile(str(file)) == f"dockerfile:{file}"
