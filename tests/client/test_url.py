"""Addresses: what users write, what a socket needs, what is local."""

from __future__ import annotations

import pytest

from openenv.client.url import Address, convert_to_ws_url, hf_space_subdomain, parse_ws_url


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://host:8000", "ws://host:8000"),
        ("https://host/", "wss://host"),
        ("HTTPS://host//", "wss://host"),
        ("ws://host/base/", "ws://host/base"),
        ("wss://host", "wss://host"),
        ("host:8000", "ws://host:8000"),
        (" localhost ", "ws://localhost"),
        ("ftp://host", "ftp://host"),
    ],
)
def test_every_form_becomes_a_websocket_url(given: str, expected: str) -> None:
    assert convert_to_ws_url(given) == expected


@pytest.mark.parametrize(
    ("url", "expected", "authority"),
    [
        ("ws://host/ws", Address("host", 80, "/ws", False), "host"),
        ("wss://host/ws", Address("host", 443, "/ws", True), "host"),
        ("ws://host:443/ws?a=1", Address("host", 443, "/ws?a=1", False), "host:443"),
        ("wss://host:8443", Address("host", 8443, "/", True), "host:8443"),
        ("ws://[::1]:9/ws", Address("::1", 9, "/ws", False), "[::1]:9"),
    ],
)
def test_a_websocket_url_is_split(url: str, expected: Address, authority: str) -> None:
    assert parse_ws_url(url) == expected
    assert parse_ws_url(url).authority == authority


@pytest.mark.parametrize("url", ["http://host", "ws://", "host", "ftp://host/ws", "ws://host:port/"])
def test_what_is_no_websocket_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        parse_ws_url(url)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("env.localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("example.com", False),
        ("localhost.example.com", False),
    ],
)
def test_local_addresses_are_known(host: str, local: bool) -> None:
    assert Address(host, 80, "/", False).is_local is local


@pytest.mark.parametrize(
    ("repo", "subdomain"),
    [("Org/My_Space", "org-my-space"), ("a/b.c--d", "a-b-c-d"), ("-x-/-y-", "x-y"), ("Ü/z", "z")],
)
def test_a_space_has_its_subdomain(repo: str, subdomain: str) -> None:
    assert hf_space_subdomain(repo) == subdomain
