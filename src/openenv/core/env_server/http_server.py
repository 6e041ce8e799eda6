"""Facade: servers and application factories. Re-exports only; the code lives in `openenv.server`."""

from __future__ import annotations

from openenv.env.environment import (
    Environment,
)
from openenv.errors import (
    ConcurrencyConfigurationError,
    EnvironmentFactoryError,
    SessionCapacityError,
)
from openenv.protocol.codec import (
    serialize_observation,
)
from openenv.protocol.schema import (
    deserialize_action,
)
from openenv.server.app import (
    create_app,
    create_fastapi_app,
)
from openenv.server.compat import (
    HTTPEnvServer,
)
from openenv.types import (
    Action,
    ConcurrencyConfig,
    EnvironmentMetadata,
    HealthResponse,
    HealthStatus,
    Observation,
    ResetRequest,
    ResetResponse,
    SchemaResponse,
    ServerCapacityStatus,
    ServerMode,
    SessionInfo,
    State,
    StepRequest,
    StepResponse,
    WSErrorCode,
)

__all__ = [
    "Action",
    "ConcurrencyConfig",
    "ConcurrencyConfigurationError",
    "Environment",
    "EnvironmentFactoryError",
    "EnvironmentMetadata",
    "HTTPEnvServer",
    "HealthResponse",
    "HealthStatus",
    "Observation",
    "ResetRequest",
    "ResetResponse",
    "SchemaResponse",
    "ServerCapacityStatus",
    "ServerMode",
    "SessionCapacityError",
    "SessionInfo",
    "State",
    "StepRequest",
    "StepResponse",
    "WSErrorCode",
    "create_app",
    "create_fastapi_app",
    "deserialize_action",
    "serialize_observation",
]
