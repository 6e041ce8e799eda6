"""Facade: the published path of `openenv.packaging.validate.providers`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.errors import ProviderError as ProviderError
from openenv.packaging.validate.providers import ExecResult as ExecResult
from openenv.packaging.validate.providers import RunningSubject as RunningSubject
from openenv.packaging.validate.providers import StartupError as StartupError
from openenv.packaging.validate.providers import UnsupportedCapability as UnsupportedCapability
from openenv.packaging.validate.providers import ValidationProvider as ValidationProvider

export_imports(__name__)
