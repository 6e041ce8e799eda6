"""The Reasoning Gym environment: an episode is a question, an answer and its score. Datasets are elsewhere."""

from __future__ import annotations

import html
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from typing_extensions import TypedDict

from openenv import Environment
from openenv.core.env_server.types import EnvironmentMetadata
from openenv.env.tasks import TaskCatalogue
from reasoning_gym_env.models import ReasoningGymAction, ReasoningGymObservation, ReasoningGymState
from reasoning_gym_env.server.questions import DatasetChoice, make_dataset, score_of

DEFAULT_DATASET = "leg_counting"
DEFAULT_SIZE = 500
SPLITS = {"train": 0, "test": 2**30}
"""The seed of each split's dataset. Question N is made with seed + N, so that splits never share one."""


class Task(TypedDict):
    """A question of a split; `reset(split=..., index=...)` asks it."""

    split: str
    index: int
    dataset_name: str
    seed: int
    question: str


class ReasoningGymEnvironment(
    TaskCatalogue[Task], Environment[ReasoningGymAction, ReasoningGymObservation, ReasoningGymState]
):
    """Answer a question that a program has made; the answer is scored by that program.

    Args:
        dataset_name: The dataset of episodes that name none, and of the tasks.
        size: How many questions it has.
    """

    SPLITS = SPLITS

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, dataset_name: str = DEFAULT_DATASET, size: int = DEFAULT_SIZE) -> None:
        super().__init__()
        self._default = DatasetChoice(dataset_name, seed=0, size=size)
        self._choice: DatasetChoice | None = None
        self._dataset: ProceduralDataset | None = None
        self._entry: dict[str, Any] | None = None
        self._next = 0

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        dataset_name: str | None = None,
        dataset_config: dict[str, Any] | None = None,
        dataset_specs: list[dict[str, Any]] | None = None,
        size: int | None = None,
        split: str | None = None,
        index: int | None = None,
        **kwargs: Any,
    ) -> ReasoningGymObservation:
        """Ask a question: of a dataset, of a task (`split` and `index`), or the next one of the last dataset.

        Args:
            seed: Of the dataset; the first question of it is asked, unless `index` names another.
            episode_id: A name for the episode.
            dataset_name: A dataset of Reasoning Gym, or `composite`.
            dataset_config: Arguments of the dataset.
            dataset_specs: Of `composite`: the name, weight and config of each part.
            size: How many questions the dataset has; after the last one the first follows.
            split: The tasks: train or test.
            index: Which question.

        Raises:
            ValueError: There is no such dataset or split, or an argument does not fit.
            IndexError: There is no such question.
        """
        if split is not None:
            choice = self._of_split(split)
        elif any(value is not None for value in (seed, dataset_name, dataset_config, dataset_specs, size)):
            choice = DatasetChoice(
                dataset_name or ("composite" if dataset_specs else self._default.name),
                seed=seed or 0,
                size=size or self._default.size,
                config=dataset_config or {},
                specs=tuple(dataset_specs or ()),
            )
        else:
            choice = self._choice or self._default
        place = self._place(choice, split, index)
        if choice != self._choice or self._dataset is None or seed is not None:
            self._dataset = make_dataset(choice)
        self._entry = self._dataset[place]
        self._choice, self._next = choice, (place + 1) % choice.size
        state = self.state
        state.dataset_name, state.seed, state.size, state.index = choice.name, choice.seed, choice.size, place
        return ReasoningGymObservation(question=self._entry["question"], reward=0.0)

    def _place(self, choice: DatasetChoice, split: str | None, index: int | None) -> int:
        if index is None:
            return self._next if choice is self._choice and split is None else 0
        if not 0 <= index < choice.size:
            raise IndexError(f"{split or choice.name} has questions 0 to {choice.size - 1}, not {index}")
        return index

    def step(
        self, action: ReasoningGymAction, timeout_s: float | None = None, **kwargs: Any
    ) -> ReasoningGymObservation:
        """Score the answer, which ends the episode.

        Raises:
            RuntimeError: No question was asked.
        """
        entry, dataset = self._entry, self._dataset
        if entry is None or dataset is None:
            raise RuntimeError("no episode is running: call reset first")
        score = score_of(dataset, entry, action.answer)
        self._entry = None
        return ReasoningGymObservation(
            score=score,
            correct_answer=None if entry["answer"] is None else str(entry["answer"]),
            dataset_metadata=entry.get("metadata"),
            reward=score,
            done=True,
            terminated=True,
        )

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="reasoning_gym_env",
            description=f"Questions with scored answers; {self._default.name} if a reset names no other dataset.",
            version="0.11.0",
        )

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """Show the question, or what the answer was worth."""
        if observation.get("question"):
            return f"{_STYLE}<pre>{html.escape(observation['question'])}</pre>"
        if observation.get("score") is None:
            return None
        right = html.escape(str(observation.get("correct_answer")))
        return f"{_STYLE}<h2>Score {observation['score']:g}</h2><p>An answer that is right:</p><pre>{right}</pre>"

    # -- tasks ----------------------------------------------------------------------------------------------------

    def _of_split(self, split: str) -> DatasetChoice:
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}")
        return DatasetChoice(self._default.name, seed=SPLITS[split], size=self._default.size)

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        return self._of_split(split).size

    def get_task(self, split: str, index: int) -> Task:
        """Return one task."""
        self._place(self._of_split(split), split, index)
        return self.get_task_range(split, index, index + 1)[0]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Task]:
        """Return the tasks from `start` up to but without `stop`."""
        choice = self._of_split(split)
        dataset = make_dataset(choice)
        return [
            Task(
                split=split,
                index=index,
                dataset_name=choice.name,
                seed=choice.seed,
                question=dataset[index]["question"],
            )
            for index in range(choice.size)[start:stop]
        ]


_STYLE = """<style>
:root { color-scheme: light dark }
body { margin: 8px; font: 15px/1.5 system-ui, sans-serif }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: inherit }
</style>"""
