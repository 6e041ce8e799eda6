"""What became of an episode: the same as without faults, an honest error, or a lie, and which."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from .environment import Deed
from .episode import Ask, Renewed, Trace


class Outcome(Enum):
    """How an episode, or a wait in line, can end. All but the first three are violations."""

    IDENTICAL = "identical"
    TYPED_ERROR = "typed error"
    GONE = "left the line"
    OTHER_ERROR = "other error"
    SILENT_RESET = "SILENT RESET"
    RUN_TWICE = "RUN TWICE"
    LEFT_OUT = "STEP LEFT OUT"
    WRONG_REPLY = "WRONG REPLY"
    OUT_OF_ORDER = "OUT OF ORDER"
    NEVER_SERVED = "NEVER SERVED"
    TOO_MANY = "MORE THAN SLOTS"


VIOLATIONS = frozenset(set(Outcome) - {Outcome.IDENTICAL, Outcome.TYPED_ERROR, Outcome.GONE})


@dataclass(frozen=True)
class Verdict:
    """An outcome and, where there is more to say, what was seen."""

    outcome: Outcome
    detail: str = ""


def judge(owner: int, script: list[Ask], trace: Trace, twin: Trace, deeds: dict[str, list[Deed]]) -> Verdict:
    """Compare an episode with its twin, and with what the server's environments did for it."""
    for ask, reply, expected in zip(script, trace.replies, twin.replies, strict=False):
        if reply != expected:
            return _lie(owner, ask, reply, expected)
    if isinstance(trace.afterwards, dict):
        after = Ask("step", trace.after_number)
        return _lie(owner, after, trace.afterwards, _after(twin, len(trace.replies), after.number))
    hidden = _hidden(script, trace, deeds)
    if hidden is not None:
        return hidden
    if trace.error is None:
        return Verdict(Outcome.IDENTICAL)
    name = type(trace.error).__name__
    reason = getattr(trace.error, "reason", None)
    typed = any(base is Renewed or base.__name__ == "OpenEnvError" for base in type(trace.error).__mro__)
    return Verdict(Outcome.TYPED_ERROR if typed else Outcome.OTHER_ERROR, f"{name}: {reason}" if reason else name)


def _after(twin: Trace, done: int, number: int) -> dict[str, Any]:
    """What a step that goes on after an error would have had to see, as far as it is known."""
    last = twin.replies[done - 1]
    return {**last, "kind": "step", "number": number, "count": (last.get("count") or 0) + 1}


def _lie(owner: int, ask: Ask, reply: dict[str, Any], expected: dict[str, Any]) -> Verdict:
    detail = f"{ask.kind} {ask.number}: {_brief(reply)} instead of {_brief(expected)}"
    if ask.kind != "state" and (reply.get("number") != ask.number or reply.get("kind") != ask.kind):
        return Verdict(Outcome.WRONG_REPLY, detail)
    if reply.get("owner") != owner:
        fresh = reply.get("owner") == -1
        return Verdict(Outcome.SILENT_RESET if fresh else Outcome.WRONG_REPLY, detail)
    counts = [content.get("step_count" if ask.kind == "state" else "count") or 0 for content in (reply, expected)]
    if counts[0] > counts[1]:
        return Verdict(Outcome.RUN_TWICE, detail)
    return Verdict(Outcome.SILENT_RESET if counts[0] < counts[1] else Outcome.WRONG_REPLY, detail)


def _brief(reply: dict[str, Any]) -> str:
    content = {key: reply.get(key) for key in ("owner", "number", "count", "step_count", "digest")}
    return str({key: value for key, value in content.items() if value is not None})


def _hidden(script: list[Ask], trace: Trace, deeds: dict[str, list[Deed]]) -> Verdict | None:
    """Find what the client did not see: each environment began with a reset, and took each step once and in order."""
    wanted = [Deed(ask.kind, ask.number) for ask in script if ask.kind != "state"]
    longest = 0
    for done in deeds.values():
        if not done or (len(trace.renewed) > 1 and done == trace.renewed):  # one that only began is like any other
            continue
        if done[0].kind != "reset":
            return Verdict(Outcome.SILENT_RESET, f"an environment that was never reset took {done[0]}")
        if len(set(done)) < len(done):
            return Verdict(Outcome.RUN_TWICE, f"the environment did {done}")
        start = wanted.index(done[0])
        if done != wanted[start : start + len(done)]:
            return Verdict(Outcome.LEFT_OUT, f"the environment did {done}, asked was {wanted}")
        longest = max(longest, start + len(done))
    answered = sum(ask.kind != "state" for ask in script[: len(trace.replies)])
    if longest < answered:
        return Verdict(Outcome.WRONG_REPLY, f"{answered} replies, {longest} deeds")
    return None
