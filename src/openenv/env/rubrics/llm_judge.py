"""A rubric that asks a language model for the score, and the reading of scores from the model's answers.

Knows prompts and the ways a score is written. Must not know which model answers or how it is reached, and must not
turn an endpoint that is down into a reward.
"""

# The prompt contains the agent's text, which can make a working endpoint fail: too long, refused by a filter, no UTF-8.
#
#   prompt ──> answer ──> score
#     │ fails
#     ▼
#   `_PROBE` ──> fails: the endpoint is down, raise
#     │ answer
#     ▼
#   prompt ──> answer ──> score
#     │ fails: the agent's text is the cause, so it earns `default_score`, or 0. Raising would discard its failure

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from .rubric import Rubric

logger = logging.getLogger(__name__)

_PROBE = "Answer with the word yes."
"""A prompt without the agent's text: shows whether the endpoint works."""
_NUMBER = r"[-+\N{MINUS SIGN}]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE_WORD = r"(?:-|\N{EN DASH}|\N{EM DASH}|to\b|and\b|through\b)"
# A number, but not part of a word, a date, a version, a longer number or a range.
_VALUE = (
    rf"(?<![\w.,/\-\N{{MINUS SIGN}}])(?P<number>{_NUMBER})"
    rf"(?:\s*(?:/|out\s+of\b)\s*(?P<whole>{_NUMBER})|\s*(?P<percent>%|percent\b))?"
    rf"(?![\w/%]|[.,]\d|\s*/\s*\d|\s*{_RANGE_WORD}\s*{_NUMBER})"
)
_THINKING = re.compile(r"<think>.*?</think>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<score>([^<]*)</score>", re.IGNORECASE)
_LABEL = re.compile(
    rf"(?P<verdict>\b(?:final|overall|total)\s+)?\b(?:score|rating)\b[\"']?\s*(?P<note>\([^)]*\))?\s*[:=]\s*[\"']?{_VALUE}",
    re.IGNORECASE,
)
_RANGE = re.compile(rf"(?<![\w.])(?P<low>{_NUMBER})\s*{_RANGE_WORD}\s*(?P<high>{_NUMBER})(?!\w|\.\d)", re.IGNORECASE)
_ANYWHERE = re.compile(_VALUE, re.IGNORECASE)


class ScoreParseError(ValueError):
    """Report that a model's answer holds no score, or more than one.

    Attributes:
        reason: the problem with the answer.
        response: the whole answer.
    """

    def __init__(self, reason: str, response: str) -> None:
        super().__init__(reason, response)
        self.reason = reason
        self.response = response

    def __str__(self) -> str:
        excerpt = self.response if len(self.response) <= 200 else f"{self.response[:200]}..."
        return f"cannot read a score from the judge's answer: {self.reason}; the answer was {excerpt!r}"


class CompletionClient(Protocol):
    """The part of a language model client that a judge uses."""

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        """Return the model's answer to a prompt."""
        ...


class CachedClient:
    """A client that keeps its answers by prompt, in a file that threads and processes can share.

        LLMJudge("Rate this answer: {action}", CachedClient(client, "judge.sqlite"), votes=5)

    An answer belongs to the prompt, its further arguments, the number of the vote, and the client's `model`. Use
    another file if the same name stands for another model.

    Args:
        client: The client that answers new prompts.
        path: The file, an SQLite database; it is created if it does not exist.
    """

    def __init__(self, client: CompletionClient, path: str | Path) -> None:
        self.path = Path(path)
        self._client = client
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._opened() as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        """Return the answer to a prompt."""
        return await self.vote(prompt, 0, **kwargs)

    async def vote(self, prompt: str, number: int, **kwargs: Any) -> str:
        """Return one of several answers to a prompt, by its number."""
        key = self._key(prompt, number, kwargs)
        kept = await asyncio.to_thread(self._run, "SELECT answer FROM answers WHERE key = ?", key)
        if kept is not None:
            return kept
        answer = await self._client.complete(prompt, **kwargs)
        # The first answer counts, so that all processes give the same score.
        await asyncio.to_thread(self._run, "INSERT OR IGNORE INTO answers VALUES (?, ?)", key, answer)
        return answer

    async def forget(self, prompt: str, number: int = 0, **kwargs: Any) -> None:
        """Drop an answer, because it cannot be used."""
        await asyncio.to_thread(self._run, "DELETE FROM answers WHERE key = ?", self._key(prompt, number, kwargs))

    def _key(self, prompt: str, number: int, kwargs: dict[str, Any]) -> str:
        parts = [str(getattr(self._client, "model", "")), prompt, number, sorted(kwargs.items())]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

    # A connection per call: rubrics are copied to other threads and processes, and a judge's call takes seconds.
    def _run(self, statement: str, *values: str) -> str | None:
        with self._opened() as database:
            row = database.execute(statement, values).fetchone()
        return None if row is None else str(row[0])

    def _opened(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(self.path, timeout=30.0, isolation_level=None))


class LLMJudge(Rubric):
    """Score with the number a language model answers to a prompt.

    An answer without a clear score raises, unless the caller chose a `default_score` for this case: a judge that
    failed must not look like an action that deserved 0. Errors of the client are raised if the endpoint is down: if it
    also fails without the action's text. If only that text makes it fail, the score is `default_score`, or 0.

    Args:
        prompt_template: text with `{action}` and `{observation}`, which `str.format` fills in.
        client: what completes the prompt.
        score_pattern: regular expression whose first match, or its first group, is the score; without one, see
            `parse_score`.
        default_score: score of an answer that holds none. Without one (or with None) the attribute and the state
            read 0.0, but `uses_default` is false and such an answer raises.
        normalize: clamp the score to [0, 1]; `default_score` is taken as it is.
        votes: how often the model is asked; the score is the median. More votes make a sampled judge steadier.

    Raises:
        ValueError: `votes` is below 1.
    """

    def __init__(
        self,
        prompt_template: str,
        client: CompletionClient,
        *,
        score_pattern: str | None = None,
        default_score: float | None = None,
        normalize: bool = True,
        votes: int = 1,
    ) -> None:
        super().__init__()
        if votes < 1:
            raise ValueError(f"votes must be at least 1, not {votes}")
        self.votes = votes
        self.prompt_template = prompt_template
        self.uses_default = default_score is not None
        self.default_score = 0.0 if default_score is None else default_score
        self.normalize = normalize
        self._client = client
        self._score_pattern = _compiled(score_pattern)

    async def forward(self, action: Any, observation: Any) -> float:
        """Ask the model, and read the score from its answer.

        Raises:
            ScoreParseError: the answer holds no clear score, and no default was chosen.
            Exception: the client's error, if the endpoint is down.
        """
        prompt = self._render_prompt(action, observation)
        votes = [asyncio.ensure_future(self._vote(prompt, number)) for number in range(self.votes)]
        try:
            return median(await asyncio.gather(*votes))
        finally:
            for vote in votes:  # after the error of one of them
                vote.cancel()

    async def _vote(self, prompt: str, number: int) -> float:
        """Return the score of one answer."""
        try:
            response = await self._complete(prompt, number)
        except Exception as exc:
            try:
                await self._client.complete(_PROBE)
            except Exception:
                raise exc from None
            try:
                response = await self._complete(prompt, number)  # the first failure may have been an accident
            except Exception as again:
                logger.warning("the judge's model fails only with this action's text: %s", again)
                return self.default_score
        try:
            return self._parse_score(response)
        except ScoreParseError:
            if isinstance(self._client, CachedClient):  # the next answer may be readable
                await self._client.forget(prompt, number)
            raise

    async def _complete(self, prompt: str, number: int) -> str:
        if isinstance(self._client, CachedClient):
            return await self._client.vote(prompt, number)
        return await self._client.complete(prompt)

    def _render_prompt(self, action: Any, observation: Any) -> str:
        """Fill in the prompt; override to render actions and observations in another way."""
        return self.prompt_template.format(action=action, observation=observation)

    def _parse_score(self, response: str) -> float:
        """Read the score from an answer; override to read another format."""
        try:
            if self._score_pattern is None:
                score = parse_score(response)
            else:
                score = _match_score(self._score_pattern, response)
        except ScoreParseError:
            if not self.uses_default:
                raise
            return self.default_score
        return min(max(score, 0.0), 1.0) if self.normalize else score

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration; the client is not part of it."""
        return {
            **super().state_dict(),
            "prompt_template": self.prompt_template,
            "score_pattern": None if self._score_pattern is None else self._score_pattern.pattern,
            "default_score": self.default_score,
            "normalize": self.normalize,
            **({"votes": self.votes} if self.votes > 1 else {}),  # the published state has no votes
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the configuration.

        A `default_score` other than 0.0 was chosen by a caller and is used from now on; 0.0 may be the
        value of an unset default, so it leaves `uses_default` alone.
        """
        super().load_state_dict(state)
        self.prompt_template = state.get("prompt_template", self.prompt_template)
        self.default_score = state.get("default_score", self.default_score)
        self.uses_default = self.uses_default or self.default_score != 0.0
        self.normalize = state.get("normalize", self.normalize)
        self.votes = state.get("votes", self.votes)
        if "score_pattern" in state:
            self._score_pattern = _compiled(state["score_pattern"])


def parse_score(response: str) -> float:
    """Read the one score an answer gives, without clamping it.

    The first of these that occurs decides: `<score>0.8</score>`; a JSON object with a `score`; `Score: 0.8`
    (a final, overall or total score before the others); the only value in the text. A value is a number, a fraction
    (`8/10`, `8 out of 10`) or a percentage. A stated scale such as "0 to 1" is not a value; beside another scale a
    bare number is not clear.

    Raises:
        ScoreParseError: the answer has no score, or several that differ.
    """
    text = re.sub(r"[*`]", "", _THINKING.sub("", response))
    bare_ok = not _states_other_scale(text)
    tags = _TAG.findall(text)
    if tags:
        return _only([_whole_value(tag, bare_ok) for tag in tags], "score tag", response)
    objects = [candidate for candidate in _json_objects(text) if "score" in candidate]
    if objects:
        return _only([_json_value(candidate["score"], bare_ok) for candidate in objects], "JSON score", response)
    labels = list(_LABEL.finditer(text))
    if labels:
        verdicts = [label for label in labels if label["verdict"]]
        return _only([_labelled_value(label, bare_ok) for label in verdicts or labels], "labelled score", response)
    return _lone_value(text, response)


def _only(values: list[float | None], kind: str, response: str) -> float:
    """Return the value that all readable ones agree on."""
    distinct = {value for value in values if value is not None}
    if not distinct:
        raise ScoreParseError(f"its {kind} is not a clear value", response)
    if len(distinct) > 1:
        raise ScoreParseError(f"it gives several values as {kind}: {sorted(distinct)}", response)
    return distinct.pop()


def _lone_value(text: str, response: str) -> float:
    """Return the only value in a text, leaving ranges out; beside a range other than 0 to 1 it may not be bare."""
    bare_ok = all(map(_is_unit_range, _RANGE.finditer(text)))
    values = list(_ANYWHERE.finditer(_RANGE.sub(" ", text)))
    if not values:
        raise ScoreParseError("it holds no score", response)
    return _only([_value(value, bare_ok) for value in values], "score", response)


def _labelled_value(label: re.Match[str], bare_ok: bool) -> float | None:
    """Return the value after a label; the note in brackets behind the label may put it on another scale."""
    note = label["note"] or ""
    other_scale = re.search(r"\d", note) and not any(map(_is_unit_range, _RANGE.finditer(note)))
    return _value(label, bare_ok and not other_scale)


def _json_objects(text: str) -> Iterator[dict[str, object]]:
    """Iterate over the outermost JSON objects in a text."""
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        try:
            candidate, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            yield candidate
        start = text.find("{", end)


def _json_value(value: object, bare_ok: bool) -> float | None:
    if isinstance(value, str):
        return _whole_value(value, bare_ok)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _finite(value) if bare_ok else None


def _whole_value(text: str, bare_ok: bool) -> float | None:
    """Return the value that a text consists of."""
    match = _ANYWHERE.fullmatch(text.strip())
    return _value(match, bare_ok) if match else None


def _value(match: re.Match[str], bare_ok: bool) -> float | None:
    """Return the number in a match of `_VALUE`, or None if it is ambiguous."""
    number = _number(match["number"])
    if match["percent"]:
        return _finite(number / 100)
    if match["whole"]:
        whole = _number(match["whole"])
        return _finite(number / whole) if whole > 0 else None
    return _finite(number) if bare_ok else None


def _states_other_scale(text: str) -> bool:
    """Say whether the text names a scale, such as 1 to 10, on which a bare 1 would not be the full score."""
    return any(
        "scale" in text[max(0, stated.start() - 25) : stated.end() + 15].lower() and not _is_unit_range(stated)
        for stated in _RANGE.finditer(text)
    )


def _is_unit_range(match: re.Match[str]) -> bool:
    return (_number(match["low"]), _number(match["high"])) == (0.0, 1.0)


def _match_score(pattern: re.Pattern[str], response: str) -> float:
    """Return the first match of a caller's pattern: its first group, or the whole match if it has no group."""
    match = pattern.search(response)
    if match is None:
        raise ScoreParseError(f"nothing matches {pattern.pattern!r}", response)
    text = match[1] if pattern.groups else match[0]
    try:
        score = _finite(float(text))
    except (TypeError, ValueError):
        score = None
    if score is None:
        raise ScoreParseError(f"{pattern.pattern!r} matches {text!r}, which is not a number", response)
    return score


def _number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-"))


def _finite(number: float) -> float | None:
    try:
        return float(number) if math.isfinite(number) else None
    except OverflowError:  # an integer of JSON that no float can hold
        return None


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    return None if pattern is None else re.compile(pattern)
