"""Errors of `HTTPEnvClient` that are errors of `requests` as well: the first release used it, and callers catch those.

Must not import `requests`: a program that catches its errors has imported it already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from openenv.errors import ConnectFailed, OpenEnvError, ProtocolError, RequestTimeout, ServerError, SessionLost

# The names in `requests.exceptions`, for the first class that fits.
_NAMES: tuple[tuple[type[OpenEnvError], str], ...] = (
    (RequestTimeout, "Timeout"),
    (ConnectFailed, "ConnectionError"),
    (SessionLost, "ConnectionError"),
    (ServerError, "HTTPError"),
    (ProtocolError, "InvalidJSONError"),
)


@contextmanager
def also_of_requests() -> Iterator[None]:
    """Raise our errors as errors of `requests`, too, if the program has imported it.

    try:
        client.step(action)
    except requests.exceptions.HTTPError:    # as with the first release
        ...
    except openenv.errors.ServerError:       # the same error
        ...
    """
    try:
        yield
    except OpenEnvError as error:
        both = _both(type(error))
        if both is None:
            raise
        # Not `both(...)`: each of our classes has arguments of its own. Errors of requests are OSErrors.
        twin: Any = OSError.__new__(both)
        twin.__dict__.update(vars(error), request=None, response=None)
        twin.args = error.args
        raise twin.with_traceback(error.__traceback__) from error.__cause__


@functools.cache
def _both_of(kind: type[OpenEnvError], other: type[Exception]) -> type[OpenEnvError]:
    def reduce(self: OpenEnvError) -> tuple[Any, ...]:
        # A pickle has our class: the other process may not have imported `requests`.
        make, _, state = OpenEnvError.__reduce__(self)
        return make, (kind,), {name: value for name, value in state.items() if name not in ("request", "response")}

    # The name and the module of ours, so that messages and logs do not change.
    return type(kind.__name__, (kind, other), {"__module__": kind.__module__, "__reduce__": reduce})


def _both(kind: type[OpenEnvError]) -> type[OpenEnvError] | None:
    exceptions = sys.modules.get("requests.exceptions")
    name = next((name for ours, name in _NAMES if issubclass(kind, ours)), None)
    if exceptions is None or name is None:
        return None
    return _both_of(cast("Hashable", kind), getattr(exceptions, name))
