"""The desk: the notes of an episode and the tools that work on them. Knows tasks; must not know rewards or steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from notes_env.server.catalogue import Task


class Desk:
    """Notes by title. Its public methods that agents may use are `tools`."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.notes: dict[str, str] = {}
        self.is_submitted = False

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """What an agent can do."""
        return [self.list_notes, self.read_note, self.write_note, self.delete_note, self.submit]

    def begin(self, task: Task) -> None:
        """Lay out the notes of a task."""
        self.task, self.notes, self.is_submitted = task, dict(task.notes), False

    def list_notes(self) -> list[str]:
        """List the titles of all notes."""
        self._check_open()
        return list(self.notes)

    def read_note(self, title: str) -> str:
        """Return the text of a note.

        Args:
            title: The note's title, exactly as it is listed.
        """
        self._check_open()
        if title not in self.notes:
            raise ValueError(f"there is no note called {title!r}")
        return self.notes[title]

    def write_note(self, title: str, text: str) -> str:
        """Write a note; one of that title is replaced.

        Args:
            title: The note's title.
            text: Its whole text.
        """
        self._check_open()
        if not title:
            raise ValueError("a note needs a title")
        is_new = title not in self.notes
        self.notes[title] = text
        return "written" if is_new else "replaced"

    def delete_note(self, title: str) -> str:
        """Delete a note.

        Args:
            title: The note's title, exactly as it is listed.
        """
        self._check_open()
        if title not in self.notes:
            raise ValueError(f"there is no note called {title!r}")
        del self.notes[title]
        return "deleted"

    def submit(self) -> str:
        """Hand in the work when the task is done; afterwards nothing can be changed."""
        self._check_open()
        self.is_submitted = True
        return "handed in"

    def progress(self) -> float:
        """Return which share of the wanted notes is right."""
        if self.task is None:
            return 0.0
        wanted = self.task.wanted
        return sum(_same(self.notes.get(title), text) for title, text in wanted.items()) / len(wanted)

    def is_tidy(self) -> bool:
        """Say whether all notes that the task does not name are as they were."""
        if self.task is None:
            return True
        wanted = self.task.wanted
        others = {title: text for title, text in self.notes.items() if title not in wanted}
        return others == {title: text for title, text in self.task.notes.items() if title not in wanted}

    def _check_open(self) -> None:
        if self.task is None or self.is_submitted:
            raise RuntimeError("no episode is running: call reset first")


def _same(text: str | None, wanted: str | None) -> bool:
    return text == wanted if text is None or wanted is None else text.strip() == wanted
