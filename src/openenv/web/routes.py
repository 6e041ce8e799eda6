"""The page's routes that are about playing: `/web/page`, `/web/reset`, `/web/step` and their kin.

Knows HTTP; what is done is in `play`, for whom in `visitors`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import settings
from ..errors import (
    EnvironmentFactoryError,
    OpenEnvError,
    SessionCapacityError,
    SessionLost,
    message_of,
)
from ..protocol.json_values import decode, encode
from ..protocol.server_v1 import error_list
from ..server.access import AccessPolicy, role_of
from ..server.asgi import (
    BODY_TOO_LARGE,
    BodyTooLarge,
    ClientGone,
    HeaderList,
    Receive,
    Scope,
    Send,
    cookie,
    header,
    read_body,
    respond,
    respond_json,
)
from ..server.mcp.tool_calls import NoTools
from ..server.service import EnvService
from ..types import WSErrorCode
from .login import is_https
from .page import PageDescription
from .play import NoState, Play, UnfitAction
from .quickstart import DEFAULT_URL
from .visitors import COOKIE, Visitor, Visitors

logger = logging.getLogger(__name__)

NO_TOOLS = "NO_TOOLS"
NO_STATE = "NO_STATE"
_UNFIT = WSErrorCode.VALIDATION_ERROR.value
_FAILED = WSErrorCode.EXECUTION_ERROR.value
_HOST = re.compile(r"[\w.:\[\]-]+", re.ASCII)
_NO_STORE: HeaderList = ((b"cache-control", b"no-store"),)


class Unfit(Exception):
    """A body is not what the route takes."""

    def __init__(self, text: str, errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(text)
        self.errors = errors or [{"type": "value_error", "loc": [], "msg": text}]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route answers."""

    body: bytes
    status: int = 200
    headers: HeaderList = _NO_STORE


class PlayRoutes:
    """The ASGI handlers.

    Args:
        service: The served environment.
        visitors: Who plays.
        play: Does it.
        page: Says what the page shows.
        access: Tells which tokens count.
    """

    def __init__(
        self,
        service: EnvService,
        visitors: Visitors,
        play: Play,
        page: PageDescription,
        access: Callable[[], AccessPolicy],
    ) -> None:
        self._service = service
        self._visitors = visitors
        self._play = play
        self._page = page
        self._access = access

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/page`."""

        async def answer() -> Answer:
            asks = not self._access().is_open
            return Answer(encode(await self._page.describe(role_of(scope), url=address_of(scope), asks_for_token=asks)))

        await self._answer(send, answer)

    async def metadata(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/metadata`."""

        async def answer() -> Answer:
            return Answer(encode((await self._page.metadata()).model_dump()))

        await self._answer(send, answer)

    async def state(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/state`."""

        async def answer() -> Answer:
            try:
                return Answer(await self._play.state(self._visitor(scope)))
            except NoState as exc:
                return Answer(encode({"detail": str(exc), "code": NO_STATE}), 409)

        await self._answer(send, answer)

    async def reset(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/reset`."""

        async def answer() -> Answer:
            kwargs = await self._object(receive)
            return Answer((await self._play.reset(self._visitors.of(cookie(scope, COOKIE) or None), kwargs)).payload)

        await self._answer(send, answer)

    async def step(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/step`."""

        async def answer() -> Answer:
            body = await self._object(receive)
            visitor = self._visitor(scope)
            if "message" in body and "action" not in body:
                return Answer((await self._play.say(visitor, str(body["message"]))).payload)
            action = body.get("action", {})
            if not isinstance(action, dict):
                raise Unfit("'action' has to be an object")
            return Answer((await self._play.step(visitor, action)).payload)

        await self._answer(send, answer)

    async def close(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/close`."""
        await respond_json(send, 200, {"closed": self._visitor(scope).end()}, _NO_STORE)

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /web/call`."""

        async def answer() -> Answer:
            body = await self._object(receive)
            name, arguments = body.get("name"), body.get("arguments") or {}
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise Unfit("expected the 'name' of a tool, and its 'arguments' as an object")
            called = await self._play.call(self._visitor(scope), name, arguments)
            return Answer(encode({"result": called.result, "error": called.error}))

        await self._answer(send, answer)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _visitor(self, scope: Scope) -> Visitor:
        return self._visitors.find(cookie(scope, COOKIE) or None)

    async def _object(self, receive: Receive) -> dict[str, Any]:
        raw = await read_body(receive, self._service.options.max_message_bytes)
        try:
            body = decode(raw) if raw.strip() else {}
        except ValueError as exc:
            raise Unfit(f"The body is not JSON: {exc}") from exc
        if body is not None and not isinstance(body, dict):
            raise Unfit("The body has to be an object")
        return body or {}

    async def _answer(self, send: Send, work: Callable[[], Any]) -> None:
        """Answer with what the work returns, or with what went wrong."""
        try:
            answer: Answer = await work()
        except ClientGone:
            return
        except BodyTooLarge as exc:
            self._service.manager.report_error(BODY_TOO_LARGE)
            body = {"detail": str(exc), "code": BODY_TOO_LARGE, "limit_bytes": exc.limit}
            answer = Answer(encode(body), 413)
        except (Unfit, UnfitAction) as exc:
            self._service.manager.report_error(_UNFIT)
            answer = _unfit(exc)
        except NoTools:
            answer = Answer(encode({"detail": "This environment has no tools.", "code": NO_TOOLS}), 404)
        except OpenEnvError as exc:
            answer = self._refusal(exc)
        except Exception as exc:
            logger.exception("a request of the web page failed")
            answer = Answer(encode({"detail": message_of(exc), "code": _FAILED}), 500)
        await respond(send, answer.status, answer.body, answer.headers)

    def _refusal(self, exc: OpenEnvError) -> Answer:
        reason = exc.details.get("reason") if isinstance(exc, EnvironmentFactoryError) else None
        text = str(exc) if reason is None else f"{exc} {reason}"
        body = encode({"detail": text, "code": exc.code, **exc.details})
        if isinstance(exc, SessionLost):
            return Answer(body, 410)
        if isinstance(exc, SessionCapacityError):
            later = str(max(1, int(self._service.manager.retry_after_s))).encode()
            return Answer(body, 503, [*_NO_STORE, (b"retry-after", later)])
        if not isinstance(exc, EnvironmentFactoryError):
            logger.error("a request of the web page failed", exc_info=exc)
        return Answer(body, 500)


def _unfit(exc: Unfit | UnfitAction) -> Answer:
    if isinstance(exc, Unfit):
        text, errors = str(exc), exc.errors
    else:
        cause = exc.__cause__
        assert isinstance(cause, Exception)
        text, errors = "The action does not fit.", error_list(cause)
    return Answer(encode({"detail": text, "code": _UNFIT, "errors": errors}), 422)


def address_of(scope: Scope) -> str:
    """Return the address that clients connect to, as the browser knows it."""
    space = settings.space_host()
    if space:
        return f"https://{space}"
    host = header(scope, b"host")
    if not host or not _HOST.fullmatch(host):  # the program that is shown has it in quotes
        return DEFAULT_URL
    root = str(scope.get("root_path", "")).rstrip("/")
    return f"{'https' if is_https(scope) else 'http'}://{host}{root}"
