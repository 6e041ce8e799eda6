"""`VectorEnv`: many sessions as one, stepped in batches over few connections; `AsyncVectorEnv` is the same, awaited.

Blocking, and for one thread at a time. Knows episodes and their policies; how requests reach sessions is the pool's.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar

from typing_extensions import Self

from openenv.errors import ClientModeError, NotForkable, OpenEnvError, ProtocolError, RequestTimeout, SlotsFailed
from openenv.protocol.codec import JSON, MSGPACK, SUBPROTOCOLS
from openenv.protocol.columns import ColumnBlock, ColumnLayout, fit, nest, pick, rows_of, step_data
from openenv.protocol.redaction import redacted

from ..driver import KEEPALIVE, ProcessLock
from ..env_client import EnvClient, GenericEnvClient, SyncEnvClient
from ..network import PROTOCOLS, ConnectionOptions, ProtocolChoice, with_token
from .results import (
    AUTORESETS,
    POLICIES,
    Autoreset,
    ColumnRows,
    OnFailure,
    SlotEpisode,
    SlotResult,
    VectorResult,
)
from .session_pool import SessionPool, placements
from .slot_pool import BEGINS, STEPS, SlotPool

ActT = TypeVar("ActT")
ObsT = TypeVar("ObsT")
T = TypeVar("T")

Actions = Sequence[ActT] | Mapping[int, ActT] | Mapping[str, Any]
"""One action for each slot, some by slot, or arrays by field with a row for each slot."""

CodecName = Literal["auto", "json", "msgpack"]

_ANSWERS: Final = frozenset({"state", "fork", "restore"})
# Messages of several connections are encoded, run and decoded side by side, but each costs two wake-ups: 8 sessions are
# nearly twice as fast on one connection as on two, and 128 on two as on one (benchmarks/gymnasium_vector.py).
_MOST_CONNECTIONS: Final = 4
_SESSIONS_EACH: Final = 64
_OF_SERVERS: Final[Mapping[str, Any]] = {
    "connections": None, "protocol": "auto", "token": None, "wait_s": None, "compress": None, "reconnect_s": 30.0,
    "connect_timeout_s": 10.0, "retry_refused_s": 2.0, "max_message_size_mb": 1024.0, "ping_interval_s": 20.0,
    "ping_timeout_s": 20.0, "headers": None,
}  # fmt: skip
"""Options that mean nothing without a server, with their defaults."""
_UNSEEDED: Final = frozenset({"seed", "episode_id"})  # options of one episode, not of the following ones


class _Slots:
    """What both kinds of a `VectorEnv` show of their slots."""

    _urls: Sequence[str]
    _pool: SlotPool
    _has_hooks: bool

    def __repr__(self) -> str:
        where = ", ".join(map(redacted, self._urls))
        return f"<{type(self).__name__} of {len(self)} sessions at {where}>"

    def __len__(self) -> int:
        return len(self._pool.slots)

    @property
    def n(self) -> int:
        """How many slots there are."""
        return len(self._pool.slots)

    @property
    def codecs(self) -> list[str | None]:
        """The subprotocol of each connection, or `v1` for a connection without one; None if it is not connected."""
        formats = [shared.connection.format for shared in self._pool.connections]
        return [None if wire_format is None else wire_format.name for wire_format in formats]

    @property
    def sessions(self) -> list[str | None]:
        """The name of each slot's session; None for a slot without a session, or if the server gives no names."""
        return [slot.public_name for slot in self._pool.slots]

    @property
    def column_layout(self) -> ColumnLayout | None:
        """The arrays of actions and observations, for environments that step in columns; known once connected."""
        return None if self._has_hooks else self._pool.layout

    @property
    def traffic(self) -> tuple[int, int]:
        """How many bytes the present connections have sent and received."""
        present = [shared.connection for shared in self._pool.connections]
        return sum(one.bytes_sent for one in present), sum(one.bytes_received for one in present)


class VectorEnv(_Slots, Generic[ActT, ObsT]):
    """Many environments stepped together: sessions on one server or several, or processes of this machine.

    Sessions are opened at the first use. A connection that breaks is replaced and its sessions are resumed: nothing is
    run twice, and a lost episode is an error in its slot, never silently replaced by a fresh one. A server that speaks
    only protocol v1 gets a socket for each session; there a broken connection is such an error.

    An `Environment` class, or a target such as `gymnasium:CartPole-v1`, needs no server: worker processes hold the
    environments, and arrays travel in shared memory. Results and errors are the same; a worker that dies is a
    `SessionLost` in each of its slots. Arguments about servers and connections do not apply.

    Args:
        url: The server, or several; slots are spread evenly. If it is a function that returns them, such as `urls` of a
            provider, it is asked again when a server is gone: the next episodes of its slots begin on another server.
            Or an environment class, a target such as `gymnasium:ID`, or with `workers` a function without arguments
            that makes an environment.
        n: How many sessions.
        workers: The number of processes for environments on this machine; `auto` (default) is one for each core, or
            fewer for a class with `RUNS_INLINE`, whose steps take microseconds. Slots of one worker step one after the
            other, so take one worker for each slot if single steps are slow.
        client: A client class, or an object of one, whose `_step_payload`, `_parse_result` and `_parse_state` are used;
            by default actions and observations are dicts.
        connections: The total number of connections; each server gets at least one, or one for each session if it
            speaks protocol v1. By default one for each 64 sessions and at most four, or more for a server with several
            workers: a connection is bound to one worker.
        codec: `json`, `msgpack`, or `auto`: MessagePack if both sides have it, but JSON if you pass a client class, as
            its hooks may rely on the JSON form of bytes and arrays.
        protocol: `v1`, `v2`, or `auto`: v2 if the server speaks it, else v1.
        autoreset: What follows an episode's end. `next_step`: the slot's next step is a reset, its action ignored;
            `same_step`: the reset happens at once, the last result is in `finals`; `disabled`: nothing.
        on_failure: `raise` a `SlotsFailed` once all have answered; `mask` failed slots until the next `reset`;
            `restart` their episodes, marked as such. With `mask` and `restart` an error is raised when no slot is left.
        token: Sent as `Authorization: Bearer`; by default `OPENENV_TOKEN`.
        wait_s: How long to wait in the servers' queues for free slots; by default not at all. Only with v2.
        compress: Ask for compression of replies of at least that many bytes.
        reconnect_s: How long to try to restore a broken connection. Only with v2.
        connect_timeout_s: How long connecting may take; transient failures are retried until then.
        retry_refused_s: How long to retry, within that time, if no server listens or its host is out of reach.
        message_timeout_s: How long replies may take if a call sets no limit.
        max_message_size_mb: The largest reply that is read: one holds all observations of a connection.
        ping_interval_s: How often a silent connection is checked; None for never.
        ping_timeout_s: How long the answer to a check may take.
        headers: HTTP headers for the handshake.
    """

    def __init__(
        self,
        url: str | Sequence[str] | Callable[[], Any],
        n: int,
        *,
        workers: int | Literal["auto"] | None = None,
        client: type[EnvClient[ActT, ObsT, Any]] | EnvClient[ActT, ObsT, Any] | None = None,
        connections: int | None = None,
        codec: CodecName = "auto",
        protocol: ProtocolChoice = "auto",
        autoreset: Autoreset = "next_step",
        on_failure: OnFailure = "raise",
        token: str | None = None,
        wait_s: float | None = None,
        compress: int | None = None,
        reconnect_s: float = 30.0,
        connect_timeout_s: float = 10.0,
        retry_refused_s: float = 2.0,
        message_timeout_s: float | None = 60.0,
        max_message_size_mb: float = 1024.0,
        ping_interval_s: float | None = 20.0,
        ping_timeout_s: float | None = 20.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        _check("n", n >= 1, "at least one session")
        _check("connections", connections is None or connections >= 1, "at least one")
        _check("protocol", protocol in PROTOCOLS, f"one of {', '.join(PROTOCOLS)}")
        _check("autoreset", autoreset in AUTORESETS, f"one of {', '.join(AUTORESETS)}")
        _check("on_failure", on_failure in POLICIES, f"one of {', '.join(POLICIES)}")
        self._options: dict[str, Any] = {
            "client": client, "connections": connections, "codec": codec, "protocol": protocol, "autoreset": autoreset,
            "on_failure": on_failure, "token": token, "wait_s": wait_s, "compress": compress,
            "reconnect_s": reconnect_s, "connect_timeout_s": connect_timeout_s, "retry_refused_s": retry_refused_s,
            "message_timeout_s": message_timeout_s, "max_message_size_mb": max_message_size_mb,
            "ping_interval_s": ping_interval_s, "ping_timeout_s": ping_timeout_s, "headers": headers,
        }  # fmt: skip
        if is_environment(url, workers):
            self._pool = _local_pool(url, n, workers or "auto", self._options, self._on_answer)
            self._urls = [url if isinstance(url, str) else getattr(url, "__name__", repr(url))]
            ping_interval_s = None
        else:
            self._pool, self._urls = self._server_pool(url, n)
        self._hooks: Any = _hooks(client, self._urls[0] if isinstance(self._pool, SessionPool) else "http://localhost")
        self._has_hooks = client is not None
        self._parse = self._hooks._parse_result
        self._over = bytearray(n)  # for each slot whether its episode has ended
        self._episodes = [SlotEpisode(index, autoreset, on_failure, self._over) for index in range(n)]
        self._autoreset, self._on_failure, self._timeout_s = autoreset, on_failure, message_timeout_s
        self._wait_s = wait_s
        self._pings = ping_interval_s is not None
        self._reset_kwargs: dict[str, Any] = {}
        self._asked: set[int] = set()  # slots with a request whose result was not taken
        self._special: set[int] = set()  # slots whose next step depends on a failure
        self._blocks: list[ColumnBlock] = []  # results of a step in columns that were not returned yet
        self._answers: dict[int, Any] = {}  # to requests outside of episodes, such as `state`
        self._each = False
        self._connected = False
        self._closed = False
        self._pid = os.getpid()
        self._lock = ProcessLock()

    def _server_pool(self, url: Any, n: int) -> tuple[SessionPool, list[str]]:
        """Return the pool of a vector on servers, and their addresses."""
        options = self._options
        listed = [url] if isinstance(url, str) else url
        urls = list(listed() if callable(listed) else listed)
        _check("url", bool(urls), "at least one server")
        connections, protocol = options["connections"], options["protocol"]
        connection_options = ConnectionOptions(
            connect_timeout_s=options["connect_timeout_s"],
            retry_refused_s=options["retry_refused_s"],
            message_timeout_s=options["message_timeout_s"],
            max_message_bytes=int(options["max_message_size_mb"] * 1024 * 1024),
            ping_interval_s=options["ping_interval_s"],
            ping_timeout_s=options["ping_timeout_s"],
            headers=with_token(options["headers"], options["token"]),
            protocol=protocol,
            subprotocols=_offers(options["codec"], protocol, has_hooks=options["client"] is not None),
        )
        pool = SessionPool(
            placements(urls, n, connections or min(_MOST_CONNECTIONS, -(-n // _SESSIONS_EACH))),
            fits_workers=connections is None,
            options=connection_options,
            open_options={key: options[key] for key in ("wait_s", "compress") if options[key] is not None},
            reconnect_s=options["reconnect_s"],
            on_answer=self._on_answer,
            find_urls=url if callable(url) else None,
        )
        return pool, urls

    # -- operations -----------------------------------------------------------------------------------------------

    def connect(self) -> Self:
        """Open all sessions now instead of at the first reset.

        Raises:
            ConnectFailed: A server cannot be reached, or does not speak the codec or protocol.
            AccessDenied: A server requires another token.
            SessionCapacityError: A server has no slot left.
        """
        with self._here():
            self._connect()
        return self

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        slots: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> VectorResult[ObsT]:
        """Begin an episode in each slot; one that had lost its session gets a new one.

        Args:
            seed: A seed for each slot, or the first of consecutive ones.
            slots: Only these.
            timeout_s: How long to wait for all of them.
            kwargs: For the environment's `reset`, also when an episode begins by itself later.
        """
        indices = range(self.n) if slots is None else list(slots)
        seeds = _seeds(seed, indices)
        with self._here():
            late: RequestTimeout | None = None
            try:
                self._connect()
            except RequestTimeout as exc:  # requests are queued, and sent when the sessions are open
                late = exc
            self._reset_kwargs = {key: value for key, value in kwargs.items() if key not in _UNSEEDED}
            self._pool.use_for_resets(self._reset_kwargs)
            self._blocks = [] if len(indices) == self.n else self._blocks
            for index, own in zip(indices, seeds, strict=True):
                self._episodes[index].ask(stepping=False)
                self._asked.add(index)
                self._pool.request(self._pool.slots[index], "reset", kwargs if own is None else {**kwargs, "seed": own})
            self._pool.flush()
            if late is not None:
                raise late
            return self._collect(self._time(timeout_s), k=None)

    def step(self, actions: Actions[ActT], *, timeout_s: float | None = None) -> VectorResult[ObsT]:
        """Take an action in each slot and wait for all of them.

        Args:
            actions: One for each slot, some by slot, or arrays by field with a row for each slot.
            timeout_s: How long to wait.

        Raises:
            SlotsFailed: Slots failed; see `on_failure`.
            RequestTimeout: Not all have answered in time. Nothing is lost: `step_wait` waits again.
        """
        self.step_async(actions)
        return self.step_wait(timeout_s)

    def step_async(self, actions: Actions[ActT], *, each: bool | None = None) -> None:
        """Send actions; `step_wait` returns their results.

        Args:
            actions: One for each slot, some by slot, or arrays by field with a row for each slot, such as
                `{"action": array}`.
            each: Whether the server may answer slot by slot instead of when all of a connection are ready; by default
                whether `step_wait` has been called with `k`.

        Raises:
            ValueError: There is not one action for each slot.
            ClientModeError: A slot has not answered its last action yet.
        """
        each = self._each if each is None else each
        with self._here():
            arrays = self._arrays_of(actions) if self._connected and not each else None
            if arrays is not None:
                self._step_columns(arrays)
                return
            payload = self._hooks._step_payload
            payloads = {index: payload(action) for index, action in self._by_slot(actions)}
            self._check_idle(payloads)
            self._connect()

            def prepare(shared: Any) -> None:
                for slot in shared.slots:
                    if slot.index in payloads:
                        self._step(slot, payloads[slot.index])

            self._pool.flush(each=each, prepare=prepare)

    def step_wait(self, timeout_s: float | None = None, *, k: int | None = None) -> VectorResult[ObsT]:
        """Wait for the actions that were sent.

        Args:
            timeout_s: How long.
            k: Return as soon as that many slots are ready, with all that are; `slots` of the result says which.

        Raises:
            SlotsFailed: Slots failed; see `on_failure`.
            RequestTimeout: They have not answered in time. Nothing is lost: call it again.
        """
        with self._here():
            self._each = self._each or k is not None
            return self._collect(self._time(timeout_s), k=k)

    def states(self, *, timeout_s: float | None = None) -> list[Any]:
        """Ask for the state of each slot; one that has no session has None.

        Raises:
            ServerError: A slot could not return its state.
        """
        with self._here():
            present = [slot.index for slot in self._pool.slots if slot.name is not None]
            self._check_idle(range(self.n))
            states = self._ask(present, "state", None, self._time(timeout_s))
        return [self._hooks._parse_state(states[index]) if index in states else None for index in range(self.n)]

    def fork(self, slot: int, n: int, *, timeout_s: float | None = None) -> Self:
        """Return another `VectorEnv` whose slots continue from a slot, each with a copy of its environment.

        It has the options of this one and separate connections to the slot's server. Close it separately.

        Args:
            slot: Which slot.
            n: How many copies; either all are made, or none.
            timeout_s: How long to wait for them.

        Raises:
            NotForkable: The environment cannot be copied; the text gives the reason and a remedy.
            SessionCapacityError: The server has not so many slots left.
            ProtocolError: The server speaks only v1.
            SessionLost: The slot has no session.
        """
        _check("n", n >= 1, "at least one copy")
        self._check_copies()
        data: dict[str, Any] = {"n": n} if self._wait_s is None else {"n": n, "wait_s": self._wait_s}
        waiting_s = self._time(timeout_s)
        with self._here():
            self._connect()
            self._check_forkable([slot])
            waiting_s = None if waiting_s is None else waiting_s + (self._wait_s or 0.0)
            sessions = self._ask([slot], "fork", data, waiting_s)[slot]["sessions"]
            copies = type(self)(self._pool.slots[slot].shared.address.url, n, **self._options)
            copies._reset_kwargs = self._reset_kwargs
            for copied, episode, session in zip(copies._pool.slots, copies._episodes, sessions, strict=True):
                copied.continue_copy(str(session["token"]))
                episode.is_over = self._episodes[slot].is_over
        return copies.connect()

    def restore(
        self,
        snapshot: VectorEnv[Any, Any] | EnvClient[Any, Any, Any] | SyncEnvClient[Any, Any, Any] | str,
        *,
        slots: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Continue slots of the same server from a snapshot, which may be used any number of times.

        Args:
            snapshot: A `VectorEnv` of one slot, such as `fork(slot, 1)` returns, a client, or the resume token of one.
            slots: Which slots; by default all.
            timeout_s: How long to wait for them.

        Raises:
            NotForkable: The snapshot is gone, or cannot be copied.
            ValueError: It is not one session.
        """
        self._check_copies()
        is_over = False
        if isinstance(snapshot, VectorEnv):
            _check("snapshot", snapshot.n == 1, "a VectorEnv of one slot")
            token, is_over = snapshot._pool.slots[0].token, snapshot._episodes[0].is_over
        else:
            token = snapshot if isinstance(snapshot, str) else snapshot.resume_token
        _check("snapshot", token is not None, "one that has a session")
        indices = list(range(self.n)) if slots is None else list(slots)
        with self._here():
            self._connect()
            self._check_forkable(indices)
            self._ask(indices, "restore", {"from": token}, self._time(timeout_s))
            for index in indices:
                self._episodes[index].is_over = is_over

    def interrupt(self) -> None:
        """Have a wait in another thread end soon; only `close` makes sense afterwards."""
        self._pool.interrupt()

    def close(self) -> None:
        """End all sessions and hang up; a wait in another thread ends with them."""
        self.interrupt()
        KEEPALIVE.discard(self)
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            self._pool.forget()
            return
        with self._lock.here():
            self._pool.close()

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests -------------------------------------------------------------------------------------------------

    def _check_copies(self) -> None:
        if not isinstance(self._pool, SessionPool):
            raise NotForkable("Local vectors make no copies. Serve the environment: openenv serve --runner process")

    def _here(self) -> Any:
        """Return the lock to hold; a process that was forked off must not share its parent's connections."""
        if self._closed:
            raise ClientModeError("This VectorEnv is closed")
        if self._pid != os.getpid():
            raise ClientModeError("This VectorEnv was opened in another process; make one in each")
        return self._lock.here()

    def _connect(self) -> None:
        if self._connected:
            return
        for slot in self._pool.slots:
            if slot.error is None:
                self._pool.open(slot)
        self._pool.flush()
        waiting = None if self._timeout_s is None else self._timeout_s + (self._wait_s or 0.0)
        self._pool.wait(lambda: not any(slot.is_opening for slot in self._pool.slots), waiting)
        failure = next((slot.error for slot in self._pool.slots if slot.error is not None), None)
        if failure is not None:
            self._closed = True
            self._pool.close()
            raise failure
        self._connected = True
        if self._pings:
            KEEPALIVE.add(self)

    def _step(self, slot: Any, payload: Any) -> None:
        episode = self._episodes[slot.index]
        self._asked.add(slot.index)
        kind = episode.ask(stepping=True)
        missing = episode.masked or slot.error
        if missing is not None:
            if episode.failed("step", missing):
                self._begin(slot)
        elif kind == "reset":
            self._begin(slot)
        else:
            self._pool.request(slot, "step", payload)

    def _begin(self, slot: Any) -> None:
        self._pool.request(slot, "reset", self._reset_kwargs)

    def _on_answer(self, slot: Any, kind: str, data: Any, error: OpenEnvError | None) -> None:
        if kind in _ANSWERS:
            self._answers[slot.index] = data if error is None else error
            return
        episode = self._episodes[slot.index]
        if episode.failed(kind, error) if error is not None else episode.answered(kind, data, self._parse):
            self._begin(slot)
        self._note(episode)

    def _note(self, episode: SlotEpisode) -> None:
        """Record whether a failure decides what the next step of a slot is."""
        if episode.has_failed:
            self._special.add(episode.slot)
        else:
            self._special.discard(episode.slot)

    # -- steps in columns -----------------------------------------------------------------------------------------

    def _arrays_of(self, actions: Any) -> list[Any] | None:
        """Return actions as arrays, one for each column; None if they must be sent one by one.

        Values that do not fit are sent one by one, too: then the error names the slot.
        """
        layout = self.column_layout
        if layout is None or not actions or len(self._asked) == self.n:
            return None
        try:
            if isinstance(actions, Mapping):
                values = pick(layout.actions, actions)
            elif len(actions) == self.n:
                picked = [pick(layout.actions, action) for action in actions]
                if any(len(action) != 1 for action in actions):  # fields that have no column
                    return None
                values = list(zip(*picked, strict=True))
            else:
                return None
            return [fit(column, value, self.n) for column, value in zip(layout.actions, values, strict=True)]
        except (LookupError, TypeError, ValueError):
            return None

    def _step_columns(self, arrays: list[Any]) -> None:
        """Step all slots in columns, except for those that have failed, or begin an episode and the pool cannot."""
        import numpy as np  # the arrays are its own

        pool, layout = self._pool, self._pool.layout
        assert layout is not None
        if self._asked or self._blocks or pool.columns_left():
            self._check_idle(range(self.n))
        special = self._special | pool.missing if pool.missing else self._special
        begins = b"\1" in self._over and self._autoreset == "next_step"
        if not (special or begins):
            pool.begin_columns(arrays, None)
            pool.flush()
            return
        chosen: Any = np.full(self.n, STEPS, np.uint8)
        over: Any = np.frombuffer(self._over, bool)
        in_columns = begins and pool.begins_episodes
        if in_columns:
            chosen[over] = BEGINS
        elif begins:
            special = special.union(over.nonzero()[0].tolist())
        for index in sorted(special):
            chosen[index] = False
            episode = self._episodes[index]
            is_step = episode.is_plain or episode.autoreset == "disabled"
            self._step(pool.slots[index], nest(layout.actions, [array[index] for array in arrays]) if is_step else None)
        if in_columns:
            over[chosen == BEGINS] = False
        pool.begin_columns(arrays, chosen)
        pool.flush()

    def _take_block(self, *, whole: bool) -> None:
        """Take in results of a step in columns; failed and finished slots go on as their policies say."""
        block = self._pool.take_columns(whole=whole)
        if block is None:
            return
        import numpy as np  # the arrays are its own

        self._blocks.append(block)
        ends = block.terminated | block.truncated
        if not (np.count_nonzero(ends) or block.errors):
            return
        ended = block.slots[ends]
        if self._autoreset != "same_step":
            np.frombuffer(self._over, bool)[ended] = True
        is_left = self._autoreset == "same_step" and isinstance(self._pool, SessionPool)
        for index in {*(ended.tolist() if is_left else ()), *block.errors, *block.unbegun}:
            slot, episode = self._pool.slots[index], self._episodes[index]
            if index in block.errors:
                began = block.begun is not None and block.begun[block.slots.searchsorted(index)]
                episode.is_over = False  # the flags of a worker that died are those of an earlier step
                episode.ask(stepping=True)
                self._asked.add(index)
                self._on_answer(slot, "reset" if began else "step", None, block.errors[index])
            elif index in block.unbegun:
                self._take_unbegun(slot, *block.unbegun[index])
            else:
                episode.ask(stepping=True)
                self._asked.add(index)
                assert self._pool.layout is not None
                row = int(block.slots.searchsorted(index))
                data = step_data(self._pool.layout, block, row, block.metadata.get(index, {}))
                self._on_answer(slot, "step", data, None)
        self._pool.flush()

    def _take_unbegun(self, slot: Any, final: dict[str, Any], error: OpenEnvError) -> None:
        """Take in the end of an episode whose following one could not begin."""
        episode = self._episodes[slot.index]
        episode.ask(stepping=True)
        self._asked.add(slot.index)
        if episode.answered("step", final, self._parse):
            self._on_answer(slot, "reset", None, error)
        else:
            self._note(episode)

    def _merged(self, single: list[SlotResult[ObsT]]) -> VectorResult[ObsT]:
        """Return results that came as arrays, together with those that came one by one."""
        import numpy as np

        layout, blocks = self._pool.layout, self._blocks
        assert layout is not None
        self._blocks = []
        block, own = blocks[0], {one.slot: one for one in single}
        if len(block.slots) < self.n and (len(blocks) > 1 or not own.keys() <= set(block.slots.tolist())):
            slots = np.array(sorted({index for one in blocks for index in one.slots.tolist()} | own.keys()))
            block = _joined(layout, blocks, slots)
        rows = {int(block.slots.searchsorted(index)): one for index, one in own.items()}
        columns: ColumnRows[ObsT] = ColumnRows(layout, block, rows, self._parse)
        return VectorResult(columns, columns, columns.arrays)

    def _by_slot(self, actions: Any) -> Iterable[tuple[int, Any]]:
        # Without keys it is an empty choice of slots: no slot is played any more.
        if isinstance(actions, Mapping) and actions and all(isinstance(key, str) for key in actions):
            return enumerate(rows_of(actions, self.n))
        if isinstance(actions, Mapping):
            unknown = [index for index in actions if index not in range(self.n)]
            _check("actions", not unknown, f"by slot, from 0 to {self.n - 1}, not {unknown}")
            return actions.items()
        _check("actions", len(actions) == self.n, f"one for each of the {self.n} slots, not {len(actions)}")
        return enumerate(actions)

    def _ask(self, indices: Sequence[int], kind: str, data: Any, timeout_s: float | None) -> dict[int, Any]:
        """Send a request outside of an episode to some slots, and return the data of their replies.

        Raises:
            OpenEnvError: The error of the first slot that failed.
        """
        self._answers = {}
        for index in indices:
            self._pool.request(self._pool.slots[index], kind, data)
        self._pool.flush()
        self._pool.wait(lambda: len(self._answers) == len(set(indices)), timeout_s)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if isinstance(answer, OpenEnvError):
                raise answer
        return answers

    def _check_forkable(self, indices: Sequence[int]) -> None:
        for index in indices:
            _check("slot", index in range(self.n), f"from 0 to {self.n - 1}, not {index}")
            slot = self._pool.slots[index]
            if slot.shared.is_session:
                raise ProtocolError(f"Copies need protocol v2, and {slot.shared.address.shown} speaks only v1")
            missing = self._episodes[index].masked or slot.error
            if missing is not None:
                raise missing
        self._check_idle(indices)

    def _check_idle(self, indices: Any) -> None:
        # One that is only being resumed is not: it takes the next request with it.
        slots, episodes = self._pool.slots, self._episodes
        taken = {index for block in self._blocks for index in block.slots.tolist()}
        busy = [
            index
            for index in indices
            if slots[index].pending is not None
            or episodes[index].is_asked
            or index in taken
            or self._pool.in_columns(index)
        ]
        if busy:
            raise ClientModeError(f"slots {busy[:5]} have not answered yet: call step_wait first")

    # -- collecting -----------------------------------------------------------------------------------------------

    def _collect(self, timeout_s: float | None, *, k: int | None) -> VectorResult[ObsT]:
        _check("k", k is None or k >= 1, "at least 1")
        pool, others = self._pool, 0
        if k is not None:
            taken = sum(len(block.slots) for block in self._blocks)
            others = max(0, len(self._asked) + pool.columns_untaken() + taken - k)
        waiting = [self._episodes[index] for index in self._asked]

        def enough() -> bool:
            nonlocal waiting
            if waiting:
                waiting = [episode for episode in waiting if not episode.is_ready]
            return len(waiting) + pool.columns_left() <= others

        while True:
            pool.wait(enough, timeout_s, whole=k is None)
            self._take_block(whole=k is None)
            waiting = [self._episodes[index] for index in self._asked]
            if enough():
                break
        single: list[SlotResult[ObsT]] = []
        if self._asked:
            ready = [self._episodes[index] for index in sorted(self._asked) if self._episodes[index].is_ready]
            single = [episode.take(self._parse) for episode in ready]
            self._asked.difference_update(episode.slot for episode in ready)
        result: VectorResult[ObsT] = self._merged(single) if self._blocks else VectorResult(single)
        errors = result.errors
        if errors and (self._on_failure == "raise" or all(slot.name is None for slot in pool.slots)):
            raise SlotsFailed(errors, result)
        return result

    def _time(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def keep_alive(self) -> None:
        """Answer the servers' pings while no call waits; called by the keepalive thread."""
        lock = self._lock.here()
        if self._pid == os.getpid() and not self._closed and lock.acquire(blocking=False):
            try:
                self._pool.keep_alive()
            finally:
                lock.release()


def is_environment(url: Any, workers: int | str | None) -> bool:
    """Whether the first argument of a vector names an environment for this machine, and not servers.

    Raises:
        ValueError: `workers` does not fit the first argument.
    """
    _check("workers", workers in (None, "auto") or (isinstance(workers, int) and workers >= 1), "'auto' or at least 1")
    if isinstance(url, str):
        scheme, _, rest = url.partition(":")
        is_target = bool(rest) and not rest.startswith("//") and not rest[:1].isdigit() and "." not in scheme
        _check("workers", is_target or workers is None, "only for environments on this machine: a server has its own")
        return is_target
    if isinstance(url, type):
        return True
    _check("workers", workers is None or callable(url), "only for environments on this machine")
    return workers is not None


def _local_pool(target: Any, n: int, workers: int | str, options: Mapping[str, Any], on_answer: Any) -> SlotPool:
    """Return the pool of a vector in processes of this machine.

    Raises:
        ValueError: An option is only for servers.
        ClientModeError: Only the client is installed.
    """
    for name, default in _OF_SERVERS.items():
        _check(name, options[name] == default, "only for servers")
    try:
        vectors = importlib.import_module("openenv.server.vectors")
        pool = importlib.import_module("openenv.server.vectors.pool")
    except ModuleNotFoundError as exc:
        raise ClientModeError(
            f"Environments on this machine need the package 'openenv' with NumPy, not only the client ({exc})"
        ) from exc
    # Like a server: JSON types for the hooks of a client class, arrays and bytes otherwise.
    codec = _offers(options["codec"], "v2", has_hooks=options["client"] is not None)[0]
    made: SlotPool = pool.LocalPool(
        vectors.environment_of(target),
        n,
        workers=workers,
        codec=codec,
        restarts=options["autoreset"] == "same_step",
        on_answer=on_answer,
    )
    return made


def _joined(layout: ColumnLayout, blocks: Sequence[ColumnBlock], slots: Any) -> ColumnBlock:
    """Return one block for these slots from several with some of them; other rows are zeros."""
    import numpy as np

    whole = ColumnBlock(
        slots,
        [np.zeros(column.batch_shape(len(slots)), column.dtype) for column in layout.observations],
        np.zeros(len(slots)),
        np.zeros(len(slots), bool),
        np.zeros(len(slots), bool),
        {},
        {},
    )
    for block in blocks:
        rows = slots.searchsorted(block.slots)
        for array, values in zip(whole.observations, block.observations, strict=True):
            array[rows] = values
        whole.rewards[rows], whole.terminated[rows], whole.truncated[rows] = (
            block.rewards,
            block.terminated,
            block.truncated,
        )
        whole.metadata.update(block.metadata)
        whole.finals.update(block.finals)
        if block.begun is not None:
            whole.begun = np.zeros(len(slots), bool) if whole.begun is None else whole.begun
            whole.begun[rows] = block.begun
    return whole


def _offers(codec: str, protocol: str, *, has_hooks: bool) -> tuple[str, ...]:
    _check("codec", protocol != "v1" or codec != "msgpack", "json: protocol v1 knows nothing else")
    offers: dict[str, tuple[str, ...]] = {
        "json": (JSON.name,),
        "msgpack": (MSGPACK.name,),
        "auto": (JSON.name,) if has_hooks else SUBPROTOCOLS,
    }
    _check("codec", codec in offers, f"one of {', '.join(offers)}")
    _check("codec", codec != "msgpack" or MSGPACK.name in SUBPROTOCOLS, "json: msgpack is not installed")
    return () if protocol == "v1" else offers[codec]


def _hooks(client: type[EnvClient[Any, Any, Any]] | EnvClient[Any, Any, Any] | None, url: str) -> Any:
    """Return the object with the hooks for actions and replies; it never connects."""
    if client is None:
        return GenericEnvClient(base_url=url)
    return client(base_url=url) if isinstance(client, type) else client


def _seeds(seed: int | Sequence[int | None] | None, slots: Sequence[int]) -> list[int | None]:
    if seed is None:
        return [None] * len(slots)
    if isinstance(seed, int):
        return [seed + slot for slot in slots]
    _check("seed", len(seed) == len(slots), f"one for each of the {len(slots)} slots, not {len(seed)}")
    return list(seed)


def _check(name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {wanted}")


class AsyncVectorEnv(_Slots, Generic[ActT, ObsT]):
    """Many sessions of one environment, stepped together, for code on an event loop.

    Arguments and results are those of `VectorEnv`, which runs in one thread, so that connecting and waiting never block
    the loop. A cancelled call goes on in that thread, and the next one waits for it. Nothing is lost: the next
    `step_wait` returns the results of a cancelled `step`.
    """

    def __init__(self, url: str | Sequence[str] | Callable[[], Any], n: int, **options: Any) -> None:
        self._use(VectorEnv(url, n, **options))

    def _use(self, env: VectorEnv[ActT, ObsT]) -> None:
        self._env = env
        self._urls, self._pool, self._has_hooks = self._env._urls, self._env._pool, self._env._has_hooks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openenv-vector")
        self._waiting: Future[VectorResult[ObsT]] | None = None
        self._is_closed = False

    async def connect(self) -> Self:
        """Open all sessions now instead of at the first reset; raises as `VectorEnv.connect` does."""
        await self._run(self._env.connect)
        return self

    async def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        slots: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> VectorResult[ObsT]:
        """Begin an episode in each slot, or in some; a step that was not waited for is forgotten."""
        self._waiting = None
        return await self._run(partial(self._env.reset, seed=seed, slots=slots, timeout_s=timeout_s, **kwargs))

    async def step(self, actions: Actions[ActT], *, timeout_s: float | None = None) -> VectorResult[ObsT]:
        """Take an action in each slot and wait for all of them; raises as `VectorEnv.step` does."""
        await self.step_async(actions)
        return await self.step_wait(timeout_s)

    async def step_async(self, actions: Actions[ActT], *, each: bool | None = None) -> None:
        """Send actions; `step_wait` returns their results.

        Raises:
            ClientModeError: An earlier step was not waited for.
        """
        if self._waiting is not None:
            raise ClientModeError("A step was cancelled while it was waited for: call step_wait first, or reset")
        await self._run(partial(self._env.step_async, actions, each=each))

    async def step_wait(self, timeout_s: float | None = None, *, k: int | None = None) -> VectorResult[ObsT]:
        """Wait for the actions that were sent, or for `k` slots; raises as `VectorEnv.step_wait` does."""
        if self._waiting is None:
            self._waiting = self._submit(partial(self._env.step_wait, timeout_s, k=k))
        waiting = self._waiting
        is_cancelled = False
        try:
            return await asyncio.shield(asyncio.wrap_future(waiting))
        except asyncio.CancelledError:
            is_cancelled = True  # the next step_wait returns it
            raise
        finally:
            if self._waiting is waiting and not is_cancelled:
                self._waiting = None

    async def states(self, *, timeout_s: float | None = None) -> list[Any]:
        """Ask for the state of each slot; one that has no session has None."""
        return await self._run(partial(self._env.states, timeout_s=timeout_s))

    async def fork(self, slot: int, n: int, *, timeout_s: float | None = None) -> Self:
        """Return another `AsyncVectorEnv` whose slots continue from a slot; raises as `VectorEnv.fork` does."""
        forking = self._submit(partial(self._env.fork, slot, n, timeout_s=timeout_s))
        try:
            env = await asyncio.shield(asyncio.wrap_future(forking))
        except asyncio.CancelledError:
            forking.add_done_callback(_close_forked)
            raise
        copies = object.__new__(type(self))
        copies._use(env)
        return copies

    async def restore(
        self,
        snapshot: AsyncVectorEnv[Any, Any] | EnvClient[Any, Any, Any] | SyncEnvClient[Any, Any, Any] | str,
        *,
        slots: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Continue slots of the same server from a snapshot; raises as `VectorEnv.restore` does."""
        source = snapshot._env if isinstance(snapshot, AsyncVectorEnv) else snapshot
        await self._run(partial(self._env.restore, source, slots=slots, timeout_s=timeout_s))

    async def close(self) -> None:
        """End all sessions and hang up; requests in progress end with them."""
        if self._is_closed:
            return
        self._is_closed = True
        self._env.interrupt()
        closing = self._thread.submit(self._env.close)
        try:
            await asyncio.shield(asyncio.wrap_future(closing))
        finally:
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        if self._is_closed:
            raise ClientModeError("This AsyncVectorEnv is closed")
        return self._thread.submit(function)

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.wrap_future(self._submit(function)))


def _close_forked(forking: Future[VectorEnv[Any, Any]]) -> None:
    """Close copies that came after their caller had stopped waiting."""
    if not forking.cancelled() and forking.exception() is None:
        forking.result().close()
