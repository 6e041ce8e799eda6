"""The host's end of a local sandbox: requests to `init_process`, its PID 1, each with a channel for the replies.

A reply was written inside and is not trusted: it is a kind byte, a number and a text, and nothing is evaluated.
"""

from __future__ import annotations

import marshal
import os
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openenv.errors import SandboxError, SandboxTreeError

_LARGE = 128 * 1024
_REPLY = 4096
_MARSHAL = 2  # a format that every version of Python reads


@dataclass(frozen=True, slots=True)
class InitReply:
    """The reply to a request: `s`tarted, e`x`ited, `o`k or `e`rror, and its value."""

    kind: str
    value: bytes

    @property
    def number(self) -> int:
        """Return the number at the beginning of the value."""
        try:
            return int(self.value.split(b" ", 1)[0])
        except ValueError:
            raise SandboxError("The sandbox sent an invalid reply.") from None

    def raise_for_path(self, path: str) -> None:
        """Raise the OSError of a failed file operation."""
        if self.kind != "e":
            return
        text = self.value.partition(b" ")[2].decode("utf-8", "replace")
        if self.number == 0:
            raise SandboxTreeError(f"{path}: {text}")
        raise OSError(self.number, os.strerror(self.number), path)


class ReplyChannel(socket.socket):
    """The socket on which the replies to one request arrive."""

    def receive(self, timeout: float | None = None) -> InitReply | None:
        """Return the next reply; None if the other end is gone. Raise TimeoutError if none comes in time."""
        self.settimeout(timeout)
        try:
            return _parsed(self.recv(_REPLY))
        except (TimeoutError, BlockingIOError):  # a timeout of 0 makes the socket a nonblocking one
            raise TimeoutError("no reply in time") from None
        except ConnectionError:
            return None

    def receive_fd(self, timeout: float) -> tuple[InitReply | None, int | None]:
        """Return the next reply with the file descriptor that comes with it."""
        self.settimeout(timeout)
        data, fds, _, _ = socket.recv_fds(self, _REPLY, 1)
        return _parsed(data), fds[0] if fds else None


def _parsed(data: bytes) -> InitReply | None:
    return InitReply(data[:1].decode("latin-1"), data[1:]) if data else None


class Control:
    """The one socket to PID 1 inside. When it closes, the sandbox ends."""

    def __init__(self) -> None:
        self._end, self.inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def configure(self, config: Mapping[str, object]) -> None:
        """Send what PID 1 needs before it can serve."""
        self._end.send(marshal.dumps(dict(config), _MARSHAL))

    def wait_ready(self, timeout: float) -> bool:
        """Wait until PID 1 serves; False when it ended or takes too long."""
        self.inner.close()
        self._end.settimeout(timeout)
        try:
            return self._end.recv(_REPLY) == b"ready"
        except (TimeoutError, ConnectionError):
            return False
        finally:
            self._end.settimeout(None)

    def call(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> ReplyChannel:
        """Send a request with file descriptors; return the channel of its replies.

        Raises:
            OSError: The sandbox is gone.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        data = marshal.dumps(dict(request), _MARSHAL)
        memory = None
        try:
            sent = [theirs.fileno(), *fds]
            if len(data) > _LARGE:
                memory = os.memfd_create("request")
                os.write(memory, data)
                os.lseek(memory, 0, os.SEEK_SET)
                sent.append(memory)
                data = b"large"
            socket.send_fds(self._end, [data], sent)
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
            if memory is not None:
                os.close(memory)
        return ReplyChannel(fileno=mine.detach())

    def end_reason(self) -> str | None:
        """Return why PID 1 ended, empty if it did not say; None while it lives."""
        poll = select.poll()
        try:
            poll.register(self._end.fileno(), select.POLLIN)
            if not poll.poll(0):
                return None
            return self._end.recv(_REPLY).decode("latin-1")
        except (OSError, ValueError):
            return ""

    def abandon(self) -> None:
        """Close this process's copy and leave the sandbox as it is."""
        self._end.close()
        self.inner.close()

    def close(self) -> None:
        """Close the socket: the sandbox ends if it has not yet."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._end.close()
        self.inner.close()
