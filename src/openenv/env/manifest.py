"""`openenv.yaml` as plain data: where a package has it, and what it says of a class. `manifest_models` checks it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "openenv.yaml"
DEFAULT_APP = "server.app:app"
_LEVELS = 3  # a class may be in PACKAGE/, PACKAGE/server/ or PACKAGE/server/part/
_PROJECT = re.compile(r"(?ms)^\[project\]\s*$(.*?)(?=^\[|\Z)")
_VERSION = re.compile(r"""(?m)^\s*version\s*=\s*["']([^"'\n]+)["']""")


class ManifestError(ValueError):
    """A manifest cannot be read or declares what it must not: each problem, and how to correct them."""

    def __init__(self, errors: list[str], *, remediation: str | None = None) -> None:
        super().__init__("; ".join(errors))
        self.errors = errors
        self.remediation = remediation


def read_manifest(path: Path) -> dict[str, Any]:
    """Read an `openenv.yaml`; what its values are is not checked.

    Raises:
        ManifestError: It is no YAML, or not a mapping.
        OSError: It cannot be read.
    """
    import yaml  # only packages have a manifest

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ManifestError([f"{path} is not valid YAML: {exc}"]) from exc
    if not isinstance(data, dict):
        raise ManifestError([f"{path} must be a mapping (a YAML dictionary) with at least a name"])
    return data


def project_version(folder: Path) -> str | None:
    """Return the version that the `pyproject.toml` of a folder declares, if there is one."""
    try:
        project = _PROJECT.search((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    version = None if project is None else _VERSION.search(project.group(1))
    return None if version is None else version.group(1)


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """What the files around a class say of it; None where they do not."""

    name: str | None = None
    version: str | None = None


def package_facts(cls: type[Any]) -> PackageFacts:
    """Read name and version from the `openenv.yaml` of a class's package, and the version from its `pyproject.toml`.

    The package is the folder of the class's module, or one of two above it, that has an `openenv.yaml`. Without one, a
    `pyproject.toml` beside the module itself gives the version.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return PackageFacts()
    folders = Path(file).resolve().parents[:_LEVELS]
    folder = next((one for one in folders if (one / MANIFEST).is_file()), None)
    if folder is None:
        return PackageFacts(version=project_version(folders[0])) if folders else PackageFacts()
    try:
        data = read_manifest(folder / MANIFEST)
    except (ManifestError, OSError):  # `openenv serve` and `validate` say what is wrong with it
        data = {}
    name, version = data.get("name"), data.get("version")
    return PackageFacts(
        name if isinstance(name, str) and name else None,
        version if isinstance(version, str) and version else project_version(folder),
    )
