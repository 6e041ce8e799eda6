"""What a client has sent before there was room for the answers: kept, in its order, while no more is read.

A socket that is told to read no more may have read some already, and a client that does not read its answers must not
make the server keep more of them. Knows messages as bytes; must not know what they mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from ..runners import loop_local
from .sockets import Socket

logger = logging.getLogger(__name__)


class LoopTurns:
    """Whose turn it is on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taken = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopTurns:
        """Return the loop's own turns."""
        return loop_local(loop, cls, lambda: cls(loop))

    def take(self) -> bool:
        """Take this pass, unless somebody has it or waits for it."""
        if self._is_taken:
            return False
        self._is_taken = True
        self._loop.call_soon(self._pass_on)
        return True

    def wait(self, action: Callable[[], None]) -> None:
        """Have something done in a later pass, in order; only for whoever could not `take` this one."""
        self._waiting.append(action)

    def _pass_on(self) -> None:
        if not self._waiting:
            self._is_taken = False
            return
        self._loop.call_soon(self._pass_on)
        try:
            self._waiting.popleft()()
        except Exception:
            logger.exception("a message could not be handled in its turn")


class Backpressure:
    """The messages of one connection that have to wait.

    Args:
        socket: Where they come from.
        take: Takes one: its payload, and whether it was binary.
        is_loaded: Says whether there is enough to do already.
        takes_turns: Says of a message whether it means so much work that others must not wait for one after it too.
        turns: Whose turn it is then.
    """

    def __init__(
        self,
        socket: Socket,
        take: Callable[[bytes, bool], None],
        is_loaded: Callable[[], bool],
        takes_turns: Callable[[bytes], bool],
        turns: LoopTurns,
    ) -> None:
        self._socket = socket
        self._take = take
        self._is_loaded = is_loaded
        self._takes_turns = takes_turns
        self._turns = turns
        self._waits_its_turn = False
        self._held: deque[tuple[bytes, bool]] = deque()
        self._is_at_work = False
        self.is_paused = False

    def receive(self, payload: bytes, binary: bool) -> None:
        """Take a message, or hold it while there is enough to do or to send."""
        if self.is_paused or self._socket.is_full or self._waits_its_turn:
            self._held.append((payload, binary))
            self.pause()
        elif self._takes_turns(payload) and not self._turns.take():
            self._held.append((payload, binary))
            self._waits_its_turn = True
            self._turns.wait(self._take_turn)
        else:
            self._take(payload, binary)

    def _take_turn(self) -> None:
        self._waits_its_turn = False
        self._take_held()
        if self._held:
            self.pause()
        self.go_on()  # what was taken may have made us pause, and be done already

    def pause(self) -> None:
        """Read no more for now."""
        if not self.is_paused:
            self.is_paused = True
            self._socket.pause()

    def go_on(self) -> None:
        """Take what was held, as far as there is room for the answers; read again once that is all."""
        if self._is_at_work or not self.is_paused:
            return  # what is taken here may be done at once, and lead back here
        self._take_held()
        if not (self._held or self._is_loaded()):
            self.is_paused = False
            self._socket.resume()

    def _take_held(self) -> None:
        self._is_at_work = True
        try:
            while self._held and not (self._is_loaded() or self._socket.is_full):
                self._take(*self._held.popleft())
        finally:
            self._is_at_work = False

    def drop(self) -> None:
        """Forget what was held: the client is gone."""
        self._held.clear()
