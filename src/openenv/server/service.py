"""`EnvService`: the parts that all surfaces of a server share: models, schemas, metadata, sessions, redaction.

Built once per served environment. Must not know HTTP or WebSocket.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, overload

from openenv.env.binding import factory_name, infer_models
from openenv.env.environment import Environment
from openenv.env.tools.source import ToolSource
from openenv.errors import (
    AccessDenied,
    EnvironmentFactoryError,
    ExecutionError,
    HarnessTurnTimeoutError,
    NonFiniteReward,
    NotForkable,
    OpenEnvError,
    RequestCancelled,
    SessionCapacityError,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
    StaleRequest,
    ToolCallError,
    message_of,
)
from openenv.protocol.json_values import ValueLimit
from openenv.protocol.schema import json_schema
from openenv.protocol.server_v1 import ServerProtocol, observation_frame, state_frame
from openenv.protocol.server_v2 import WRITERS, ServerProtocolV2
from openenv.types import EnvironmentMetadata, SchemaResponse, ServerMode, State

from .author_frames import author_exc_info, install_hint
from .options import ServerOptions
from .sessions.manager import FactoryHooks, SessionManager
from .sessions.operations import CALL, build_operations

logger = logging.getLogger(__name__)

# Never redacted: errors of the framework, of the request, and of a tool to the agent that called it. An environment may
# be a client of other servers, so any other exception counts as the environment's.
_SHOWN = (
    AccessDenied,
    EnvironmentFactoryError,  # contains the text of `explain`
    HarnessTurnTimeoutError,
    RequestCancelled,
    SessionCapacityError,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
    StaleRequest,
    ToolCallError,
)


class Redaction:
    """Decides whether clients see an exception's text, or only an id of the log entry with the text.

    Args:
        is_on: Whether to hide the texts.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on

    @overload
    def shown(self, exc: OpenEnvError) -> OpenEnvError: ...

    @overload
    def shown(self, exc: BaseException) -> BaseException: ...

    def shown(self, exc: BaseException) -> BaseException:
        """Return an exception as clients may see it."""
        if isinstance(exc, _SHOWN):
            return exc
        if not self._is_on:
            hint = install_hint(exc)
            return ExecutionError(f"{message_of(exc)}{hint}") if hint else exc
        error_id = _logged(exc)
        if isinstance(exc, NotForkable):
            return NotForkable(f"The environment cannot be copied; the server's log has more under {error_id}.")
        if isinstance(exc, NonFiniteReward):
            text = f"The environment's reward is not a finite number; the server's log has more under {error_id}."
            return NonFiniteReward(text, details={"error_id": error_id})
        text = f"The environment failed; the server's log has more under {error_id}."
        return ExecutionError(text, details={"error_id": error_id})

    def text(self, exc: BaseException) -> str:
        """Return the text of an exception as clients may see it."""
        return message_of(self.shown(exc))

    def explain(self, exc: BaseException) -> str:
        """Return why an environment could not be built, as clients may see it."""
        if self._is_on:
            return f"the server's log has more under {_logged(exc)}"
        return f"{type(exc).__name__}: {message_of(exc)}{install_hint(exc)}"


def _logged(exc: BaseException) -> str:
    error_id = secrets.token_hex(6)
    logger.error("error %s: %s", error_id, type(exc).__name__, exc_info=author_exc_info(exc))
    return error_id


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models of a served environment; None for an undeclared one.

    Args:
        action: Validates actions.
        observation: Describes observations.
        state: Describes the state; by default the environment's own declaration.
        reset_observation: Describes the first observation, if it differs.
    """

    action: type[Any] | None
    observation: type[Any] | None
    state: type[Any] | None = None
    reset_observation: type[Any] | None = None


class EnvService:
    """One served environment.

    Args:
        factory: Makes an environment.
        models: The models of its messages.
        options: How it is served.
        env_name: Its name in the Task API; by default the factory's.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        models: ServedModels,
        *,
        options: ServerOptions,
        env_name: str | None = None,
    ) -> None:
        if isinstance(factory, Environment) or not callable(factory):
            raise TypeError(
                f"env must be a callable that returns an environment (the class itself, or a factory function), "
                f"not an instance of {type(factory).__name__}"
            )
        self.factory = factory
        self.options = options
        self.errors = Redaction(options.redact_errors)
        classes = (models.action, models.observation, models.state)
        self._models = tuple(cls for cls in classes if isinstance(cls, type))
        self.manager = SessionManager(
            factory,
            options.limits,
            runner=options.runner,
            processes=replace(options.processes, models=self._models),
            hooks=FactoryHooks(self._prepare, self.errors.explain),
        )
        self.env_name = env_name or factory_name(factory)
        self.action_cls = models.action
        self.observation_cls = models.observation
        self.reset_observation_cls = models.reset_observation
        self.mode = ServerMode.SIMULATION
        self._state_cls = models.state
        self.protocol = ServerProtocol(models.action)
        self.frame_operations = build_operations(observation_frame, state_frame)
        self.value_limit = ValueLimit.within(options.max_message_bytes)
        self.protocol_v2 = self._protocol_v2()
        self.operations_v2 = {writer: build_operations(writer.observation, writer.state) for writer in WRITERS.values()}
        self._metadata: EnvironmentMetadata | None = None
        self._schema: SchemaResponse | None = None

    def _protocol_v2(self) -> ServerProtocolV2:
        return ServerProtocolV2(self.action_cls, max_batch=self.options.max_batch, limit=self.value_limit)

    def _prepare(self, env: Any) -> None:
        """Set the mode of an environment with tools: some tools exist in one only."""
        if isinstance(getattr(env, "tools", None), ToolSource):
            env._mode = self.mode.value

    def reconfigure(self, options: ServerOptions) -> None:
        """Change limits and runner before the first session; raises as `SessionManager.reconfigure` does."""
        runner = options.runner if isinstance(options.runner, str) else None
        processes = replace(options.processes, models=self._models)
        self.manager.reconfigure(options.limits, runner=runner, processes=processes)
        self.options = options
        self.value_limit = ValueLimit.within(options.max_message_bytes)
        self.protocol_v2 = self._protocol_v2()

    @property
    def state_cls(self) -> type[Any]:
        """The class of the state, from the arguments or the environment's declaration."""
        if self._state_cls is not None and self._state_cls is not State:
            return self._state_cls
        env_cls = self.manager.env_cls
        return infer_models(env_cls).state if env_cls is not None else State

    def schema(self) -> SchemaResponse:
        """Describe the models as JSON schemas."""
        known = self.manager.env_cls is not None
        if self._schema is not None:
            return self._schema
        observation = json_schema(self.observation_cls) if self.observation_cls is not None else {}
        reset_cls = self.reset_observation_cls
        schema = SchemaResponse(
            action=json_schema(self.action_cls) if self.action_cls is not None else {},
            observation=observation,
            state=json_schema(self.state_cls),
            reset_observation=json_schema(reset_cls) if reset_cls is not None else observation,
        )
        if known:
            self._schema = schema
        return schema

    async def metadata(self) -> EnvironmentMetadata:
        """Ask an environment to describe itself, once."""
        if self._metadata is None:
            async with self.manager.borrow() as session:
                self.describe_as(await session.run(CALL, lambda env: env.get_metadata()))
        assert self._metadata is not None
        return self._metadata

    def describe_as(self, metadata: Any) -> None:
        """Store an environment's metadata."""
        self._metadata = EnvironmentMetadata.model_validate(metadata, from_attributes=True)
