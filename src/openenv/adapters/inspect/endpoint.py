"""A model of Inspect AI behind an OpenAI-compatible address, for agents that run in sandboxes. Needs inspect-ai.

agent in its sandbox ──> capture proxy ──> InspectEndpoint (a thread) ──> the sample's task ──> model.generate
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any

import anyio
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from openenv.errors import install_command
from openenv.rollout.tasks.task import Model
from openenv.server.thread_server import ThreadServer

from .messages import Json, from_inspect_output, to_inspect_messages, to_inspect_tool_choice, to_inspect_tools

try:
    from inspect_ai.model import GenerateConfig, ModelOutput
    from inspect_ai.util import LimitExceededError
except ImportError as exc:
    raise ModuleNotFoundError(f"inspect-ai is required: {install_command('inspect')}", name=exc.name) from exc

_LAST_ANSWER = "The limit of this evaluation is reached: I stop here."
_Question = tuple[Json, "concurrent.futures.Future[Json]"]


# agent in a sandbox -> loopback proxy of the rollout -> this endpoint -> Inspect's model
class InspectEndpoint:
    """Answers chat completions with a model of Inspect, for one sample; an async context manager.

    Calls are made in the context of the task that enters it, so that Inspect logs them in the sample and counts them
    against its limits. How the model samples is decided by the evaluation; agents choose messages and tools.

    Args:
        model: The model.
        on_failure: Called when a call fails, in the event loop: the sample cannot go on.
    """

    def __init__(self, model: Any, on_failure: Callable[[BaseException], None]) -> None:
        self._model = model
        self._on_failure = on_failure
        self._key = secrets.token_urlsafe(32)
        self._questions: asyncio.Queue[_Question] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        routes = [Route("/v1/chat/completions", self._chat, methods=["POST"]), Route("/v1/models", self._models)]
        self._server = ThreadServer(Starlette(routes=routes), lifespan="off", ws="none", timeout_graceful_shutdown=2)
        self.failure: BaseException | None = None
        """Why a call failed; None while none has."""
        self.limit: BaseException | None = None
        """Which limit of the sample is reached; later calls get an answer that ends the agent, and its work counts."""
        self.messages: list[Any] = []
        """The longest conversation so far, with its answer."""
        self.output: Any = None
        """The last answer in it."""

    @property
    def model(self) -> Model:
        """The address, as rollouts take it."""
        name = str(self._model)
        # Many providers refuse to name log-probabilities, and nothing is trained on here.
        return Model(
            base_url=f"{self._server.url}/v1",
            name=name,
            api_key=SecretStr(self._key),
            top_logprobs=0,
            return_token_ids=False,
            max_tokens_cap=None,
            sampling={},  # Inspect's configuration decides
        )

    async def __aenter__(self) -> InspectEndpoint:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._server.start)
        # Tasks inherit the context of this one: Inspect finds the sample in it. A thread has no such context.
        self._start(self._take())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):  # a limit of Inspect cancels every wait
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            while not self._questions.empty():
                self._questions.get_nowait()[1].cancel()
            await asyncio.to_thread(self._server.close)

    # -- in the sample's context --------------------------------------------------------------------------------------

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self) -> None:
        while True:
            self._start(self._answer(*await self._questions.get()))

    async def _answer(self, body: Json, answer: concurrent.futures.Future[Json]) -> None:
        try:
            if self.limit is not None:
                raise self.limit
            messages = to_inspect_messages(body.get("messages") or [])
            stop = body.get("stop")
            config = GenerateConfig(stop_seqs=[stop] if isinstance(stop, str) else stop)
            output = await self._model.generate(
                messages,
                tools=to_inspect_tools(body.get("tools") or []),
                tool_choice=to_inspect_tool_choice(body.get("tool_choice")),
                config=config,
            )
            if len(messages) >= len(self.messages):
                self.messages, self.output = [*messages, output.message], output
            answer.set_result(from_inspect_output(output))
        except LimitExceededError as exc:
            self.limit = exc
            answer.set_result(from_inspect_output(ModelOutput.from_content(str(self._model), _LAST_ANSWER)))
        except asyncio.CancelledError:
            answer.cancel()
            raise
        except BaseException as exc:  # the boundary of a call: the sample ends with it
            if self.failure is None:
                self.failure = exc
                self._on_failure(exc)
            answer.set_exception(exc)

    # -- in the server's thread ---------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> JSONResponse:
        if request.headers.get("authorization") != f"Bearer {self._key}":
            return _refusal(401, "this key is not known here")
        try:
            body = await request.json()
        except ValueError as exc:
            return _refusal(400, f"the body is not JSON: {exc}")
        if not isinstance(body, dict):
            return _refusal(400, "the body must be a JSON object")
        answer: concurrent.futures.Future[Json] = concurrent.futures.Future()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._questions.put_nowait, (body, answer))
        try:
            return JSONResponse(await asyncio.wrap_future(answer))
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            return _refusal(503, "the sample has ended")
        except Exception as exc:  # of the model: the solver raises it
            return _refusal(500, f"{type(exc).__name__}: {exc}")

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": str(self._model), "object": "model"}]})


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
