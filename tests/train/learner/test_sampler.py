"""The sampler of the learner: answers follow the model's distribution, whatever stands beside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner has an environment of its own: make test-trainers")

import torch

from openenv.train.learner.policy import Policy
from openenv.train.learner.sampler import SampledTokens, Sampler, TokenPrompt
from small_policy import small_policy

WAIT_S = 60.0


@pytest.fixture
def policy() -> Policy:
    return small_policy()


@pytest.fixture
def sampler(policy: Policy) -> Iterator[Sampler]:
    with Sampler(policy, slots=3, context=64) as running:
        yield running


def prompts(count: int, **more: Any) -> list[TokenPrompt]:
    """Return prompts of different lengths."""
    return [
        TokenPrompt([(7 * number + place) % 250 for place in range(3 + 5 * number)], 6 + number, seed=number, **more)
        for number in range(count)
    ]


def answers(sampler: Sampler, asked: list[TokenPrompt]) -> list[SampledTokens]:
    """Ask all prompts at once."""
    waiting = [sampler.submit(prompt) for prompt in asked]
    return [future.result(WAIT_S) for future in waiting]


def logprobs_of(policy: Policy, prompt: list[int], answer: list[int]) -> list[float]:
    """Return the log-probabilities of an answer from one forward pass."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt + answer])).logits[0].float()
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, answer, strict=True)]


def test_log_probabilities_are_those_of_a_forward_pass(policy: Policy, sampler: Sampler) -> None:
    asked = prompts(7)  # more than there are slots
    for prompt, answer in zip(asked, answers(sampler, asked), strict=True):
        assert 1 <= len(answer.ids) <= prompt.max_tokens
        assert answer.ended == (answer.ids[-1] in policy.end_ids)
        assert answer.logprobs == pytest.approx(logprobs_of(policy, prompt.ids, answer.ids), abs=1e-4)


def test_a_greedy_answer_is_that_of_generate(policy: Policy, sampler: Sampler) -> None:
    for prompt, answer in zip(asked := prompts(4, greedy=True), answers(sampler, asked), strict=True):
        expected = policy.model.generate(
            torch.tensor([prompt.ids]),
            attention_mask=torch.ones((1, len(prompt.ids)), dtype=torch.long),
            do_sample=False,
            max_new_tokens=prompt.max_tokens,
            eos_token_id=sorted(policy.end_ids),
            pad_token_id=0,
        )
        assert answer.ids == expected[0, len(prompt.ids) :].tolist()


def test_the_answer_of_a_seed_does_not_depend_on_its_neighbours(sampler: Sampler) -> None:
    together = answers(sampler, prompts(5))
    alone = [answers(sampler, [prompt])[0] for prompt in prompts(5)]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]


def test_tokens_come_as_often_as_their_probabilities_say(policy: Policy) -> None:
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(60)  # a few likely tokens
    first = [5, 6, 7]
    with torch.no_grad():
        expected = policy.model(input_ids=torch.tensor([first])).logits[0, -1].float().softmax(-1)
    with Sampler(policy, slots=100, context=8) as running:
        drawn = [answer.ids[0] for answer in answers(running, [TokenPrompt(first, 1) for _ in range(2000)])]
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected)) / len(drawn)
    assert float((counts - expected).abs().max()) < 0.05
    assert float(expected.max()) > 0.1


def test_work_alone_runs_between_answers_and_raises_where_it_was_given(policy: Policy, sampler: Sampler) -> None:
    before = [sampler.submit(prompt) for prompt in prompts(3)]
    seen: list[bool] = []

    def count_up() -> str:
        seen.extend(future.done() for future in before)
        policy.version += 1
        return threading.current_thread().name

    done = sampler.alone(count_up)
    after = sampler.submit(prompts(1)[0])
    assert done.result(WAIT_S) == "openenv-sampler"
    assert after.result(WAIT_S).version == 1
    assert all(future.result(WAIT_S).version in (0, 1) for future in before)
    assert all(done for done, future in zip(seen, before, strict=True) if future.result().version == 0)

    def fail() -> None:
        raise ValueError("no update today")

    with pytest.raises(ValueError, match="no update today"):
        sampler.alone(fail).result(WAIT_S)


def test_a_failed_batch_fails_its_prompts_and_no_later_ones(policy: Policy, sampler: Sampler) -> None:
    forward = policy.model.forward

    def run_out(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    policy.model.forward = run_out
    failed = [sampler.submit(prompt) for prompt in prompts(2)]
    for future in failed:
        with pytest.raises(RuntimeError, match="out of memory"):
            future.result(WAIT_S)
    policy.model.forward = forward
    assert len(answers(sampler, prompts(4))) == 4


def test_closing_fails_what_waits_and_refuses_more(policy: Policy) -> None:
    sampler = Sampler(policy, slots=1, context=64)
    started, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        go_on.wait(WAIT_S)

    with sampler:
        held = sampler.alone(hold)
        assert started.wait(WAIT_S)
        waiting: list[Future[Any]] = [sampler.submit(prompt) for prompt in prompts(3)]
        waiting.append(sampler.alone(lambda: None))
        closing = threading.Thread(target=sampler.__exit__, args=(None, None, None))
        closing.start()
        go_on.set()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert held.result(WAIT_S) is None
        assert all(future.done() for future in waiting)
    with pytest.raises(RuntimeError, match="closed"):
        sampler.submit(prompts(1)[0])


@pytest.mark.parametrize(("ids", "most"), [([], 1), ([1], 0), ([1] * 60, 5)])
def test_prompts_that_do_not_fit_are_refused(sampler: Sampler, ids: list[int], most: int) -> None:
    with pytest.raises(ValueError, match=r"tokens|empty"):
        sampler.submit(TokenPrompt(ids, most))


@pytest.mark.parametrize(("slots", "context"), [(0, 8), (1, 1)])
def test_sizes_below_the_least_are_refused(policy: Policy, slots: int, context: int) -> None:
    with pytest.raises(ValueError, match="slots must be at least 1"):
        Sampler(policy, slots=slots, context=context)
