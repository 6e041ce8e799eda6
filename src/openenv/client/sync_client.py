"""`SyncEnvClient`: the blocking twin of a client, a plain socket and no event loop.

Works anywhere, also inside a running loop (a notebook). Knows `EnvClient`; adds nothing to the protocol.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Generic

from typing_extensions import Self

from ..types import StepResult
from .env_client import ActT, EnvClient, ObsT, StateT
from .flows import detach, hang_up


class SyncEnvClient(Generic[ActT, ObsT, StateT]):
    """Blocks where its `EnvClient` would be awaited. Other methods of that client, coroutines too, work as well.

    Raises:
        ClientModeError: The client is already in asynchronous use.
    """

    def __init__(self, async_client: EnvClient[ActT, ObsT, StateT]) -> None:
        async_client._driver.claim_blocking()
        self._client = async_client
        self._driver = async_client._driver

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._client!r}>"

    @property
    def async_client(self) -> EnvClient[ActT, ObsT, StateT]:
        """The client that this one drives."""
        return self._client

    def connect(self) -> Self:
        """Connect now instead of at the first request."""
        self._driver.run_blocking(self._client._connect_flow())
        return self

    def reset(self, **kwargs: Any) -> StepResult[ObsT]:
        """Begin an episode; keywords go to the environment's `reset`."""
        return self._driver.run_blocking(self._client._reset_flow(kwargs))

    def step(self, action: ActT, **kwargs: Any) -> StepResult[ObsT]:
        """Take an action."""
        return self._driver.run_blocking(self._client._step_flow(action, kwargs))

    def state(self) -> StateT:
        """Ask for the environment's state."""
        return self._driver.run_blocking(self._client._state_flow())

    def disconnect(self) -> None:
        """End the session and hang up; the provider keeps running."""
        self._driver.run_blocking(hang_up(self._driver))

    def detach(self) -> str:
        """Hang up but leave the session, and return the token that another client continues it with."""
        return self._driver.run_blocking(detach(self._driver))

    @property
    def resume_token(self) -> str | None:
        """What another client continues this session with; see `EnvClient.resume_token`."""
        return self._client.resume_token

    def close(self) -> None:
        """End the session, the sessions of child clients, and the provider."""
        self._client._close_blocking()

    def new_session(self) -> SyncEnvClient[ActT, ObsT, StateT]:
        """Return another blocking client of the same server, with a session of its own."""
        return SyncEnvClient(self._client.new_session())

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._client, name)
        if not callable(value) or inspect.isclass(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._driver.run_helper(value, *args, **kwargs)

        return call
