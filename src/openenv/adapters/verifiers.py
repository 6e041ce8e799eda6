"""Environments of verifiers' as `Environment`s: the client is the model. Needs verifiers (0.4 or newer).

Each model call of an episode becomes an observation, and the action is the model's answer:

    client            session                         event loop of the class, in a separate thread
    reset ----------> start an episode -------------> verifiers plays; its model calls go to a loopback endpoint
    observation <---- messages and tools <----------- POST /KEY/v1/chat/completions waits
    step -----------> content, tool calls ----------> the answer to that call; the next call, or the end with a reward
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from types import new_class
from typing import Any, ClassVar, TypeVar

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openenv.adapters import importing
from openenv.env.environment import Environment
from openenv.types import Action, EnvironmentMetadata, Observation, State

with importing("verifiers>=0.4", needed_by="openenv.adapters.verifiers"):
    import verifiers.v1 as vf

T = TypeVar("T")
# Loading an environment may download its dataset.
_START_S = 120.0
_MOST_TASKS = 10_000
"""How many tasks of an endless taskset are served."""


class ChatAnswer(Action):
    """The model's answer to the last request."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)


class ChatRequest(Observation):
    """The prompt for the model: messages and callable tools; empty at the end of an episode."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)


class ServedVerifiers(Environment[ChatAnswer, ChatRequest, State]):
    """Base of the classes that `verifiers_environment` makes.

    `reset` takes `task`, the number of a task; by default the seed chooses one. An episode that verifiers could not
    play raises: it has no reward.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    config: ClassVar[Any]
    action_cls: ClassVar[type[ChatAnswer]] = ChatAnswer
    observation_cls: ClassVar[type[ChatRequest]] = ChatRequest
    reset_observation_cls: ClassVar[type[ChatRequest]] = ChatRequest
    _host: ClassVar[_Host]

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._episode: _Episode | None = None
        # The first session starts the shared loop and endpoint.
        self._host.acquire()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task: int | None = None, **kwargs: Any
    ) -> ChatRequest:
        """Begin an episode, and return the first request to the model."""
        # An unfinished episode still waits for answers; verifiers must stop before the next one begins.
        self._end_episode()
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        self._episode = self._host.run(self._host.begin(seed or 0 if task is None else task))
        return self._next()

    def step(self, action: ChatAnswer, timeout_s: float | None = None, **kwargs: Any) -> ChatRequest:
        """Answer the last request, and return the next one, or the end with the reward.

        Raises:
            RuntimeError: No request waits for an answer, or verifiers could not play the episode.
        """
        if self._episode is None:
            raise RuntimeError("the episode is over: reset begins one")
        self._state.step_count += 1
        # Answer first, then wait: verifiers continues only after it has the answer.
        self._host.run(self._episode.answer(action))
        return self._next()

    def _next(self) -> ChatRequest:
        assert self._episode is not None
        body = self._host.run(self._episode.next())
        # A body is the next model call; None means that verifiers has finished the episode.
        if body is not None:
            return ChatRequest(messages=body.get("messages") or [], tools=body.get("tools") or [])
        episode, self._episode = self._episode, None
        played = self._host.run(episode.result())
        # A failed rollout has no meaningful reward. Raising keeps it out of training.
        if not played.ok:
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            reasons = [error.message for error in errors]
            raise RuntimeError(f"verifiers could not play the episode: {'; '.join(reasons)[:1000]}")
        metrics = {name: float(value) for trace in played.traces for name, value in trace.metrics.items()}
        # An episode may contain several traces, one for each agent.
        reward = float(sum(trace.reward for trace in played.traces))
        return ChatRequest(reward=reward, done=True, terminated=True, metadata={"metrics": metrics})

    @property
    def state(self) -> State:
        """The episode's id and how many answers were given."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(name=str(self.config.taskset.id), description="An environment of verifiers'")

    def close(self) -> None:
        """End the episode; the last session stops what all share."""
        try:
            self._end_episode()
        finally:
            self._host.release()

    def _end_episode(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            self._host.run(episode.cancel())


def verifiers_environment(config: Mapping[str, Any] | Any) -> type[ServedVerifiers]:
    """Make an `Environment` class of an environment of verifiers'.

    Args:
        config: Its configuration, as `verifiers.v1.resolve_env_config` takes it: `{"taskset": {"id": ...}, ...}`.
    """
    resolved = vf.resolve_env_config(dict(config) if isinstance(config, Mapping) else config)
    title = "".join(part for part in str(resolved.taskset.id).title() if part.isalnum())
    members = {"__module__": __name__, "config": resolved, "_host": _Host(resolved)}
    return new_class(f"{title}Environment", (ServedVerifiers,), exec_body=lambda space: space.update(members))


class EpisodeGivenUp(Exception):
    """The session was reset or closed while a model call waited for its answer."""


class _Episode:
    """One episode that verifiers plays, and the model calls of it that wait for an answer."""

    def __init__(self) -> None:
        # The key in the URL identifies the episode, because the endpoint serves all sessions of the class.
        self.key = secrets.token_hex(16)
        # None in the queue marks the end. It is put by a callback, so that it comes after a crash as well.
        self._calls: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._waiting: deque[asyncio.Future[ChatAnswer]] = deque()
        self._playing: asyncio.Task[Any] | None = None
        self._is_given_up = False

    def play(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start to play."""
        self._playing = asyncio.create_task(work)
        # Runs for success, failure and cancellation alike.
        self._playing.add_done_callback(lambda _: self._calls.put_nowait(None))

    async def ask(self, body: dict[str, Any]) -> ChatAnswer:
        """Put a model call, and wait for its answer.

        Raises:
            EpisodeGivenUp: There will be none.
        """
        if self._is_given_up:
            raise EpisodeGivenUp
        answer: asyncio.Future[ChatAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._calls.put_nowait(body)
        try:
            return await answer
        # A cancelled call must not receive the answer of the next one.
        finally:
            if answer in self._waiting:
                self._waiting.remove(answer)

    async def next(self) -> dict[str, Any] | None:
        """Wait for the next call; None at the end."""
        return await self._calls.get()

    async def answer(self, action: ChatAnswer) -> None:
        """Answer the oldest call."""
        if not self._waiting:
            raise RuntimeError("no model call waits for an answer")
        self._waiting.popleft().set_result(action)

    async def result(self) -> Any:
        """Return the finished episode."""
        assert self._playing is not None
        return await self._playing

    async def cancel(self) -> None:
        """Stop to play."""
        assert self._playing is not None
        # Calls first: verifiers waits for those under way when it is cancelled.
        self._is_given_up = True
        while self._waiting:
            self._waiting.popleft().set_exception(EpisodeGivenUp())
        self._playing.cancel()
        await asyncio.gather(self._playing, return_exceptions=True)


class _Host:
    """What sessions of a class share: the environment of verifiers', its resources, and the model endpoint."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._sessions = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._episodes: dict[str, _Episode] = {}
        self._url = ""

    # Locks and loops cannot be pickled. Another process gets a new host with the same configuration.
    def __reduce__(self) -> tuple[type[_Host], tuple[Any]]:
        return _Host, (self._config,)

    def acquire(self) -> None:
        """Start for the first session."""
        with self._lock:
            if self._sessions == 0:
                # The thread reports success or failure through a future, so that the first session sees the error.
                ready: Future[None] = Future()
                self._thread = threading.Thread(
                    target=self._serve, args=(ready,), name="openenv-verifiers", daemon=True
                )
                self._thread.start()
                ready.result(_START_S)
            self._sessions += 1

    def release(self) -> None:
        """Stop with the last session."""
        with self._lock:
            self._sessions -= 1
            # The last session ends the thread; a later session starts it again.
            if self._sessions == 0 and self._loop is not None and self._stop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
                self._thread.join(_START_S)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def begin(self, number: int) -> _Episode:
        """Begin an episode of a task; numbers beyond the last begin at the first again."""
        # Seeds beyond the taskset wrap around, so that every seed is valid.
        task = self._tasks[number % len(self._tasks)]
        episode = _Episode()
        self._episodes[episode.key] = episode
        # verifiers requires the name of a variable for the API key, even if the endpoint needs none.
        client = vf.EvalClientConfig(base_url=f"{self._url}/{episode.key}/v1", api_key_var="NO_KEY")
        context = vf.ModelContext(model="policy", client=client)

        async def play() -> Any:
            try:
                return await self._env.run_slot(self._env.slots(task)[0], context)
            finally:
                del self._episodes[episode.key]

        episode.play(play())
        return episode

    def _serve(self, ready: Future[None]) -> None:
        try:
            asyncio.run(self._main(ready))
        except BaseException as exc:
            if ready.done():
                raise
            ready.set_exception(exc)

    async def _main(self, ready: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._env = vf.load_environment(self._config)
        taskset = self._env.taskset
        # An endless taskset is cut off, because the catalogue has to count its tasks.
        self._tasks = list(taskset if taskset.bounded else taskset.take(_MOST_TASKS))
        if not self._tasks:
            raise ValueError(f"the taskset {self._config.taskset.id!r} has no tasks")
        # The listener is bound before the server starts, so its port is known and calls cannot be refused.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            routes = [Route("/{key}/v1/chat/completions", self._completion, methods=["POST"])]
            server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off"))
            serving = asyncio.create_task(server.serve([listener]))
            try:
                async with self._env.serving():
                    ready.set_result(None)
                    await self._stop.wait()
            # The flag lets open requests finish; cancelling the task would cut them off.
            finally:
                server.should_exit = True
                await serving

    async def _completion(self, request: Request) -> Response:
        """Answer a model call of verifiers' with the action of a session."""
        episode = self._episodes.get(request.path_params["key"])
        if episode is None:
            return JSONResponse({"error": {"message": "there is no such episode"}}, 404)
        body = await request.json()
        try:
            # Waits for `step`, possibly for minutes: a trainer samples a whole batch first.
            action = await episode.ask(body)
        except EpisodeGivenUp:
            return JSONResponse({"error": {"message": "the episode was given up"}}, 410)
        message: dict[str, Any] = {"role": "assistant", "content": action.content}
        if action.tool_calls:
            message["tool_calls"] = [_tool_call(call, number) for number, call in enumerate(action.tool_calls)]
        reason = "tool_calls" if action.tool_calls else "stop"
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.get("model", "")}
        # Clients that stream expect server-sent events. The answer is complete, so it is one delta and the end.
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
            return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        deltas = [
            {"index": 0, "delta": message, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": reason},
        ]
        chunks = [{**head, "object": "chat.completion.chunk", "choices": [delta]} for delta in deltas]
        lines = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
        return Response("".join(f"data: {line}\n\n" for line in lines), media_type="text/event-stream")


# Trainers may keep parsed calls instead of the wire form.
def _tool_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a call in the shape of chat completions; also accepts `{"name": ..., "arguments": {...}}`."""
    function = call.get("function") or {"name": call.get("name"), "arguments": call.get("arguments") or {}}
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {
        "index": number,
        "id": call.get("id") or f"call_{number}_{uuid.uuid4().hex[:8]}",
        "type": "function",
        "function": {"name": function.get("name"), "arguments": written},
    }
