"""One model call on its way through the proxy: to the endpoint, into the records, and back to the agent.

Each piece of an answer is in the records before the agent sees it. The disk has the whole answer before the agent gets
its last piece, or within a second if it has just written another answer. Each call that began has an end on disk,
however it ended:

    agent                     proxy                                records              endpoint
      | POST /v1/messages ---> | remove parameters that agents may not set,                 |
      |                        | translate, force logprobs and ids -> call                  |
      |                        | ------------------------------------------- POST ------->  |
      |                        | an error before the first byte  ---> try | resent  (again) |
      |                        | <------------------------------------------- 200 --------- |
      |                        |                                 ---> head                  |
      |                        | <------------------------------------------- events ------ |
      |                        | split into events               ---> prompt, up            |
      | <------ events ------- | remove forced fields, translate                            |
      |                        | the last event                  ---> end                   |
      | <------ end ---------- |                                                            |

Knows the order of the steps, and how a call is stopped. Each step has its module:

    agent_routes        admission: key, dialect, budget
    call_request        the endpoint's request, and its repairs
    endpoint_sender     attempts and retries
    answer_relay        the agent's answer, with stream_tap for streams
    call_parts          tokens, attempts and the end of the call in the records
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from concurrent.futures import ThreadPoolExecutor

from .answer_relay import AnswerRelay, send_final_answer
from .call_parts import CallLedger, CallParts, Services
from .call_request import CallRequest, PreparedRequest
from .captured_rollout import EXHAUSTED, CapturedRollout
from .endpoint_sender import EndpointSender
from .inbound import AgentReply
from .records import Call, JournalFull, Recorder
from .upstream_errors import ProxiedCallFailed

log = logging.getLogger("openenv.rollout.capture")


class ProxiedCall:
    """A call under way. The constructor writes the request into the records.

    Args:
        services: The shared objects of all calls.
        rollout: The rollout.
        request: The agent's request.
        reply: The agent's connection.
        recorded: The call whose answer the agent gets again; None asks the endpoint.

    Raises:
        JournalFull: The request could not be recorded.
        RecordsTooLarge: The records have no room for the request.
    """

    def __init__(
        self,
        services: Services,
        rollout: CapturedRollout,
        request: CallRequest,
        reply: AgentReply,
        recorded: Call | None = None,
    ) -> None:
        prepared = PreparedRequest(request, rollout)
        ledger = CallLedger(rollout, request, prepared, recorded)
        self._recorded = recorded
        self._call = CallParts(services, rollout, request, prepared, ledger, reply)
        self._sender = EndpointSender(self._call)
        self._relay = AnswerRelay(self._call, self._complete)
        self.over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_complete = False
        self._stopped: str | None = None  # the reason given to `stop`; None if the server cancels the task
        self._policy_task: asyncio.Task[str | None] | None = None

    @property
    def unspent(self) -> int:
        """Return how many more tokens the call may sample; 0 if it has no limit."""
        return self._call.ledger.unspent

    async def run(self) -> None:
        """Carry the call out; return when everything is in the records and the agent has its answer."""
        rollout = self._call.rollout
        self._task = asyncio.current_task()
        self._call.reply.on_gone = lambda: self.stop("agent_gone")
        rollout.active.add(self)
        helpers: list[asyncio.Task[None] | asyncio.Task[str | None]] = []
        if self._call.request.wants_stream:
            helpers.append(asyncio.create_task(self._relay.ping()))
        if rollout.model.policy_url and self._recorded is None:
            # Asked at the same time as the model: the policy may have changed when the answer is complete.
            self._policy_task = asyncio.create_task(self._sender.policy_version(rollout.model.policy_url))
            helpers.append(self._policy_task)
        seconds_left = rollout.spending.seconds_left()
        deadline = None
        if seconds_left is not None:
            deadline = asyncio.get_running_loop().call_later(seconds_left, self.stop, "budget")
        #   _carry: EndpointSender.answer --> AnswerRelay.relay --> _complete --> settled "complete"
        #               |                         |
        #               +-------------------------+--> ProxiedCallFailed, cancelled, JournalFull --> settled, _end_early
        #
        # `finally` settles the rest: a call must have an end in the records even if the task is cancelled while it
        # sends an error.
        try:
            failure = await self._failure()
            if failure is not None:
                await self._end_early(failure)
        finally:
            if deadline is not None:
                deadline.cancel()
            for helper in helpers:
                helper.cancel()
            with contextlib.suppress(JournalFull):
                self._call.ledger.settle("cancelled")
            if self._recorded is not None and not self._is_complete and rollout.replay is not None:
                rollout.replay.put_back(self._recorded)
            # The parts of a call refer to each other: without this, long prompts and conversations wait for the garbage
            # collector.
            self._call.ledger.prompt_ids = self._call.ledger.answer = None
            self._call.reply.on_gone = self._task = None
            del self._relay
            rollout.active.discard(self)
            rollout.changed.set()
            self.over.set()

    # Called by the connection (the agent hung up), by a timer (the budget's seconds), and by `CaptureServer.revoke`.
    # The first reason counts: a connection that closes because its rollout was revoked is not an agent that left.
    def stop(self, how: str) -> None:
        """End the call; the tokens sampled so far stay in the records."""
        if self._stopped is None:
            self._stopped = how
            if self._task is not None:
                self._task.cancel()

    async def _carry(self) -> None:
        if self._recorded is not None:
            await self._relay.relay_recorded(self._recorded)
            return
        response = await self._sender.answer()
        await self._relay.relay(response)

    async def _failure(self) -> ProxiedCallFailed | None:
        """Carry the call out; return the reason if it ended early, None if it went well."""
        try:
            if self._call.reply.gone:
                self._stopped = "agent_gone"
            else:
                await self._carry()
                return None
        except asyncio.CancelledError:
            if self._stopped is None:  # the server stops: the task must end as cancelled
                raise
        except ProxiedCallFailed as exc:
            await self._sender.look_for_outage(exc)
            return exc
        except JournalFull as exc:
            return ProxiedCallFailed("record_failed", 507, f"this call could not be recorded: {exc}")
        except Exception as exc:  # the boundary of a call
            log.error("a call failed:\n%s", self._call.redacted(traceback.format_exc()))
            return ProxiedCallFailed(
                "broken", 502, f"the endpoint's answer could not be passed on: {type(exc).__name__}"
            )
        finally:
            self._sender.close()
        if self._stopped == "revoked":
            return ProxiedCallFailed("revoked", 403, "the key of this rollout was revoked")
        if self._stopped == "budget":
            return ProxiedCallFailed("budget", 429, EXHAUSTED)
        return ProxiedCallFailed(self._stopped or "cancelled", 499, "the call was ended")

    # First the records, then the agent: an agent that gets its error may end at once, and then its rollout is read.
    async def _end_early(self, failure: ProxiedCallFailed) -> None:
        """Record the end of a call that did not complete, then tell the agent."""
        call, rollout = self._call, self._call.rollout
        if rollout.traits.ends_at_context_limit and failure.is_context_limit:
            failure.how = "context"
        ends_rollout = failure.how in ("budget", "context")
        with contextlib.suppress(JournalFull):  # the recorder keeps that as `failure`
            call.ledger.settle(failure.how, failure.error)
            if ends_rollout:
                limit = "context" if failure.how == "context" else rollout.spending.exhausted()
                rollout.budget_ended(limit or "seconds", call.request.dialect.name)
        if ends_rollout and not call.reply.started:
            await send_final_answer(call.reply, call.request.dialect, call.request.body)
        else:
            await self._relay.send_error(failure, is_stopped=self._stopped is not None)

    async def _complete(self, missing_prompt_ids: int | None) -> None:
        """Finish a call that went well.

        Args:
            missing_prompt_ids: The number of prompt tokens, if llama.cpp must be asked for their IDs.
        """
        rollout, ledger = self._call.rollout, self._call.ledger
        wants_ids = self._call.prepared.options.return_token_ids and not rollout.no_prompt_ids
        if missing_prompt_ids is not None and wants_ids:
            ids = await self._sender.prompt_ids(missing_prompt_ids)
            if ids is None:
                rollout.no_prompt_ids = True
            else:
                ledger.recorder.prompt(ids, is_separate=True)
                ledger.prompt_ids = ids
        if rollout.tokens is not None and ledger.answer is not None and ledger.prompt_ids is not None:
            prepared, reader = self._call.prepared, self._call.request.endpoint
            was_read_here = prepared.token_call is not None or (
                self._recorded is not None and self._recorded.reused_ids > 0
            )
            rollout.tokens.remember(
                prepared.body, ledger.answer, ledger.prompt_ids, reader, was_read_here=was_read_here
            )
        if self._policy_task is not None:
            ledger.policy = await self._policy_task or ledger.policy
            # Asked again: an update during the answer gives its tokens two versions.
            last = await self._sender.policy_version(rollout.model.policy_url or "")
            ledger.policy_changed = last is not None and last != ledger.policy
        ledger.settle("complete")
        self._is_complete = True
        if self._recorded is None:
            await self._let_disk_write()

    async def _let_disk_write(self) -> None:
        """Wait until the disk has the answer, or arrange it if it has just written another one."""
        recorder, disk, loop = self._call.rollout.recorder, self._call.services.disk, asyncio.get_running_loop()
        pause_s = recorder.next_sync_s()
        if pause_s is None or disk is None:
            return
        recorder.is_sync_planned = True
        if pause_s == 0:
            await loop.run_in_executor(disk, recorder.sync)
        else:
            loop.call_later(pause_s, _begin_sync, disk, recorder)


def _begin_sync(disk: ThreadPoolExecutor, recorder: Recorder) -> None:
    """Let the disk write the answers of the last second, unless the server has closed meanwhile."""
    with contextlib.suppress(RuntimeError):
        disk.submit(recorder.sync)
