"""Which folders are packages, what their manifests promise, and the hash of their sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from openenv.env.manifest import VALIDATION_EXAMPLE, ManifestError
from openenv.packaging.validate.manifest import (
    NormalizedManifest,
    NormalizedManifestV2,
    OpenEnvYamlParser,
    ParserRegistry,
    SignatureError,
    UnsupportedPackageError,
    detect_signature,
)
from openenv.packaging.validate.report import source_digest
from openenv.packaging.validate.rules import SignatureKind
from openenv.packaging.validate.runner import default_parser_registry

MANIFEST = f"name: maze\n{VALIDATION_EXAMPLE}\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no openenv.yaml"),
        (["task.toml"], "task.toml is validated by no command"),
        (["openenv.yaml", "task.md"], "ambiguous"),
    ],
)
def test_a_folder_that_is_no_package_or_two_is_refused(files: list[str], message: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(SignatureError, match=message):
        detect_signature(tmp_path)
    with pytest.raises(SignatureError, match="does not exist"):
        detect_signature(tmp_path / "nowhere")


def test_a_manifest_is_of_the_second_version_if_it_says_how_it_is_run(tmp_path: Path) -> None:
    (tmp_path / "openenv.yaml").write_text(MANIFEST)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "maze"\nversion = "0.3.0"\n')
    assert detect_signature(tmp_path) is SignatureKind.OPENENV_SERVED
    first = OpenEnvYamlParser().parse(tmp_path)
    assert (type(first), first.manifest_schema_version, first.version) == (NormalizedManifest, "1", "0.3.0")
    assert "execution" not in first.model_dump()
    (tmp_path / "openenv.yaml").write_text(MANIFEST + "  execution: {}\n")
    second = OpenEnvYamlParser().parse(tmp_path)
    assert isinstance(second, NormalizedManifestV2)
    assert second.execution.probe_path == "validation/runtime.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": {"mode": "allowlist"}}, "at least one"),
        ({"network": {"mode": "public", "allowed_hosts": ["a"]}}, "needs mode: allowlist"),
        ({"reward": {"range": [1, 0], "floor_margin": 0.1}}, "the smaller one first"),
        ({"execution": {"requires_credentials": "yes"}}, "requires_credentials"),
        ({"execution": {"dockerfile": "../Dockerfile"}}, "inside the package"),
    ],
)
def test_promises_that_do_not_fit_are_all_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    data = yaml.safe_load(MANIFEST)
    data["validation"] |= change
    (tmp_path / "openenv.yaml").write_text(yaml.safe_dump({**data, "unknown": 1}))
    with pytest.raises(ManifestError) as failure:
        OpenEnvYamlParser().parse(tmp_path)
    assert len(failure.value.errors) == 2
    assert message in str(failure.value)
    assert "reward_channel" in str(failure.value.remediation)


def test_parsers_are_found_by_the_kind_of_package() -> None:
    registry = default_parser_registry()
    assert isinstance(registry.parser_for(SignatureKind.OPENENV_SERVED), OpenEnvYamlParser)
    with pytest.raises(ValueError, match="already"):
        registry.register(OpenEnvYamlParser())
    with pytest.raises(UnsupportedPackageError) as failure:
        ParserRegistry().parser_for(SignatureKind.HARBOR_TASK)
    assert failure.value.category == "parser-not-implemented"


def test_a_digest_is_the_published_one_and_follows_links(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two").write_bytes(b"22")
    (tmp_path / "a.py").write_bytes(b"1")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "log").write_text("not source")
    # sha256 of b"a.py\0" b"1\0" b"b/two\0" b"22\0"
    assert source_digest(tmp_path) == "4cda6188a53742c94cf38169203840c40d11cd1176e1929f8885a2f82da8b50f"
    (tmp_path / "link").symlink_to("nowhere")
    linked = source_digest(tmp_path)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("elsewhere")
    assert source_digest(tmp_path) != linked
