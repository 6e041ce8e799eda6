"""`LocalEnv`: the client's interface to an environment in this process, without a socket or server.

For tests and single-process training. The environment runs in a session, so lifecycle, call order and errors are the
same as on a server. Nothing is serialised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError
from typing_extensions import Self

from openenv.env.binding import declared_concurrency, factory_class, factory_name, infer_models, shared_attributes
from openenv.env.environment import Environment
from openenv.errors import ExecutionError, NotForkable, OpenEnvError, RequestValidationError, SessionLost
from openenv.protocol.json_values import check_observation, finite_reward
from openenv.protocol.schema import deserialize_action
from openenv.protocol.server_v1 import error_list
from openenv.types import ActT, ObsT, StateT, StepResult

from .author_frames import author_place
from .runners import InlineRunner
from .sessions.lifetime import CLOSED_BY_CLIENT, SessionLimits
from .sessions.manager import SessionManager
from .sessions.operations import Operation, Operations, build_operations
from .sessions.session import Session, SessionKind, SessionState, error_hint

T = TypeVar("T")


def _result(observation: Any) -> StepResult[Any]:
    check_observation(observation)
    fields = observation if isinstance(observation, Mapping) else vars(observation)
    return StepResult(
        observation=observation,
        reward=finite_reward(fields.get("reward")),
        done=bool(fields.get("done", False)),
        metadata=fields.get("metadata") or None,
    )


_OPERATIONS: Operations = build_operations(_result, lambda state: state)


class LocalEnv(Generic[ActT, ObsT, StateT]):
    """An environment in this process, with the client's methods.

    Awaitable inside a running event loop, blocking outside, `sync()` for blocking anywhere. Actions may be instances
    of the action class or dicts.

    Args:
        env: The environment class, or a function without arguments that returns an environment.
        action_cls: The action model; by default the environment's declaration.

    Raises:
        TypeError: `env` is an environment, not a callable that makes one.
    """

    def __init__(self, env: Callable[[], Any], action_cls: type[Any] | None = None) -> None:
        if isinstance(env, Environment) or not callable(env):
            raise TypeError(
                f"env must be a callable that returns an environment (the class itself, or a factory function), "
                f"not an instance of {type(env).__name__}"
            )
        self._factory = env
        self._action_cls = action_cls
        self._manager: SessionManager | None = None
        self._session: Session | None = None
        self._closed = False
        self._private_loop: asyncio.AbstractEventLoop | None = None
        self._children: list[LocalEnv[ActT, ObsT, StateT]] = []

    def __repr__(self) -> str:
        state = "not built"
        if self._session is not None:
            state = "closed" if self._closed else self._session.state.value
        return f"<{type(self).__name__} of {factory_name(self._factory)}, {state}>"

    @property
    def env(self) -> Any:
        """The environment itself, once it is built."""
        return None if self._session is None else self._session.env

    def connect(self) -> Coroutine[Any, Any, Self]:
        """Build the environment now instead of at the first request."""
        return self._dispatch(self._connect(), "LocalEnv.connect")

    def reset(self, **kwargs: Any) -> Coroutine[Any, Any, StepResult[ObsT]]:
        """Begin an episode; keywords go to the environment's `reset`."""
        self._closed = False
        return self._dispatch(self._run(_OPERATIONS.reset, kwargs), "LocalEnv.reset")

    def step(self, action: ActT | Mapping[str, Any], **kwargs: Any) -> Coroutine[Any, Any, StepResult[ObsT]]:
        """Take an action.

        Raises:
            RequestValidationError: The action does not fit.
            ExecutionError: The environment raised; the cause is attached.
            SessionLost: The environment was closed; `reset` opens another one.
        """
        return self._dispatch(self._run(_OPERATIONS.step, action), "LocalEnv.step")

    def state(self) -> Coroutine[Any, Any, StateT]:
        """Return the environment's state."""
        return self._dispatch(self._run(_OPERATIONS.state, None), "LocalEnv.state")

    def fork(self, n: int = 1) -> Coroutine[Any, Any, list[LocalEnv[ActT, ObsT, StateT]]]:
        """Return clients that continue from here, each with a copy of the environment; close each of them.

        Raises:
            NotForkable: The environment cannot be copied; the text says why, and what to do.
        """
        return self._dispatch(self._fork(n), "LocalEnv.fork")

    def snapshot(self) -> Coroutine[Any, Any, LocalEnv[ActT, ObsT, StateT]]:
        """Return a client with a copy of the environment as it is now, to `restore` from."""
        return self._dispatch(self._snapshot(), "LocalEnv.snapshot")

    def restore(
        self, snapshot: LocalEnv[ActT, ObsT, StateT] | SyncLocalEnv[ActT, ObsT, StateT]
    ) -> Coroutine[Any, Any, None]:
        """Continue from a snapshot, which may be used any number of times.

        Raises:
            NotForkable: The snapshot is closed, or cannot be copied.
        """
        return self._dispatch(self._restore(snapshot), "LocalEnv.restore")

    def disconnect(self) -> Coroutine[Any, Any, None]:
        """Close the environment."""
        return self.close()

    def close(self) -> Coroutine[Any, Any, None]:
        """Close the environment, and the environments of child clients."""
        return self._dispatch(self._close(), "LocalEnv.close")

    def new_session(self) -> LocalEnv[ActT, ObsT, StateT]:
        """Return another client with a new environment; it is closed together with this one."""
        child: LocalEnv[ActT, ObsT, StateT] = LocalEnv(self._factory, self._action_cls)
        self._children.append(child)
        return child

    def sync(self) -> SyncLocalEnv[ActT, ObsT, StateT]:
        """Return the blocking twin."""
        return SyncLocalEnv(self)

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def __enter__(self) -> Self:
        self._block(self._connect())
        return self

    def __exit__(self, *_: object) -> None:
        self._block(self._close())
        self._drop_loop()

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _connect(self) -> Self:
        if self._session is None or self._session.is_ending:
            if self._closed:
                raise SessionLost(CLOSED_BY_CLIENT)
            await self._open()
        return self

    async def _open(self, build: Callable[[], Any] | None = None) -> None:
        env_cls = factory_class(self._factory)
        separate = env_cls is not None and declared_concurrency(env_cls) is None and not shared_attributes(env_cls)
        limits = SessionLimits(sessions=1, separate=separate)
        self._manager = SessionManager(self._factory, limits, runner=InlineRunner())
        self._session = await self._manager.open(SessionKind.SOCKET, build=build)

    async def _fork(self, n: int) -> list[LocalEnv[ActT, ObsT, StateT]]:
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n!r}")
        await self._connect()
        assert self._session is not None
        assert self._manager is not None
        copies: list[LocalEnv[ActT, ObsT, StateT]] = []
        try:
            for copied in await self._manager.copy_environment(self._session, n):
                copies.append(LocalEnv(self._factory, self._action_cls))
                await copies[-1]._open_copy(copied.build, of=self._session)
        except BaseException:
            for local in copies:
                await local._close()
            raise
        return copies

    async def _open_copy(self, build: Callable[[], Any], *, of: Session) -> None:
        await self._open(build)
        assert self._session is not None
        self._session.continue_episode(of)

    async def _snapshot(self) -> LocalEnv[ActT, ObsT, StateT]:
        return (await self._fork(1))[0]

    async def _restore(self, snapshot: LocalEnv[ActT, ObsT, StateT] | SyncLocalEnv[ActT, ObsT, StateT]) -> None:
        source = snapshot._local if isinstance(snapshot, SyncLocalEnv) else snapshot
        await self._connect()
        assert self._session is not None
        assert self._manager is not None
        if source._session is None or source._session.is_ending:
            raise NotForkable("The snapshot is closed.")
        await self._manager.restore(self._session, source._session)

    async def _run(self, operation: Operation, argument: Any) -> Any:
        await self._connect()
        assert self._session is not None
        if operation.kind == "step":
            argument = self._action(argument)
        try:
            return await self._session.run(operation, argument)
        except OpenEnvError:
            raise
        except Exception as exc:
            place, hint = author_place(exc), error_hint(self._session, operation.kind)
            at = "" if place is None else f" (at {place})"
            raise ExecutionError(f"{type(exc).__name__}: {exc}{hint}{at}") from exc

    def _action(self, action: Any) -> Any:
        if not isinstance(action, Mapping):
            return action
        if self._action_cls is None:
            env_cls = factory_class(self._factory) or type(self.env)
            self._action_cls = infer_models(env_cls).action
        try:
            return deserialize_action(action, self._action_cls)
        except ValidationError as exc:
            raise RequestValidationError(f"Invalid action: {exc}", details={"errors": error_list(exc)}) from exc

    async def _close(self) -> None:
        children, self._children = self._children, []
        for child in children:
            if child._private_loop is None:
                await child._close()
            else:  # its coroutines belong to its own loop
                child._block(child._close())
                child._drop_loop()
        self._closed = self._session is not None
        if self._session is not None:
            self._session.close(CLOSED_BY_CLIENT)
            if self._session.state is not SessionState.CLOSED and self._manager is not None:
                await self._manager.drain()  # its `close` is a coroutine, or another call still runs

    def _dispatch(self, work: Coroutine[Any, Any, T], name: str) -> Coroutine[Any, Any, T]:
        """Return the coroutine in a running loop, else its result; `sync()` has exact types for the latter."""
        if asyncio._get_running_loop() is not None:
            coroutine: Any = work
            coroutine.__qualname__ = name  # for the warning when it is not awaited
            return work
        return cast("Coroutine[Any, Any, T]", self._block(work))

    def _drop_loop(self) -> None:
        loop, self._private_loop = self._private_loop, None
        if loop is not None:
            loop.close()

    def _block(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in this thread. Without coroutines, the environment never needs the loop to run."""
        loop = self._private_loop
        if loop is None or loop.is_closed():
            loop = self._private_loop = asyncio.new_event_loop()
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            return loop.run_until_complete(work)
        finally:
            asyncio._set_running_loop(outer)


class SyncLocalEnv(Generic[ActT, ObsT, StateT]):
    """The blocking twin of a `LocalEnv`, also inside a running loop."""

    def __init__(self, local: LocalEnv[ActT, ObsT, StateT]) -> None:
        self._local = local

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._local!r}>"

    def reset(self, **kwargs: Any) -> StepResult[ObsT]:
        """Begin an episode."""
        self._local._closed = False
        result: StepResult[ObsT] = self._local._block(self._local._run(_OPERATIONS.reset, kwargs))
        return result

    def step(self, action: ActT | Mapping[str, Any], **kwargs: Any) -> StepResult[ObsT]:
        """Take an action."""
        result: StepResult[ObsT] = self._local._block(self._local._run(_OPERATIONS.step, action))
        return result

    def state(self) -> StateT:
        """Return the environment's state."""
        state: StateT = self._local._block(self._local._run(_OPERATIONS.state, None))
        return state

    def fork(self, n: int = 1) -> list[SyncLocalEnv[ActT, ObsT, StateT]]:
        """Return clients that continue from here, each with a copy of the environment."""
        return [SyncLocalEnv(copied) for copied in self._local._block(self._local._fork(n))]

    def snapshot(self) -> SyncLocalEnv[ActT, ObsT, StateT]:
        """Return a client with a copy of the environment as it is now, to `restore` from."""
        return SyncLocalEnv(self._local._block(self._local._snapshot()))

    def restore(self, snapshot: LocalEnv[ActT, ObsT, StateT] | SyncLocalEnv[ActT, ObsT, StateT]) -> None:
        """Continue from a snapshot."""
        self._local._block(self._local._restore(snapshot))

    def close(self) -> None:
        """Close the environment."""
        self._local._block(self._local._close())
        self._local._drop_loop()

    def new_session(self) -> SyncLocalEnv[ActT, ObsT, StateT]:
        """Return another client with a new environment."""
        return SyncLocalEnv(self._local.new_session())

    def __enter__(self) -> Self:
        self._local._block(self._local._connect())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
