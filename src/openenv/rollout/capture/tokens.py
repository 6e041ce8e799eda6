"""Token ids, log-probabilities and texts of what a model sampled, aligned one to one.

Knows the shapes in which engines send them (vLLM, SGLang, llama.cpp, OpenAI). Nothing is tokenised here: what the
engine does not say is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_ID_PREFIX = "token_id:"


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled in one call: three lists of one length."""

    ids: tuple[int | None, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    texts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Codes of what did not fit together: `logprob_misalign`, `id_mismatch`, `positive_logprob`."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_ids(self) -> bool:
        """Say whether the engine gave an id for every token."""
        return bool(self.ids) and None not in self.ids

    @property
    def has_logprobs(self) -> bool:
        """Say whether the engine gave a log-probability for any token."""
        return any(value is not None for value in self.logprobs)


@dataclass(slots=True)
class TokenLog:
    """Collects ids and log-probability entries as they come, and aligns them at the end."""

    _pieces: list[tuple[list[int], list[Any]]] = field(default_factory=list)

    def add(self, ids: Any, entries: Any) -> None:
        """Take what one chunk said: `ids` and `entries` are the engine's lists, or anything where it has none."""
        known = _ids_in(ids)
        listed = entries if isinstance(entries, list) else []
        if known or listed:
            self._pieces.append((known, listed))

    def __len__(self) -> int:
        """Return how many tokens were sampled so far, as far as the engine says."""
        return max(sum(len(ids) for ids, _ in self._pieces), sum(len(entries) for _, entries in self._pieces))

    def sampled(self) -> Sampled:
        """Return the tokens, aligned."""
        all_ids = [token for ids, _ in self._pieces for token in ids]
        all_entries = [entry for _, entries in self._pieces for entry in entries]
        if not all_ids or not all_entries or len(all_ids) == len(all_entries):
            return _aligned([(all_ids, all_entries)])
        return _aligned(self._pieces)  # pair chunk by chunk: a gap in one does not shift all that follow


def _ids_in(value: Any) -> list[int]:
    if not isinstance(value, list):
        return []
    return [token for token in value if isinstance(token, int) and not isinstance(token, bool)]


def _aligned(pieces: Iterable[tuple[list[int], list[Any]]]) -> Sampled:
    ids: list[int | None] = []
    logprobs: list[float | None] = []
    texts: list[str] = []
    problems: set[str] = set()
    for known, entries in pieces:
        if known and entries and len(known) != len(entries):
            problems.add("logprob_misalign")
        usable: Sequence[Any] = entries if not known or len(known) == len(entries) else []
        for position in range(max(len(known), len(usable))):
            entry = usable[position] if position < len(usable) else None
            said, logprob, text = _entry(entry)
            token = known[position] if known else said
            if known and said is not None and said != token:
                problems.add("id_mismatch")
            if logprob is not None and logprob > 0:
                problems.add("positive_logprob")
            ids.append(token)
            logprobs.append(logprob)
            texts.append(text)
    return Sampled(tuple(ids), tuple(logprobs), tuple(texts), tuple(sorted(problems)))


def _entry(entry: Any) -> tuple[int | None, float | None, str]:
    """Read one log-probability entry: the id that it names, the value, the text."""
    if not isinstance(entry, dict):
        return None, None, ""
    text = entry.get("token")
    text = text if isinstance(text, str) else ""
    token: int | None = None
    for key in ("id", "token_id"):
        value = entry.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            token = value
    if token is None and text.startswith(_ID_PREFIX) and text[len(_ID_PREFIX) :].isdigit():
        token = int(text[len(_ID_PREFIX) :])
    logprob = entry.get("logprob")
    if isinstance(logprob, bool) or not isinstance(logprob, (int, float)) or not math.isfinite(logprob):
        return token, None, text
    return token, float(logprob), text
