"""Weight updates of engines while a stream plays, with doubles of vLLM and SGLang: the real engines need a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from openenv.rollout import Model, Sampling
from openenv.testing import serve
from openenv.train import (
    EpisodeStream,
    Mixture,
    SampleGroup,
    WeightUpdateFailed,
    collate,
    engine_of,
    play,
    updating_weights,
)
from vllm_double import SglangDouble, VllmDouble, check_tokens, echo_policy
from waiting import wait_until_async

TURNS = 4
KINDS = {"vllm": VllmDouble, "sglang": SglangDouble}
LOADS = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from echo_env.server.app import app

    with serve(app) as served:
        yield served.url


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model_of(kind: str, double: VllmDouble, **more: Any) -> Model:
    fields: dict[str, Any] = {"base_url": double.url, "name": "m", "engine": kind, "sampling": Sampling()}
    if kind == "vllm":
        fields["policy_url"] = f"{double.root}/weight_info"
    return Model(**{**fields, **more})


@asynccontextmanager
async def playing(url: str, model: Model, groups: int, **options: Any) -> AsyncIterator[EpisodeStream]:
    settings: dict[str, Any] = {"samples": 2, "concurrency": 2, "gives_rewards": True, "max_turns": TURNS + 1}
    settings |= {"groups_per_update": 1, "max_staleness": 0, **options}
    async with play(url, model, [{}] * groups, **settings) as stream:
        yield stream


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def paths(double: VllmDouble) -> list[str]:
    return [path for path, _, _ in double.posts]


def check(group: SampleGroup, weights: dict[str, int]) -> None:
    """Check every log-probability against the weights that the token's version names."""
    for sample in group.samples:
        assert sample.outcome.status == "ok"
        for sequence in sample.sequences:
            check_tokens(sequence, weights)


def test_after_a_drain_every_answer_comes_from_one_version(url: str, kind: str) -> None:
    async def train(double: VllmDouble) -> list[SampleGroup]:
        model, groups = model_of(kind, double), []
        engine = engine_of(model)
        async with playing(url, model, 2) as stream:
            async for group in stream:
                groups.append(group)
                async with updating_weights(Mixture({"echo": stream}), engine, version=len(groups)):
                    await engine.sleep()
                    await engine.wake_up(["weights"])
                    await engine.load(f"/checkpoints/step-{len(groups)}")
                    await engine.wake_up(["kv_cache"])
        return groups

    with KINDS[kind](echo_policy(TURNS)) as double:
        groups = run(train(double))
    names = {"vllm": ["/pause", "/sleep", "/wake_up", "/collective_rpc", "/wake_up", "/reset_prefix_cache"]}
    names["sglang"] = ["/pause_generation", "/release_memory_occupation", "/resume_memory_occupation"]
    names["sglang"] += ["/update_weights_from_disk", "/resume_memory_occupation", "/flush_cache"]
    ends = {"vllm": "/resume", "sglang": "/continue_generation"}
    assert paths(double) == [*names[kind], "/update_weight_version", ends[kind]] * 2
    for version, group in enumerate(groups):
        name = str(version) if version else "default"
        check(group, {name: version})
        assert {each.policy_version for sample in group.samples for each in sample.sequences} == {name}
    batch = collate(groups)
    for row, mask in zip(batch.policy_versions, batch.loss_mask, strict=True):
        named = {version for version, bit in zip(row, mask, strict=True) if bit}
        assert named in ({-1}, {1})
        assert {version for version, bit in zip(row, mask, strict=True) if not bit} == {-1}


def test_an_update_in_flight_gives_the_tokens_of_an_answer_two_versions(url: str, kind: str) -> None:
    async def train(double: VllmDouble) -> SampleGroup:
        model = model_of(kind, double)
        engine = engine_of(model)
        async with playing(url, model, 1) as stream:
            taking = asyncio.ensure_future(anext(stream))
            await wait_until_async(lambda: double.update_at is None)  # an answer waits at its fifth token
            async with updating_weights(stream, engine, version=1, mode="in_flight"):
                assert double.is_paused
                await engine.load("/checkpoints/step-1")
            assert (stream.policy_version, double.is_paused) == (1, False)
            return await taking

    with KINDS[kind](echo_policy(TURNS), update_at=5) as double:
        group = run(train(double))
    crossed = [sample for sample in double.samples if len(set(sample.labels)) > 1]
    assert [sample.labels[4:6] for sample in crossed] == [["default", "1"]]
    sequences = [sequence for sample in group.samples for sequence in sample.sequences]
    if kind == "sglang":
        check(group, {"default": 0, "1": 1})
        mixed = [each for each in sequences if each.policy_version is None]
        pairs = [pair for each in mixed for pair in pairwise(each.version_spans)]
        assert [(one.version, two.version) for one, two in pairs if one.end == two.start] == [("default", "1")]
        assert {"default", "1"} <= {name for sample in group.samples for name in sample.policy_versions}
    else:  # its chat routes name no versions: those of the mixed answer are unknown, and the trainer is told
        (answer,) = crossed
        ids, start = [*answer.prompt, *answer.ids], len(answer.prompt)
        # The other sample has the same prompt, and perhaps the same answer, of one version.
        same = [each for each in sequences if each.input_ids[: len(ids)] == ids]
        (sequence, *_) = [each for each in same if set(each.token_versions()[start : len(ids)]) == {None}]
        assert "unknown_version" in [finding.code for finding in sequence.validation]
        assert (sequence.policy_version, sequence.trainable) == (None, True)


def test_a_failed_load_leaves_everything_paused_until_another_one_succeeds(url: str, kind: str) -> None:
    async def train(double: VllmDouble) -> SampleGroup:
        model = model_of(kind, double)
        engine = engine_of(model)
        async with playing(url, model, 2) as stream:
            await anext(stream)
            with pytest.raises(WeightUpdateFailed, match="127"):
                async with updating_weights(stream, engine, version=1):
                    await engine.load("/checkpoints/step-1")
            assert (double.is_paused, stream.is_free.is_set(), stream.policy_version) == (True, False, 0)
            async with updating_weights(stream, engine, version=1):
                await engine.load("/checkpoints/step-1")
            assert (double.is_paused, stream.is_free.is_set(), stream.policy_version) == (False, True, 1)
            return await anext(stream)

    with KINDS[kind](echo_policy(TURNS), fails={LOADS[kind]: 1}) as double:
        check(run(train(double)), {"1": 1})


def test_a_replica_that_cannot_be_paused_stops_no_stream(url: str, kind: str) -> None:
    async def train(good: VllmDouble, bad: VllmDouble) -> None:
        model = model_of(kind, good, base_urls=(bad.url,))
        async with playing(url, model, 1) as stream:
            with pytest.raises(WeightUpdateFailed, match=bad.root.rpartition("/")[2]):
                async with updating_weights(stream, engine_of(model), version=1):
                    raise AssertionError("the block must not run")
            assert (good.is_paused, stream.is_free.is_set()) == (False, True)
            assert (await anext(stream)).rewards == [0.0, 0.0]

    with ExitStack() as stack:
        good = stack.enter_context(KINDS[kind](echo_policy(TURNS)))
        pauses = {"vllm": "/pause", "sglang": "/pause_generation"}
        bad = stack.enter_context(KINDS[kind](echo_policy(TURNS), fails={pauses[kind]: 1}))
        run(train(good, bad))


def test_all_replicas_must_report_the_new_version(url: str, kind: str) -> None:
    class Forgetful(KINDS[kind]):  # type: ignore[misc, valid-type]
        async def _set_label(self, request: Any) -> Any:
            return await self._nothing(request)

    async def train(one: VllmDouble, other: VllmDouble) -> None:
        model = model_of(kind, one, base_urls=(other.url,))
        engine = engine_of(model)
        async with playing(url, model, 1) as stream:
            with pytest.raises(WeightUpdateFailed, match="report the versions 3, default instead of 3"):
                async with updating_weights(stream, engine, version=3):
                    await engine.load("/checkpoints/step-3")
            assert one.is_paused
            assert other.is_paused

    with KINDS[kind](echo_policy(TURNS)) as one, Forgetful(echo_policy(TURNS)) as other:
        run(train(one, other))


@pytest.mark.parametrize("engine", [None, "llamacpp", "openai"])
def test_an_engine_without_control_routes_is_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match="one of vllm, sglang"):
        engine_of(Model(base_url="http://127.0.0.1:1/v1", name="m", engine=engine))


def test_an_engine_that_does_not_answer_is_named() -> None:
    model = Model(base_url="http://127.0.0.1:1/v1", name="m", engine="vllm")
    with pytest.raises(WeightUpdateFailed, match=r"127\.0\.0\.1:1/weight_info did not answer"):
        run(engine_of(model, timeout_s=5).versions())


def test_an_unknown_mode_is_refused() -> None:
    async def update() -> None:
        engine = engine_of(Model(base_url="http://127.0.0.1:1/v1", name="m", engine="vllm"))
        async with updating_weights([], engine, version=1, mode="now"):  # type: ignore[arg-type]
            pass

    with pytest.raises(ValueError, match="choose from 'drain', 'in_flight'"):
        run(update())
