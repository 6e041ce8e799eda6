"""The routes of the rollout viewer: lists and statistics, single and running rollouts, exports.

They only read stores. Text from agents and models is sent as JSON only, never as a page.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, TypeVar, get_args
from urllib.parse import parse_qsl

from starlette.applications import Starlette

from openenv import settings
from openenv._lazy import load_package_version
from openenv.errors import OpenEnvError, StoreError
from openenv.server.access import AccessGate, AccessPolicy, OriginPolicy, role_of
from openenv.server.asgi import Handler, Receive, Scope, Send, disconnected, respond, respond_json
from openenv.server.web.episode_files import read_rows
from openenv.server.web.page_routes import PageLogin
from openenv.server.web.web_page import HiddenRoute, PageFiles

from ..capture.records import FILE, read
from ..capture.transcript import Transcript, token_documents, transcript
from ..store.changes import compare_trees
from ..store.exports import export_rollouts, json_lines
from ..store.rollout_index import FIRST, Grouping, Order, RolloutFilter, RolloutRow, RolloutStats
from ..store.store import STEPS_FILE, Record, RolloutStore, is_unused
from ..tasks.checks import Check, case_verdicts
from ..tasks.task import TRUSTS, CommandResult

logger = logging.getLogger(__name__)

PATH: Final = "/web/rollouts"
MOST_ROWS: Final = 1000
"""The most rows of a list per request."""
_MOST_NAMES = 1000
_MOST_LINES = 20
_MOST_BRANCHES = 300
_MOST_OUTPUT = 100_000
_LOG_BLOCK = 256 * 1024
_THREADS = 2  # a server used for training needs the other cores
_KEPT_TRANSCRIPTS = 4
_NO_STORE = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_GROUPINGS: Mapping[str, Grouping] = {
    "task": "task_id",
    "group": "group",
    "agent": "agent",
    "model": "model",
    "status": "status",
    "trust": "trust",
    "environment": "environment",
    "policy_version": "policy_version",
    "verdict": "verdict",
}
_SEVERAL = {name: column for name, column in _GROUPINGS.items() if name != "verdict"} | {"sandbox": "sandbox"}
_NUMBERS = ("min_reward", "max_reward", "since", "until")
_FILTERS = frozenset({*_SEVERAL, *_NUMBERS, "min_trust", "text", "verdict", "store"})
_T = TypeVar("_T")


class InvalidQuery(OpenEnvError):
    """A query parameter is unknown or invalid."""

    code = "VALIDATION_ERROR"


class RolloutQuery:
    """The query string of a request; unknown parameters are refused.

    Args:
        text: The encoded query string.
        known: The parameters of the route, in addition to the filters.
    """

    def __init__(self, text: bytes, *known: str) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in parse_qsl(text.decode("latin-1"), keep_blank_values=True):
            self._values.setdefault(name, []).append(value)
        unknown = self._values.keys() - _FILTERS - set(known)
        if unknown:
            raise InvalidQuery(f"unknown parameter {', '.join(sorted(unknown))}")

    def text(self, name: str, default: str = "") -> str:
        """Return the last value of a parameter."""
        return self._values.get(name, [default])[-1]

    def number(self, name: str) -> float | None:
        """Return a number, or None."""
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InvalidQuery(f"{name} must be a number, not {text!r}")
        return value

    def count(self, name: str, default: int, most: int | None = None) -> int:
        """Return a whole number."""
        text = self.text(name, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 15:
            raise InvalidQuery(f"{name} must be a whole number, not {text!r}")
        return int(text) if most is None else min(int(text), most)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """Return one of the choices."""
        text = self.text(name, default)
        if text not in choices:
            raise InvalidQuery(f"{name} must be one of {', '.join(choices)}, not {text!r}")
        return text

    def filter(self) -> RolloutFilter:
        """Return the filter for rollouts."""
        conditions: dict[str, Any] = {
            column: tuple(self._values[name]) for name, column in _SEVERAL.items() if name in self._values
        }
        conditions |= {name: self.number(name) for name in _NUMBERS}
        if self.text("min_trust"):
            conditions["min_trust"] = self.choice("min_trust", TRUSTS, "")
        return RolloutFilter(text=self.text("text") or None, verdict=self.text("verdict") or FIRST, **conditions)


class StoreSet:
    """Several stores by name, each opened at its first use; safe from any thread."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = dict(folders)
        self._opened: dict[str, RolloutStore] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """The names of the stores; the first one is the default."""
        return list(self._folders)

    def get(self, name: str = "") -> RolloutStore | None:
        """Return a store, by default the first one; None if its folder is missing or empty: no rollout has begun.

        Raises:
            InvalidQuery: the name is unknown.
            StoreError: the folder contains something else.
        """
        name = name or next(iter(self._folders))
        if name not in self._folders:
            raise InvalidQuery(f"unknown store {name!r}")
        with self._lock:
            if name not in self._opened:
                try:
                    self._opened[name] = RolloutStore(self._folders[name], create=False)
                except StoreError:
                    if is_unused(self._folders[name]):
                        return None
                    raise
            return self._opened[name]

    def holding(self, rollout_id: str) -> tuple[str, RolloutStore, str]:
        """Return the name of the store that contains a rollout, the store, and the complete rollout ID.

        Raises:
            StoreError: no store contains it.
        """
        error: StoreError | None = None
        for name in self._folders:
            store = self.get(name)
            if store is None:
                continue
            try:
                return name, store, rollout_id if store.unfinished(rollout_id) else store.resolve(rollout_id)
            except StoreError as exc:
                error = error or exc
        raise error or StoreError(f"There is no rollout '{rollout_id}'")

    def close(self) -> None:
        """Close the stores."""
        with self._lock:
            for store in self._opened.values():
                store.close()
            self._opened.clear()


@dataclass(frozen=True, slots=True)
class _CaptureState:
    """The captured calls of a rollout, with the file size at which they were read."""

    size: int
    transcript: Transcript | None


class RolloutViewer:
    """The content of the responses as plain values; its methods block."""

    def __init__(self, stores: StoreSet) -> None:
        self.stores = stores
        self._transcripts: OrderedDict[Path, _CaptureState] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, query: RolloutQuery) -> dict[str, Any]:
        """Return a page of the list, and the running rollouts."""
        order = query.choice("order", get_args(Order), "newest")
        offset, limit = query.count("offset", 0), query.count("limit", 100, MOST_ROWS)
        store = self.stores.get(query.text("store"))
        if store is None:
            return {"total": 0, "offset": 0, "rows": [], "running": [], "all": None}
        where = self._filter(store, query)
        rows = store.find(where, order=order, limit=limit, offset=offset)  # type: ignore[arg-type]
        whole = store.stats(where)
        return {
            "total": store.count(where),
            "offset": offset,
            "rows": [_row_document(row) for row in rows],
            "running": [each.model_dump(mode="json") for each in store.running()],
            "all": _stats_document(whole[0]) if whole else None,
        }

    def curve(self, query: RolloutQuery) -> dict[str, Any]:
        """Return learning curves by task, environment, group or another column, over time or policy versions."""
        by = query.choice("by", ["", *_GROUPINGS], "")
        over: Any = query.choice("over", ["time", "policy_version"], "time")
        lines = query.count("limit", 8, _MOST_LINES)
        store = self.stores.get(query.text("store"))
        if store is None:
            return {"by": by, "over": over, "points": []}
        points = store.curve(self._filter(store, query), by=_GROUPINGS.get(by), over=over, lines=lines)
        return {"by": by, "over": over, "points": [{**asdict(each), "interval": each.interval} for each in points]}

    def stats(self, query: RolloutQuery) -> dict[str, Any]:
        """Return statistics by task, group, agent or model, and over all."""
        by = query.choice("by", list(_GROUPINGS), "task")
        limit = query.count("limit", 200, _MOST_NAMES)
        store = self.stores.get(query.text("store"))
        if store is None:
            return {"by": by, "rows": [], "all": None}
        where = self._filter(store, query)
        whole = store.stats(where)
        return {
            "by": by,
            "rows": [_stats_document(each) for each in store.stats(where, by=_GROUPINGS[by], limit=limit)],
            "all": _stats_document(whole[0]) if whole else None,
        }

    def names(self, query: RolloutQuery) -> dict[str, Any]:
        """Return the possible values of the filters with their counts."""
        store = self.stores.get(query.text("store"))
        names = {
            name: [] if store is None else store.names(column, limit=_MOST_NAMES) for name, column in _GROUPINGS.items()
        }
        return {"stores": self.stores.names, "names": names}

    def rollout(self, rollout_id: str, query: RolloutQuery) -> dict[str, Any]:
        """Return one rollout without transcript and files: its outcome, task, verdicts and events."""
        name, store, whole_id = self.stores.holding(rollout_id)
        events = store.events(whole_id)
        begun = store.unfinished(whole_id)
        if begun is not None:
            task = None if begun.damage else store.task(whole_id).model_dump(mode="json")
            about = begun.model_dump(mode="json")
            return {"store": name, "rollout_id": whole_id, "begun": about, "task": task, "events": events}
        chosen = store.get(whole_id, verdict=query.text("verdict") or FIRST)
        history = store.history(whole_id)
        outcome = chosen.outcome.model_dump(mode="json", exclude={"turns", "files", "verify_results", "setup_results"})
        outcome["setup_results"] = [_command_document(each) for each in chosen.outcome.setup_results]
        return {
            "store": name,
            "rollout_id": whole_id,
            "begun": None,
            "group": chosen.group,
            "verdict": chosen.verdict,
            "task": chosen.task.model_dump(mode="json"),
            "outcome": outcome,
            "turns": len(chosen.outcome.turns),
            "verdicts": [_verdict_document(record) for record in reversed(history)],
            "events": events,
            "has_capture": any("turn" in each for each in events),
            "has_steps": store.live_file(whole_id, STEPS_FILE).is_file(),
            "has_log": store.live_file(whole_id, "agent.log").is_file(),
            "tree": _tree_document(store, whole_id),
        }

    def beside(self, rollout_id: str, query: RolloutQuery) -> dict[str, Any]:
        """Return the rollouts before and after one in the list that the query describes."""
        order = query.choice("order", get_args(Order), "newest")
        _, store, whole_id = self.stores.holding(rollout_id)
        before, after = store.beside(whole_id, self._filter(store, query), order=order)  # type: ignore[arg-type]
        return {"before": before, "after": after}

    def raw(self, rollout_id: str, query: RolloutQuery) -> dict[str, Any]:
        """Return the stored record of a rollout: task and outcome as they are on disk."""
        _, store, whole_id = self.stores.holding(rollout_id)
        return store.get(whole_id, verdict=query.text("verdict") or FIRST).model_dump(mode="json")

    def steps(self, rollout_id: str, query: RolloutQuery) -> dict[str, Any]:
        """Return the reset and the steps of a played episode, as rows of a recorded episode."""
        _, store, whole_id = self.stores.holding(rollout_id)
        path = store.live_file(whole_id, STEPS_FILE)
        return {"rows": list(read_rows(path)) if path.is_file() else []}

    def call(self, rollout_id: str, turn: str, query: RolloutQuery) -> dict[str, Any]:
        """Return one model call as it was recorded: the request to the endpoint and its response."""
        _, store, whole_id = self.stores.holding(rollout_id)
        folder = store.captures / whole_id
        calls = read(folder).calls if (folder / FILE).is_file() else []
        found = next((each for each in calls if str(each.number) == turn), None)
        if found is None:
            raise StoreError(f"The rollout '{whole_id}' has no model call {turn}")
        return {"turn": found.number, "request": found.sent, "status": found.status, "response": found.response}

    def transcript(self, rollout_id: str, query: RolloutQuery) -> dict[str, Any]:
        """Return the model calls of a rollout, without their tokens."""
        _, store, whole_id = self.stores.holding(rollout_id)
        known = self._captured(store, whole_id).transcript
        return {"turns": [], "findings": [], "level": None, "stops": 0} if known is None else known.document()

    def tokens(self, rollout_id: str, turn: str, query: RolloutQuery) -> dict[str, Any]:
        """Return the tokens of one model call."""
        _, store, whole_id = self.stores.holding(rollout_id)
        known = self._captured(store, whole_id).transcript
        turns = [] if known is None else [each for each in known.turns if str(each.number) == turn]
        if not turns:
            raise StoreError(f"The rollout '{whole_id}' has no model call {turn}")
        return {"turn": turns[0].number, "tokens": token_documents(turns[0])}

    def changes(self, rollout_id: str, query: RolloutQuery) -> dict[str, Any]:
        """Return the agent's changes in its work folder."""
        _, store, whole_id = self.stores.holding(rollout_id)
        worktree, baseline = (store.live_file(whole_id, each) for each in ("worktree.tar", "baseline.tar"))
        return asdict(compare_trees(*(path if path.is_file() else None for path in (worktree, baseline))))

    def log(self, rollout_id: str, query: RolloutQuery) -> dict[str, Any]:
        """Return a block of the agent's output from `start`."""
        _, store, whole_id = self.stores.holding(rollout_id)
        return _log_part(store.live_file(whole_id, "agent.log"), query.count("start", 0))

    def live(self, rollout_id: str, query: RolloutQuery) -> dict[str, Any]:
        """Return the new parts of a running rollout.

        The query has the caller's state: `events` (their number), `start` (the position in the log, in bytes), `size`
        (of the file of calls) and `turn` (the last turn, which may be incomplete).
        """
        _, store, whole_id = self.stores.holding(rollout_id)
        begun = store.unfinished(whole_id)
        state = "stored"
        if begun is not None:
            state = "running" if begun.is_running else "interrupted"
        size, turn = query.count("size", 0), query.count("turn", 0)
        captured = self._captured(store, whole_id) if self._capture_size(store, whole_id) != size else None
        turns = [] if captured is None or captured.transcript is None else captured.transcript.document()["turns"]
        return {
            "state": state,
            "events": store.events(whole_id)[query.count("events", 0) :],
            "log": _log_part(store.live_file(whole_id, "agent.log"), query.count("start", 0)),
            "size": size if captured is None else captured.size,
            "turns": [each for each in turns if each["number"] >= turn],
        }

    def export(self, query: RolloutQuery) -> tuple[str, Iterator[bytes]]:
        """Return the name of a file, and its content in blocks.

        Raises:
            RolloutError: the file is Parquet and pyarrow is not installed.
        """
        kind = query.choice("format", ("jsonl", "parquet"), "jsonl")
        messages = query.choice("messages", ("0", "1"), "0") == "1"
        store = self.stores.get(query.text("store"))
        if store is None:
            raise StoreError("the store has no rollouts yet")
        where = self._filter(store, query)
        name = time.strftime(f"rollouts-%Y%m%d-%H%M%S.{kind}")
        if kind == "jsonl":
            return name, (line.encode() for line in json_lines(store, where, messages=messages))
        return name, _parquet(store, where)

    def _filter(self, store: RolloutStore, query: RolloutQuery) -> RolloutFilter:
        where = query.filter()
        return where.having({"verdict": store.resolve_verdict(where.verdict or FIRST)})

    def _capture_size(self, store: RolloutStore, rollout_id: str) -> int:
        try:
            return (store.captures / rollout_id / FILE).stat().st_size
        except OSError:
            return 0

    def _captured(self, store: RolloutStore, rollout_id: str) -> _CaptureState:
        """Return the transcript of a rollout; caches the last few until their files grow."""
        path = store.captures / rollout_id / FILE
        with self._lock:
            size = self._capture_size(store, rollout_id)
            known = self._transcripts.get(path)
            if known is None or known.size != size:
                known = _CaptureState(size, transcript(read(path)) if size else None)
                self._transcripts[path] = known
            self._transcripts.move_to_end(path)
            while len(self._transcripts) > _KEPT_TRANSCRIPTS:
                self._transcripts.popitem(last=False)
            return known


def _parquet(store: RolloutStore, where: RolloutFilter) -> Iterator[bytes]:
    with tempfile.TemporaryDirectory(prefix="openenv-export-") as folder:
        target = Path(folder) / "export.parquet"
        export_rollouts(store, target, kind="parquet", where=where)
        with target.open("rb") as file:
            while block := file.read(1024 * 1024):
                yield block


def _row_document(row: RolloutRow) -> dict[str, Any]:
    names = ("rollout_id", "verdict", "stored_at", "task_id", "group", "status", "phase", "reason", "reward", "trust")
    more = ("agent", "model", "sandbox", "environment", "policy_version", "parent", "parent_call")
    return {
        name: getattr(row, name) for name in (*names, *more, "instruction", "turns", "tokens", "started_at", "wall_s")
    }


def _tree_document(store: RolloutStore, rollout_id: str) -> dict[str, Any]:
    """Return the tree of a rollout and its branches, the root first; no nodes if it has neither parent nor branches."""
    root = next(iter(store.find(rollout_id=rollout_id)), None)
    seen = {rollout_id}  # any program may write labels, so parents could form a circle
    while root is not None and root.parent not in {"", *seen}:
        above = next(iter(store.find(rollout_id=root.parent)), None)
        if above is None:  # deleted, or in another store
            break
        root = above
        seen.add(root.rollout_id)
    nodes: list[RolloutRow] = [] if root is None else [root]
    latest, left_out = nodes, 0
    while latest:
        parents = tuple(each.rollout_id for each in latest)
        latest = store.find(parent=parents, order="oldest", limit=_MOST_BRANCHES + 1 - len(nodes))
        left_out += store.count(parent=parents) - len(latest)
        known = {each.rollout_id for each in nodes}
        latest = [each for each in latest if each.rollout_id not in known]
        nodes = [*nodes, *latest]
        if len(nodes) > _MOST_BRANCHES:
            break
    names = ("rollout_id", "parent", "parent_call", "turns", "reward", "status", "reason")
    documents = [{name: getattr(each, name) for name in names} for each in nodes]
    return {"nodes": documents if len(documents) > 1 else [], "left_out": left_out}


def _stats_document(stats: RolloutStats) -> dict[str, Any]:
    return {**asdict(stats), "pass_rate": stats.pass_rate, "interval": stats.interval}


def _verdict_document(record: Record) -> dict[str, Any]:
    outcome = record.outcome
    names = ("status", "phase", "reason", "reward", "trust", "started_at", "wall_s", "sandbox")
    return {
        "verdict": record.verdict,
        "record_id": record.record_id,
        "stored_at": record.stored_at,
        **{name: getattr(outcome, name) for name in names},
        "results": [
            _check_document(each, check)
            for each, check in zip_longest(outcome.verify_results, record.task.verify)
            if each is not None
        ],
    }


def _check_document(result: CommandResult, check: str | Check | None) -> dict[str, Any]:
    cases = case_verdicts(check, result.stdout) if isinstance(check, Check) else []
    return {**_command_document(result), "cases": [asdict(each) for each in cases]}


def _command_document(result: CommandResult) -> dict[str, Any]:
    document = result.model_dump(mode="json", exclude={"run"})
    for stream in ("stdout", "stderr"):
        text = document[stream]
        document[stream] = text[:_MOST_OUTPUT]
        document[f"{stream}_cut"] = max(0, len(text) - _MOST_OUTPUT)
    document["run"] = None if result.run is None else _command_document(result.run)
    return document


def _log_part(path: Path, start: int) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(start)
            data = file.read(_LOG_BLOCK)
    except OSError:
        return {"start": start, "end": start, "size": 0, "text": ""}
    # A character that is not whole waits for its rest, unless there is none.
    cut = next((n for n in range(1, 4) if start + len(data) < size and data[-n:][:1] >= b"\xc0"), 0)
    data = data[: len(data) - cut] if cut else data
    return {"start": start, "end": start + len(data), "size": size, "text": data.decode("utf-8", "replace")}


class RolloutRoutes:
    """The ASGI handlers; a small thread pool runs blocking code."""

    def __init__(self, viewer: RolloutViewer) -> None:
        self._viewer = viewer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="openenv-view")

    def handlers(self) -> list[tuple[str, Handler]]:
        """Return the handlers of GET requests by path."""
        viewer = self._viewer
        one = f"{PATH}/{{rollout_id}}"
        return [
            (PATH, self._answering(viewer.rows, "order", "offset", "limit")),
            (f"{PATH}/-/stats", self._answering(viewer.stats, "by", "limit")),
            (f"{PATH}/-/curve", self._answering(viewer.curve, "by", "over", "limit")),
            (f"{PATH}/-/names", self._answering(viewer.names)),
            (f"{PATH}/-/export", self._export),
            (one, self._answering(viewer.rollout)),
            (f"{one}/transcript", self._answering(viewer.transcript)),
            (f"{one}/beside", self._answering(viewer.beside, "order")),
            (f"{one}/raw", self._answering(viewer.raw)),
            (f"{one}/steps", self._answering(viewer.steps)),
            (f"{one}/calls/{{turn}}", self._answering(viewer.call)),
            (f"{one}/tokens/{{turn}}", self._answering(viewer.tokens)),
            (f"{one}/changes", self._answering(viewer.changes)),
            (f"{one}/log", self._answering(viewer.log, "start")),
            (f"{one}/live", self._answering(viewer.live, "events", "start", "size", "turn")),
        ]

    def close(self) -> None:
        """Wait for the threads, and close the stores."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._viewer.stores.close()

    def _answering(self, work: Callable[..., dict[str, Any]], *known: str) -> Handler:
        """Make a handler from a function of path parameters and query."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            def answer() -> bytes:
                query = RolloutQuery(scope.get("query_string", b""), *known)
                return _encoded(work(*scope["path_params"].values(), query))

            try:
                body = await self._in_thread(answer)
            except Exception as exc:  # the boundary of a request
                await _refuse(send, exc)
            else:
                await respond(send, 200, body, _NO_STORE)

        return handle

    async def _export(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an export; the response starts before the file is complete."""
        try:
            query = RolloutQuery(scope.get("query_string", b""), "format", "messages")
            name, pieces = await self._in_thread(partial(self._viewer.export, query))
            first = await self._in_thread(partial(next, pieces, b""))
        except Exception as exc:  # the boundary of a request
            await _refuse(send, exc)
            return
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-disposition", f'attachment; filename="{name}"'.encode()),
            *_NO_STORE,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            piece = first
            while piece and not gone.done():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await self._in_thread(partial(next, pieces, b""))
            if not gone.done():
                await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            await self._in_thread(getattr(pieces, "close", lambda: None))

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def store_routes(folder: Path) -> RolloutRoutes:
    """Make the rollouts tab of a server's web UI from the store of its environment."""
    return RolloutRoutes(RolloutViewer(StoreSet({"rollouts": folder})))


def _encoded(value: Any) -> bytes:
    # ASCII, because agents can send lone surrogates, which UTF-8 cannot encode.
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:  # browsers cannot parse NaN
        return json.dumps(_finite(value), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def _refuse(send: Send, exc: Exception) -> None:
    if isinstance(exc, InvalidQuery):
        status = 422
    elif isinstance(exc, OpenEnvError):
        status = 404 if isinstance(exc, StoreError) else 409
    else:
        status = 500
        logger.error("a request of the rollout viewer failed", exc_info=exc)
    text = str(exc) if status < 500 else f"{type(exc).__name__}: {exc}"
    await respond(send, status, _encoded({"detail": text, "code": getattr(exc, "code", "EXECUTION_ERROR")}), _NO_STORE)


# ---- the application of `openenv view` ----


def viewer_app(folders: Mapping[str, Path], access: AccessPolicy | None = None) -> Starlette:
    """Build the application of `openenv view`: the viewer with login and access checks, without an environment.

    Args:
        folders: The stores by their displayed names.
        access: The required tokens; by default none.
    """
    policy = access or AccessPolicy()
    routes = RolloutRoutes(RolloutViewer(StoreSet(folders)))
    files = PageFiles(None, index="viewer.html")
    login = PageLogin(lambda: policy, lambda code: None)

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        about = {
            "role": role_of(scope).value,
            "openenv_version": load_package_version(),
            "asks_for_token": not policy.is_open,
        }
        await respond_json(send, 200, about, [(b"cache-control", b"no-store")])

    handlers: list[tuple[str, str, Handler]] = [
        ("GET", "/", files.redirect),
        ("GET", "/web", files.redirect),
        ("GET", "/web/", files.index),
        ("GET", "/web/static/{file}", files.static),
        ("POST", "/web/login", login.login),
        ("POST", "/web/logout", login.logout),
        ("GET", "/web/page", page),
        *(("GET", path, handler) for path, handler in routes.handlers()),
    ]
    own = [HiddenRoute(method, path, handler) for method, path, handler in handlers]
    gate = AccessGate(OriginPolicy(settings.allowed_origins()), policy)
    gate.enclose(own, report=lambda code: None)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            routes.close()

    return Starlette(routes=own, lifespan=lifespan)
