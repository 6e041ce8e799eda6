"""What goes wrong with catalogues."""

from __future__ import annotations


class CatalogError(ValueError):
    """A catalogue cannot be built, read, written or searched; the text says why."""
