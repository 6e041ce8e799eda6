"""Checks: what comes out of a command."""

from __future__ import annotations

import hashlib
import time
from collections import Counter

from openenv.sandboxes.base import Stream
from openenv.sandboxes.checks.bench import Bench, Check, holds, raises, same

_HUNDRED_MB = 100 * 1024 * 1024


class _Stop(Exception):
    """Raised by a check's own callback."""


def streams(bench: Bench) -> None:
    """Write to both streams."""
    result = bench.box.exec("echo out; echo err >&2; exit 5")
    same((result.exit_code, result.stdout, result.stderr), (5, "out\n", "err\n"), "the result")
    holds(0 < result.duration_s < 60, "the duration is not set")


def binary(bench: Bench) -> None:
    """Write every byte value many times."""
    content = bytes(range(256)) * 4096
    bench.box.write_bytes("bytes.bin", content)
    got: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    result = bench.box.exec("cat bytes.bin; cat bytes.bin >&2", on_output=lambda stream, data: got[stream].extend(data))
    same(result.exit_code, 0, "the exit code")
    for stream, received in got.items():
        same(hashlib.sha256(received).hexdigest(), hashlib.sha256(content).hexdigest(), f"the hash of {stream}")


def huge(bench: Bench) -> None:
    """Write 100 MB."""
    count: Counter[str] = Counter()
    command = f"head -c {_HUNDRED_MB} /dev/zero"
    result = bench.box.exec(
        command, timeout=120, max_output=1000, on_output=lambda stream, data: count.update({stream: len(data)})
    )
    same((result.exit_code, count["stdout"]), (0, _HUNDRED_MB), "exit code and size")
    same((len(result.stdout), result.truncated), (1000, True), "what was kept")


def kept(bench: Bench) -> None:
    """Write more than is kept, and exactly as much."""
    result = bench.box.exec("printf 0123456789; printf abc >&2", max_output=4)
    same((result.stdout, result.stderr, result.truncated), ("0123", "abc", True), "what was kept")
    result = bench.box.exec("printf 0123", max_output=4)
    same((result.stdout, result.truncated), ("0123", False), "what was kept")


def streaming(bench: Bench) -> None:
    """Write something, wait, and write again."""
    seen: list[tuple[float, bytes]] = []
    bench.box.exec(
        "echo first; sleep 0.7; echo second", on_output=lambda stream, data: seen.append((time.monotonic(), data))
    )
    same(b"".join(data for _, data in seen), b"first\nsecond\n", "the output")
    holds(len(seen) > 1 and seen[-1][0] - seen[0][0] > 0.3, "the first line did not come before the second was written")


def both(bench: Bench) -> None:
    """Fill both streams at once."""
    command = "head -c 5000000 /dev/zero >&2 & head -c 5000000 /dev/zero; wait"
    result = bench.box.exec(command, timeout=60)
    same((len(result.stdout), len(result.stderr), result.exit_code), (5_000_000, 5_000_000, 0), "sizes and exit code")


def callback_error(bench: Bench) -> None:
    """Raise while output comes in."""

    def refuse(stream: Stream, data: bytes) -> None:
        raise _Stop

    with raises(_Stop):
        bench.box.exec("echo x; sleep 60", on_output=refuse, timeout=30)
    same(bench.box.exec("echo still here").stdout, "still here\n", "the next command's output")


CHECKS = (
    Check("output.streams", "Both streams are kept apart.", streams),
    Check("output.binary", "Every byte comes out as it was written.", binary),
    Check("output.huge", "100 MB pass through, and only the beginning is kept.", huge),
    Check("output.kept", "More than max_output bytes of a stream are dropped, and that is said.", kept),
    Check("output.streaming", "Output is passed on while the command runs.", streaming),
    Check("output.both", "Two full streams do not block each other.", both),
    Check("output.callback", "An exception of the callback ends the command and is raised.", callback_error),
)
