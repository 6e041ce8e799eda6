"""Graders that read the declarations of a package."""

from .manifest import StaticManifestGrader as StaticManifestGrader

__all__ = ["StaticManifestGrader"]
