"""Facade: the published path of `openenv.packaging.validate.manifest`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.manifest import UNSUPPORTED_CATEGORIES as UNSUPPORTED_CATEGORIES
from openenv.packaging.validate.manifest import WELL_KNOWN_FILES as WELL_KNOWN_FILES
from openenv.packaging.validate.manifest import SignatureError as SignatureError
from openenv.packaging.validate.manifest import UnsupportedPackageError as UnsupportedPackageError
from openenv.packaging.validate.manifest import detect_signature as detect_signature

export_imports(__name__)
