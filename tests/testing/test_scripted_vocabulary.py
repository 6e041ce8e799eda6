"""The tokeniser of scripted models is reversible, and its made-up log-probabilities could be real ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openenv.testing.scripted import vocabulary
from openenv.testing.scripted.vocabulary import Tokenizer, alternatives, decode, encode, logprob


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert all(16 <= token < vocabulary.SIZE for token in ids)


@given(st.integers(0, vocabulary.SIZE - 1), st.integers(0, vocabulary.SIZE - 1), st.integers(0, 10_000))
def test_log_probabilities_are_those_of_a_distribution(before: int, token: int, position: int) -> None:
    chance = logprob(before, token, position)
    assert math.log(0.5) <= chance < 0
    assert chance == logprob(before, token, position)
    listed = alternatives(token, chance, 8)
    assert listed[0] == (token, chance)
    assert [one.logprob for one in listed] == sorted((one.logprob for one in listed), reverse=True)
    assert sum(math.exp(one.logprob) for one in listed) <= 1 + 1e-9
    assert alternatives(token, chance, 0) == []


def test_special_tokens_cannot_be_written_as_text() -> None:
    assert vocabulary.END not in encode("<|end|>")
    assert decode([vocabulary.END, *encode("x")], special=False) == "x"
    with pytest.raises(ValueError, match="no token"):
        decode([vocabulary.SIZE])


def test_the_tokenizer_remembers_the_latest_texts_only() -> None:
    tokenizer = Tokenizer(remembered=2)
    texts = [letter * 100 for letter in "abc"]
    assert [tokenizer.encode(text) for text in texts * 2] == [encode(text) for text in texts * 2]
    assert len(tokenizer._seen) == 2
