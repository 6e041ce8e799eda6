"""`AsyncVectorEnv`: a `VectorEnv` whose operations are awaited.

All of them run in one thread of its own, so that connecting and waiting never block the event loop. Knows threads and
futures; everything else is `VectorEnv`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from typing_extensions import Self

from ..errors import ClientModeError
from .vector_env import VectorEnv
from .vector_result import VectorResult

ActT = TypeVar("ActT")
ObsT = TypeVar("ObsT")
T = TypeVar("T")


class AsyncVectorEnv(Generic[ActT, ObsT]):
    """Many sessions of one environment, stepped together, for code on an event loop.

    Arguments and results are those of `VectorEnv`. A call that is cancelled goes on in its thread, and the next one
    waits for it. Nothing is lost by that: what a cancelled `step` leads to is returned by the next `step_wait`.
    """

    def __init__(self, url: str | Sequence[str], n: int, **options: Any) -> None:
        self._env: VectorEnv[ActT, ObsT] = VectorEnv(url, n, **options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openenv-vector")
        self._waiting: Future[VectorResult[ObsT]] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{repr(self._env).removeprefix('<VectorEnv')}"

    def __len__(self) -> int:
        return len(self._env)

    @property
    def n(self) -> int:
        """How many slots there are."""
        return self._env.n

    @property
    def codecs(self) -> list[str | None]:
        """The subprotocol of each connection, or `v1` where there is none; None where it is not connected."""
        return self._env.codecs

    @property
    def sessions(self) -> list[str | None]:
        """The name of each slot's session; None where there is none, or the server gives them no names."""
        return self._env.sessions

    @property
    def traffic(self) -> tuple[int, int]:
        """How many bytes the present connections have sent and received."""
        return self._env.traffic

    async def connect(self) -> Self:
        """Open all sessions now instead of at the first reset; raises as `VectorEnv.connect` does."""
        await self._run(self._env.connect)
        return self

    async def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        slots: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> VectorResult[ObsT]:
        """Begin an episode in each slot, or in some; a step that nobody has waited for is forgotten."""
        self._waiting = None
        return await self._run(partial(self._env.reset, seed=seed, slots=slots, timeout_s=timeout_s, **kwargs))

    async def step(
        self, actions: Sequence[ActT] | Mapping[int, ActT], *, timeout_s: float | None = None
    ) -> VectorResult[ObsT]:
        """Take an action in each slot and wait for all of them; raises as `VectorEnv.step` does."""
        await self.step_async(actions)
        return await self.step_wait(timeout_s)

    async def step_async(self, actions: Sequence[ActT] | Mapping[int, ActT], *, each: bool | None = None) -> None:
        """Send actions; `step_wait` returns what comes of them.

        Raises:
            ClientModeError: An earlier step was not waited for.
        """
        if self._waiting is not None:
            raise ClientModeError("A step was cancelled while it was waited for: call step_wait first, or reset")
        await self._run(partial(self._env.step_async, actions, each=each))

    async def step_wait(self, timeout_s: float | None = None, *, k: int | None = None) -> VectorResult[ObsT]:
        """Wait for the actions that were sent, or for `k` slots; raises as `VectorEnv.step_wait` does."""
        if self._waiting is None:
            self._waiting = self._submit(partial(self._env.step_wait, timeout_s, k=k))
        waiting = self._waiting
        try:
            result = await asyncio.shield(asyncio.wrap_future(waiting))
        except asyncio.CancelledError:
            raise  # whoever waits next gets it
        except BaseException:
            self._forget(waiting)
            raise
        self._forget(waiting)
        return result

    def _forget(self, waiting: Future[VectorResult[ObsT]]) -> None:
        if self._waiting is waiting:
            self._waiting = None

    async def states(self, *, timeout_s: float | None = None) -> list[Any]:
        """Ask for the state of each slot; one that has no session has None."""
        return await self._run(partial(self._env.states, timeout_s=timeout_s))

    async def close(self) -> None:
        """End all sessions and hang up; what is under way ends with them."""
        if self._is_closed:
            return
        self._is_closed = True
        self._env.interrupt()
        closing = self._thread.submit(self._env.close)
        try:
            await asyncio.shield(asyncio.wrap_future(closing))
        finally:
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        if self._is_closed:
            raise ClientModeError("This AsyncVectorEnv is closed")
        return self._thread.submit(function)

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.wrap_future(self._submit(function)))
