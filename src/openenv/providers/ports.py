"""A free port for a server that is yet to be started, kept for it until it listens.

The kernel chooses, and a bound socket that does not listen keeps the port: nobody else is given it, but a server that
sets SO_REUSEADDR, as servers do, can bind it. Only Linux has that; elsewhere the port is free again for a moment.
"""

from __future__ import annotations

import socket
import sys

_CAN_KEEP = sys.platform == "linux"


class Reservation:
    """A port that is kept until `release`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
            self.port: int = self._socket.getsockname()[1]
        except BaseException:
            self._socket.close()
            raise
        if not _CAN_KEEP:
            self._socket.close()

    def release(self) -> None:
        """Let go of the port."""
        self._socket.close()


def local_url(host: str, port: int) -> str:
    """Return where a program on this machine finds a server that listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
