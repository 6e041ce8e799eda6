"""Exceptions of an author's code: tracebacks without our leading frames, the failing line, missing packages."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_DISTRIBUTIONS = {
    "Bio": "biopython",
    "Crypto": "pycryptodome",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "browsergym": "browsergym-core",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "git": "gitpython",
    "github": "pygithub",
    "google.genai": "google-genai",
    "google.protobuf": "protobuf",
    "gym_minigrid": "minigrid",
    "jose": "python-jose",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "multipart": "python-multipart",
    "ors": "ors-sdk",
    "pkg_resources": "setuptools",
    "pyspiel": "open-spiel",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "socketio": "python-socketio",
    "usb": "pyusb",
    "websocket": "websocket-client",
    "yaml": "pyyaml",
}
"""Modules whose distribution has another name, as far as environments are known to import them."""


def install_hint(exc: BaseException) -> str:
    """Return the command that installs a missing module, as the end of a message; empty for other exceptions.

    A module of an installed package, of Python or of ours is not missing for want of a package: it gets no command.
    """
    name = exc.name if isinstance(exc, ModuleNotFoundError) else None
    top = (name or "").partition(".")[0]
    if name is None or not top.isidentifier() or top in sys.stdlib_module_names or top.startswith("openenv"):
        return ""
    if name != top and importlib.util.find_spec(top) is not None and name not in _DISTRIBUTIONS:
        return ""
    return f". Install it with: pip install {_DISTRIBUTIONS.get(name) or _DISTRIBUTIONS.get(top) or top}"


class RemoteTraceback(Exception):
    """Carries the traceback of a worker process as the cause of an exception.

    Args:
        text: The traceback there.
        place: The failing line of the author's code.
    """

    def __init__(self, text: str, place: str | None = None) -> None:
        super().__init__(text, place)
        self._text = text
        self.place = place

    def __str__(self) -> str:
        return f"\n\nin a worker process:\n{self._text}"


def own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Skip our frames and the import system's, up to the first frame of the author's code."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if not file.startswith((_PACKAGE, "<frozen importlib")) and file != importlib.__file__:
            break
        frames = frames.tb_next
    return frames


def author_exc_info(exc: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return `exc_info` for a logger from the author's first frame on; with all frames if the author has none."""
    is_remote = isinstance(exc.__cause__, RemoteTraceback)  # the cause contains the author's frames
    return type(exc), exc, own_frames(exc.__traceback__) or (None if is_remote else exc.__traceback__)


def author_traceback(exc: BaseException) -> str:
    """Return the traceback as text, from the author's first frame on."""
    return "".join(traceback.format_exception(type(exc), exc, own_frames(exc.__traceback__)))


def is_without_author(exc: BaseException) -> bool:
    """Return whether no code of the author raised an error or its cause, so that a traceback would not help."""
    return all(author_place(each) is None for each in (exc, exc.__cause__) if each is not None)


def author_place(exc: BaseException) -> str | None:
    """Return the last line of author code in a traceback, such as `maze.py:12, in step`.

    Prefer code outside of site-packages; installed code counts too, because the environment may be installed.
    """
    places: dict[bool, str] = {}  # by whether the file is installed
    for frame, line in traceback.walk_tb(exc.__traceback__):
        file = frame.f_code.co_filename
        is_installed = any(folder in file for folder in _INSTALLED)
        if not file.startswith((_PACKAGE, "<")) and (is_installed or not file.startswith(_PYTHON)):
            places[is_installed] = f"{os.path.basename(file)}:{line}, in {frame.f_code.co_name}"
    remote = exc.__cause__.place if isinstance(exc.__cause__, RemoteTraceback) else None
    return places.get(False) or places.get(True) or remote
