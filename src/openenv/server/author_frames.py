"""Tracebacks of an author's code: without the frames of this package that lead to it, and the line where it failed."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class RemoteTraceback(Exception):
    """Shows, as the cause of an exception, where it was raised in a worker process.

    Args:
        text: The traceback there.
        place: The line of the author's code.
    """

    def __init__(self, text: str, place: str | None = None) -> None:
        super().__init__(text, place)
        self._text = text
        self.place = place

    def __str__(self) -> str:
        return f"\n\nin a worker process:\n{self._text}"


def own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Leave out the frames that lead to the author's code: ours and those of the import system."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if not file.startswith((_PACKAGE, "<frozen importlib")) and file != importlib.__file__:
            break
        frames = frames.tb_next
    return frames


def author_exc_info(exc: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return what a logger takes as `exc_info`, from the author's first frame on; all frames where none is theirs."""
    is_remote = isinstance(exc.__cause__, RemoteTraceback)  # which shows the author's frames
    return type(exc), exc, own_frames(exc.__traceback__) or (None if is_remote else exc.__traceback__)


def author_traceback(exc: BaseException) -> str:
    """Return the traceback as text, from the author's first frame on."""
    return "".join(traceback.format_exception(type(exc), exc, own_frames(exc.__traceback__)))


def author_place(exc: BaseException) -> str | None:
    """Return the last line of the author's code that an exception passed, such as `maze.py:12, in step`.

    Code that is installed counts where there is no other: the environment itself may be.
    """
    places: dict[bool, str] = {}  # by whether the file is installed
    for frame, line in traceback.walk_tb(exc.__traceback__):
        file = frame.f_code.co_filename
        is_installed = any(folder in file for folder in _INSTALLED)
        if not file.startswith((_PACKAGE, "<")) and (is_installed or not file.startswith(_PYTHON)):
            places[is_installed] = f"{os.path.basename(file)}:{line}, in {frame.f_code.co_name}"
    remote = exc.__cause__.place if isinstance(exc.__cause__, RemoteTraceback) else None
    return places.get(False) or places.get(True) or remote
