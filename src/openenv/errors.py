"""The error tree. Each class carries its wire `code`; builtin co-bases keep old `except` clauses working.

    OpenEnvError
    ├── ConcurrencyConfigurationError      CONCURRENCY_CONFIGURATION
    ├── SessionNotFoundError               SESSION_NOT_FOUND
    │   └── SessionElsewhere               SESSION_ELSEWHERE   another process of the server has it
    ├── SessionClosedError                 SESSION_CLOSED
    ├── ServerError (RuntimeError)         SERVER_ERROR        an error reply of a server
    │   ├── InvalidMessageError            INVALID_JSON
    │   ├── UnknownTypeError               UNKNOWN_TYPE
    │   ├── RequestValidationError         VALIDATION_ERROR
    │   ├── ExecutionError                 EXECUTION_ERROR     the environment raised
    │   │   └── NonFiniteReward            NON_FINITE_REWARD   NaN, infinity or not a number at all
    │   ├── SessionError                   SESSION_ERROR
    │   ├── SessionCapacityError           CAPACITY_REACHED
    │   ├── SessionCreationError           SESSION_CREATION_FAILED
    │   ├── EnvironmentFactoryError        FACTORY_ERROR
    │   ├── StaleRequest                   STALE_REQUEST       an old id; its reply is deleted
    │   ├── ReplyTooLarge                  REPLY_TOO_LARGE     does not fit into the answer to its batch
    │   ├── RequestCancelled               CANCELLED
    │   ├── NotForkable                    NOT_FORKABLE        cannot be copied; the text names the remedy
    │   ├── AccessDenied (PermissionError) UNAUTHORIZED        no token, or one that the server does not know
    │   │   └── Forbidden                  FORBIDDEN           the token's role does not allow this
    │   └── ToolCallError                  TOOL_FAILED         a tool raised
    │       ├── ToolNotFoundError          TOOL_NOT_FOUND
    │       ├── ToolArgumentsError         INVALID_TOOL_ARGUMENTS
    │       ├── ToolTimeout (TimeoutError) TOOL_TIMEOUT
    │       └── ToolTransportError         TOOL_TRANSPORT      the way to the tool is broken
    ├── ClientModeError (RuntimeError)     CLIENT_MODE         one client used both with and without await
    ├── ProtocolError (RuntimeError)       PROTOCOL_ERROR      the peer does not speak the protocol
    ├── ConnectFailed (ConnectionError)    CONNECT_FAILED
    ├── RequestTimeout (TimeoutError)      REQUEST_TIMEOUT     the episode is lost with it
    ├── SlotsFailed (RuntimeError)         SLOTS_FAILED        some sessions of a `VectorEnv` failed
    ├── SandboxError (RuntimeError)        SANDBOX_ERROR       a sandbox failed, not what ran in it
    │   ├── SandboxUnavailable             SANDBOX_UNAVAILABLE it cannot run here; the text says why
    │   ├── SandboxUnsupported             SANDBOX_UNSUPPORTED the backend does not offer this
    │   ├── SandboxTreeError               SANDBOX_TREE        a tree inside is too large or cannot be read
    │   └── SandboxGone                    SANDBOX_GONE        killed, closed or expired
    ├── ProviderError (RuntimeError)       PROVIDER_ERROR      a server could not be started or stopped
    │   ├── ProviderUnavailable            PROVIDER_UNAVAILABLE a program is missing; the text names it
    │   ├── ServerCommandUnknown (ValueError) SERVER_COMMAND_UNKNOWN the command that starts it is not known
    │   ├── ImagePullFailed                IMAGE_PULL_FAILED   a node of the cluster cannot get the image
    │   ├── ServerDied                     SERVER_DIED         it ended before it answered
    │   └── ServerNotReady (TimeoutError)  SERVER_NOT_READY    it runs, but does not answer in time
    │       └── Unschedulable              UNSCHEDULABLE       no node of the cluster took it in time
    ├── RolloutError (RuntimeError)        ROLLOUT_ERROR
    │   ├── AgentUnavailable               AGENT_UNAVAILABLE   the agent cannot be installed here; the text says why
    │   ├── CaptureError                   CAPTURE_ERROR       the capture proxy or its records
    │   ├── StoreError                     STORE_ERROR         not stored, not found: disk full, unknown id
    │   ├── NoRewards                      NO_REWARDS          an environment that never gives a reward
    │   ├── WeightUpdateFailed             WEIGHT_UPDATE_FAILED a replica of the engine refused new weights
    │   ├── TrustError                     TRUST_TOO_LOW       a check of the task is weaker than `min_trust`
    │   ├── TaskRefused                    TASK_REFUSED        a check of the task fails on the task's own solution
    │   └── RolloutCancelled               ROLLOUT_CANCELLED
    ├── PackageUnavailable (ModuleNotFoundError) PACKAGE_UNAVAILABLE an adapter's package is missing or too old
    ├── HarnessError (RuntimeError)        HARNESS_ERROR       a turn-based agent failed
    │   ├── HarnessStartupError            HARNESS_STARTUP     it did not start
    │   ├── HarnessNotRunningError         HARNESS_NOT_RUNNING no episode, or its process has ended
    │   └── HarnessTurnTimeoutError (TimeoutError) HARNESS_TURN_TIMEOUT
    └── SessionLost (ConnectionError)      SESSION_LOST        only `reset` begins a new episode

Knows nothing of transports; `protocol.client_sessions` builds these from error frames, `protocol.server_v1` and
`server_v2` do the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar


class OpenEnvError(Exception):
    """Base of every error that the framework raises on purpose."""

    code: ClassVar[str] = "OPENENV_ERROR"

    def __init__(self, message: str = "", *, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self._details = dict(details or {})

    def __reduce__(self) -> tuple[Any, ...]:
        # By attributes: the default calls the class with `args`, the text, but subclasses take other arguments.
        return _blank, (type(self),), {**self.__dict__, "args": self.args}

    @property
    def details(self) -> dict[str, Any]:
        """What goes on the wire beside message and code."""
        return self._details


def message_of(exc: BaseException) -> str:
    """Return an exception's text in a form that can be sent; a key or an exit code follows its class name."""
    try:
        text = str(exc)
    except Exception:  # an exception that fails to describe itself must still be reported
        text = ""
    if text and (type(exc).__str__ is KeyError.__str__ or isinstance(exc, SystemExit)):
        text = f"{type(exc).__name__}: {text}"  # a key or a number alone does not explain the error
    return text.encode("utf-8", "backslashreplace").decode() or type(exc).__name__


def _blank(cls: type[OpenEnvError]) -> OpenEnvError:
    # Not `cls.__new__`: that may be RuntimeError's, which Python refuses for a class that is an OSError too.
    return (OSError if issubclass(cls, OSError) else Exception).__new__(cls)


class ConcurrencyConfigurationError(OpenEnvError):
    """The server is to hold more sessions than the environment class supports."""

    code = "CONCURRENCY_CONFIGURATION"

    def __init__(self, environment_name: str, max_concurrent_envs: int, message: str | None = None) -> None:
        self.environment_name = environment_name
        self.max_concurrent_envs = max_concurrent_envs
        super().__init__(
            message
            or f"Environment '{environment_name}' does not declare SUPPORTS_CONCURRENT_SESSIONS = True, so "
            f"max_concurrent_envs={max_concurrent_envs} is not possible. Set the attribute if its sessions share "
            "nothing, or serve it with max_concurrent_envs=1."
        )


class SessionNotFoundError(OpenEnvError):
    """No session has that id."""

    code = "SESSION_NOT_FOUND"

    def __init__(self, session_id: str, message: str | None = None) -> None:
        self.session_id = session_id
        super().__init__(message or f"Session '{session_id}' not found.", details={"session_id": session_id})


class SessionElsewhere(SessionNotFoundError):
    """Another process of the server has the session, and the request has not reached that one; it has not run."""

    code = "SESSION_ELSEWHERE"


class SessionClosedError(OpenEnvError):
    """The session was closed before or while the request ran."""

    code = "SESSION_CLOSED"

    def __init__(self, session_id: str, reason: str = "closed") -> None:
        self.session_id = session_id
        self.reason = reason
        details = {"session_id": session_id, "reason": reason}
        super().__init__(f"Session '{session_id}' is closed ({reason}).", details=details)


class ServerError(OpenEnvError, RuntimeError):
    """A server answered with an error; the text names its message and code."""

    code = "SERVER_ERROR"


class InvalidMessageError(ServerError):
    """A message was not JSON, or not a JSON object."""

    code = "INVALID_JSON"


class UnknownTypeError(ServerError):
    """A message had no known `type`."""

    code = "UNKNOWN_TYPE"


class RequestValidationError(ServerError):
    """A message or an action did not fit its schema; `details["errors"]` says where."""

    code = "VALIDATION_ERROR"


class ExecutionError(ServerError):
    """The environment raised; the session lives on."""

    code = "EXECUTION_ERROR"


class NonFiniteReward(ExecutionError):
    """The environment's reward is NaN, infinite or not a number; `details["value"]` shows it.

    The step or reset has run and counts, but its observation is lost. The session stays open: `reset` begins a new
    episode, `step` continues this one.
    """

    code = "NON_FINITE_REWARD"

    reply: Any = None
    """The reply for surfaces that publish null instead of an error (protocol v1, plain HTTP); never sent to others."""

    @classmethod
    def of(cls, reward: object) -> NonFiniteReward:
        """Build the error for a reward."""
        try:
            text = repr(reward)[:100]
        except Exception:  # an integer too long to print, or an object that cannot describe itself
            text = type(reward).__name__
        return cls.noted(text)

    @classmethod
    def noted(cls, text: object) -> NonFiniteReward:
        """Build the error from the text of a reward."""
        return cls(f"The environment's reward is {text}; return a finite number or None.", details={"value": text})


class SessionError(ServerError):
    """The server could not open or keep the session."""

    code = "SESSION_ERROR"


class SessionCapacityError(ServerError):
    """Every session slot of the server is taken."""

    code = "CAPACITY_REACHED"

    def __init__(
        self,
        active_sessions: int,
        max_sessions: int,
        message: str | None = None,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        self.active_sessions = active_sessions
        self.max_sessions = max_sessions
        self.retry_after_s = retry_after_s
        details: dict[str, Any] = {"active_sessions": active_sessions, "max_sessions": max_sessions}
        if retry_after_s is not None:
            details["retry_after_s"] = retry_after_s
        super().__init__(
            message
            or f"Server at capacity: {active_sessions}/{max_sessions} sessions active. Cannot accept new connections.",
            details=details,
        )


class SessionCreationError(ServerError):
    """A session could not be created."""

    code = "SESSION_CREATION_FAILED"

    def __init__(self, reason: str, message: str | None = None) -> None:
        self.reason = reason
        super().__init__(message or f"Failed to create session: {reason}", details={"reason": reason})


class EnvironmentFactoryError(ServerError):
    """The environment's constructor raised; `reason` names the cause."""

    code = "FACTORY_ERROR"

    def __init__(self, factory_name: str, message: str | None = None, *, reason: str | None = None) -> None:
        self.factory_name = factory_name
        self.reason = reason
        details = {"factory_name": factory_name}
        if reason is not None:
            details["reason"] = reason
        super().__init__(message or f"Environment factory '{factory_name}' failed to create instance.", details=details)


class AccessDenied(ServerError, PermissionError):
    """The server requires a token, and got none that it accepts."""

    code = "UNAUTHORIZED"


class StaleRequest(ServerError):
    """The request's id is not new and its reply is deleted: the request has run, but cannot be answered again."""

    code = "STALE_REQUEST"

    def __init__(self, request_id: int | str, last_id: int, message: str | None = None) -> None:
        self.request_id = request_id
        self.last_id = last_id
        text = message or f"Request {request_id} has been answered before, and its reply is no longer kept."
        super().__init__(text, details={"last_id": last_id})


class ReplyTooLarge(ServerError):
    """A request has run, but its reply does not fit into the answer to its batch; repeated, it gets the reply."""

    code = "REPLY_TOO_LARGE"


class RequestCancelled(ServerError):
    """The request was cancelled before it was done."""

    code = "CANCELLED"

    def __init__(self, message: str = "The request was cancelled.") -> None:
        super().__init__(message)


class NotForkable(ServerError):
    """The environment cannot be copied in mid-episode; the text gives the reason and a remedy."""

    code = "NOT_FORKABLE"


class Forbidden(AccessDenied):
    """The role of the token that was sent does not allow this; `role` names it."""

    code = "FORBIDDEN"

    def __init__(self, role: str, message: str | None = None) -> None:
        self.role = role
        super().__init__(message or f"The role '{role}' does not allow this.", details={"role": role})


class ToolCallError(ServerError):
    """A tool call failed; the session lives on. `error_type` is the name that observations carry."""

    code = "TOOL_FAILED"
    error_type: ClassVar[str] = "execution_error"

    def __init__(self, tool_name: str, message: str) -> None:
        self.tool_name = tool_name
        super().__init__(message, details={"tool_name": tool_name, "error_type": self.error_type})


class ToolNotFoundError(ToolCallError):
    """No tool has that name, or none in this mode."""

    code = "TOOL_NOT_FOUND"
    error_type = "tool_not_found"

    def __init__(self, tool_name: str, message: str | None = None) -> None:
        super().__init__(tool_name, message or f"Tool '{tool_name}' not found")


class ToolArgumentsError(ToolCallError):
    """The arguments do not fit the tool's schema; the tool was not called."""

    code = "INVALID_TOOL_ARGUMENTS"
    error_type = "invalid_args"


class ToolTimeout(ToolCallError, TimeoutError):
    """The tool did not return in time."""

    code = "TOOL_TIMEOUT"
    error_type = "timeout"

    def __init__(self, tool_name: str, message: str | None = None, *, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        super().__init__(tool_name, message or f"Tool '{tool_name}' timed out after {timeout_s} seconds")


class ToolTransportError(ToolCallError):
    """The way to the tool is broken, not the tool."""

    code = "TOOL_TRANSPORT"
    error_type = "transport_error"


class ClientModeError(OpenEnvError, RuntimeError):
    """One client object was used both synchronously and asynchronously."""

    code = "CLIENT_MODE"


class ProtocolError(OpenEnvError, RuntimeError):
    """The other side sent something that is not the OpenEnv protocol."""

    code = "PROTOCOL_ERROR"


class ConnectFailed(OpenEnvError, ConnectionError):
    """The server could not be reached.

    Args:
        message: Why; of the last attempt where there were several.
        attempts: How many attempts there were.
        is_transient: Whether another attempt may help: the server is still starting, or the connection broke.
    """

    code = "CONNECT_FAILED"

    def __init__(self, message: str = "", *, attempts: int = 1, is_transient: bool = False) -> None:
        self.attempts = attempts
        self.is_transient = is_transient
        super().__init__(message)


class RequestTimeout(OpenEnvError, TimeoutError):
    """No reply came in time. It is unknown whether the request has run, so the episode is given up."""

    code = "REQUEST_TIMEOUT"


class SessionLost(OpenEnvError, ConnectionError):
    """The episode is gone; `reset` begins a new one. `reason` says what happened."""

    code = "SESSION_LOST"

    def __init__(self, reason: str, message: str | None = None) -> None:
        self.reason = reason
        text = message or f"The session and its episode are lost ({reason}). Call reset() to begin a new one."
        super().__init__(text, details={"reason": reason})


class SlotsFailed(OpenEnvError, RuntimeError):
    """Some slots of a `VectorEnv` failed: `errors` has their exceptions, `result` the answers of the others."""

    code = "SLOTS_FAILED"

    def __init__(self, errors: Mapping[int, OpenEnvError], result: Any) -> None:
        self.errors = dict(errors)
        self.result = result
        slot, first = next(iter(self.errors.items()))
        more = f" and {len(self.errors) - 1} more" if len(self.errors) > 1 else ""
        details = {"slots": {slot: str(error) for slot, error in self.errors.items()}}
        super().__init__(f"slot {slot}{more} of {len(result)} failed: {first}", details=details)


class SandboxError(OpenEnvError, RuntimeError):
    """A sandbox failed, not what ran in it."""

    code = "SANDBOX_ERROR"


class SandboxUnavailable(SandboxError):
    """This backend cannot run here; the text names the missing program and the command that installs it."""

    code = "SANDBOX_UNAVAILABLE"


class SandboxUnsupported(SandboxError):
    """This backend does not offer the requested feature."""

    code = "SANDBOX_UNSUPPORTED"


class SandboxTreeError(SandboxError):
    """A tree inside a sandbox cannot be taken out: it is too large, or cannot be read. The sandbox itself is well."""

    code = "SANDBOX_TREE"


class SandboxGone(SandboxError):
    """The sandbox was killed, was closed or has expired; `reason` says which."""

    code = "SANDBOX_GONE"

    def __init__(self, sandbox_id: str, reason: str) -> None:
        self.sandbox_id = sandbox_id
        self.reason = reason
        details = {"sandbox_id": sandbox_id, "reason": reason}
        super().__init__(f"Sandbox '{sandbox_id}' is gone ({reason}).", details=details)


class ProviderError(OpenEnvError, RuntimeError):
    """A server could not be started, awaited or stopped; `log` is the end of its output, if available."""

    code = "PROVIDER_ERROR"

    def __init__(self, message: str = "", *, log: str = "") -> None:
        self.log = log
        super().__init__(message)


class ProviderUnavailable(ProviderError):
    """A program or service that starts the server is missing or does not answer; the text names it and the remedy."""

    code = "PROVIDER_UNAVAILABLE"


class ServerDied(ProviderError):
    """The server ended before it answered; the text has the end of its log."""

    code = "SERVER_DIED"


class ServerNotReady(ProviderError, TimeoutError):
    """The server was started, but did not answer in time."""

    code = "SERVER_NOT_READY"


class ServerCommandUnknown(ProviderError, ValueError):
    """Neither the caller nor the image names the server's start command; the text names the argument to pass."""

    code = "SERVER_COMMAND_UNKNOWN"


class ImagePullFailed(ProviderError):
    """A node of the cluster cannot get the image; the text has the cluster's own words."""

    code = "IMAGE_PULL_FAILED"


class Unschedulable(ServerNotReady):
    """No node of the cluster took the server in time; the text quotes the cluster's reasons."""

    code = "UNSCHEDULABLE"


class RolloutError(OpenEnvError, RuntimeError):
    """A rollout could not be run, stored or read."""

    code = "ROLLOUT_ERROR"


class WeightUpdateFailed(RolloutError):
    """A replica of the engine refused a weight update, or did not answer."""

    code = "WEIGHT_UPDATE_FAILED"


class AgentUnavailable(RolloutError):
    """The agent is not installed and cannot be; the text names the command that would do it."""

    code = "AGENT_UNAVAILABLE"


class CaptureError(RolloutError):
    """The capture proxy cannot serve, or its records cannot be read."""

    code = "CAPTURE_ERROR"


class StoreError(RolloutError):
    """A rollout could not be stored or read; `outcome` is the one that could not be stored, if any."""

    code = "STORE_ERROR"

    def __init__(self, message: str, *, outcome: object = None) -> None:
        self.outcome = outcome
        super().__init__(message)


class NoRewards(RolloutError):
    """The environment has given no reward in any episode of the run, so there is nothing to train on."""

    code = "NO_REWARDS"


class TrustError(RolloutError):
    """A task has a check that may be trusted less than asked; the text names it and says how to write it."""

    code = "TRUST_TOO_LOW"


class TaskRefused(RolloutError):
    """A check of the task fails on the task's own solution; the text names the check and shows its output."""

    code = "TASK_REFUSED"


class RolloutCancelled(RolloutError):
    """The rollout was cancelled."""

    code = "ROLLOUT_CANCELLED"


class PackageUnavailable(OpenEnvError, ModuleNotFoundError):
    """The package that an adapter needs is missing or too old; the text names the command that installs it."""

    code = "PACKAGE_UNAVAILABLE"


def install_command(extra: str) -> str:
    """Return the command that installs an extra, such as `pip install 'huggingface_hub>=1.29'` for `hub`.

    It names the packages of the extra and never `openenv[hub]`: an index may have another package called `openenv`,
    or none, until this one is released.
    """
    from importlib import metadata  # slow to import, and needed in failures only

    try:
        lines = metadata.requires("openenv") or []
    # A checkout on PYTHONPATH has no metadata.
    except metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in the checkout of openenv"
    # `ray[default]>=2.40; extra == 'ray'` belongs to the extra ray.
    of_extra = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    return f"pip install {' '.join(repr(line.partition(';')[0].strip()) for line in lines if of_extra.search(line))}"


class HarnessError(OpenEnvError, RuntimeError):
    """A turn-based agent, or what connects it with its environment, failed."""

    code = "HARNESS_ERROR"


class HarnessStartupError(HarnessError):
    """The agent's process did not start, or was not ready in time."""

    code = "HARNESS_STARTUP"


class HarnessNotRunningError(HarnessError):
    """A message came before `reset`, or after the agent's process had ended."""

    code = "HARNESS_NOT_RUNNING"


class HarnessTurnTimeoutError(HarnessError, TimeoutError):
    """The agent did not end its turn in time; its episode is over."""

    code = "HARNESS_TURN_TIMEOUT"
