"""The parts of the process runner alone: messages, pickled values, the backoff in crash loops, waiting threads."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest

from openenv.errors import OpenEnvError, SessionClosedError, SessionLost, ToolNotFoundError, ToolTimeout
from openenv.server.runners import ProcessOptions
from openenv.server.runners.base import NotSendable, make_runner
from openenv.server.runners.process.messages import (
    MessageKind,
    MessageReader,
    encode_message,
    modules_of,
    pack_error,
    pack_factory,
    unpack,
    unpack_error,
)
from openenv.server.runners.process.runner import PATIENCE, StartBackoff, WorkersKeepDying


def test_messages_are_read_as_they_were_written_however_the_stream_is_cut() -> None:
    sent = [(MessageKind.ASK, 1, b""), (MessageKind.BYTES, 2**40, b"x" * 1000), (MessageKind.EXIT, 0, b"\0")]
    stream = b"".join(encode_message(*message) for message in sent)
    for size in (1, 7, 17, 400, len(stream)):
        reader = MessageReader()
        messages = [
            message for start in range(0, len(stream), size) for message in reader.feed(stream[start : start + size])
        ]
        assert [tuple(message) for message in messages] == sent


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        KeyError("key"),
        OSError(2, "gone", "file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        SessionLost("expired"),
        SessionClosedError("s", "closed"),
        ToolNotFoundError("saw"),
        ToolTimeout("saw", timeout_s=2.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_crosses_with_class_text_and_attributes(error: Exception) -> None:
    crossed = unpack_error(pack_error(error))
    assert type(crossed) is type(error)
    assert str(crossed) == str(error)
    assert vars(crossed) == vars(error)
    if isinstance(error, OpenEnvError):
        assert crossed.details == error.details  # type: ignore[attr-defined]


def test_an_exception_that_cannot_be_pickled_keeps_name_text_and_kind(envs: ModuleType) -> None:
    class Local(LookupError):
        pass

    for error, kind in ((Local("here"), LookupError), (envs.Unpicklable("this", "that"), ValueError)):
        crossed = unpack_error(pack_error(error))
        assert isinstance(crossed, kind)
        assert (type(crossed).__name__, str(crossed)) == (type(error).__name__, str(error))
    assert "not a pickle" not in str(unpack_error(b"nonsense"))


def test_a_factory_is_sent_by_name_and_its_modules_are_named(envs: ModuleType) -> None:
    factory = partial(envs.make, envs.OneThread)
    sent = unpack(pack_factory(factory))
    assert sent.args == (envs.OneThread,)
    files, main = modules_of(factory, [envs.Do])
    assert files["process_runner_environments"] == envs.__file__
    assert main is None


def test_only_deaths_in_a_row_and_for_nothing_stop_new_workers() -> None:
    now = [0.0]
    backoff = StartBackoff(lambda: now[0])
    for _ in range(PATIENCE - 1):
        backoff.died("killed")
    backoff.check()
    backoff.answered()
    for _ in range(PATIENCE):
        backoff.check()
        backoff.died("killed by SIGSEGV")
    with pytest.raises(WorkersKeepDying, match="SIGSEGV"):
        backoff.check()
    now[0] += 1.1
    backoff.check()
    for _ in range(20):
        backoff.died("killed")
    now[0] += 30.1  # the longest pause
    backoff.check()


def test_numbers_that_make_no_sense_are_refused(envs: ModuleType) -> None:
    for options in ({"processes": 0}, {"sessions_each": 0}):
        with pytest.raises(ValueError, match="at least one"):
            ProcessOptions(**options)
    with pytest.raises(ValueError, match="unknown runner"):
        make_runner("ray", max_threads=1, factory=envs.Perilous)
    with pytest.raises(NotSendable):
        make_runner("process", max_threads=1, factory=lambda: envs.Perilous())
