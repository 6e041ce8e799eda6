"""Imports FastAPI for a command that wants to be up soon: without what only the page of an API's documentation needs.

Knows what FastAPI does while it is imported: it builds the validators of 40 OpenAPI models, and loads
email-validator for one field of them. Together that is a fifth of the time a server takes to start.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


def import_fastapi() -> None:
    """Import FastAPI, with its OpenAPI models unbuilt until they are asked for and the address of a contact unchecked.

    For the main thread of a program that has just started: what other threads import meanwhile is affected too.
    """
    if "fastapi" in sys.modules:
        return
    with _models_built_on_use(), _without("email_validator"):
        import fastapi.openapi.models  # noqa: F401


@contextlib.contextmanager
def _models_built_on_use() -> Iterator[None]:
    """Let models that are declared meanwhile be built when they are first used, where pydantic can be told so."""
    try:
        from pydantic._internal._config import config_defaults
    except ImportError:  # another pydantic: the models are built at once, as ever
        yield
        return
    before = config_defaults["defer_build"]
    config_defaults["defer_build"] = True
    try:
        yield
    finally:
        config_defaults["defer_build"] = before


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Let an import of `module` fail meanwhile, as if it were not installed; it can be imported afterwards."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
