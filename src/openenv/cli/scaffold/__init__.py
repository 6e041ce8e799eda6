"""A new environment package from a template: a small environment that runs, a typed client, tests and an image.

Knows files and names; must not know the command line.
"""

from __future__ import annotations

import keyword
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TEMPLATE = Path(__file__).parent / "template"
SUFFIX = ".tmpl"  # so that nothing takes a template for source code, and no packager drops a hidden file
_TAKEN = frozenset({"openenv", "openenv_core", "client", "models", "server", "tests"})
_LOOKS = (("🎲", "blue", "green"), ("🧭", "indigo", "purple"), ("🧩", "yellow", "red"), ("🛰️", "gray", "blue"))


class ScaffoldError(Exception):
    """The package cannot be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Names:
    """What the parts of an environment package are called, from the name of the package."""

    package: str

    @classmethod
    def of(cls, name: str) -> Names:
        """Check a name and return what follows from it.

        Raises:
            ScaffoldError: No package can be called so.
        """
        if not name.isidentifier() or not name.isascii() or not name.strip("_"):
            raise ScaffoldError(f"{name!r} is no name for a Python package: letters, digits and _, such as maze_env")
        if keyword.iskeyword(name) or name in sys.stdlib_module_names or name in _TAKEN:
            raise ScaffoldError(f"{name!r} is a name that Python or openenv uses already; take {name}_env or another")
        return cls(name)

    @property
    def stem(self) -> str:
        """The name without `_env`."""
        return self.package.removesuffix("_env").strip("_") or self.package.strip("_")

    @property
    def prefix(self) -> str:
        """What its classes begin with."""
        return "".join(part[0].upper() + part[1:] for part in self.stem.split("_") if part)

    @property
    def title(self) -> str:
        """What people read."""
        return " ".join(part[0].upper() + part[1:] for part in self.stem.split("_") if part)

    def placeholders(self) -> dict[str, str]:
        """Return what stands in a template, and what takes its place."""
        emoji, first, second = _LOOKS[zlib.crc32(self.package.encode()) % len(_LOOKS)]
        return {
            "__ENV_NAME__": self.package,
            "__ENV_CLASS_NAME__": self.prefix,
            "__ENV_TITLE_NAME__": self.title,
            "__ENV_DIST_NAME__": f"openenv-{self.package.strip('_')}",
            "__ENV_IMAGE_NAME__": f"openenv-{self.stem.lower()}",
            "__HF_EMOJI__": emoji,
            "__HF_COLOR_FROM__": first,
            "__HF_COLOR_TO__": second,
        }


def write_package(names: Names, folder: Path) -> list[Path]:
    """Write the files of a new package into a folder and return them; on any failure nothing of it is left.

    Raises:
        ScaffoldError: The folder is a file, or holds something already, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ScaffoldError(f"{folder} is a file; choose another name, or another place with --output-dir")
    if folder.exists() and any(folder.iterdir()):
        raise ScaffoldError(f"{folder} is not empty; choose another name, or another place with --output-dir")
    made = _missing_top(folder)
    try:
        return [_write(names, template, folder / place) for template, place in _files(names)]
    except BaseException as error:
        _undo(folder, made)
        if isinstance(error, OSError):
            raise ScaffoldError(f"{folder} cannot be written: {error.strerror or error}") from error
        raise


def _files(names: Names) -> Iterator[tuple[Path, Path]]:
    """Walk through the template: each file, and where it goes in the package."""
    pending = [(_TEMPLATE, Path())]
    while pending:
        folder, place = pending.pop()
        for entry in sorted(folder.iterdir()):
            if entry.is_dir():
                pending.append((entry, place / entry.name))
            elif entry.name.endswith(SUFFIX):
                name = entry.name.removesuffix(SUFFIX).replace("dot.", ".").replace("NAME", names.package)
                yield entry, place / name


def _write(names: Names, template: Path, path: Path) -> Path:
    text = template.read_text(encoding="utf-8").replace("\r\n", "\n")
    for placeholder, value in names.placeholders().items():
        text = text.replace(placeholder, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def _missing_top(folder: Path) -> Path | None:
    """Return the uppermost folder that has to be made, or None where the folder is there."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    return missing[-1] if missing else None


def _undo(folder: Path, made: Path | None) -> None:
    """Remove what was written: the folders that were made, or what is in one that was there and empty."""
    if made is not None:
        shutil.rmtree(made, ignore_errors=True)
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
