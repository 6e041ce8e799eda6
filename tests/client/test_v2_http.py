"""`HTTPEnvClient` on connections that break: requests are repeated under their key, and run once."""

from __future__ import annotations

from typing import Any

import pytest

from dict_client import DictHTTPClient
from openenv.errors import ConnectFailed, SessionLost
from servers import Serve

STEPS = 3


def play(client: DictHTTPClient) -> list[Any]:
    return [client.step({"number": number}).observation["count"] for number in range(STEPS)]


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_cut_at_any_byte_of_a_step_changes_nothing(start: Any, proxy_to: Any, env_cls: Any, way: str) -> None:
    proxy = proxy_to(start(sessions=64))
    with DictHTTPClient(proxy.url) as healthy:
        healthy.reset()
        proxy.count()
        play(healthy)
        total = proxy.passed[way]
    for cut in range(1, total, 1 + total // 12):
        env_cls.ran.clear()
        with DictHTTPClient(proxy.url) as client:
            client.reset()
            proxy.count()
            proxy.cut_after = (way, cut)
            assert play(client) == [1, 2, 3], cut
            assert env_cls.ran == list(range(STEPS)), cut
            proxy.cut_after = None


def test_a_server_out_of_reach_is_a_failed_connection_and_the_episode_goes_on_later(start: Any, proxy_to: Any) -> None:
    server = start()
    with DictHTTPClient(server.url) as client:
        client.reset()
        client._http.close()
        client._http = client._new_http()
        client._http.base_url = "http://127.0.0.1:9"
        with pytest.raises(ConnectFailed):
            client.step({})
        client._http.base_url = server.url
        assert client.step({}).observation["count"] == 1


def test_a_connection_that_breaks_each_time_is_a_lost_session(start: Any, proxy_to: Any) -> None:
    proxy = proxy_to(start())
    with DictHTTPClient(proxy.url) as client:
        client.reset()
        proxy.refuses = True
        proxy.cut()
        for _ in range(2):
            with pytest.raises(SessionLost):
                client.step({})
        proxy.refuses = False
        client.reset()
        assert client.step({}).observation["count"] == 1


def test_a_request_without_a_session_is_never_repeated(serve: Serve) -> None:
    """Older servers know no keys: a second request would be a second step."""
    paths: list[bytes] = []

    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"].encode())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        await send({"type": "http.response.body", "body": b"{", "more_body": False})

    with DictHTTPClient(serve(breaks, lifespan="off", log_level="critical").url) as client:
        with pytest.raises(SessionLost):
            client.step({})
    assert paths == [b"/step"]


def test_gone_is_a_lost_session_whatever_server_answers_it(serve: Serve) -> None:
    async def gone(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 410, "headers": []})
        await send({"type": "http.response.body", "body": b"no longer here"})

    with DictHTTPClient(serve(gone, lifespan="off").url) as client:
        with pytest.raises(SessionLost, match="no longer here"):
            client.step({})
