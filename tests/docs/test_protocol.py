"""`docs/protocol.md` says what the code does: every request with its keys, and every reason why a session is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from openenv.protocol.server_v2 import _KEYS, NONCE_CHARS
from openenv.server.sessions import lifetime
from openenv.server.sessions.lifetime import CANCELLED, CLOSED_BY_CLIENT, DISCONNECTED, TAKEN_OVER, client_reason

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
ROWS = {match.group(1): match.group(0) for match in re.finditer(r"^\| `([^`]+)` \|.*$", PAGE, re.MULTILINE)}
NOT_IN_TABLE = {"traceparent"}
REASONS = {value for name, value in vars(lifetime).items() if name.isupper() and isinstance(value, str)}
CLIENT_REASONS = sorted(REASONS - {CLOSED_BY_CLIENT, DISCONNECTED, CANCELLED, TAKEN_OVER})


@pytest.mark.parametrize("request_type", sorted(_KEYS))
def test_every_request_is_listed_with_its_keys(request_type: str) -> None:
    for key in _KEYS[request_type] - NOT_IN_TABLE:
        assert f"`{key}`" in ROWS[request_type]


@pytest.mark.parametrize("reason", CLIENT_REASONS)
def test_every_reason_why_a_session_is_lost_is_listed(reason: str) -> None:
    assert reason in ROWS


def test_reasons_that_only_logs_distinguish_are_reported_as_listed_ones() -> None:
    for reason in (CLOSED_BY_CLIENT, DISCONNECTED, CANCELLED, None):
        assert client_reason(reason) in CLIENT_REASONS
    assert client_reason("maintenance") == "maintenance"


def test_the_reason_a_taken_over_connection_gets_is_documented() -> None:
    assert f"`{TAKEN_OVER}`" in PAGE


def test_the_length_of_a_nonce_is_as_written() -> None:
    assert f"{NONCE_CHARS[0]} to {NONCE_CHARS[1]} characters" in PAGE
