"""A command as a channel: what it has started may hold its streams open, which delays nothing."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from openenv.sandboxes.shell_command import ProcessChannel

LIMIT_S = 30.0
HOLDER = "setsid sh -c 'echo $$; exec sleep 60' & cat >/dev/null"


def first_line(channel: ProcessChannel) -> bytes:
    line = b""
    deadline = time.monotonic() + LIMIT_S
    while not line.endswith(b"\n") and time.monotonic() < deadline:
        got = channel.receive(1)
        line += got[1] if got is not None else b""
    return line


def test_a_reader_ends_when_the_channel_is_closed_though_another_process_holds_the_streams() -> None:
    channel = ProcessChannel(["sh", "-c", HOLDER])
    holder = int(first_line(channel))
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(EOFError):
            channel.receive(None)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    closing.join(LIMIT_S)
    os.kill(holder, signal.SIGKILL)
    assert not closing.is_alive()
    assert ended.wait(LIMIT_S)


def test_a_writer_ends_when_the_channel_is_closed_though_its_output_is_not_read() -> None:
    channel = ProcessChannel(["sh", "-c", "exec 3<&0; setsid sh -c 'echo $$; exec sleep 60' <&3 & sleep 60"])
    holder = int(first_line(channel))
    writing = threading.Thread(target=channel.send, args=(bytes(1 << 22),), daemon=True)
    writing.start()
    channel.close()
    writing.join(LIMIT_S)
    os.kill(holder, signal.SIGKILL)
    assert not writing.is_alive()


def test_silence_is_reported_after_the_timeout() -> None:
    channel = ProcessChannel(["sh", "-c", "cat >/dev/null; echo late; exit 3"])
    started = time.monotonic()
    assert channel.receive(0.6) is None
    assert time.monotonic() - started >= 0.5
    channel.end_input()
    assert first_line(channel) == b"late\n"
    with pytest.raises(EOFError):
        channel.receive(None)
    assert channel.exit_code == 3
    channel.close()
