from __future__ import annotations

from typing import Any

from word_env import WORDS, WordGame, WordObservation

SPLITS = {"train": WORDS[:4], "test": WORDS[4:]}


class WordTasks(WordGame):
    """The word game with a catalogue: `GET /word_tasks/splits`, `POST /word_tasks/task` and so on."""

    def reset(self, split: str = "train", index: int = 0, **kwargs: Any) -> WordObservation:
        observation = super().reset(**kwargs)
        self._state.word = SPLITS[split][index]
        return observation

    def list_splits(self) -> list[str]:
        return list(SPLITS)

    def num_tasks(self, split: str) -> int:
        return len(SPLITS[split])

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return {"split": split, "index": index, "letters": len(SPLITS[split][index])}

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self.get_task_range(split)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        return [self.get_task(split, index) for index in range(len(SPLITS[split]))[start:stop]]
