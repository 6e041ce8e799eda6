"""The same for `VectorEnv`: several episodes at once over few connections, each judged by itself.

Either all slots step together, or each goes on as soon as it is among the first k that are ready, whatever the others
do. What happens to slots that fail is decided by the seed, and is one of the policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from openenv.client.vector.vector_env import SlotsFailed, VectorEnv, VectorResult
from openenv.errors import OpenEnvError

from .environment import Deed, Seen, hashed
from .episode import AFTERWARDS, PING_S, Ask, Renewed, Trace, is_first_step
from .runner import SLOTS

CONNECTIONS = 2
FIRST_OWNER = 10_000_000
POLICIES: tuple[Literal["raise", "mask", "restart"], ...] = ("mask", "raise", "restart")


def owners_of(seed: int) -> list[int]:
    """Number the episodes of a seed."""
    return [FIRST_OWNER + seed * SLOTS + slot for slot in range(SLOTS)]


def steps_of(script: list[Ask]) -> list[Ask]:
    """Leave only what a vector can be asked for in one go: a reset and steps."""
    words = [(ask.word, ask.pause_s) for ask in script[1:]]
    return [Ask("reset", 0), *(Ask("step", number, *word) for number, word in enumerate(words, 1))]


def play_vector(urls: Sequence[str], seed: int, script: list[Ask], *, first_k: bool = False) -> list[Trace]:
    """Play a script in every slot, on one server or several; codec, policy and manner of waiting go by the seed."""
    vector: VectorEnv[Any, Any] = VectorEnv(
        urls,
        SLOTS,
        connections=CONNECTIONS,
        codec="json" if seed % 2 else "msgpack",
        autoreset="disabled",
        on_failure=POLICIES[seed % 3] if first_k else "mask",
        reconnect_s=15.0,
        connect_timeout_s=2.0,
        message_timeout_s=20.0,
        ping_interval_s=PING_S,
        ping_timeout_s=PING_S,
    )
    game = _Game(vector, seed, script)
    try:
        if first_k:
            game.play_first_k(1 + seed // 3 % 3)
        else:
            game.play_together(one_by_one=seed % 4 > 1)
        game.go_on()
    finally:
        vector.close()
    return game.traces


class _Game:
    """A script in each slot of a vector."""

    def __init__(self, vector: VectorEnv[Any, Any], seed: int, script: list[Ask]) -> None:
        self._vector = vector
        self._script = script
        self._owners = owners_of(seed)
        self.traces = [Trace() for _ in range(SLOTS)]

    def play_together(self, *, one_by_one: bool) -> None:
        """Have all slots take each step together."""
        for ask in self._script:
            slots = range(SLOTS)
            if ask.kind == "step" and not self._send(dict.fromkeys(slots, ask), each=one_by_one):
                return
            missing = set(slots)
            while missing and self._wait(missing, ask.kind, k=1 if one_by_one else None):
                pass

    def play_first_k(self, k: int) -> None:
        """Have each slot go on when it is among the first that are ready; they are not equally quick."""
        waiting = set(range(SLOTS))
        self._wait(waiting, "reset", k=None)
        while True:
            ready = {slot: ask for slot in range(SLOTS) if slot not in waiting and (ask := self._next(slot))}
            if ready and not self._send(ready, each=True):
                return
            waiting |= set(ready)
            if not waiting or not self._wait(waiting, "step", k=k):
                return

    def go_on(self) -> None:
        """Take one more step in slots that have failed, as a loop does that logs errors."""
        failed = {slot for slot, trace in enumerate(self.traces) if trace.error is not None}
        after = Ask("step", len(self._script), AFTERWARDS)
        if failed and self._send(dict.fromkeys(failed, after), each=False):
            while failed and self._wait(failed, "step", k=None):
                pass

    def _next(self, slot: int) -> Ask | None:
        trace = self.traces[slot]
        done = len(trace.replies)
        if trace.error is not None or done == len(self._script):
            return None
        ask = self._script[done]
        return Ask(ask.kind, ask.number, ask.word, (slot + done) % SLOTS * 0.01)

    def _send(self, asks: dict[int, Ask], *, each: bool) -> bool:
        moves = {
            slot: {"owner": self._owners[slot], "number": ask.number, "word": ask.word, "pause_s": ask.pause_s}
            for slot, ask in asks.items()
        }
        try:
            self._vector.step_async(moves, each=each)
        except OpenEnvError as exc:
            self._fail(list(asks), exc)
            return False
        return True

    def _wait(self, missing: set[int], kind: str, *, k: int | None) -> bool:
        """Take in what is ready; say whether it is worth while to go on."""
        try:
            for one in self._results(kind, k=k).by_slot:
                missing.discard(one.slot)
                self._note(one, kind)
        except OpenEnvError as exc:
            self._fail(list(missing), exc)
            return False
        return True

    def _results(self, kind: str, *, k: int | None) -> VectorResult[Any]:
        try:
            return self._vector.reset(seed=self._owners, number=0) if kind == "reset" else self._vector.step_wait(k=k)
        except SlotsFailed as exc:
            return exc.result

    def _fail(self, slots: Sequence[int], exc: OpenEnvError) -> None:
        for slot in slots:
            trace = self.traces[slot]
            if trace.error is None:
                trace.error = exc
            elif trace.afterwards is None:
                trace.afterwards = exc

    def _note(self, one: Any, kind: str) -> None:
        trace = self.traces[one.slot]
        content = None if one.result is None else {"kind": kind, **_content(one.result)}
        is_new = one.started and kind == "step"  # the policy has begun another episode, and says so
        if trace.error is None:
            if one.error is None and content is not None:
                trace.replies.append(content)
            else:
                trace.error = one.error
                trace.renewed = [Deed("reset", 0)] if is_new and content is not None else []
        elif trace.afterwards is None and trace.replies:
            trace.after_number = len(self._script)
            after = Ask("step", trace.after_number, AFTERWARDS)
            if one.error is not None:
                trace.afterwards = one.error
            elif is_new:
                trace.afterwards = Renewed("restarted")
            elif trace.renewed and is_first_step(
                content or {}, after, self._owners[one.slot], hashed("reset", None, 0)
            ):
                trace.afterwards = Renewed("restarted")
                trace.renewed.append(Deed("step", after.number))
            else:
                trace.afterwards = content


def _content(result: Any) -> dict[str, Any]:
    content = {**result.observation, "reward": result.reward}
    return {key: content.get(key) for key in (*Seen.model_fields, "step_count", "episode_id")}
