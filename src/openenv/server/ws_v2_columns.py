"""Steps in columns on protocol v2: one message with arrays for the steps of many sessions (docs/reference/protocol.md).

    ColumnBatch --> each row: a plain, new step of an idle session? --yes--> ColumnGroup per thread --> arrays
                                                                  \\-no---> a single request          --> a reply
                --> one message with the arrays, and the single replies beside them

Ids, ledgers and failures are those of single steps: a row that is repeated after a lost connection is answered from the
ledger, which keeps rows and encodes them only then. Knows messages, sessions and arrays; must not know transports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from openenv.env.columnar import layout_of, step_action
from openenv.errors import ReplyTooLarge, RequestCancelled
from openenv.protocol.binary_values import is_array
from openenv.protocol.columns import ColumnLayout, action_fields, fit, layout_as_json, row_bytes, row_data, step_data
from openenv.protocol.server_v2 import ColumnBatch
from openenv.types import WSErrorCode

from .runners import LaneExecutor
from .sessions.group import StepGroup
from .sessions.session import Session, SessionCall, has_stepped

if TYPE_CHECKING:
    from .ws_v2 import SentMessage, V2Connection

_KEPT_ROW: Final = 128  # bytes of a kept row beside its values


class ConnectionColumns:
    """The steps in columns of one connection."""

    def __init__(self, connection: V2Connection) -> None:
        self._connection = connection
        self._cls: type[Any] | None = None
        self._layout: ColumnLayout | None = None
        self._names: list[str] = []  # the sessions of the last message

    def offer(self, session: Session) -> dict[str, Any]:
        """Return the entries of `opened` that offer steps in columns; empty if the session takes none."""
        connection, layout = self._connection, self._known_layout()
        if layout is None or not connection.codec.is_binary or not connection.takes_any_step:
            return {}
        if type(session.env) is not self._cls:  # in another process
            return {}
        most = min(connection.service.options.max_batch, connection.max_bytes // (2 * row_bytes(layout)))
        return {"columns": {**layout_as_json(layout), "max_rows": most, "resets": True}} if most > 0 else {}

    def _known_layout(self) -> ColumnLayout | None:
        cls = self._connection.manager.env_cls
        if cls is not self._cls:
            self._cls, self._layout = cls, layout_of(cls)
        return self._layout

    def run(self, batch: ColumnBatch, message: SentMessage) -> None:
        """Run the steps, in groups where possible."""
        if batch.sessions is not None:
            self._names = batch.sessions
        layout = self._known_layout()
        try:
            if layout is None or not self._connection.takes_any_step:
                raise ValueError("the environment takes no steps in columns")
            actions = self._actions(layout, batch)
        except ValueError as exc:
            error = {"message": f"Invalid message: {exc}", "code": WSErrorCode.VALIDATION_ERROR.value, "errors": []}
            self._connection.refuse(error, batch.id)
            return
        message.source = ColumnRequests(layout, self._names, batch, actions)
        self._run_rows(ColumnReplies(self._connection, layout, batch.id, message.source), message)

    def _actions(self, layout: ColumnLayout, batch: ColumnBatch) -> list[Any]:
        count = len(batch.ids)
        if count != len(self._names):
            raise ValueError(f"{count} ids for {len(self._names)} sessions")
        if count > self._connection.service.options.max_batch:
            raise ValueError(f"{count} steps, over the limit of {self._connection.service.options.max_batch}")
        if count * row_bytes(layout) > self._connection.max_bytes:
            raise ValueError(f"the reply to {count} steps would be over {self._connection.max_bytes} bytes")
        if len(batch.actions) != len(layout.actions):
            raise ValueError(f"{len(batch.actions)} arrays of actions where {len(layout.actions)} were expected")
        if not all(map(is_array, batch.actions)):
            raise ValueError("actions must be arrays")
        return [fit(column, values, count) for column, values in zip(layout.actions, batch.actions, strict=True)]

    def _run_rows(self, replies: ColumnReplies, message: SentMessage) -> None:
        connection, requests = self._connection, replies.requests
        cls: Any = self._cls
        sessions, sent, resets = connection.sessions, ("step", message), requests.resets
        # Telemetry measures steps of groups; resets are no steps.
        alone_resets = resets if connection.manager.observers.step is not None else frozenset()
        # A recording needs each observation as a model.
        groups_allowed = connection.manager.observers.group is None
        valid = cls.valid_actions(requests.actions).tolist()
        groups: dict[LaneExecutor, ColumnGroup] = {}
        alone: list[int] = []
        for row, (name, request_id) in enumerate(zip(requests.names, requests.ids, strict=True)):
            session = sessions.get(name)
            # Also false for an environment in another process.
            if (
                session is not None
                and (valid[row] or row in resets)
                and groups_allowed
                and row not in alone_resets
                and type(session.env) is cls
            ):
                executor = session.lane.host
                group = groups.get(executor)
                if group is None:
                    group = groups[executor] = ColumnGroup(replies, sent, connection)
                ledger = session.ledger
                if request_id > ledger.last_id and session.begin_step(group, group.operation, None):
                    ledger.begin_step(request_id, sent if row not in resets else ("reset", message))
                    group.sessions.append(session)
                    group.ids.append(request_id)
                    group.places.append(row)
                    continue
            alone.append(row)
        connection.start_groups({executor: group for executor, group in groups.items() if group.sessions})
        for row in alone:
            connection.run_alone(requests.request(row), message, replies, row)
        if not requests.ids:
            replies.send()


class ColumnRequests:
    """The requests of one message: sessions, ids and actions by row; some rows are resets."""

    __slots__ = ("_layout", "actions", "ids", "kwargs", "names", "resets")

    def __init__(self, layout: ColumnLayout, names: list[str], batch: ColumnBatch, actions: list[Any]) -> None:
        self._layout = layout
        self.names = names
        self.ids = batch.ids
        self.actions = actions
        self.resets = batch.resets
        self.kwargs = batch.reset

    def kind(self, row: int) -> str:
        """Return the type of one request."""
        return "reset" if row in self.resets else "step"

    def request(self, row: int) -> dict[str, Any]:
        """Return one request as a message."""
        fields = self.kwargs if row in self.resets else action_fields(self._layout, self.actions, row)
        return {"type": self.kind(row), "id": self.ids[row], "session": self.names[row], "data": fields}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.request, range(len(self.ids)))


class ColumnGroup(StepGroup):
    """Steps on one thread that read and write rows of arrays."""

    __slots__ = ("_replies",)

    def __init__(self, replies: ColumnReplies, sent: Any, connection: V2Connection) -> None:
        super().__init__(
            connection.step_operation,
            connection.writer.observed,
            sent,
            connection.dispatcher,
            replies.put_group,
            connection.manager.observers,
        )
        self._replies = replies

    def _run_steps(self) -> list[tuple[Session, SessionCall]]:
        replies, outcomes, times, cancelled = self._replies, self.outcomes, self._times, self._cancelled
        requests, observations, count = replies.requests, replies.observations, len(self.sessions)
        actions, resets = requests.actions, requests.resets
        only = observations[0] if len(observations) == 1 else None
        rewards, terminated, truncated = [0.0] * count, [False] * count, [False] * count
        waiting = []
        for place, (session, row) in enumerate(zip(self.sessions, self.places, strict=True)):
            begins = bool(resets) and row in resets
            try:
                if cancelled and session in cancelled:
                    raise RequestCancelled() if session.close_reason is None else session.closed_error()
                if begins:
                    values, metadata = session.env.reset_values(requests.kwargs)
                else:
                    values, rewards[place], terminated[place], truncated[place], metadata = step_action(
                        session.env, [array[row] for array in actions]
                    )
                if only is not None:
                    only[row] = values[0]
                else:
                    for array, value in zip(observations, values, strict=True):
                        array[row] = value
                if metadata:
                    replies.metadata[row] = dict(metadata)
                outcomes.append(b"")
            except BaseException as exc:  # the environment's code, which may raise anything
                outcomes.append(exc)
                following = session.end_step(failed=not has_stepped(exc), began=begins)
            else:
                following = session.end_step(failed=False, began=begins)
            if times is not None:
                times.append(perf_counter())
            if following is not None:
                waiting.append((session, following))
        rows = self.places
        replies.rewards[rows], replies.terminated[rows], replies.truncated[rows] = rewards, terminated, truncated
        return waiting


class KeptRow:
    """The reply to one step in a ledger, encoded when it is repeated."""

    __slots__ = ("_replies", "_row")

    def __init__(self, replies: ColumnReplies, row: int) -> None:
        self._replies = replies
        self._row = row

    def __bytes__(self) -> bytes:
        return self._replies.encoded(self._row)


class ColumnReplies:
    """The results of one message, sent together."""

    def __init__(self, connection: V2Connection, layout: ColumnLayout, batch_id: int, requests: ColumnRequests) -> None:
        import numpy as np  # present where environments have columns

        self.requests = requests
        count = len(requests.ids)
        self.observations = [np.zeros(column.batch_shape(count), column.dtype) for column in layout.observations]
        self.rewards: Any = np.zeros(count)
        self.terminated: Any = np.zeros(count, bool)
        self.truncated: Any = np.zeros(count, bool)
        self.metadata: dict[int, dict[str, Any]] = {}
        self._connection = connection
        self._layout = layout
        self._id = batch_id
        self._single: dict[int, bytes] = {}  # replies that are not in the arrays
        self._single_bytes = 0
        self._row_bytes = row_bytes(layout) + _KEPT_ROW
        self._missing = count

    def put_group(self, group: StepGroup) -> None:
        """Store the outcomes of a group in the ledgers; send the message after the last one."""
        connection, size, requests = self._connection, self._row_bytes, self.requests
        message = group.request[1]
        steps = zip(group.sessions, group.ids, group.places, group.outcomes, strict=True)
        for session, request_id, row, outcome in steps:
            reply: Any
            kind = requests.kind(row)
            request = group.request if kind == "step" else (kind, message)
            if isinstance(outcome, bytes):
                reply = KeptRow(self, row)
                session.ledger.finish_step(request_id, request, reply, size)
                continue
            session.report_error(outcome)
            data = connection.failure(outcome, session, request_id, kind)
            reply = self._single[row] = connection.writer.message("error", request_id, session.id, data)
            session.ledger.finish_step(request_id, request, reply, len(reply))
        connection.finished_group(group)
        self._count(len(group.sessions))

    def put(self, row: int, reply: bytes) -> None:
        """Store the reply to a step that ran by itself."""
        if not self.has_room(len(reply)):
            reply = self._refusal(row)
        self._single_bytes += len(reply)
        self._single[row] = reply
        self._count(1)

    def has_room(self, size: int) -> bool:
        """Return whether a reply of that size fits beside the others; the first one always does."""
        most = self._connection.max_bytes // 2  # the arrays take the other half
        return not self._single_bytes or self._single_bytes + size <= most

    def refuse(self, row: int) -> None:
        """Store an error in the place of a reply that does not fit."""
        self.put(row, self._refusal(row))

    def _refusal(self, row: int) -> bytes:
        writer, requests = self._connection.writer, self.requests
        text = f"The replies to one batch have at most {self._connection.max_bytes} bytes; repeat the request"
        return writer.message("error", requests.ids[row], requests.names[row], writer.error(ReplyTooLarge(text)))

    def _count(self, answered: int) -> None:
        self._missing -= answered
        if not self._missing:
            self.send()

    def encoded(self, row: int) -> bytes:
        """Encode one row as the reply to a single step."""
        writer = self._connection.writer
        metadata = self.metadata.get(row, {})
        if row in self.requests.resets:
            fields = row_data(self._layout, self.observations, row, metadata)
        else:
            fields = step_data(self._layout, self, row, metadata)
        return writer.message("observation", self.requests.ids[row], self.requests.names[row], writer.data(fields))

    def send(self) -> None:
        """Send the arrays."""
        message: dict[str, Any] = {
            "type": "columns",
            "id": self._id,
            "observations": self.observations,
            "rewards": self.rewards,
            "terminated": self.terminated,
            "truncated": self.truncated,
        }
        if self.metadata:
            message["metadata"] = _pairs(self.metadata)
        if self._single:
            message["replies"] = _pairs(self._single)
        self._connection.send_message(message)


def _pairs(by_row: dict[int, Any]) -> Sequence[Any]:
    return [[row, by_row[row]] for row in sorted(by_row)]
