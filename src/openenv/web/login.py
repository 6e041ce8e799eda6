"""`/web/login` and `/web/logout`: a token for a cookie that scripts cannot read.

The cookie counts for the page's own routes only. Knows tokens and cookies; who may do what is in `server.access`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.json_values import decode
from ..server.access import AccessPolicy, Role, page_key, token_cookie
from ..server.asgi import BodyTooLarge, ClientGone, Receive, Scope, Send, header, read_body, respond_json

_MAX_BODY = 16 * 1024


class Login:
    """The ASGI handlers of `/web/login` and `/web/logout`.

    Args:
        access: Tells which tokens count.
        report: Told the code of each refusal.
    """

    def __init__(self, access: Callable[[], AccessPolicy], report: Callable[[str], None]) -> None:
        self._access = access
        self._report = report

    async def login(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/login`."""
        try:
            body = decode(await read_body(receive, _MAX_BODY))
        except ClientGone:
            return
        except (ValueError, BodyTooLarge):
            body = None
        access = self._access()
        if access.is_open:
            await respond_json(send, 200, {"role": Role.ORCHESTRATOR.value})
            return
        token = body.get("token") if isinstance(body, dict) else None
        role = access.role(token.strip()) if isinstance(token, str) else None
        if role is None:
            await self._refuse(send, 401, "UNAUTHORIZED", "This server does not know that token.")
        elif role is Role.AGENT:
            await self._refuse(send, 403, "FORBIDDEN", "The token is an agent's, who may call tools and nothing else.")
        else:
            assert isinstance(token, str)
            kept = _set_cookie(scope, page_key(token.strip()))
            await respond_json(send, 200, {"role": role.value}, [kept])

    async def logout(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/logout`."""
        forgotten = _set_cookie(scope, "", life="; Max-Age=0")
        await respond_json(send, 200, {"role": None}, [forgotten])

    async def _refuse(self, send: Send, status: int, code: str, text: str) -> None:
        self._report(code)
        await respond_json(send, status, {"detail": text, "code": code})


def _set_cookie(scope: Scope, value: str, *, life: str = "") -> tuple[bytes, bytes]:
    secure = "; Secure" if is_https(scope) else ""
    return b"set-cookie", f"{token_cookie(scope)}={value}; Path=/; HttpOnly; SameSite=Strict{secure}{life}".encode()


def is_https(scope: Scope) -> bool:
    """Say whether the browser speaks TLS, with this server or with a proxy in front of it."""
    forwarded = (header(scope, b"x-forwarded-proto") or "").split(",")[0].strip().lower()
    return scope.get("scheme") in ("https", "wss") or forwarded == "https"
