"""Request flows, written once as generators, for the blocking and the awaiting client alike.

Those of protocol v1 are here; where the server speaks v2, the same names lead to `resumption`. Knows the protocol's
client side; must not know sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import (
    EnvironmentFactoryError,
    ProtocolError,
    RequestTimeout,
    SessionCapacityError,
    SessionError,
    SessionLost,
)
from ..protocol.client_sessions import ClientSession, Event, ResumableSession
from .commands import Exchange, Flow, HangUp, Unasked
from .connecting import reach
from .link import Link
from .resumption import Call, OtherProtocol, ask

CLOSED_BY_CLIENT = "closed by the client"


def connect(link: Link) -> Flow[None]:
    """Open a connection unless there is one."""
    if link.is_open:
        return
    if link.has_connected and isinstance(link.session, ClientSession):
        link.session.lose(link.lost_reason)
    yield from reach(link)
    link.has_connected = True
    try:
        link.agree()
    except ProtocolError:
        yield HangUp()
        raise


def request(
    link: Link,
    kind: str,
    data: Any,
    timeout_s: float | None,
    *,
    extra: Mapping[str, Any] | None = None,
    listen: Callable[[Event], object] | None = None,
    events_count: bool = True,
) -> Flow[dict[str, Any]]:
    """Send a request and return its reply's data; a lost episode stays lost until `reset`.

    Args:
        link: The client's connection and session.
        kind: The type of the request.
        data: What it is about.
        timeout_s: How long the reply may take; None for ever.
        extra: Further keys; v1 has none.
        listen: Told of events; v1 has none.
        events_count: Whether an event gives the reply its time anew.
    """
    if not link.has_connected:
        yield from connect(link)
    session = link.session
    if isinstance(session, ResumableSession):
        try:
            return (yield from ask(link, session, Call(kind, data, timeout_s, extra, listen, events_count)))
        except OtherProtocol:
            return (yield from request(link, kind, data, timeout_s))
    return (yield from _request_v1(link, session, kind, data, timeout_s))


def _request_v1(
    link: Link, session: ClientSession, kind: str, data: Any, timeout_s: float | None
) -> Flow[dict[str, Any]]:
    if not link.is_open and link.has_connected:
        session.lose(link.lost_reason)
        if kind != "reset" and (farewell := link.last_words()) is not None:
            session.reply(kind, farewell)  # raises: it says why the server has hung up
    payload = session.request(kind, data)
    was_open = link.is_open
    yield from connect(link)
    if link.session is not session:
        return (yield from request(link, kind, data, timeout_s))
    try:
        raw = yield from _exchange(session, kind, payload, timeout_s)
    except SessionLost:
        # A reset begins anew anyway, so a connection that had died unnoticed may be replaced for it.
        if not (was_open and kind == "reset"):
            raise
        yield from connect(link)
        if link.session is not session:
            return (yield from request(link, kind, data, timeout_s))
        raw = yield from _exchange(session, kind, payload, timeout_s)
    return (yield from _reply(session, kind, raw))


def next_reply(link: Link, kind: str, timeout_s: float | None) -> Flow[dict[str, Any]]:
    """Wait for one more message of the server to the request that it is still at work on."""
    session = link.session
    assert isinstance(session, ClientSession), "v2 has events instead"
    raw = yield from _exchange(session, kind, None, timeout_s)
    return (yield from _reply(session, kind, raw))


def _reply(session: ClientSession, kind: str, raw: bytes) -> Flow[dict[str, Any]]:
    """Read a reply; one that ends the session ends the connection as well."""
    try:
        return session.reply(kind, raw)
    except (SessionCapacityError, EnvironmentFactoryError, SessionError, ProtocolError) as exc:
        session.lose(f"the server ended the session: {exc}")
        yield HangUp()
        raise


def _exchange(session: ClientSession, kind: str, payload: bytes | None, timeout_s: float | None) -> Flow[bytes]:
    """Exchange messages; whatever goes wrong, the episode is lost with it."""
    try:
        raw: bytes = yield Exchange(payload, timeout_s)
        return raw
    except SessionLost as exc:
        session.lose(exc.reason)
        raise
    except RequestTimeout:
        session.lose("a request timed out")
        raise
    except Unasked as exc:
        early = exc.payload
    except BaseException:
        session.lose("a request was interrupted")
        raise
    session.lose("the server sent a message that nobody asked for")
    yield HangUp()
    session.reply(kind, early)  # raises, where it is the reason why the server hung up
    raise SessionLost("the server sent a message that nobody asked for")


def hang_up(link: Link) -> Flow[None]:
    """End session and connection."""
    if link.is_open:  # a v2 session has left a will that says the same
        yield HangUp(b'{"type":"close"}' if isinstance(link.session, ClientSession) else None)
    if link.has_connected:
        link.session.lose(CLOSED_BY_CLIENT)


def detach(link: Link) -> Flow[str]:
    """Hang up and leave the session to whoever has its token; return that.

    Raises:
        ProtocolError: There is no session that could be resumed.
    """
    session = link.session
    token = session.token if isinstance(session, ResumableSession) and session.lost_reason is None else None
    if token is None:
        raise ProtocolError("Nothing to detach: no session has been opened, or the server speaks only protocol v1")
    link.leave_will(None)
    if link.is_open:
        yield HangUp()
    session.lose("detached by the client")
    return token


__all__ = ["CLOSED_BY_CLIENT", "connect", "detach", "hang_up", "next_reply", "request"]
