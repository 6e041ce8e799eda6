"""The artificial tokeniser of scripted models: single bytes, common words, and a few special tokens.

Encoding is reversible and the vocabulary never changes, so IDs are the same in every run. Log-probabilities are
computed from the IDs: always negative, constant for the same IDs, and larger than the values of the alternatives.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from typing import NamedTuple

_NAMES = "pad begin end system user assistant tool tools call arguments"
SPECIAL = tuple(f"<|{name}|>" for name in _NAMES.split())
PAD, BEGIN, END, SYSTEM, USER, ASSISTANT, TOOL, TOOLS, CALL, ARGUMENTS = range(len(SPECIAL))

_FIRST_BYTE = 16  # IDs between the special tokens and this one are reserved
_WORDS = (
    "a all an and any are as at be but by can def do else file files for from function has have if import in is it "
    "list long low mid high new none not of on one or out path pass print range return self set str the then this "
    "tests to true use was what when while will with word you your None True False int class assert write read "
    "command content string object type description properties name value array required tool must should"
)
_FRAGMENTS = (
    "th he in er an re nd on en at ou ed ha or it is hi es ng st te ti ar nt al le se ve me io ne ro ri de co ra li ce "
    "ch om ma ic la el ur us ut ct ec et ad ot as no pr pe mi si ag ul ol il id ex em ac am ap ow ue "
    "the ing ion ent tio ati for her ter ver all con com pro ess res ate per ith age ser ert out ect ment able"
)
_SPACES = ("  ", "    ", "        ", "\n\n", "\n    ")
_SIGNS = ('":"', '","', '": "', '", "', " = ", "):\n", "()", "//", ", ", ". ")
_PIECES = tuple(
    piece.encode()
    for piece in dict.fromkeys(
        [
            *(f" {word}" for word in _WORDS.split()),
            *(word for word in _WORDS.split() if len(word) > 2),
            *_FRAGMENTS.split(),
            *_SPACES,
            *_SIGNS,
        ]
    )
)
_FIRST_WORD = _FIRST_BYTE + 256
_TABLE: dict[bytes, int] = {bytes([byte]): _FIRST_BYTE + byte for byte in range(256)} | {
    piece: _FIRST_WORD + index for index, piece in enumerate(_PIECES)
}
_BYTES: dict[int, bytes] = {token: piece for piece, token in _TABLE.items()} | {
    token: text.encode() for token, text in enumerate(SPECIAL)
}
_PATTERN = re.compile(
    b"|".join(re.escape(piece) for piece in sorted(_PIECES, key=len, reverse=True)) + b"|.", re.DOTALL
)

SIZE = _FIRST_WORD + len(_PIECES)
"""The number of IDs."""
NAME = "scripted-bytes-and-words-1"
"""The tokeniser's name; change it whenever IDs change."""


class Alternative(NamedTuple):
    """An alternative to a sampled token."""

    token: int
    logprob: float


class Tokenizer:
    """Turns text into IDs; caches the latest texts, because agents repeat the same long texts."""

    def __init__(self, *, remembered: int = 512) -> None:
        self._seen: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._remembered = remembered

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the IDs of a text; names of special tokens in it are ordinary text."""
        if len(text) < 64:
            return encode(text)
        ids = self._seen.get(text)
        if ids is None:
            ids = self._seen[text] = encode(text)
            if len(self._seen) > self._remembered:
                self._seen.popitem(last=False)
        return ids


def encode(text: str) -> tuple[int, ...]:
    """Return the ids of a text."""
    table = _TABLE
    return tuple([table[piece] for piece in _PATTERN.findall(text.encode("utf-8", "surrogatepass"))])


def decode(ids: tuple[int, ...] | list[int], *, special: bool = True) -> str:
    """Return the text of IDs, with the names of special tokens or without them."""
    kept = ids if special else [token for token in ids if token >= _FIRST_BYTE]
    return b"".join(bytes_of(token) for token in kept).decode("utf-8", "replace")


def bytes_of(token: int) -> bytes:
    """Return the bytes of a token; for a special token, its name.

    Raises:
        ValueError: The ID is unknown.
    """
    try:
        return _BYTES[token]
    except KeyError:
        raise ValueError(f"no token has the id {token}") from None


def logprob(before: int, token: int, position: int) -> float:
    """Return the made-up log-probability of a token after another one: between log 0.5 and 0."""
    share = ((before * 7919 + token * 104729 + position * 1299709) % 9973) / 9973
    return round(math.log(0.5 + 0.4999 * share), 6)


def alternatives(token: int, chosen: float, count: int) -> list[Alternative]:
    """Return the `count` most probable tokens at a position, the sampled one first; their probabilities add up to less
    than 1."""
    rest = 1.0 - math.exp(chosen)
    others = [
        Alternative(_FIRST_BYTE + (token * 31 + rank * 101) % (SIZE - _FIRST_BYTE), math.log(rest * 0.5**rank))
        for rank in range(1, count)
    ]
    return [Alternative(token, chosen), *others][:count]
