"""Credentials in the forms that log lines have."""

from __future__ import annotations

import io
import logging

import pytest

from openenv.protocol.redaction import RedactSecrets, redacted

SECRETS = [
    "GET /ws?token=SECRET HTTP/1.1",
    "GET /ws?a=1&access_token=SECRET&b=2",
    "b'token=SECRET&x=1'",
    "https://host/v1?api_key=SECRET",
    "https://host/v1beta/models?key=SECRET",
    "https://user:SECRET@host/x",
    "https://SECRET@host/x",
    "Authorization: Bearer SECRET",
    "Proxy-Authorization: Basic SECRET==",
    "{'authorization': 'Bearer SECRET'}",
    "[(b'x-api-key', b'SECRET'), (b'host', b'x')]",
    "{'X-Api-Key': 'SECRET'}",
    "x-goog-api-key: SECRET",
    "Cookie: openenv_session=SECRET; other=SECRET",
    "[(b'cookie', b'openenv_web=SECRET; x=SECRET')]",
    '{"type": "attach", "token": "SECRET"}',
    '{"resume_token":"SE\\"CRET"}',
    "set-cookie: openenv_web_8000=SECRET; Path=/",
    "OPENENV_TOKEN=SECRET was set",
    "the key sk-proj-SECRETSECRETSECRET is not valid",
    "hf_SECRETSECRETSECRET",
]
HARMLESS = [
    "unexpected token: a number",
    "3 tokens sampled, keys=3",
    "GET /tasks?split=train&monkey=7",
    "https://host:8000/web",
    "the environment has no key 'a'",
    "mail@example.org",
    "session 5c1d: step failed",
]


@pytest.mark.parametrize("text", SECRETS)
def test_credentials_are_hidden(text: str) -> None:
    shown = redacted(text)
    assert "SECRET" not in shown
    assert "CRET" not in shown
    assert "***" in shown
    assert redacted(shown) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_stay(text: str) -> None:
    assert redacted(text) == text


def test_the_rest_of_a_line_stays() -> None:
    assert redacted("GET /docs?token=abc&x=1 by 1.2.3.4") == "GET /docs?token=***&x=1 by 1.2.3.4"
    assert redacted("ws://user:abc@host/ws") == "ws://***@host/ws"


def test_known_secrets_are_hidden_wherever_they_stand() -> None:
    assert redacted("the word tangerine-42 in a text", ["tangerine-42"]) == "the word *** in a text"


def test_a_handler_hides_messages_arguments_tracebacks_and_extra_fields() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(message)s %(address)s"))
    handler.addFilter(RedactSecrets(["tangerine-42", "longer tangerine-42", "short"]))
    log = logging.Logger("test")
    log.addHandler(handler)
    try:
        raise ValueError("Authorization: Bearer SECRET, and tangerine-42")
    except ValueError:
        log.exception("to %s", "ws://host?token=SECRET", extra={"address": "https://SECRET@host"})
    log.warning("%s", {"cookie": "a=SECRET"}, extra={"address": "a short longer tangerine-42"})
    text = out.getvalue()
    assert "SECRET" not in text
    assert "tangerine" not in text
    assert "ValueError: Authorization: ***" in text
    assert "a short ***" in text


def test_a_long_line_takes_no_time_that_grows_with_its_square() -> None:
    for piece in ("a.", "a-", "://", "token", "'cookie':'", "bearer "):
        redacted(piece * 100_000)
