"""`VectorEnv` and a server of the published package, which has no protocol v2: told at once, with what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from openenv import GenericEnvClient, VectorEnv
from openenv.errors import ConnectFailed

pytestmark = pytest.mark.published


@pytest.mark.parametrize("codec", ["auto", "json", "msgpack"])
def test_an_old_server_is_named_as_such_and_the_advice_works(
    server: Callable[..., Any], published: Any, codec: Any
) -> None:
    url = server(published).url
    began = time.monotonic()
    with pytest.raises(ConnectFailed, match=r"openenv 0\.10.*a client for each session") as caught:
        VectorEnv(url, 2, codec=codec).connect()
    assert time.monotonic() - began < 5
    assert caught.value.attempts == 1
    assert ("codec='json'" in str(caught.value)) is (codec == "msgpack")
    with GenericEnvClient(url).sync() as client:
        client.reset()
