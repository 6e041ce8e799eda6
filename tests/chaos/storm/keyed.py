"""Episodes over plain HTTP with keys: `POST /sessions`, keys in headers and in bodies, and a WebSocket in between.

A session is opened over HTTP. Its episode goes on there, over a WebSocket that attaches by the session's token, or
over both in turn: one episode, whichever way a request takes.
"""

from __future__ import annotations

from typing import Any

from .environment import Move
from .episode import Player, client_of
from .repeating import SESSION, Repeating


class KeyedPlayer:
    """Plays over HTTP, and over a WebSocket from one request to another.

    Args:
        url: Where the server is.
        seed: Decides how keys are sent, and when the episode moves.
        keeps_keys: Whether repeated requests keep their keys.
    """

    UNSENT_IS_HARMLESS = True  # the episode goes on after a request that could not be sent

    def __init__(self, url: str, seed: int, *, keeps_keys: bool = True) -> None:
        self._url = url
        self._http = Repeating(url, keeps_keys=keeps_keys)
        self._in_body = seed % 2 == 0
        self._moves_at = 3 if seed % 3 else 0  # the request from which on it goes over a WebSocket; 0 for never
        self._returns_at = 6 if seed % 3 == 2 else 0
        self._asked = 0
        self._opened: dict[str, str] | None = None
        self._socket: Any = None

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode; the first one opens the session."""
        if self._opened is None:
            self._opened = self._http.ask("POST", "/sessions", {}).body
        return self._socket.reset(**kwargs) if self._goes_by_socket() else self._result("/reset", kwargs)

    def step(self, action: Move) -> Any:
        """Take a step."""
        if self._goes_by_socket():
            return self._socket.step(action)
        return self._result("/step", {"action": action.model_dump(exclude={"metadata"})}, key_in_body=self._in_body)

    def state(self) -> Any:
        """Ask for the state; that needs no key."""
        if self._goes_by_socket():
            return self._socket.state()
        return self._http.ask("GET", "/state", headers=self._named(), is_keyed=False).body

    def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            self._socket.close()
        elif self._opened is not None:
            self._http.patience_s = 0.0  # a lease ends what is not closed
            self._http.ask("DELETE", f"/sessions/{self._opened['session_id']}", headers=self._named(), is_keyed=False)
        self._http.hang_up()

    def _goes_by_socket(self) -> bool:
        self._asked += 1
        if self._asked == self._moves_at and self._opened is not None:
            self._socket = client_of(self._url, resume_token=self._opened["token"]).sync()
        elif self._asked == self._returns_at and self._socket is not None:
            self._socket.detach()
            self._socket = None
        return self._socket is not None

    def _named(self) -> dict[str, str]:
        assert self._opened is not None
        return {SESSION: self._opened["session_id"]}

    def _result(self, path: str, body: dict[str, Any], *, key_in_body: bool = False) -> Any:
        payload = self._http.ask("POST", path, body, headers=self._named(), key_in_body=key_in_body).body
        return _PARSER._parse_result(payload)


_PARSER: Any = Player(base_url="http://127.0.0.1:1")  # never connects
