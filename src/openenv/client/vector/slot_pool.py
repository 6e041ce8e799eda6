"""`SlotPool`: how the requests of a `VectorEnv` reach its slots, the interface of both ways.

    session_pool.SessionPool     sessions of servers, over WebSockets
    server.vectors.pool          environments in worker processes of this machine, in shared memory

Must not know episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from openenv.errors import OpenEnvError
from openenv.protocol.columns import ColumnBlock, ColumnLayout

STEPS: Final = 1
BEGINS: Final = 2
"""What a slot does in a step in columns; 0 for nothing."""

OnAnswer = Callable[[Any, str, Any, "OpenEnvError | None"], None]
"""Receives a slot, the request's type, and the reply's data or an error."""


class SlotPool(ABC):
    """The slots, and one unanswered request for each of them."""

    slots: Sequence[Any]
    connections: Sequence[Any] = ()
    layout: ColumnLayout | None = None
    """The arrays of a step in columns; None if the slots take none."""
    missing: set[int]
    """Slots without an environment."""

    @property
    @abstractmethod
    def begins_episodes(self) -> bool:
        """Whether a step in columns may begin episodes in some of its slots."""

    @abstractmethod
    def open(self, slot: Any) -> None:
        """Open a session, with the next write, for a slot that has none."""

    @abstractmethod
    def request(self, slot: Any, kind: str, data: Any = None) -> None:
        """Send a request with the next write; a slot without a session gets one first."""

    @abstractmethod
    def flush(self, *, each: bool = False, prepare: Callable[[Any], None] | None = None) -> None:
        """Send the waiting requests.

        Args:
            each: Whether slots are answered one by one.
            prepare: Makes the requests of some slots just before they are sent.
        """

    @abstractmethod
    def wait(self, enough: Callable[[], bool], timeout_s: float | None, *, whole: bool = False) -> None:
        """Take in replies until there are enough.

        Args:
            enough: Whether there are.
            timeout_s: How long to wait; None for no limit.
            whole: Whether they are not enough before all results of a step in columns have come.

        Raises:
            RequestTimeout: They did not come in time; they still may.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """End a wait in another thread, soon and for good."""

    @abstractmethod
    def keep_alive(self) -> None:
        """Answer pings while no call waits."""

    @abstractmethod
    def close(self) -> None:
        """End all sessions; never raises."""

    @abstractmethod
    def forget(self) -> None:
        """Drop everything without a message."""

    # -- steps in columns; the defaults are those of slots without them ---------------------------------------------

    def begin_columns(self, actions: Sequence[Any], chosen: Any) -> None:
        """Take a step in the chosen slots, with the next write.

        Args:
            actions: One array for each action column, with a row for each slot of the vector.
            chosen: For each slot `STEPS`, `BEGINS` (an episode, if the pool can) or 0, as bytes; None if all step.
        """
        raise NotImplementedError

    def take_columns(self, *, whole: bool) -> ColumnBlock | None:
        """Return the results of a step in columns that have come since the last call.

        Args:
            whole: Return a row for each slot of the vector if all results have come. Rows of slots that did not take
                the step have no meaning; their flags are not set.
        """
        return None

    def columns_left(self) -> int:
        """Return how many results of a step in columns are still to come."""
        return 0

    def columns_untaken(self) -> int:
        """Return how many results of a step in columns were not taken yet, whether they have come or not."""
        return 0

    def in_columns(self, index: int) -> bool:
        """Whether a slot takes part in a step in columns whose results were not taken yet."""
        return False

    def use_for_resets(self, kwargs: Mapping[str, Any]) -> None:
        """Set the keywords of resets that follow the end of an episode in the same step."""
        return
