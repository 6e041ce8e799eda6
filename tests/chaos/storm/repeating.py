"""A stranger's HTTP client, written from the protocol's page alone: it repeats a request until it is answered.

Each request has a key, the same for all its repetitions, whatever ended the last one: a connection that broke, or no
answer in time.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from openenv.errors import ProtocolError, ServerError, SessionLost

KEY = "Idempotency-Key"
SESSION = "X-OpenEnv-Session"
REPLY_S = 1.5
PATIENCE_S = 12.0
PAUSE_S = 0.1


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: Any


@dataclass
class Repeating:
    """Sends requests to one server.

    Args:
        url: Where it is.
        keeps_keys: Whether a repetition carries the key of the first attempt. One that does not is what a judge has to
            find out.
        patience_s: How long a request is repeated.
    """

    url: str
    keeps_keys: bool = True
    patience_s: float = PATIENCE_S
    repetitions: int = 0
    lost: str | None = None
    _connection: http.client.HTTPConnection | None = field(default=None, repr=False)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        key_in_body: bool = False,
        is_keyed: bool = True,
    ) -> Answer:
        """Send a request until it is answered, and return what the answer says.

        Args:
            method: The method.
            path: The path.
            body: What is sent as JSON.
            headers: Sent along.
            key_in_body: Send the key as `request_id`. The answer does not name it then, so that such a request has a
                connection of its own.
            is_keyed: Whether it has a key at all; what only looks needs none.

        Raises:
            SessionLost: The server says so, or has not answered in time, however often it was asked.
            ServerError: It refuses.
        """
        if self.lost is not None:
            raise SessionLost(self.lost)
        key, deadline = uuid.uuid4().hex, time.monotonic() + self.patience_s
        while True:
            if not self.keeps_keys:
                key = uuid.uuid4().hex
            named = {**(headers or {}), **({KEY: key} if is_keyed and not key_in_body else {})}
            sent = {**body, "request_id": key} if key_in_body else body
            try:
                answer = self._exchange(method, path, sent, named, alone=key_in_body or not is_keyed)
            except (OSError, http.client.HTTPException, ValueError) as exc:
                problem: Exception = exc
            else:
                if _is_to(answer, named):
                    return _checked(answer)
                problem = ProtocolError("the answer is another request's")
            self.hang_up()
            if time.monotonic() > deadline:  # it may have run or not: the episode must not go on as if that were known
                self.lost = f"no answer to {method} {path}: {problem}"
                raise SessionLost(self.lost)
            self.repetitions += 1
            time.sleep(PAUSE_S)

    def _exchange(self, method: str, path: str, body: Any, headers: dict[str, str], *, alone: bool) -> Answer:
        if alone:
            self.hang_up()
        if self._connection is None:
            host, _, port = self.url.removeprefix("http://").partition(":")
            self._connection = http.client.HTTPConnection(host, int(port), timeout=REPLY_S)
            self._connection.connect()
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, {"Content-Type": "application/json", **headers})
        response = self._connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        text = response.read()
        if len(text) != int(found.get("content-length", -1)):  # a head that was cut off looks like a short one
            raise http.client.IncompleteRead(text)
        if alone:
            self.hang_up()
        return Answer(response.status, found, json.loads(text) if text else None)

    def hang_up(self) -> None:
        """Close the connection; the next request has a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_to(answer: Answer, sent: dict[str, str]) -> bool:
    """Say whether an answer is to a request with these headers: it has to name its key, unless it refuses it."""
    named = answer.headers.get(KEY.lower())
    return KEY not in sent or named == sent[KEY] or (named is None and answer.status >= 400)


def _checked(answer: Answer) -> Answer:
    if answer.status < 400:
        return answer
    data = answer.body if isinstance(answer.body, dict) else {}
    if answer.status == 410:
        raise SessionLost(str(data.get("reason") or data.get("detail")))
    raise ServerError(f"HTTP {answer.status}: {json.dumps(data)[:300]}")
