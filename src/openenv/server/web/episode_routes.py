"""The routes of recorded episodes: the list, one episode, its download, and a view of a running session.

They are read-only. Text from environments and agents is sent as JSON only, never as a page.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from typing import Any, Final
from urllib.parse import parse_qs

from openenv.errors import OpenEnvError, SessionNotFoundError
from openenv.types import ServerMode

from ..asgi import Handler, HeaderList, Receive, Scope, Send, header, respond
from ..service import EnvService
from ..sessions.session import Session
from .episode_files import INTERRUPTED, EpisodeError, EpisodeSummary
from .episode_recorder import EpisodeRecorder, opener_of
from .visitors import Visitors

logger = logging.getLogger(__name__)

PATH: Final = "/web/episodes"
_MOST: Final = 1000
_NO_STORE: HeaderList = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_FORWARDED: Final = (b"x-forwarded-for", b"forwarded", b"x-real-ip")


class EpisodeRoutes:
    """The ASGI handlers; files are read in threads."""

    def __init__(self, service: EnvService, recorder: EpisodeRecorder, visitors: Visitors) -> None:
        self._service = service
        self._recorder = recorder
        self._visitors = visitors

    def handlers(self) -> list[tuple[str, Handler]]:
        """Return the GET routes by path; production mode has no episodes."""
        if self._service.mode is ServerMode.PRODUCTION:
            return []
        return [
            (PATH, self.all),
            (f"{PATH}/{{episode_id}}", self.show),
            (f"{PATH}/{{episode_id}}/download", self.download),
            ("/web/sessions/{session_id}/watch", self.watch),
        ]

    async def all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/episodes`: the newest episodes and their statistics."""
        try:
            limit = _count(scope, "limit", _MOST)
            summaries, count = await _in_thread(self._summaries, limit)
            answer = {
                "recording": self._recorder.status(),
                "count": count,
                "episodes": [_document(each, is_running=self._recorder.is_running(each)) for each in summaries],
            }
        except Exception as exc:  # the boundary of a request
            await _refuse(send, exc)
        else:
            await respond(send, 200, await _in_thread(_encoded, answer), _NO_STORE)

    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/episodes/{episode_id}`: its rows, with tracebacks for visitors on the same machine."""
        try:
            episode_id = scope["path_params"]["episode_id"]
            rows, summary = await _in_thread(self._episode, episode_id)
            shown = rows if is_loopback(scope) else [without_traceback(row) for row in rows]
            answer = {"summary": _document(summary, is_running=self._recorder.is_running(summary)), "rows": shown}
            body = await _in_thread(_encoded, answer)
        except Exception as exc:  # the boundary of a request
            await _refuse(send, exc)
        else:
            await respond(send, 200, body, _NO_STORE)

    async def download(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/episodes/{episode_id}/download`: the file, as `openenv replay` reads it."""
        try:
            episode_id = scope["path_params"]["episode_id"]
            rows, _ = await _in_thread(self._episode, episode_id)
            shown = rows if is_loopback(scope) else [without_traceback(row) for row in rows]
            body = await _in_thread(lambda: b"".join(_encoded(row) + b"\n" for row in shown))
        except Exception as exc:  # the boundary of a request
            await _refuse(send, exc)
            return
        name = f'attachment; filename="episode-{episode_id}.jsonl"'.encode()
        headers = [(b"content-type", b"application/x-ndjson"), (b"content-disposition", name), *_NO_STORE]
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
        await send({"type": "http.response.body", "body": body})

    async def watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/sessions/{session_id}/watch`: a session's last action; orchestrators only.

        An unrecorded session is noted from the first request on, while further requests follow.
        """
        try:
            session_id = scope["path_params"]["session_id"]
            sessions = self._service.manager.sessions()
            session = next((each for each in sessions if each.id == session_id and not each.is_ending), None)
            if session is None:
                raise SessionNotFoundError(session_id)
            answer = await self._look(session)
            if not is_loopback(scope) and answer["last"] is not None:
                answer["last"] = without_traceback(answer["last"])
            body = _encoded(answer)
        except Exception as exc:  # the boundary of a request
            await _refuse(send, exc)
        else:
            await respond(send, 200, body, _NO_STORE)

    async def _look(self, session: Session) -> dict[str, Any]:
        visitor = self._visitors.by_session.get(session.id)
        tap = self._recorder.watch(session, "page" if visitor is not None else opener_of(session))
        await _in_thread(self._recorder.writer.flush)
        info = self._service.manager.info(session.id)
        episode = tap.episode
        return {
            "session_id": session.id,
            "state": session.state.value,
            "opened_by": "page" if tap.is_page else opener_of(session),
            "opened_at": None if info is None else info.created_at,
            "step_count": session.step_count,
            "idle_s": session.unused_s,
            "is_recorded": episode is not None and episode.is_kept,
            "episode": None if episode is None else _document(episode.summary, is_running=True),
            "last": None if episode is None else episode.last,
            "picture": None if episode is None else episode.picture,
        }

    def _summaries(self, limit: int) -> tuple[list[EpisodeSummary], int]:
        files = self._recorder.files
        self._recorder.writer.flush()
        return files.summaries(limit), files.count()

    def _episode(self, episode_id: str) -> tuple[list[dict[str, Any]], EpisodeSummary]:
        files = self._recorder.files
        self._recorder.writer.flush()
        return files.rows(episode_id), files.summary(episode_id)


def is_loopback(scope: Scope) -> bool:
    """Return whether a request comes from the same machine, and not through a proxy there."""
    client = scope.get("client")
    if not client or any(header(scope, name) is not None for name in _FORWARDED):
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:  # a Unix socket, or a name
        return False


def without_traceback(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the server's source lines and paths."""
    error = row.get("error")
    if not isinstance(error, dict) or "traceback" not in error:
        return row
    return {**row, "error": {name: value for name, value in error.items() if name != "traceback"}}


def _document(summary: EpisodeSummary, *, is_running: bool) -> dict[str, Any]:
    document = {**summary.document(), "is_running": is_running, "outcome": summary.why}
    if document["reason"] is None and not is_running:
        document["reason"] = summary.why or INTERRUPTED
    return document


def _count(scope: Scope, name: str, most: int) -> int:
    values = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(name)
    if not values:
        return most
    if not (values[-1].isascii() and values[-1].isdigit() and len(values[-1]) < 10):
        raise InvalidEpisodeQuery(f"{name} must be a whole number, not {values[-1][:40]!r}")
    return min(int(values[-1]), most)


class InvalidEpisodeQuery(OpenEnvError):
    """The `limit` query parameter is not a whole number."""

    code = "VALIDATION_ERROR"


async def _in_thread(work: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)


def _encoded(value: Any) -> bytes:
    # ASCII: an environment's text may contain lone surrogates, which UTF-8 cannot encode.
    return json.dumps(value, separators=(",", ":")).encode()


async def _refuse(send: Send, exc: Exception) -> None:
    if isinstance(exc, InvalidEpisodeQuery):
        status = 422
    elif isinstance(exc, EpisodeError | SessionNotFoundError):
        status = 404
    else:
        status = 500
        logger.error("a request for episodes failed", exc_info=exc)
    body = {"detail": str(exc), "code": getattr(exc, "code", "EXECUTION_ERROR")}
    await respond(send, status, _encoded(body), _NO_STORE)
