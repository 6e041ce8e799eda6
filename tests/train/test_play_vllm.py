"""`play` with a double of vLLM: token-in, sleep and wake-up, a weight update in between, routed experts."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from openenv.rollout import Model, Sampling
from openenv.testing import serve
from openenv.train import SampleGroup, play
from vllm_double import LAYERS, TOP, VllmDouble, decode, echo_policy, experts, logprob

TURNS = 4


policy = echo_policy(TURNS)


@pytest.mark.parametrize("keep_reasoning", [True, False])
def test_thoughts_are_sent_back_unless_they_are_not_wanted(keep_reasoning: bool) -> None:
    from echo_env.server.app import app

    async def groups(url: str, double: VllmDouble) -> list[SampleGroup]:
        model = Model(base_url=double.url, name="m", engine="vllm", sampling=Sampling(), token_in=False)
        options: dict[str, Any] = {"samples": 1, "gives_rewards": True, "keep_reasoning": keep_reasoning}
        async with play(url, model, [{}], **options) as stream:
            return [group async for group in stream]

    with VllmDouble(policy) as double, serve(app) as served:
        asyncio.run(asyncio.wait_for(groups(served.url, double), 60))
    thoughts = [decode(sample.prompt).count("another one") for sample in double.samples]
    assert thoughts == (list(range(TURNS)) if keep_reasoning else [0] * TURNS)


def test_episodes_around_a_weight_update_are_exact() -> None:
    from echo_env.server.app import app

    async def groups(url: str, double: VllmDouble) -> list[SampleGroup]:
        model = Model(
            base_url=double.url,
            name="m",
            engine="vllm",
            sampling=Sampling(),
            routed_experts=True,
            policy_url=f"{double.root}/version_of_the_trainer",
        )
        options: dict[str, Any] = {"samples": 2, "concurrency": 2, "gives_rewards": True}
        options |= {"groups_per_update": 1, "max_staleness": 0}
        found: list[SampleGroup] = []
        async with play(url, model, [{}, {}], **options) as stream, httpx2.AsyncClient(trust_env=False) as http:
            async for group in stream:
                found.append(group)
                async with stream.paused():  # no call is under way while the engine sleeps
                    for route in ("sleep", "update_weights", "wake_up"):
                        assert (await http.post(f"{double.root}/{route}")).status_code == 200
                    stream.policy_version = len(found)
        return found

    with VllmDouble(policy, routed_experts=True) as double, serve(app) as served:
        first, second = asyncio.run(asyncio.wait_for(groups(served.url, double), 60))
    assert {sample.path for sample in double.samples} == {"chat", "completions"}
    for version, group in enumerate((first, second)):
        for sample in group.samples:
            assert sample.outcome.status == "ok"
            (sequence,) = sample.sequences
            assert (sequence.n_turns, sequence.policy_version) == (TURNS, str(version))
            assert sample.tokens().excluded == {}
            ids = sequence.input_ids
            expected = experts(ids, version)
            assert sequence.routed_experts is not None
            assert sequence.routed_experts.shape == [len(ids), LAYERS, TOP]
            for place, bit in enumerate(sequence.loss_mask):
                if bit:
                    assert abs(sequence.logprobs[place] - logprob(ids[:place], ids[place], version)) < 1e-9
                if place < len(ids) - 1:
                    assert sequence.routed_experts.of(place) == expected[place].reshape(-1).tolist()
        batch = group.collate(layout="packed")
        assert [one is not None for one in batch.routed_experts] == [True, True]


@pytest.mark.parametrize(("is_raw", "temperature"), [(True, 0.7), (False, 0.7), (True, 1.0)])
def test_logprobs_from_before_temperature_are_not_trained_on(
    is_raw: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echo_env.server.app import app

    async def groups(url: str, double: VllmDouble) -> list[SampleGroup]:
        sampling = Sampling(temperature=temperature)
        model = Model.model_validate({"base_url": double.url, "name": "m", "engine": "vllm", "sampling": sampling})
        async with play(url, model, [{}], samples=2, gives_rewards=True) as stream:
            found = [group async for group in stream]
        excluded.update(stream.counts.tokens.excluded)
        return found

    excluded: dict[str, int] = {}
    with VllmDouble(policy, is_raw=is_raw) as double, serve(app) as served:
        (group,) = asyncio.run(asyncio.wait_for(groups(served.url, double), 60))
        assert group.rewards == [0.0, 0.0]  # an evaluation needs no log-probabilities
        if is_raw and temperature != 1:
            assert set(excluded) == {"raw_logprobs"}
            with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
                group.collate()
            monkeypatch.setenv("OPENENV_ALLOW_RAW_LOGPROBS", "1")
            excluded.clear()
            (group,) = asyncio.run(asyncio.wait_for(groups(served.url, double), 60))
    assert excluded == {}
    assert group.collate().n_tokens > 0
