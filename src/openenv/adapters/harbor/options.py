"""Options of Harbor runs and servers: each list is written here once, as the fields of a dataclass.

The published functions take the same names as keyword arguments. `takes_fields` derives their signatures from the
dataclasses, so that no list is repeated:

    run_rollout(task_dir=..., harness=...)   ->  run_task(HarborRun(task_dir=..., harness=...))
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from typing_extensions import ParamSpec

from openenv import settings
from openenv.rollout.agents.base import Agent
from openenv.rollout.capture.sessions_api.capture_sessions import SessionRegistry, UpstreamAddress
from openenv.rollout.capture.sessions_api.engine_client import InferenceClient
from openenv.sandboxes.base import Sandboxes

P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
ResultT = TypeVar("ResultT")


def takes_fields(
    options: Callable[P, OptionsT], function: Callable[[OptionsT], ResultT], *, name: str
) -> Callable[P, ResultT]:
    """Return the published form of a function: it takes the fields of its options as arguments.

    Args:
        options: The dataclass of the options.
        function: The function that takes one options object.
        name: The published name.
    """

    def published(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        return function(options(*args, **kwargs))

    async def published_async(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await cast("Awaitable[Any]", function(options(*args, **kwargs)))

    # Callers may test for a coroutine function, so an async function stays one.
    made: Any = published_async if inspect.iscoroutinefunction(function) else published
    # `help`, editors and `inspect` show the fields instead of `*args, **kwargs`.
    made.__name__ = made.__qualname__ = name
    made.__module__, made.__doc__ = function.__module__, function.__doc__
    made.__signature__ = inspect.signature(options)
    return cast("Callable[P, ResultT]", made)


# The same five fields belong to every option list below, which inherit them.
@dataclass(frozen=True, kw_only=True)
class ModelEndpoint:
    """The address of a model, and how to authenticate there."""

    llm_url: str | None = None
    """The base URL of an OpenAI or Anthropic API. Empty for agents that call no model."""
    model: str | None = None
    """The model's ID. Default: the only model that the endpoint serves."""
    api_key: str | None = field(default=None, repr=False)
    """Default: `OPENENV_LLM_API_KEY`. Sandboxes never receive it."""
    auth_header: str = "Authorization"
    """The header that carries the key."""
    provider: str = "openai"
    """`openai` or `anthropic`."""


# -- the published functions, one dataclass each -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HarborSetup(ModelEndpoint):
    """Options of `prepare`."""

    datasets: Sequence[str] | None = None
    """Default: `OPENENV_DATASETS`."""
    sandboxes: Sequence[str] | None = None
    """The backends to check. Default: `OPENENV_SANDBOXES`, or every backend that starts images."""
    env_file: str | Path | None = None
    """A file of variables to set first."""
    require_llm: bool = True
    """Fail unless the endpoint answers. An endpoint without token IDs suffices for evaluations."""
    quiet: bool = False
    """Print nothing."""
    report: Callable[[str], None] = print
    """Receives the summary as lines for a terminal."""


@dataclass(frozen=True, kw_only=True)
class HarborRun:
    """Options of `run_rollout`."""

    task_dir: Path | str
    harness: str | Agent
    """An agent's name, or `module:Class` of a custom agent."""
    sandbox: str | Sandboxes
    """`docker`, `kubernetes`, or a custom backend."""
    registry: SessionRegistry
    """The sessions of a running capture server. The rollout opens one session."""
    intercept_url: str
    """The URL of that server."""
    model: str
    trials_dir: Path | str
    """The store of the rollout, for `openenv rollouts --store`."""
    dataset: str = ""
    """The dataset's name, which the result repeats."""
    reward_key: str = ""
    """The reward that counts if there are several. Separate alternatives by commas; the first one present counts."""
    require_reward: bool = True
    """Fail the rollout if none of the rewards is the one that counts."""
    keep_sandbox: bool = False
    """Always refused: sandboxes are closed. Read the work tree in the store instead."""
    agent_timeout_sec: float | None = None
    """Replaces the task's time limit."""
    agent_step_limit: int | None = None
    """The maximum number of model calls."""
    force_build: bool = False
    """Rebuild the image without the engine's cache."""
    session_prefix: str = "oe"
    """Starts the name of the trial."""
    capture_level: str = "tokens"
    """The endpoint's capture level: `tokens`, `logprobs` or `text`."""
    upstream: UpstreamAddress | None = None
    """Replaces the server's endpoint for this rollout."""
    inference: InferenceClient | None = None
    """The client of the endpoint. The result lists the parameters that it had to change."""
    sampling: Mapping[str, Any] | None = None
    """Sampling parameters for training: `{"temperature": 1.0}`."""
    purpose: str = "auto"
    """`train`, `eval` or `auto`."""
    eval_sampling: Mapping[str, Any] | None = None
    """Sampling parameters for evaluation."""
    harness_profile: str | None = None
    """Always refused: agents here have no profiles."""
    on_session_created: Callable[[str], None] | None = None
    """Receives the session's ID before the agent starts."""

    @property
    def harness_name(self) -> str:
        """The agent's name."""
        return self.harness if isinstance(self.harness, str) else self.harness.name

    @property
    def sandbox_name(self) -> str:
        """The backend's name."""
        return self.sandbox if isinstance(self.sandbox, str) else self.sandbox.name


@dataclass(frozen=True, kw_only=True)
class HarborBatch(ModelEndpoint):
    """Options of `run_batch`."""

    dataset: str
    """As `resolve_task_dirs` takes it."""
    task_indices: Sequence[int]
    harness: str | Agent = "opencode"
    sandbox: str | Sandboxes = "docker"
    port: int = 8100
    """The capture server's port on this machine; 0 chooses a free one."""
    expose: str = "direct"
    """How other machines reach the capture server: `direct`, `gradio` or `cloudflare`.

    Sandboxes of `docker` and `kubernetes` reach it through their engine in any case.
    """
    trials_dir: Path | None = None
    reward_key: str = ""
    keep_sandbox: bool = False
    """Always refused, as in `HarborRun`."""
    force_build: bool = False
    env_file: str | None = None
    """A file of variables to set first."""
    admin_key: str | None = field(default=None, repr=False)
    """Authenticates requests to the session routes. Default: `OPENENV_CAPTURE_ADMIN_KEY`, or a random key."""
    report: Callable[[str], None] = print
    """Receives a line for each rollout, and the summary."""


@dataclass(frozen=True, kw_only=True)
class HarborCapture(ModelEndpoint):
    """Options of the capture server in a process that serves tasks."""

    datasets: Sequence[str]
    """The served datasets; each is a split."""
    capture_port: int = 8100
    """The capture server's port on this machine; 0 chooses a free one."""
    expose: str = "direct"
    """How other machines reach it: `direct`, or a public address by `gradio` or `cloudflare`."""
    max_output_tokens: int | None = 8192
    """The maximum length of a model's response."""


@dataclass(frozen=True, slots=True)
class HarborPermissions:
    """Which actions a server allows its callers."""

    shares_endpoint: bool = True
    """Run rollouts on the server's endpoint."""
    takes_endpoints: bool = True
    """Name another endpoint."""
    takes_private_urls: bool = True
    """Name an endpoint at a private or local address, which the server then calls."""
    runs_rollouts: bool = True
    adds_datasets: bool = False
    """Add datasets of the Hub."""
    shows_rollouts: bool = True
    """See stored rollouts in the web UI."""
    keeps_rollouts: bool = True
    """Rollouts stay on disk when the server stops."""
    reward_key: str = ""

    @classmethod
    def of(cls, *, is_local: bool, **values: Any) -> HarborPermissions:
        """Return permissions with defaults for a local server, a remote server or a Space.

        Args:
            is_local: Whether only this machine reaches the server.
            **values: Fields; None selects the default.
        """
        is_space = settings.space_id() is not None
        defaults = {
            # A remote caller could make the server send requests into its private network.
            "takes_private_urls": is_local,
            # Downloads fill the disk, so only the user of this machine starts them.
            "adds_datasets": is_local,
            # Visitors of a Space are strangers to each other, and its disk is temporary.
            "shows_rollouts": not is_space,
            "keeps_rollouts": not is_space,
        }
        return cls(**{**defaults, **{name: value for name, value in values.items() if value is not None}})


@dataclass(frozen=True, kw_only=True)
class HarborServing(HarborCapture):
    """Options of `serve_harbor`."""

    host: str = "127.0.0.1"
    port: int = 8000
    env_file: str | None = None
    """A file of variables to set first."""
    options: HarborPermissions | None = None
    report: Callable[[str], None] = print
    """Receives the addresses and the token, line by line."""
