"""Keywords of steps and options of clients, with v2 and v1."""

from __future__ import annotations

from typing import Any

import pytest

from openenv import GenericEnvClient

both = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])


# -- keywords ---------------------------------------------------------------------------------------------------------


@both
def test_keywords_of_a_step_reach_the_environment(start: Any, player: Any, blocking: bool) -> None:
    one = player(start().url, blocking=blocking)
    one("reset")
    result = one("step", {}, timeout_s=2.5, hint="left")
    assert result.metadata == {"timeout_s": 2.5, "hint": "left"}


@both
def test_a_step_that_may_take_longer_is_waited_for_longer(
    start: Any, player: Any, in_a_hurry: Any, blocking: bool
) -> None:
    one = player(start().url, blocking=blocking)
    one("reset")
    with in_a_hurry(one.client, 0.2):
        assert one("step", {"sleep_s": 0.5}, timeout_s=20).observation["count"] == 1


def test_v1_servers_do_not_get_keywords_of_a_step(start: Any) -> None:
    with GenericEnvClient(start().url, protocol="v1").sync() as client:
        client.reset()
        assert client.step({}, timeout_s=2.5, hint="left").metadata is None
        assert client.resume_token is None


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": "v3"},
        {"on_session_lost": "ignore"},
        {"reconnect_timeout_s": -1},
        {"reconnect_timeout_s": float("inf")},
        {"wait_s": -1},
        {"resume_token": "t", "protocol": "v1"},
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        GenericEnvClient("http://localhost:1", **options)


def test_children_have_the_options_of_their_parent(start: Any) -> None:
    class Narrow(GenericEnvClient):
        """A subclass whose constructor knows nothing of v2."""

        def __init__(self, base_url: str | None = None, **kwargs: Any) -> None:
            assert "protocol" not in kwargs
            super().__init__(base_url, **kwargs)

    parent = GenericEnvClient(start().url, protocol="v1", reconnect_timeout_s=3, on_session_lost="reset")
    child = parent.new_session()
    assert child._options.protocol == "v1"
    assert child._driver.backoff.timeout_s == 3
    assert child._on_session_lost == "reset"
    Narrow(parent.base_url).new_session()
