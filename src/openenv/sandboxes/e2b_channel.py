"""A command at E2B as a channel: a thread takes its events from the package, in the order in which they come.

Knows the package's command handle, which is passed in; imports nothing of the package.
"""

from __future__ import annotations

import codecs
import logging
import queue
import threading
from typing import Any

from openenv.sandboxes.base import Stream
from openenv.sandboxes.shell_run import Channel

_log = logging.getLogger(__name__)
_CHUNK = 1 << 18
_KILLED = 137


class CommandChannel(Channel):
    """The other end of a command that E2B runs."""

    def __init__(self, handle: Any, *, has_input: bool) -> None:
        self._handle = handle
        self._has_input = has_input
        self._encoding = _keep_bytes(handle)
        self._events: queue.Queue[tuple[Stream, bytes] | None] = queue.Queue(maxsize=64)
        self._closed = threading.Event()
        self._over = threading.Event()
        self._exit_code: int | None = None
        threading.Thread(target=self._follow, name=f"e2b-{handle.pid}", daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        """How the shell ended, as E2B says; a signal has no number there."""
        self._over.wait(10)
        return _KILLED if self._exit_code is not None and self._exit_code < 0 else self._exit_code

    def send(self, data: bytes) -> None:
        """Write to the standard input."""
        for start in range(0, len(data), _CHUNK):
            if self._over.is_set() or self._closed.is_set():
                return
            try:
                self._handle.send_stdin(data[start : start + _CHUNK])
            except Exception:  # the command is over, or the sandbox is: the reader learns which
                return

    def end_input(self) -> None:
        """Close the standard input."""
        if self._has_input and not self._over.is_set() and not self._closed.is_set():
            self._has_input = False
            try:
                self._handle.close_stdin()
            except Exception:  # the same
                _log.debug("close_stdin", exc_info=True)

    def receive(self, timeout: float | None) -> tuple[Stream, bytes] | None:
        """Return the next bytes of a stream."""
        if self._closed.is_set():
            raise EOFError
        try:
            got = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if got is None:
            self._events.put(None)
            raise EOFError
        return got

    def close(self) -> None:
        """Let go of it; the thread ends with the next event, or with the sandbox."""
        self._closed.set()
        while True:
            try:
                self._events.get_nowait()
            except queue.Empty:
                break
        self._events.put(None)

    def _follow(self) -> None:
        try:
            for out, err, _ in self._handle:
                if self._closed.is_set():
                    self._handle.disconnect()
                    return
                if out:
                    self._pass_on("stdout", out)
                if err:
                    self._pass_on("stderr", err)
            self._exit_code = _exit_code(self._handle)
        except Exception:  # the stream broke; the sandbox says whether it is gone
            _log.debug("e2b events", exc_info=True)
        finally:
            self._over.set()
            self._put(None)

    def _pass_on(self, stream: Stream, text: str) -> None:
        self._put((stream, text.encode(self._encoding, "replace")))

    def _put(self, event: tuple[Stream, bytes] | None) -> None:
        while not self._closed.is_set():
            try:
                self._events.put(event, timeout=0.5)
            except queue.Full:
                continue
            return


def _keep_bytes(handle: Any) -> str:
    """Have the package pass bytes on unchanged, where it lets us; return how its text is to be turned back into bytes.

    It decodes output as UTF-8, and what is no UTF-8 is lost in that. Latin-1 has a character for every byte.
    """
    if not (hasattr(handle, "_stdout_decoder") and hasattr(handle, "_stderr_decoder")):
        return "utf-8"
    decoder = codecs.getincrementaldecoder("latin-1")
    handle._stdout_decoder, handle._stderr_decoder = decoder(), decoder()
    return "latin-1"


def _exit_code(handle: Any) -> int | None:
    try:
        return int(handle.wait().exit_code)
    except Exception as error:  # the package raises for any exit code but 0, and the exception has it
        code = getattr(error, "exit_code", None)
        return code if isinstance(code, int) else None
