"""Parsers turn the declarations of a kind of package into a `NormalizedManifest`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from ..manifest import NormalizedManifest
from ..signature import UnsupportedPackageError
from ..types import SignatureKind


@runtime_checkable
class Parser(Protocol):
    """Reads the declarations of one kind of package."""

    signature: SignatureKind

    def parse(self, package_root: Path) -> NormalizedManifest:
        """Read the declarations of a package; raise `ManifestError` where they are missing or wrong."""
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
