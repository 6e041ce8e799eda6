"""What a gateway says of all its servers together.

That sessions stay with their server is tested in `tests/interaction/test_several_processes.py`.
"""

from __future__ import annotations

from typing import Any

import httpx2

import http_calls
from gateways import RunningGateway
from http_calls import close_sessions, open_session
from servers import RunningServer
from waiting import wait_until


def stepped(http: httpx2.Client, name: str, by: int = 1) -> dict[str, Any]:
    response = http.post("/step", json={"action": {"by": by}}, headers={"X-OpenEnv-Session": name})
    assert response.status_code == 200, response.text
    seen: dict[str, Any] = response.json()["observation"]
    return seen


def test_load_that_did_not_come_through_the_gateway_counts(
    gateway: RunningGateway, servers: list[RunningServer]
) -> None:
    with http_calls.Client(base_url=servers[0].url) as beside, http_calls.Client(base_url=gateway.url) as http:
        others = [open_session(beside) for _ in range(3)]
        gateway.refresh()
        names = [open_session(http) for _ in range(3)]
        assert {stepped(http, name)["server"] for name in names} == {"blue"}
        assert {stepped(http, name)["server"] for name in others} == {"red"}  # the id is enough
        close_sessions(http, *names, *others)


def test_the_gateway_answers_for_all_servers_together(gateway: RunningGateway, servers: list[RunningServer]) -> None:
    with http_calls.Client(base_url=gateway.url) as http:
        assert http.get("/health").json() == {"status": "healthy"}
        names = [open_session(http) for _ in range(3)]
        wait_until(lambda: all(server.manager.active for server in servers))
        gateway.refresh()
        ready = http.get("/ready").json()
        assert ready == {
            "status": "ready",
            "active_sessions": 3,
            "max_sessions": 16,
            "servers": {"ready": 2, "draining": 0, "unreachable": 0},
        }
        text = http.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert (lines["openenv_session_slots_used"], lines["openenv_session_slots"]) == ("3", "16")
        assert lines['openenv_gateway_servers{state="ready"}'] == "2"
        close_sessions(http, *names)
