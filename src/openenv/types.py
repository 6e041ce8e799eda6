"""The shared models: actions, observations, states, and the messages of the v1 wire.

Knows pydantic and nothing else of the project: no transport, no session, no environment.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema
from typing_extensions import Self
from typing_extensions import TypeVar as DefaultTypeVar

from openenv._notebook import html_table

ActT = TypeVar("ActT", bound="Action")
ObsT = TypeVar("ObsT", bound="Observation")
StateT = DefaultTypeVar("StateT", bound="State", default="State")  # `Environment[Guess, Hint]` is enough
_Obs = TypeVar("_Obs")

Scalar = int | float | bool


WHY_OVER = ("terminated", "truncated")
"""Fields of every observation that no schema has unless the class declares them."""
_is_none = partial(operator.is_, None)  # in C: every observation needs it twice


class ServerMode(str, Enum):
    """The interface of a server: all of Gym's, or only the part that is safe beside a live agent."""

    SIMULATION = "simulation"
    PRODUCTION = "production"


class HealthStatus(str, Enum):
    """The values of `GET /health`."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DEGRADED = "degraded"


class WSErrorCode(str, Enum):
    """Stable codes of v1 error frames."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


class Action(BaseModel):
    """An agent's request to an environment; subclass it and add fields."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)

    metadata: dict[str, Any] = Field(default_factory=dict, description="Free-form data that travels with the action")


class _FloatsFirst:
    """Tries a union as a float first if the value is a float.

    Values, their types and the JSON schema do not change. Without this, pydantic builds two errors for each float in
    a `bool | int | float` field, which is a third of the cost of an observation. A strict float alone is not enough,
    because it also accepts members of an `IntEnum`.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        union = schema.get("schema", {})
        if schema["type"] != "nullable" or union.get("type") != "union":
            return cast(CoreSchema, schema)  # another pydantic may put it otherwise
        is_float = core_schema.is_instance_schema(float)
        choices = [(core_schema.chain_schema([is_float, core_schema.float_schema(strict=True)]), "float")]
        first = cast(CoreSchema, {**schema, "schema": {**union, "choices": [*choices, *union["choices"]]}})
        # Writing, and reading JSON or text, goes by the union as it was.
        return core_schema.json_or_python_schema(json_schema=schema, python_schema=first)


class Observation(BaseModel):
    """An environment's answer; subclass it and add fields.

    `done` says that the episode is over. `terminated` and `truncated` may say why, as in Gymnasium; while unset they
    are not sent. Fields of type bytes are sent as base64 text.
    """

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, arbitrary_types_allowed=True, ser_json_bytes="base64"
    )

    done: bool = Field(default=False, description="Whether the episode is over")
    reward: Annotated[bool | int | float | None, _FloatsFirst()] = Field(
        default=None, description="Reward of the last action"
    )
    metadata: dict[str, Any] = Field(default_factory=dict, description="Free-form data beside the observation")
    terminated: bool | None = Field(default=None, description="The task itself ended the episode", exclude_if=_is_none)
    truncated: bool | None = Field(default=None, description="A limit ended the episode", exclude_if=_is_none)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe the published fields and those of the subclass: an inherited `terminated` is in no schema."""
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).get("properties", {})
        for name in WHY_OVER:
            if cls.model_fields[name].exclude_if is _is_none:  # a field of the same name has another condition
                properties.pop(name, None)
        return described

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Show why the episode ended only if that is set, because prompts contain this text."""
        for name, value in super().__repr_args__():
            if value is not None or name not in WHY_OVER:
                yield name, value


class State(BaseModel):
    """An environment's inner state, for debugging and orchestration; extra fields are welcome."""

    model_config = ConfigDict(extra="allow", validate_assignment=True, arbitrary_types_allowed=True)

    episode_id: str | None = Field(default=None, description="Identifies the running episode")
    step_count: int = Field(default=0, ge=0, description="Steps taken in this episode")


@dataclass
class StepResult(Generic[_Obs]):
    """What `reset` and `step` of a client return."""

    observation: _Obs
    reward: bool | int | float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None

    def _repr_html_(self) -> str:
        rows = [("reward", self.reward), ("done", self.done), ("observation", self.observation)]
        return html_table("StepResult", [*rows, ("metadata", self.metadata)] if self.metadata else rows)


class ResetRequest(BaseModel):
    """Body of `POST /reset`; further keys go to the environment's `reset` if it accepts them."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"seed": 7}, {}]})

    seed: int | None = Field(default=None, ge=0, description="Seed for a reproducible episode")
    episode_id: str | None = Field(default=None, max_length=255, description="Name for the new episode")


class StepRequest(BaseModel):
    """Body of `POST /step`; further keys go to the environment's `step` if it accepts them."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"action": {"message": "hello"}}]})

    action: dict[str, Any] = Field(description="The action, in the shape that `GET /schema` shows")
    timeout_s: float | None = Field(default=None, gt=0, description="How long the step may take, in seconds")
    request_id: str | None = Field(default=None, max_length=255, description="The client's own id for this request")


class ResetResponse(BaseModel):
    """Answer of `POST /reset`."""

    model_config = ConfigDict(extra="forbid")

    observation: dict[str, Any] = Field(description="The first observation of the episode")
    reward: float | None = Field(default=None, description="Reward, usually none at the start")
    done: bool = Field(default=False, description="Whether the episode is already over")
    metadata: dict[str, Any] | None = Field(default=None, description="The observation's metadata")


class StepResponse(BaseModel):
    """Answer of `POST /step`."""

    model_config = ConfigDict(extra="forbid")

    observation: dict[str, Any] = Field(description="What the action led to")
    reward: float | None = Field(default=None, description="Reward of the action")
    done: bool = Field(default=False, description="Whether the episode is over")
    metadata: dict[str, Any] | None = Field(default=None, description="The observation's metadata")


class BaseMessage(BaseModel):
    """Base of the models that allow no unknown key."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class CodeExecResult(BaseMessage):
    """Outcome of a piece of code that was run."""

    stdout: str
    stderr: str
    exit_code: int


class EnvironmentMetadata(BaseMessage):
    """How an environment describes itself."""

    name: str
    description: str
    readme_content: str | None = None
    version: str | None = None
    author: str | None = None
    documentation_url: str | None = None
    prompt_template: str | None = Field(default=None, exclude_if=_is_none)
    """The first message for a language model that plays; not sent while unset."""


class SchemaResponse(BaseMessage):
    """JSON schemas of an environment's action, observation and state."""

    action: dict[str, Any]
    observation: dict[str, Any]
    state: dict[str, Any]
    reset_observation: dict[str, Any] | None = None

    @model_serializer(mode="wrap")
    def _without_absent_reset_schema(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        if self.reset_observation is None:
            data.pop("reset_observation", None)
        return data


class HealthResponse(BaseMessage):
    """Answer of `GET /health`."""

    status: HealthStatus = HealthStatus.HEALTHY


class ListTasksRequest(BaseMessage):
    """Body of the Task API's `tasks`."""

    split: str


class NumTasksRequest(BaseMessage):
    """Body of the Task API's `num_tasks`."""

    split: str


class GetTaskRequest(BaseMessage):
    """Body of the Task API's `task`."""

    split: str
    index: int


class GetTaskRangeRequest(BaseMessage):
    """Body of the Task API's `task_range`."""

    split: str
    start: int | None = None
    stop: int | None = None


class WSResetMessage(BaseMessage):
    """Client frame: begin an episode."""

    type: Literal["reset"] = "reset"
    data: dict[str, Any] = Field(default_factory=dict)


class WSStepMessage(BaseMessage):
    """Client frame: take an action."""

    type: Literal["step"] = "step"
    data: dict[str, Any]


class WSStateMessage(BaseMessage):
    """Client frame: ask for the state."""

    type: Literal["state"] = "state"


class WSCloseMessage(BaseMessage):
    """Client frame: end the session."""

    type: Literal["close"] = "close"


class WSObservationResponse(BaseModel):
    """Server frame: answer to reset and step."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["observation"] = "observation"
    data: dict[str, Any]


class WSStateResponse(BaseModel):
    """Server frame: answer to state."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["state"] = "state"
    data: dict[str, Any]


class WSErrorResponse(BaseModel):
    """Server frame: a request failed."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["error"] = "error"
    data: dict[str, Any]


WSIncomingMessage = Annotated[
    WSResetMessage | WSStepMessage | WSStateMessage | WSCloseMessage, Field(discriminator="type")
]


class ConcurrencyConfig(BaseMessage):
    """How many sessions a server holds and how long an unused one lives."""

    max_concurrent_envs: int = Field(default=1, ge=1, description="Sessions held at once")
    session_timeout: float | None = Field(default=None, gt=0, description="Seconds without use before a session ends")


class ServerCapacityStatus(BaseMessage):
    """Sessions in use and sessions possible."""

    active_sessions: int = Field(ge=0)
    max_sessions: int = Field(ge=1)

    @model_validator(mode="after")
    def _within_capacity(self) -> Self:
        if self.active_sessions > self.max_sessions:
            raise ValueError(f"active_sessions ({self.active_sessions}) exceeds max_sessions ({self.max_sessions})")
        return self

    @property
    def available_slots(self) -> int:
        """Sessions that can still be opened."""
        return self.max_sessions - self.active_sessions

    @property
    def is_at_capacity(self) -> bool:
        """Whether no further session can be opened."""
        return self.available_slots == 0

    @classmethod
    def from_counts(cls, active: int, max_sessions: int) -> Self:
        """Build from two counts."""
        return cls(active_sessions=active, max_sessions=max_sessions)


class SessionInfo(BaseMessage):
    """A server's description of one session."""

    session_id: str
    created_at: float
    last_activity_at: float
    step_count: int = Field(default=0, ge=0)
    environment_type: str
