"""A pytest plugin with the fixture `serve_env`; a test module or conftest names it in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from .serving import Served, serve


@pytest.fixture
def serve_env() -> Iterator[Callable[..., Served]]:
    """Serve environments and applications until the test ends; takes the arguments of `serve`."""
    with ExitStack() as stack:
        yield lambda env_or_app, **options: stack.enter_context(serve(env_or_app, **options))
