"""The experts that a mixture-of-experts engine chose for each token, decoded and aligned with a training sequence.

    vLLM     choices[0].routed_experts         base64 of an `.npy` file, (tokens - 1, layers, experts per token)
    SGLang   sglext.routed_experts, or         base64 of 32-bit integers, (tokens - 1) * layers * experts per token
             meta_info.routed_experts

Both cover prompt and answer without the last token, which no forward pass has seen. So of a sequence with several
calls, each token has the experts of the first call that passed it through the model:

    call 1   prompt a b c   sampled d e        experts of a b c d          e: unknown to call 1
    call 2   prompt a b c d e f   sampled g    experts of a b c d e f      adds e and f
    row      a1 b1 c1 d1 e2 f2 -1              -1: unknown, here of the last token

Values only, without NumPy.
"""

from __future__ import annotations

import ast
import base64
import binascii
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

UNKNOWN = -1
"""The expert of a token whose experts the engine did not report."""
_NPY_MAGIC = b"\x93NUMPY"
_NPY_TYPES = {"|u1": "B", "|i1": "b", "<u2": "H", "<i2": "h", "<u4": "I", "<i4": "i", "<i8": "q"}


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of each token of a sequence."""

    shape: list[int]
    """Tokens, then the shape of one token's experts: layers and experts per token, or their product if the engine does
    not tell them apart."""
    data: str
    """Base64 of little-endian 16-bit integers in this shape; `UNKNOWN` for tokens without experts."""

    def values(self) -> array[int]:
        """Return all integers in one array."""
        return _little(array("h", base64.b64decode(self.data)))

    def of(self, token: int) -> list[int] | None:
        """Return the experts of a token, layer by layer; None if they are unknown."""
        width = prod(self.shape[1:])
        row = self.values()[token * width : (token + 1) * width].tolist()
        return None if UNKNOWN in row else row

    @property
    def n_known(self) -> int:
        """Return the number of tokens with experts."""
        width, values = prod(self.shape[1:]), self.values()
        return sum(values[start] != UNKNOWN for start in range(0, len(values), width))


@dataclass(frozen=True, slots=True)
class CallExperts:
    """One call's part of a sequence: the engine's text, and the number of tokens of prompt and answer."""

    text: str | None
    tokens: int


def align(calls: Iterable[CallExperts], tokens: int) -> RoutedExperts | None:
    """Return the experts of a sequence; None if no call reports any.

    Args:
        calls: The calls of the sequence, oldest first.
        tokens: The length of the sequence.
    """
    decoded = [(call, decode(call.text, call.tokens) if call.text is not None else None) for call in calls]
    shapes = {rows[1] for _, rows in decoded if rows is not None}
    if len(shapes) != 1:
        return None  # no experts, or of models with other shapes
    (shape,) = shapes
    width = prod(shape)
    values = array("h", [UNKNOWN]) * (tokens * width)
    start = 0
    for call, rows in decoded:
        # A call without experts leaves its tokens unknown. A later call chooses them again, perhaps otherwise.
        end = max(start, call.tokens - 1)
        if rows is not None:
            values[start * width : end * width] = rows[0][start * width : end * width]
        start = end
    return RoutedExperts([tokens, *shape], base64.b64encode(_little(values).tobytes()).decode())


def decode(text: str, tokens: int) -> tuple[array[int], tuple[int, ...]] | None:
    """Return the experts of a call's tokens, and the shape of one token's; None if they do not fit the tokens.

    Args:
        text: The engine's text.
        tokens: The number of tokens of prompt and answer.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    if data.startswith(_NPY_MAGIC):
        read = _npy(data)
        if read is None:
            return None
        values, (count, *shape) = read
    else:
        if len(data) % 4:
            return None
        values, count, shape = _little(array("i", data)), tokens - 1, []
        if count > 0 and len(values) % count == 0:
            shape = [len(values) // count]
    width = prod(shape)
    is_whole = count == tokens - 1 and bool(shape) and width > 0 and len(values) == count * width
    if not is_whole or (len(values) and not 0 <= min(values) <= max(values) < 1 << 15):
        return None
    return array("h", values), tuple(shape)


def _npy(data: bytes) -> tuple[array[int], list[int]] | None:
    """Return values and shape of an `.npy` file; None if it is not one of whole numbers in C order."""
    # NumPy Enhancement Proposal 1: magic, version, the header's length, and the header, a Python literal.
    try:
        size = 2 if data[6] == 1 else 4
        start = 8 + size
        end = start + int.from_bytes(data[8:start], "little")
        about = ast.literal_eval(data[start:end].decode("latin-1"))
        kind, shape = _NPY_TYPES[about["descr"]], [int(value) for value in about["shape"]]
        if about["fortran_order"] or len(shape) < 2:
            return None
        return _little(array(kind, data[end:])), shape
    except (IndexError, KeyError, TypeError, ValueError, SyntaxError):
        return None


def _little(values: array[int]) -> array[int]:
    """Swap the bytes of little-endian values on a big-endian machine, or back."""
    if sys.byteorder == "big":
        values.byteswap()
    return values
