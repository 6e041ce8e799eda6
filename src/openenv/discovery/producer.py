"""Facade: the published path of `openenv.packaging.catalogue.producer`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.catalogue.producer import build_catalog as build_catalog

export_imports(__name__)
