"""The endpoint's key is in nothing that the agent gets, and in no record, log or figure, however it is quoted."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import httpx2
import pytest

from openenv.rollout.capture.captured_rollout import Redactor
from openenv.rollout.tasks.task import Model

KEY = "sk-real/secret+key=0123456789&x"
FORMS = {
    "as it is": KEY,
    "in a header": f"Bearer {KEY}",
    "in a URL": quote(KEY, safe=""),
    "in a URL, lower case": quote(KEY, safe="").lower(),
    "in a form": quote_plus(KEY),
    "base64": base64.b64encode(KEY.encode()).decode(),
    "base64 of a header": base64.b64encode(f"Bearer {KEY}".encode()).decode(),
    "base64 of a user's key": base64.b64encode(f"ab:{KEY}".encode()).decode(),
    "base64 for URLs": base64.urlsafe_b64encode(f"u:{KEY}".encode()).decode(),
    "hexadecimal": KEY.encode().hex(),
}


def leaks(data: bytes | str) -> list[str]:
    """The forms of the key of which a part of 16 characters is in some text."""
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    plain = {name: form for name, form in FORMS.items() if name != "in a header"}
    return [name for name, form in plain.items() if any(form[at : at + 16] in text for at in range(len(form) - 15))]


@pytest.fixture
def keyed(open_agent: Callable[..., Any]) -> Any:
    """An agent whose endpoint has the key."""
    return open_agent(api_key=KEY)


PLACES = ["error status", "error in 200", "not JSON", "stream error", "stream text", "header"]


def quoting(fake: Any, place: str, quoted: str) -> Callable[[Any], Any]:
    """Answer with the key somewhere."""
    error = {"error": {"message": f"wrong key {quoted}!", "headers": {quoted: [quoted]}}}

    def respond(request: Any) -> Any:
        if place == "error status":
            return fake.Answer.json(error, 400)
        if place == "error in 200":
            return fake.Answer.json(error)
        if place == "not JSON":
            return fake.Answer([b"x" * 1990 + quoted.encode()], 200, {"content-type": "text/html"})
        if place == "header":
            answer = fake.vllm([1])(request)
            answer.headers.update({"x-request-id": quoted, "x-policy-version": quoted})
            return answer
        if place == "stream text":
            end = fake.event(fake.chat_chunk({}, finish="stop"))
            return fake.Answer.events(fake.event(fake.chat_chunk({"content": quoted})), end, fake.DONE)
        event = fake.event(error)
        half = event.index(quoted.encode()) + len(quoted) // 2
        first = fake.event(fake.chat_chunk({"content": "a"}))
        return fake.Answer.events(first, event[:half], 0.01, event[half:], fake.DONE)

    return respond


@pytest.mark.parametrize("place", PLACES)
def test_a_quoted_key_is_nowhere(
    keyed: Any, engine: Any, fake: Any, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    caplog.set_level(logging.DEBUG)
    for form, quoted in FORMS.items():
        engine.respond = quoting(fake, place, quoted)
        response = keyed.chat(stream=place.startswith("stream"))
        assert leaks(response.content + str(response.headers).encode()) == [], form
        assert "***" in response.text or place in ("header", "not JSON"), form
        assert leaks(repr(keyed.capture.stats())) == [], form
    assert leaks((keyed.capture.path / "calls.log").read_bytes()) == []
    assert leaks(repr(keyed.capture.calls()) + caplog.text) == []


@pytest.mark.parametrize("path", ["/messages", "/responses"])
def test_a_key_in_a_stream_that_is_translated_is_redacted(keyed: Any, engine: Any, fake: Any, path: str) -> None:
    error = fake.event({"error": {"message": f"key {KEY}"}})
    engine.respond = lambda request: fake.Answer.events(fake.event(fake.chat_chunk({"content": "a"})), error, fake.DONE)
    body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 9, "stream": True}
    response = keyed.post(path, body)
    assert "key ***" in response.text
    assert leaks(response.text) == []
    assert leaks((keyed.capture.path / "calls.log").read_bytes()) == []


def test_escapes_in_an_error_do_not_hide_the_key(keyed: Any, engine: Any, fake: Any) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    text = ('{"error": {"message": "key ' + escaped + '"}}').encode()
    engine.respond = lambda request: fake.Answer([text], 400, {"content-type": "application/json"})
    assert keyed.chat().json()["error"]["message"] == "key ***"
    engine.respond = lambda request: fake.Answer.events(b"data: " + text + b"\n\n", fake.DONE)
    assert "key ***" in keyed.chat(stream=True).text
    log = (keyed.capture.path / "calls.log").read_text()
    assert escaped not in log
    assert leaks(log) == []


def test_slashes_that_are_escaped_do_not_hide_the_key(keyed: Any, engine: Any, fake: Any) -> None:
    content = (
        b'{"choices": [{"message": {"content": "' + KEY.replace("/", "\\/").encode() + b'"}, "finish_reason": "stop"}]}'
    )
    engine.respond = lambda request: fake.Answer([content], 200, {"content-type": "application/json"})
    assert keyed.chat().json()["choices"][0]["message"]["content"] == "***"


def test_a_key_in_an_event_that_never_ends_is_not_in_the_records(keyed: Any, engine: Any, fake: Any) -> None:
    piece = f'data: {{"error": "{KEY}'.encode()
    engine.respond = lambda request: fake.Answer.events(
        fake.event(fake.chat_chunk({"content": "a"})), piece, 0.05, None
    )
    with pytest.raises(httpx2.RemoteProtocolError):
        keyed.chat(stream=True)
    assert leaks((keyed.capture.path / "calls.log").read_bytes()) == []


def test_a_failure_of_the_proxy_itself_does_not_log_the_key(
    keyed: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise LookupError(f"header 'Bearer {KEY}' is odd")

    monkeypatch.setattr("openenv.rollout.capture.outbound.Endpoints.send", fail)
    response = keyed.chat()
    assert response.status_code == 502
    assert "is odd" in caplog.text
    assert leaks(caplog.text + response.text) == []
    assert engine.requests == []


def test_other_secrets_of_a_model_are_redacted_and_words_are_not() -> None:
    headers = {"X-Api-Key": "a-second-secret-key", "Cookie": "session=abcdefgh12345", "X-Team": "research-team-42"}
    model = Model(base_url="http://me:pass%2Fword-12@host/v1", name="m", api_key="EMPTY", extra_headers=headers)
    redactor = Redactor(model)
    text = "a-second-secret-key session=abcdefgh12345 pass/word-12 pass%2Fword-12 research-team-42 EMPTY"
    assert redactor.text(text) == "*** *** *** *** research-team-42 ***"
    assert redactor.data(b"the list is EMPTY") == b"the list is EMPTY"
    assert Redactor(Model(base_url="http://h", name="m")).text("intercepted") == "intercepted"


def test_credentials_in_an_address_are_not_in_the_records(open_agent: Callable[..., Any], engine: Any) -> None:
    url = engine.url.replace("http://", "http://user:sw0rdfish-0123@")
    agent = open_agent(base_url=url)
    assert agent.chat().status_code == 200
    assert b"sw0rdfish" not in (agent.capture.path / "calls.log").read_bytes()
