"""The promises of a package, from its `openenv.yaml`. Must not know how they are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ...manifest import MANIFEST, ManifestError, project_version, read_manifest
from ...manifest_models import VALIDATION_EXAMPLE, ValidationBlock, manifest_problems
from .rules import CheckFailed

SIGNATURE = MANIFEST


class Manifest(ValidationBlock):
    """A package's promises, and which package it is."""

    manifest_schema_version: Literal["1", "2"]
    name: str
    version: str | None = None
    signature: str = SIGNATURE

    def report(self) -> dict[str, Any]:
        """Return the manifest for a report, without `execution` where the package declares none."""
        return self.model_dump(mode="json", exclude={"execution"} if self.execution is None else set())


def read_validation(folder: Path) -> Manifest:
    """Read the promises of a package.

    Raises:
        CheckFailed: There are none, or something in the manifest does not fit: a key, a type, a version.
    """
    if not (folder / SIGNATURE).is_file():
        fix = f"write one (docs/reference/manifest.md has all keys); a complete validation block:\n{VALIDATION_EXAMPLE}"
        raise CheckFailed(f"there is no {SIGNATURE}", fix=fix)
    try:
        data = read_manifest(folder / SIGNATURE)
    except (ManifestError, OSError) as error:
        fix = f"write {SIGNATURE} as a mapping with name, app and validation"
        raise CheckFailed(str(error), fix=fix) from error
    problems = [str(problem) for problem in manifest_problems(data)]
    version, released = data.get("version"), project_version(folder)
    if isinstance(version, str) and released is not None and version != released:
        problems.append(f"version: {version}, but pyproject.toml says {released}")
    block: Any = data.get("validation")
    if block is None:
        problems.append(f"{SIGNATURE} has no validation block")
    if problems:
        is_block = any(problem.startswith(("validation", SIGNATURE)) for problem in problems)
        example = f"; a complete validation block:\n{VALIDATION_EXAMPLE}" if is_block else ""
        raise CheckFailed(*problems, fix=f"correct {SIGNATURE} (docs/reference/manifest.md has all keys){example}")
    schema: Literal["1", "2"] = "2" if "execution" in block else "1"
    try:
        return Manifest(manifest_schema_version=schema, name=data["name"], version=version or released, **block)
    except ValidationError as error:  # the models above have accepted it
        raise CheckFailed(str(error)) from error
