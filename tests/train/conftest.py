"""Fixtures of training streams: sandboxes, and an agent that asks its model a few times."""

from __future__ import annotations

import pytest

from openenv.errors import SandboxUnavailable
from openenv.sandboxes import LocalSandboxes
from openenv.sandboxes.base import Sandboxes


@pytest.fixture(scope="session")
def local() -> Sandboxes:
    """The `local` backend; `make test` installs bubblewrap where it can."""
    backend = LocalSandboxes()
    try:
        backend.check()
    except SandboxUnavailable as exc:
        pytest.skip(f"no local sandboxes here: {exc}")
    return backend
