"""The output of commands: what a flood of it costs the host."""

from __future__ import annotations

import pytest

from openenv.sandboxes import ProcessSandboxes, streams
from openenv.sandboxes.base import Stream

MEGABYTE = 1 << 20


def test_a_command_that_writes_without_end_is_slowed_down(
    process: ProcessSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_UNPACED", 2 * MEGABYTE)
    monkeypatch.setattr(streams, "_DROP_RATE", 2 * MEGABYTE)
    seen = 0

    def count(stream: Stream, data: bytes) -> None:
        nonlocal seen
        seen += len(data)

    with process.open() as box:
        result = box.exec("yes", timeout=1, max_output=1000, on_output=count)
    assert result.timed_out
    assert len(result.stdout) == 1000
    assert 2 * MEGABYTE < seen < (8 + 2 * result.duration_s) * MEGABYTE


def test_output_that_is_kept_is_never_slowed_down(process: ProcessSandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_UNPACED", 0)
    monkeypatch.setattr(streams, "_DROP_RATE", 1)
    with process.open() as box:
        for most in (5 * MEGABYTE, 4 * MEGABYTE):
            result = box.exec(f"head -c {4 * MEGABYTE} /dev/zero", timeout=60, max_output=most)
            assert (result.exit_code, len(result.stdout), result.truncated) == (0, 4 * MEGABYTE, False)
