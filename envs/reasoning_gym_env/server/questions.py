"""Datasets of Reasoning Gym by name and configuration. Knows the library; must not know episodes."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

logger = logging.getLogger(__name__)

COMPOSITE = "composite"
MOST_QUESTIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class DatasetChoice:
    """Which questions: the name of a dataset, its arguments, a seed and a number."""

    name: str
    seed: int
    size: int
    config: dict[str, Any] = field(default_factory=dict)
    specs: tuple[dict[str, Any], ...] = ()
    """Of a composite dataset: name, weight and config of each part."""


def make_dataset(choice: DatasetChoice) -> ProceduralDataset:
    """Make a dataset; questions themselves are made when they are asked for.

    Raises:
        ValueError: There is no such dataset, or it does not take these arguments.
    """
    if not 0 < choice.size <= MOST_QUESTIONS:
        raise ValueError(f"size must be between 1 and {MOST_QUESTIONS}, not {choice.size}")
    if choice.specs and choice.name != COMPOSITE:
        raise ValueError(f"dataset_specs is for dataset_name={COMPOSITE!r}, not for {choice.name!r}")
    for name in (choice.name, *(str(spec.get("name")) for spec in choice.specs)):
        _require(name)
    config = dict(choice.config)
    try:
        if choice.specs:
            config["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in choice.specs]
        return reasoning_gym.create_dataset(choice.name, **{**config, "seed": choice.seed, "size": choice.size})
    except (TypeError, ValueError, AssertionError) as error:  # the library checks arguments with assertions
        raise ValueError(f"{choice.name} cannot be made with {choice.config or choice.specs}: {error}") from error


def score_of(dataset: ProceduralDataset, entry: dict[str, Any], answer: str) -> float:
    """Return what an answer is worth, from 0 to 1; of a text with answer tags, the last one counts."""
    try:
        score = float(dataset.score_answer(extract_answer(answer) or answer, entry))
    except Exception:  # scorers of the library fail in many ways on an answer that does not have the form they expect
        logger.info("the answer to a question of %s cannot be read", type(dataset).__name__, exc_info=True)
        return 0.0
    return min(1.0, max(0.0, score))


def dataset_names() -> Sequence[str]:
    """Name all datasets."""
    return sorted(DATASETS)


def _require(name: str) -> None:
    if name in DATASETS:
        return
    near = difflib.get_close_matches(name, DATASETS, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(DATASETS)}, such as leg_counting"
    raise ValueError(f"there is no dataset {name!r}: {hint}")
