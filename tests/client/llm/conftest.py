"""Fixtures for tests of model clients: scripted models behind real ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from openenv.testing import ScriptedModel


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedModel]]:
    """Start scripted models; all are stopped when the test ends."""
    with ExitStack() as stack:
        yield lambda script, **options: stack.enter_context(ScriptedModel(script, **options))
