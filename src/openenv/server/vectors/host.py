"""`VectorHost`: the slots of one worker process of a local vector.

    word in shared memory ──> step the chosen slots, actions and results in shared memory ──> word, or a message with
                              errors and metadata
    message ──> requests: open, reset, step, state of single slots ──> a reply for each
    end of the stream, or of the program ──> close all environments

Between two steps it looks at the word for a moment if that is likely to pay, then it sleeps until a message comes.

All slots run on the main thread, one after the other; coroutines of several slots run together. Nothing else runs here
except a thread that waits for the end of the program. Knows environments and messages; must not know policies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from openenv.client.vector.slot_pool import BEGINS, STEPS
from openenv.env.binding import bind_instance, infer_models
from openenv.env.columnar import ColumnarEnvironment, step_action
from openenv.errors import EnvironmentFactoryError, message_of
from openenv.protocol.codec import BY_NAME
from openenv.protocol.columns import ColumnLayout, action_fields
from openenv.protocol.server_v1 import error_data
from openenv.protocol.server_v2 import WRITERS, RefusedRequest, ServerProtocolV2

from ..runners.process.child.server_link import ServerHandle
from ..sessions.operations import CLOSE, CONSTRUCT, Operation, build_operations
from ..sessions.session import NEVER_RESET, described_failure
from .memory import SharedArrays, Watch, Words
from .messages import EACH, STEP, RequestKind, Restart, SlotReply, SlotRequest, VectorMessage, VectorReader, encode

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 256 * 1024
_CLOSE_S: Final = 5.0
_LOOK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class VectorSetup:
    """The part of a worker's setup that makes it the host of slots.

    Args:
        socket: The descriptor of the socket for messages.
        slots: The slots of this worker.
        n: The number of slots of the vector.
        codec: The name of the codec for single results.
        memory: The descriptor of the shared memory.
        worker: The index of this worker, of so many.
        workers: The number of workers.
        layout: The arrays; None for environments with other values.
        restarts: Whether a finished episode is followed by the next one in the same step.
        watch_s: How long to look for the next step before sleeping.
    """

    socket: int
    slots: range
    n: int
    codec: str
    memory: int
    worker: int
    workers: int
    layout: ColumnLayout | None = None
    restarts: bool = False
    watch_s: float = 0.0


class VectorHost:
    """The slots of this process.

    Args:
        factory: Makes an environment.
        setup: The slots and the way to their results.
        server: The program that owns the vector.
    """

    def __init__(self, factory: Callable[[], Any], setup: VectorSetup, server: ServerHandle) -> None:
        self._factory = factory
        self._setup = setup
        self._server = server
        self._socket = socket.socket(fileno=setup.socket)
        self._socket.set_inheritable(False)
        self._reader = VectorReader()
        self._first = setup.slots.start
        self._envs: list[Any] = [None] * len(setup.slots)
        self._was_reset = [False] * len(setup.slots)
        self._reset_kwargs: dict[str, Any] = {}
        self._writer = WRITERS[BY_NAME[setup.codec]]
        self._operations = build_operations(self._writer.observation, self._writer.state)
        self._protocol: ServerProtocolV2 | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        os.set_inheritable(setup.memory, False)
        self._arrays = SharedArrays(setup.layout, setup.n, setup.workers, setup.memory)
        self._rows = self._arrays.part(setup.slots)
        self._words = self._arrays.words
        self._places = self._words.places[setup.worker]
        self._wakes_for = (1 + setup.worker, Words.ANY)
        self._watch = Watch(setup.watch_s, os.sched_yield if setup.watch_s else lambda: None)
        self._step = 0  # the last step in columns
        self._received = 0  # messages

    def run(self) -> None:
        """Serve until the program closes the vector or ends."""
        threading.Thread(target=self._watch_program, name="openenv-watch", daemon=True).start()
        words, places = self._words.words, self._places
        while self._wait():
            # Messages first: requests that were made before a step come before it.
            while self._received < words[places.sent]:
                if not self._read():
                    break
            step = words[places.step]
            if step > self._step:
                self._step = step
                self._step_columns()
        self._close_all()

    def _wait(self) -> bool:
        """Wait for a step or a message; return False at the end of the stream."""
        words, places = self._words, self._places
        with self._watch as may_watch:
            if may_watch and self._watch.until(self._has_news):
                return True
            words.words[places.sleeps] = 1
            words.fence()
            if not self._has_news() and not self._read():
                return False
            words.words[places.sleeps] = 0
        return True

    def _has_news(self) -> bool:
        words, places = self._words.words, self._places
        return words[places.step] != self._step or words[places.sent] != self._received

    def _read(self) -> bool:
        """Handle what has come; return False at the end of the stream."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError:  # the program has ended with unread replies
            data = b""
        for message in self._reader.feed(data):
            self._handle(message)
        return bool(data)

    def _send(self, flags: int, step: int, replies: Sequence[SlotReply]) -> None:
        try:
            self._socket.sendall(encode(flags, step, replies))
        except OSError:  # `_read` notices the end
            return
        self._words.words[self._places.replied] += 1

    def _send_done(self) -> None:
        """Report a step of which the arrays say everything."""
        words = self._words
        words.words[self._places.done] = self._step
        words.fence()
        if words.words[words.PROGRAM_SLEEPS] in self._wakes_for:
            try:
                self._socket.sendall(encode(STEP, self._step))
            except OSError:  # `_read` notices the end
                return

    def _watch_program(self) -> None:
        """End with the program, even in the middle of a step.

        The end of the socket is not enough: a process that the program has forked may hold a copy of it.
        """
        if self._server.descriptor is not None:
            select.select([self._server.descriptor], [], [])
        else:
            while not self._server.has_ended:
                time.sleep(_LOOK_S)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        time.sleep(_CLOSE_S)
        os._exit(1)

    # -- messages -------------------------------------------------------------------------------------------------

    def _handle(self, message: VectorMessage) -> None:
        flags, _, requests = message
        if not requests:  # a step, as the words say
            return
        self._received += 1
        replies: list[SlotReply] = []
        if flags & EACH:
            self._answer(requests, lambda reply: self._send(0, 0, [reply]))
        else:
            self._answer(requests, replies.append)
        if replies:
            self._send(0, 0, replies)

    def _answer(self, requests: Sequence[SlotRequest], put: Callable[[SlotReply], None]) -> None:
        """Run requests of single slots."""
        waiting: list[Any] = []
        for request in requests:
            if request.kind == "defaults":
                self._reset_kwargs = request.data
                continue
            work = self._work(request)
            if work is None:
                put(self._run(request))
            else:
                waiting.append(self._finish(request, work, put))
        if waiting:
            self._run_async(_all(waiting))

    def _work(self, request: SlotRequest) -> Callable[[], Any] | None:
        """Return the function that begins the request's coroutine; None if its method is no coroutine."""
        env = self._envs[request.slot - self._first]
        if request.kind == "open" or env is None or request.kind not in bind_instance(env).async_kinds:
            return None
        operation: Operation = getattr(self._operations, request.kind)
        try:
            argument = self._argument(request)
        except _Refused:
            return None
        if operation.in_loop is None or (operation.prefers_lane is not None and operation.prefers_lane(env, argument)):
            return None
        return partial(operation.in_loop, env, argument)

    async def _finish(self, request: SlotRequest, work: Callable[[], Any], put: Callable[[SlotReply], None]) -> None:
        try:
            data = await work()
        except Exception as exc:
            put(self._failed(request, exc))
        else:
            self._was_reset[request.slot - self._first] |= request.kind == "reset"
            put(SlotReply(request.slot, request.number, "data", data))

    def _run(self, request: SlotRequest) -> SlotReply:
        place = request.slot - self._first
        try:
            if request.kind == "open":
                self._open(place)
                return SlotReply(request.slot, request.number, "data", None)
            env = self._envs[place]
            if env is None:  # its constructor has failed, which is the slot's answer already
                return SlotReply(request.slot, request.number, "error", {})
            if request.kind == "reset" and self._setup.layout is not None:
                metadata = self._reset_row(request.slot, env, request.data)
                return SlotReply(request.slot, request.number, "row", metadata)
            operation: Operation = getattr(self._operations, request.kind)
            data = operation.in_lane(env, self._argument(request))
            self._was_reset[place] |= request.kind == "reset"
        except _Refused as exc:
            return SlotReply(request.slot, request.number, "error", exc.data)
        except BaseException as exc:  # the slot's code, which may raise anything
            return self._failed(request, exc)
        return SlotReply(request.slot, request.number, "data", data)

    def _open(self, place: int) -> None:
        if self._envs[place] is not None:
            return
        try:
            self._envs[place] = env = CONSTRUCT.in_lane(None, self._factory)
        except Exception as exc:
            name = getattr(self._factory, "__name__", type(self._factory).__name__)
            raise EnvironmentFactoryError(name, reason=f"{type(exc).__name__}: {message_of(exc)}") from exc
        if self._protocol is None:
            self._protocol = ServerProtocolV2(infer_models(type(env)).action)

    def _argument(self, request: SlotRequest) -> Any:
        """Return the argument of an operation: a validated action, or the keywords of a reset.

        Raises:
            _Refused: The action does not fit.
        """
        if request.kind != "step":
            return request.data
        assert self._protocol is not None
        parsed = self._protocol.read({"type": "step", "id": request.number, "session": "", "data": request.data})
        if isinstance(parsed, RefusedRequest):
            raise _Refused(parsed.error)
        return parsed.data  # type: ignore[union-attr]

    def _failed(self, request: SlotRequest, exc: BaseException) -> SlotReply:
        logger.error("slot %d: %s failed", request.slot, request.kind, exc_info=exc)
        data = self._error_data(request.slot, request.kind, exc)
        return SlotReply(request.slot, request.number, "error", data)

    def _error_data(self, slot: int, kind: str, exc: BaseException) -> dict[str, Any]:
        hint = NEVER_RESET if kind == "step" and not self._was_reset[slot - self._first] else ""
        return error_data(described_failure(exc, hint))

    # -- steps in columns -----------------------------------------------------------------------------------------

    def _reset_row(self, slot: int, env: ColumnarEnvironment, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode and write its observation to the arrays; return its metadata."""
        values, metadata = env.reset_values(kwargs)
        for array, value in zip(self._arrays.observations, values, strict=True):
            array[slot] = value
        self._was_reset[slot - self._first] = True
        return dict(metadata)

    def _step_columns(self) -> None:
        """Step the chosen slots; actions and results are in the arrays."""
        # Copies: environments may keep their action, and the arrays change with the next step.
        actions = [rows.copy() for rows in self._rows.actions]
        chosen = self._rows.chosen.tolist()
        replies: list[SlotReply] = []
        self._refuse_actions(actions, chosen, replies.append)
        self._rows.terminated.fill(False)
        self._rows.truncated.fill(False)
        # Lists of NumPy's scalars and rows: made together, they cost half as much.
        each = zip(chosen, self._envs, zip(*map(list, actions), strict=True), strict=True)
        for place, (what, env, action) in enumerate(each):
            try:
                if what == STEPS:
                    remark = self._step_row(place, env, action)
                elif what == BEGINS:
                    remark = self._begin_row(place, env)
                else:
                    continue
            except BaseException as exc:  # the slot's code, which may raise anything
                kind: RequestKind = "reset" if what == BEGINS else "step"
                remark = self._failed(SlotRequest(self._first + place, 0, kind, None), exc)
            if remark is not None:
                replies.append(remark)
        if replies:
            self._send(STEP, self._step, replies)
        else:
            self._send_done()

    def _refuse_actions(self, actions: Sequence[Any], chosen: list[int], put: Callable[[SlotReply], None]) -> None:
        """Take invalid actions out of the step."""
        cls: type[ColumnarEnvironment] = type(next(env for env in self._envs if env is not None))
        valid = cls.valid_actions(actions)
        if np.count_nonzero(valid) == len(chosen):
            return
        for place in (~valid).nonzero()[0].tolist():
            if chosen[place] == STEPS:
                chosen[place] = 0
                put(self._refused_action(self._first + place, actions, place))

    def _step_row(self, place: int, env: ColumnarEnvironment, action: Sequence[Any]) -> SlotReply | None:
        """Take a slot's action; return a remark on it, if the arrays do not say everything."""
        rows = self._rows
        values, rows.rewards[place], has_terminated, has_truncated, metadata = step_action(env, action)
        if has_terminated or has_truncated:
            rows.terminated[place], rows.truncated[place] = has_terminated, has_truncated
            if self._setup.restarts:
                return self._restart(self._first + place, env, values, dict(metadata))
        if rows.only is not None:
            rows.only[place] = values[0]
        else:
            for array, value in zip(rows.observations, values, strict=True):
                array[place] = value
        return SlotReply(self._first + place, 0, "metadata", dict(metadata)) if metadata else None

    def _begin_row(self, place: int, env: ColumnarEnvironment) -> SlotReply | None:
        """Begin a slot's episode in a step."""
        self._rows.rewards[place] = 0.0
        metadata = self._reset_row(self._first + place, env, self._reset_kwargs)
        return SlotReply(self._first + place, 0, "metadata", metadata) if metadata else None

    def _restart(
        self, slot: int, env: ColumnarEnvironment, final: Sequence[Any], metadata: dict[str, Any]
    ) -> SlotReply | None:
        """Keep the last observation of an episode, and begin the next one; return None if the arrays say everything."""
        for array, value in zip(self._arrays.finals, final, strict=True):
            array[slot] = value
        try:
            restart = Restart(metadata, self._reset_row(slot, env, self._reset_kwargs))
        except Exception as exc:
            logger.exception("slot %d: reset failed", slot)
            restart = Restart(metadata, {}, self._error_data(slot, "reset", exc))
        if restart.error is None and not (restart.final or restart.metadata):
            return None
        return SlotReply(slot, 0, "restarted", restart)

    def _refused_action(self, slot: int, actions: Sequence[Any], place: int) -> SlotReply:
        """Describe why an action does not fit, as for an action that came by itself."""
        assert self._setup.layout is not None
        fields = action_fields(self._setup.layout, actions, place)
        try:
            self._argument(SlotRequest(slot, 1, "step", fields))
        except _Refused as exc:
            return SlotReply(slot, 0, "error", exc.data)
        raise AssertionError(f"valid_actions and the action model disagree on {fields}")

    # -- ending ---------------------------------------------------------------------------------------------------

    def _close_all(self) -> None:
        """Close the environments; the program kills this process if that takes too long."""
        for env in self._envs:
            if env is None:
                continue
            try:
                if "close" in bind_instance(env).async_kinds and CLOSE.in_loop is not None:
                    self._run_async(CLOSE.in_loop(env, None))
                else:
                    CLOSE.in_lane(env, None)
            except Exception:
                logger.exception("an environment could not be closed")
        if self._loop is not None:
            self._loop.close()

    def _run_async(self, work: Any) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(work)


class _Refused(Exception):
    """An action does not fit; `data` is the error of the reply."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.data = data


async def _all(work: Sequence[Any]) -> None:
    await asyncio.gather(*work)
