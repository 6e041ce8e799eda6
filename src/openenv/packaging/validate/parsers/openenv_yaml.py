"""The promises of a package, from its `openenv.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from openenv.env.manifest import MANIFEST, ManifestError, project_version, read_manifest
from openenv.env.manifest_models import VALIDATION_EXAMPLE, manifest_problems

from ..manifest import NormalizedManifest, NormalizedManifestV2
from ..types import SignatureKind

VALIDATION_BLOCK_REMEDIATION = (
    f"write or correct {MANIFEST} (docs/reference/manifest.md has all keys); a complete validation block:\n"
    f"{VALIDATION_EXAMPLE}"
)
SCHEMA_REMEDIATION = f"correct {MANIFEST} (docs/reference/manifest.md has all keys)"
_UNREADABLE_REMEDIATION = f"write {MANIFEST} as a mapping with name, app and validation"


class OpenEnvYamlParser:
    """Reads `openenv.yaml`, strictly: an unknown key is an error."""

    signature = SignatureKind.OPENENV_SERVED

    def parse(self, package_root: Path) -> NormalizedManifest | NormalizedManifestV2:
        """Read the promises of a package.

        Raises:
            ManifestError: There are none, or something in the manifest does not fit: a key, a type, a version.
        """
        if not (package_root / MANIFEST).is_file():
            raise ManifestError([f"there is no {MANIFEST}"], remediation=VALIDATION_BLOCK_REMEDIATION)
        try:
            data = read_manifest(package_root / MANIFEST)
        except (ManifestError, OSError) as error:
            raise ManifestError([str(error)], remediation=_UNREADABLE_REMEDIATION) from error
        problems = [str(problem) for problem in manifest_problems(data)]
        version, released = data.get("version"), project_version(package_root)
        if isinstance(version, str) and released is not None and version != released:
            problems.append(f"version: {version}, but pyproject.toml says {released}")
        block: Any = data.get("validation")
        if block is None:
            problems.append(f"{MANIFEST} has no validation block")
        if problems:
            is_block = any(problem.startswith(("validation", MANIFEST)) for problem in problems)
            raise ManifestError(problems, remediation=VALIDATION_BLOCK_REMEDIATION if is_block else SCHEMA_REMEDIATION)
        fields = {"name": data["name"], "version": version or released, "signature": self.signature, **block}
        try:
            if block.get("execution") is not None:
                return NormalizedManifestV2.model_validate({**fields, "manifest_schema_version": "2"})
            fields.pop("execution", None)
            return NormalizedManifest.model_validate({**fields, "manifest_schema_version": "1"})
        except ValidationError as error:  # the models above have accepted it
            raise ManifestError([str(error)], remediation=SCHEMA_REMEDIATION) from error
