"""Weight updates of inference engines while a stream runs: `updating_weights` pauses, and `InferenceEngine` has the
control routes of vLLM and SGLang.

    engine = engine_of(model)
    async with updating_weights(stream, engine, version=7):
        await engine.load("/checkpoints/step-7")

Knows HTTP routes only; tensors move over disk, or by the trainer's own transfer within the block.
"""

# One update:
#
#   drain        proxy holds new calls ──> calls under way end ──> engine pauses ──┐
#   in_flight    engine freezes the calls under way, and new ones wait there ──────┴──> the block: sleep, load, wake up
#                                                                                            │
#   stream continues <── engine resumes <── every replica reports the version <── caches ────┘
#                                           of the weights, else WeightUpdateFailed
#
# If the block fails, nothing resumes: some replicas may have half of the new weights, and no token must come from them.
# Load complete weights in another block, which resumes everything.
#
# References: vLLM, "Weight Transfer", "Async Reinforcement Learning", "Sleep Mode"; SGLang, "SGLang for RL Systems".

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2

from openenv.errors import RolloutError, WeightUpdateFailed
from openenv.rollout.tasks.task import Model

from .mixture import Mixture
from .stream import GroupStream

UpdateMode = Literal["drain", "in_flight"]
"""`drain`: calls under way end first, so each answer comes from one version. `in_flight`: they continue with the new
weights, and their tokens have two versions."""
Memory = Literal["weights", "kv_cache"]
"""A part of an engine's memory on the GPU."""


class InferenceEngine(ABC):
    """The control routes of an engine's replicas. Each method asks all replicas at once.

    Args:
        urls: The addresses of the replicas, with or without `/v1`.
        key: The bearer token of the control routes; None for none.
        timeout_s: The time limit of a request, such as the load of a checkpoint.
    """

    def __init__(self, urls: Iterable[str], *, key: str | None = None, timeout_s: float = 1800.0) -> None:
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        if not self.urls:
            raise ValueError("an engine needs at least one address")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s

    @abstractmethod
    async def pause(self, mode: UpdateMode = "drain") -> None:
        """Stop sampling; new calls wait.

        Args:
            mode: With `drain`, the caller has made sure that no call is under way. With `in_flight`, calls under way
                wait too.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Continue sampling."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free the GPU memory of weights and caches. No call may be under way. Load weights after waking up."""

    @abstractmethod
    async def wake_up(self, memory: Sequence[Memory] = ()) -> None:
        """Take the memory back: all of it, or only these parts, to load weights before the cache is there."""

    @abstractmethod
    async def load(self, path: str | Path) -> None:
        """Load a checkpoint: a folder in the format of Hugging Face, which each replica finds at the same path."""

    @abstractmethod
    async def set_version(self, version: str) -> None:
        """Name the version of the weights, which the engine reports with its answers from now on."""

    @abstractmethod
    async def versions(self) -> list[str]:
        """Return the version of each replica's weights."""

    @abstractmethod
    async def clear_cache(self) -> None:
        """Forget cached prefixes, which are those of the old weights."""

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: str | Sequence[str]
    ) -> list[dict[str, Any]]:
        """Send a request to all replicas and return their answers, `{}` for an empty one.

        Use it within `updating_weights` for other routes, such as `/update_weights_from_distributed`.

        Raises:
            WeightUpdateFailed: A replica refused it or did not answer; the text names each one.
        """
        limits = httpx2.Timeout(self._timeout_s, connect=min(10.0, self._timeout_s))
        async with httpx2.AsyncClient(timeout=limits, trust_env=False, headers=self._headers) as http:
            # All of them end before an error is raised: nothing is under way when the caller reacts to it.
            sent = [_ask(http, method, url + path, body, query) for url in self.urls]
            answers = await asyncio.gather(*sent, return_exceptions=True)
        problems = [answer for answer in answers if isinstance(answer, BaseException)]
        for problem in problems:
            if not isinstance(problem, WeightUpdateFailed):
                raise problem
        if problems:
            raise WeightUpdateFailed("; ".join(map(str, problems)))
        return [answer for answer in answers if isinstance(answer, dict)]

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str | Sequence[str]) -> None:
        """Send a POST request to all replicas.

        Raises:
            WeightUpdateFailed: As in `ask`.
        """
        await self.ask("POST", path, body, **query)


class VllmEngine(InferenceEngine):
    """vLLM, started with `VLLM_SERVER_DEV_MODE=1`, and with `--enable-sleep-mode` to sleep."""

    async def pause(self, mode: UpdateMode = "drain") -> None:
        await self.post("/pause", mode="keep" if mode == "in_flight" else "wait")

    async def resume(self) -> None:
        await self.post("/resume")

    async def sleep(self) -> None:
        # Level 2 discards the weights, which `load` replaces. Level 1 would keep a copy in the main memory.
        await self.post("/sleep", level="2")

    async def wake_up(self, memory: Sequence[Memory] = ()) -> None:
        await self.post("/wake_up", tags=list(memory)) if memory else await self.post("/wake_up")

    async def load(self, path: str | Path) -> None:
        kwargs = {"weights_path": str(path)}
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})

    async def set_version(self, version: str) -> None:
        await self.post("/update_weight_version", {"new_version": version})

    async def versions(self) -> list[str]:
        return [str(answer.get("weight_version")) for answer in await self.ask("GET", "/weight_info")]

    async def clear_cache(self) -> None:
        # Frozen calls would go on with keys and values of the old weights.
        await self.post("/reset_prefix_cache", reset_running_requests="true")


class SglangEngine(InferenceEngine):
    """SGLang, started with `--enable-memory-saver` to sleep. With `--admin-api-key`, pass it as `key`."""

    async def pause(self, mode: UpdateMode = "drain") -> None:
        # `retract` gives the caches of calls under way up: they are computed again with the new weights.
        await self.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self.post("/continue_generation", {})

    async def sleep(self) -> None:
        await self.post("/release_memory_occupation", {})

    async def wake_up(self, memory: Sequence[Memory] = ()) -> None:
        await self.post("/resume_memory_occupation", {"tags": list(memory)} if memory else {})

    async def load(self, path: str | Path) -> None:
        # The cache is flushed at the end of the update: after waking up, it may not be there yet.
        body = {"model_path": str(path), "flush_cache": False, "abort_all_requests": False}
        await self.post("/update_weights_from_disk", body)

    async def set_version(self, version: str) -> None:
        # By default this route ends all calls under way.
        await self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def versions(self) -> list[str]:
        return [str(answer.get("weight_version")) for answer in await self.ask("GET", "/model_info")]

    async def clear_cache(self) -> None:
        await self.post("/flush_cache", {})


ENGINES: Mapping[str, type[InferenceEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
"""The engines with control routes, by `Model.engine`."""


def engine_of(model: Model, *, key: str | None = None, timeout_s: float = 1800.0) -> InferenceEngine:
    """Return the engine of a model, with all its replicas.

    Args:
        model: The model; `engine` is `vllm` or `sglang`.
        key: As in `InferenceEngine`, like `timeout_s`; by default the model's key.
        timeout_s: The time limit of a request.

    Raises:
        ValueError: The model names no engine with control routes.
    """
    kind = ENGINES.get(model.engine or "")
    if kind is None:
        raise ValueError(f"weight updates need Model(engine=...), one of {', '.join(ENGINES)}, not {model.engine!r}")
    own_key = model.api_key.get_secret_value()
    return kind(model.replicas, key=own_key if key is None else key, timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def updating_weights(
    streams: GroupStream[Any] | Mixture | Iterable[GroupStream[Any]],
    engine: InferenceEngine,
    *,
    version: int,
    mode: UpdateMode = "drain",
) -> AsyncIterator[InferenceEngine]:
    """Pause the engine while the block replaces its weights; then name the version and continue.

    The block calls `engine.load`, or runs the trainer's own transfer. At its end the engine's caches are cleared, all
    replicas get the version, and `policy_version` of the streams is set. If the block fails, engine and streams stay
    paused, because the weights may be incomplete: update again, or end the streams.

    Args:
        streams: The stream, mixture or streams that sample from the engine.
        engine: The engine; `engine_of(model)` returns it.
        version: The version of the new weights.
        mode: Whether calls under way end before the update, or continue after it.

    Raises:
        ValueError: The mode is unknown.
        WeightUpdateFailed: The engine could not be paused, or a replica does not report the version afterwards.
        RolloutError: `drain`, and a stream has no capture proxy.
    """
    if mode not in ("drain", "in_flight"):
        raise ValueError(f"unknown mode {mode!r}; choose from 'drain', 'in_flight'")
    if isinstance(streams, Mixture):
        streams = streams.streams.values()
    paused = [streams] if isinstance(streams, GroupStream) else list(streams)
    try:
        if mode == "drain":
            for stream in paused:  # first all of them: one engine may serve several
                stream.pause()
            await asyncio.gather(*(stream.drain() for stream in paused))
        await engine.pause(mode)
    except BaseException:
        await _resume(paused if mode == "drain" else (), engine)
        raise
    yield engine
    await engine.clear_cache()
    await engine.set_version(str(version))
    reported = await engine.versions()
    if set(reported) != {str(version)}:
        raise WeightUpdateFailed(f"the replicas report the versions {', '.join(reported)} instead of {version}")
    await engine.resume()
    for stream in paused:
        stream.policy_version = version
        if not stream.is_free.is_set():  # also after an earlier update that failed
            stream.resume()


async def _resume(streams: Iterable[GroupStream[Any]], engine: InferenceEngine) -> None:
    """Continue after a pause that failed; a replica that does not answer is named by the first error."""
    with contextlib.suppress(WeightUpdateFailed):
        await engine.resume()
    for stream in streams:
        with contextlib.suppress(RolloutError):
            stream.resume()


async def _ask(
    http: httpx2.AsyncClient,
    method: str,
    url: str,
    body: Mapping[str, Any] | None,
    query: Mapping[str, str | Sequence[str]],
) -> dict[str, Any]:
    place = urlsplit(url)
    name = f"{place.netloc}{place.path}"
    try:
        answer = await http.request(method, url, json=body, params=dict(query))
    except httpx2.HTTPError as exc:
        raise WeightUpdateFailed(f"{name} did not answer: {exc or type(exc).__name__}") from exc
    if answer.status_code != 200:
        raise WeightUpdateFailed(f"{name} answered {answer.status_code}: {answer.text[:500]}")
    try:
        value = answer.json()
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    if value.get("success") is False:  # SGLang, with some statuses of 200
        raise WeightUpdateFailed(f"{name} failed: {value.get('message') or value}")
    return value
