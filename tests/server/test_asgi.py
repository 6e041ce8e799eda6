"""Small ASGI pieces: bodies in one or many chunks, limits, headers and cookies."""

from __future__ import annotations

from typing import Any

import pytest

from openenv.server.asgi import BodyTooLarge, ClientGone, cookie, header, read_body, respond_json

pytestmark = pytest.mark.anyio


def receiving(*messages: dict[str, Any]) -> Any:
    queue = list(messages)

    async def receive() -> dict[str, Any]:
        return queue.pop(0)

    return receive


def chunk(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


async def test_a_body_is_read_in_one_piece_or_many() -> None:
    assert await read_body(receiving(chunk(b"whole")), 5) == b"whole"
    assert await read_body(receiving(chunk(b"a", more=True), chunk(b"", more=True), chunk(b"b")), 5) == b"ab"
    assert await read_body(receiving({"type": "http.request"}), 5) == b""


async def test_a_body_over_the_limit_is_refused_before_the_rest_is_read() -> None:
    with pytest.raises(BodyTooLarge, match="larger than 5 bytes"):
        await read_body(receiving(chunk(b"123456")), 5)
    rest = [chunk(b"123", more=True), chunk(b"456", more=True)]
    with pytest.raises(BodyTooLarge):
        await read_body(receiving(*rest), 5)
    with pytest.raises(BodyTooLarge):
        await read_body(receiving(chunk(b"123", more=True), chunk(b"456")), 5)


async def test_a_client_that_goes_away_is_noticed() -> None:
    with pytest.raises(ClientGone):
        await read_body(receiving(GONE), 5)
    with pytest.raises(ClientGone):
        await read_body(receiving(chunk(b"a", more=True), GONE), 5)


def test_headers_are_found_by_lower_case_name() -> None:
    scope = {"headers": [(b"x-one", b"1"), (b"x-two", "é".encode("latin-1"))]}
    assert header(scope, b"x-two") == "é"
    assert header(scope, b"x-three") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("openenv_session=abc", "abc"),
        ("a=1; openenv_session=abc; b=2", "abc"),
        ('openenv_session="abc"', "abc"),
        ("bad/name=1; openenv_session=abc", "abc"),
        ("nonsense; =; openenv_session=abc", "abc"),
        ("other_openenv_session=abc", None),
        ("a=openenv_session", None),
        ("", None),
    ],
)
def test_a_cookie_is_found_among_others_good_or_bad(text: str, expected: str | None) -> None:
    assert cookie({"headers": [(b"cookie", text.encode())]}, "openenv_session") == expected
    assert cookie({"headers": []}, "openenv_session") is None


async def test_an_answer_has_its_length_and_type() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await respond_json(send, 418, {"a": 1}, [(b"x", b"y")])
    assert sent[0]["status"] == 418
    assert set(sent[0]["headers"]) == {(b"content-type", b"application/json"), (b"content-length", b"7"), (b"x", b"y")}
    assert sent[1]["body"] == b'{"a":1}'
