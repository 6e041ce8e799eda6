"""Facade: the published path of `openenv.packaging.validate.container`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.container import DockerRunningSubject as DockerRunningSubject
from openenv.packaging.validate.container import DockerValidationProvider as DockerValidationProvider

export_imports(__name__)
