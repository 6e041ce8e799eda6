"""Tools that never return by themselves."""

from __future__ import annotations

import time


def spin() -> str:
    # Without a docstring: a test of undocumented tools uses it.
    while True:  # in short sleeps: an exception that another thread raises here arrives between two instructions
        time.sleep(0.001)
