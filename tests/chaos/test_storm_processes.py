"""Storms in which processes end as well: workers that are killed, servers that are stopped and started again."""

from __future__ import annotations

from typing import Any

import pytest
from storm.restarts import KILLED as SERVER_KILLED
from storm.restarts import STOPPED
from storm.runner import Result, Run, Storm
from storm.workers import KILLED

# What ends an episode beside its server: a connection that could not be had, or could not be had back in time.
CONNECTIONS = ("ConnectFailed", "SessionLost: expired", "RequestTimeout")


@pytest.fixture(autouse=True)
def own_place_for_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files that are left behind where they are seen."""
    place = str(tmp_path_factory.mktemp("temporary"))
    for name in ("TMPDIR", "STORM_TMPDIR"):
        monkeypatch.setenv(name, place)
    monkeypatch.setattr("tempfile.tempdir", place)


def check(result: Result, judged: int) -> None:
    """No reply was wrong and nothing is left: no session, environment, thread, process, socket or file."""
    assert not result.violations
    assert (result.sessions_left, result.environments_left) == (0, 0)
    assert (result.threads_left, result.others_left) == ([], [])
    assert sum(result.outcomes.values()) == judged


def others(result: Result, *expected: str) -> dict[str, Any]:
    """Errors that are neither expected nor about connections."""
    return {name: count for name, count in result.errors.items() if not name.startswith((*expected, *CONNECTIONS))}


@pytest.mark.slow
def test_the_episodes_of_a_killed_worker_end_as_that_and_nothing_is_left_of_it() -> None:
    result = Run(Storm("workers", 16, at_once=8), lambda _: None).run()
    check(result, 16)
    assert result.faults[KILLED]
    assert result.errors["SessionLost: worker crashed"]
    # A worker may also die while it builds an environment for another client.
    assert not others(result, "SessionLost: worker crashed", "EnvironmentFactoryError")


@pytest.mark.slow
def test_workers_of_a_server_that_are_killed_lose_their_own_episodes_with_a_typed_error_and_no_others() -> None:
    result = Run(Storm("server-workers", 24, first_seed=84, at_once=8), lambda _: None).run()
    check(result, 24)
    assert result.faults[KILLED]
    assert result.errors["SessionLost: worker crashed"]
    assert not others(result, "SessionLost: worker crashed")


@pytest.mark.slow
def test_an_episode_on_a_server_that_is_replaced_completes_or_says_so() -> None:
    result = Run(Storm("restarts", 20, at_once=8), lambda _: None).run()
    check(result, 20)
    assert result.faults[STOPPED]
    assert not result.faults[SERVER_KILLED]  # the long form has those too
    reasons = [f"{how}: server {what}" for how in ("SessionLost", "Renewed") for what in ("restarted", "shutting down")]
    # Over HTTP a new server cannot tell whether there was such a session; one that stops opens none.
    stateless = ("SessionLost: unknown to the server", "SessionCapacityError")
    assert not others(result, *reasons, *stateless, "SessionLost: the ", "Renewed: the ", "SessionLost: connection")


@pytest.mark.slow
def test_episodes_outlive_the_gateway_that_leads_to_their_servers() -> None:
    result = Run(Storm("gateway", 16, at_once=8), lambda _: None).run()
    check(result, 16)
    assert result.faults[STOPPED]
    # The servers never end; over HTTP a request without a key is not repeated.
    assert not others(result, "SessionLost: connection", "SessionLost: no answer")
