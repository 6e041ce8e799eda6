"""Facade: the error tree. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.errors import ConcurrencyConfigurationError as ConcurrencyConfigurationError
from openenv.errors import EnvironmentFactoryError as EnvironmentFactoryError
from openenv.errors import OpenEnvError as OpenEnvError
from openenv.errors import SessionCapacityError as SessionCapacityError
from openenv.errors import SessionCreationError as SessionCreationError
from openenv.errors import SessionNotFoundError as SessionNotFoundError

export_imports(__name__)
