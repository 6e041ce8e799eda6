"""The same for `VectorEnv`: several episodes at once over few connections, each judged by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openenv.client.vector import SlotsFailed, VectorEnv, VectorResult
from openenv.errors import OpenEnvError

from .environment import Seen
from .episode import PING_S, Ask, Trace
from .runner import SLOTS

CONNECTIONS = 2
FIRST_OWNER = 10_000_000


def owners_of(seed: int) -> list[int]:
    """Number the episodes of a seed."""
    return [FIRST_OWNER + seed * SLOTS + slot for slot in range(SLOTS)]


def steps_of(script: list[Ask]) -> list[Ask]:
    """Leave only what a vector can be asked for in one go: a reset and steps."""
    words = [(ask.word, ask.pause_s) for ask in script[1:]]
    return [Ask("reset", 0), *(Ask("step", number, *word) for number, word in enumerate(words, 1))]


def play_vector(url: str, seed: int, script: list[Ask]) -> list[Trace]:
    """Play a script in every slot; codec and manner of waiting go by the seed."""
    owners, traces = owners_of(seed), [Trace() for _ in range(SLOTS)]
    vector: VectorEnv[Any, Any] = VectorEnv(
        url,
        SLOTS,
        connections=CONNECTIONS,
        codec="json" if seed % 2 else "msgpack",
        autoreset="disabled",
        on_failure="mask",
        reconnect_s=15.0,
        connect_timeout_s=2.0,
        message_timeout_s=20.0,
        ping_interval_s=PING_S,
        ping_timeout_s=PING_S,
    )
    try:
        for ask in script:
            _play_one(vector, ask, owners, traces, range(SLOTS), one_by_one=seed % 4 > 1)
        failed = [slot for slot, trace in enumerate(traces) if trace.error is not None]
        _play_one(vector, Ask("step", len(script), "afterwards"), owners, traces, failed, one_by_one=False)
    finally:
        vector.close()
    return traces


def _play_one(
    vector: VectorEnv[Any, Any],
    ask: Ask,
    owners: list[int],
    traces: list[Trace],
    slots: Sequence[int],
    *,
    one_by_one: bool,
) -> None:
    missing = set(slots)
    try:
        if ask.kind == "step":
            move = {"number": ask.number, "word": ask.word, "pause_s": ask.pause_s}
            vector.step_async({slot: {"owner": owners[slot], **move} for slot in slots}, each=one_by_one)
        while missing:
            for one in _results(vector, ask, owners, k=1 if one_by_one else None).by_slot:
                missing.discard(one.slot)
                _note(traces[one.slot], one.error or {"kind": ask.kind, **_told(one.result)}, ask)
    except OpenEnvError as exc:
        for slot in missing:
            _note(traces[slot], exc, ask)


def _results(vector: VectorEnv[Any, Any], ask: Ask, owners: list[int], *, k: int | None) -> VectorResult[Any]:
    try:
        return vector.reset(seed=owners, number=ask.number) if ask.kind == "reset" else vector.step_wait(k=k)
    except SlotsFailed as exc:
        return exc.result


def _told(result: Any) -> dict[str, Any]:
    told = {**result.observation, "reward": result.reward}
    return {key: told.get(key) for key in (*Seen.model_fields, "step_count", "episode_id")}


def _note(trace: Trace, told: dict[str, Any] | Exception, ask: Ask) -> None:
    if trace.error is None:
        if isinstance(told, Exception):
            trace.error = told
        else:
            trace.replies.append(told)
    elif trace.afterwards is None and trace.replies:
        trace.afterwards, trace.after_number = told, ask.number
