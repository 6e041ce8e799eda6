from __future__ import annotations

from typing import Any

from word_env import WORDS, WordGame, WordObservation

from openenv.env.tasks import TaskCatalogue

SPLITS = {"train": WORDS[:4], "test": WORDS[4:]}


class WordTasks(TaskCatalogue[dict[str, Any]], WordGame):
    """The word game with a catalogue: `GET /word_tasks/splits`, `POST /word_tasks/task` and so on."""

    SPLITS = SPLITS

    def reset(self, split: str = "train", index: int = 0, **kwargs: Any) -> WordObservation:
        observation = super().reset(**kwargs)
        self._state.word = SPLITS[split][index]
        return observation

    def num_tasks(self, split: str) -> int:
        return len(SPLITS[split])

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return {"split": split, "index": index, "letters": len(SPLITS[split][index])}
