"""Addresses of servers: which of them only this machine reaches."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine reach an address.

    The answer decides whether a server needs a key, so a name counts only if it is `localhost`. Other names may resolve
    to any address.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
