"""The kind of a package and its declarations, read from the `validation:` block of `openenv.yaml`.

    folder ── detect_signature ── SignatureKind ── ParserRegistry ── NormalizedManifest (in reports)

`openenv.env.manifest` describes the file. This module must not know how declarations are checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import ValidationError

from openenv.env.manifest import (
    MANIFEST,
    VALIDATION_EXAMPLE,
    ExecutionDeclaration,
    ManifestError,
    Promises,
    Types,
    manifest_problems,
    project_version,
    read_manifest,
)

from .rules import SignatureKind

WELL_KNOWN_FILES = {SignatureKind.OPENENV_SERVED: SignatureKind.OPENENV_SERVED.value}
"""The kinds that can be validated, and the file of each."""
# Named, so that users learn the reason instead of "unknown package".
UNSUPPORTED_CATEGORIES = {
    "hosted-verifier": "a service outside decides the reward, so its answers cannot be repeated here",
    "multi-agent": "several agents act in one episode, and the checks play one",
    "simulated-user": "a user model takes part in the episode, and none is run here",
    "parser-not-implemented": "packages of this kind are known, but their declarations are not read",
}
"""The kinds of packages that cannot be validated, and why."""


class SignatureError(Exception):
    """A folder contains no package, or packages of two kinds."""


class UnsupportedPackageError(Exception):
    """A package of a kind that cannot be validated."""

    def __init__(self, category: str, reason: str) -> None:
        super().__init__(f"unsupported package ({category}): {reason}")
        self.category = category
        self.reason = reason


def detect_signature(package_root: Path) -> SignatureKind:
    """Return the kind of the package in a folder.

    Raises:
        SignatureError: There is no such folder, it holds no package, or files of several kinds.
    """
    if not package_root.is_dir():
        raise SignatureError(f"not a package directory: {package_root} does not exist")
    kinds = [kind for kind in SignatureKind if (package_root / kind.value).is_file()]
    # Two kinds at once: checking one of them would make promises about the other.
    if len(kinds) > 1 and any(kind in WELL_KNOWN_FILES for kind in kinds):
        names = ", ".join(kind.value for kind in kinds)
        raise SignatureError(f"ambiguous package: {package_root} has {names}; keep the one that it is")
    if not kinds or kinds[0] not in WELL_KNOWN_FILES:
        known = ", ".join(WELL_KNOWN_FILES.values())
        hint = f" ({kinds[0].value} is validated by no command yet)" if kinds else ""
        raise SignatureError(
            f"unrecognized package: {package_root} has no {known}, which environment packages need{hint}"
        )
    return kinds[0]


TypeSpec = Types


class NormalizedManifest(Promises):
    """The declarations of a package, and its identity."""

    manifest_schema_version: Literal["1"]
    name: str
    version: str | None = None
    signature: SignatureKind


class NormalizedManifestV2(NormalizedManifest):
    """The same of a package that also says how it is run for its checks."""

    manifest_schema_version: Literal["2"]  # type: ignore[assignment]
    execution: ExecutionDeclaration


@runtime_checkable
class Parser(Protocol):
    """Reads the declarations of one kind of package."""

    signature: SignatureKind

    def parse(self, package_root: Path) -> NormalizedManifest:
        """Read the declarations of a package; raise `ManifestError` if they are missing or wrong."""
        ...


class ParserRegistry:
    """The parsers, by the kind of package that each reads."""

    def __init__(self) -> None:
        self._parsers: dict[SignatureKind, Parser] = {}

    def register(self, parser: Parser) -> None:
        """Add a parser.

        Raises:
            ValueError: There is one for this kind.
        """
        if parser.signature in self._parsers:
            raise ValueError(f"a parser for {parser.signature.value} is registered already")
        self._parsers[parser.signature] = parser

    def parser_for(self, signature: SignatureKind) -> Parser:
        """Return the parser of a kind of package.

        Raises:
            UnsupportedPackageError: There is none.
        """
        try:
            return self._parsers[signature]
        except KeyError:
            reason = f"no parser is registered for packages with a {signature.value}"
            raise UnsupportedPackageError("parser-not-implemented", reason) from None


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
        # The block has the promises; name and version come from the top of the file.
        fields = {"name": data["name"], "version": version or released, "signature": self.signature, **block}
        try:
            # Packages that say how they run have the second version of the manifest.
            if block.get("execution") is not None:
                return NormalizedManifestV2.model_validate({**fields, "manifest_schema_version": "2"})
            fields.pop("execution", None)
            return NormalizedManifest.model_validate({**fields, "manifest_schema_version": "1"})
        except ValidationError as error:  # the models above have accepted it
            raise ManifestError([str(error)], remediation=SCHEMA_REMEDIATION) from error
