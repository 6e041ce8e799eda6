"""A copy of an environment package that an image is built from, in a folder that is gone afterwards.

Knows files, and what an engine must not be sent; must not know the engine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_NOT_COPIED = frozenset({".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "node_modules"})
_DOCKERFILES = ("server/Dockerfile", "Dockerfile")
_VENDORED = "openenv"
_IN_IMAGE = f"/app/env/{_VENDORED}"
_REQUIREMENT = r"openenv(?:[-_]core)?\s*(?:\[[^\]]*\])?\s*(?:[<>=!~@][^\"'\n]*)?"
_QUOTED = re.compile(rf"""(?P<quote>["']){_REQUIREMENT}(?P=quote)""")
_BARE = re.compile(rf"(?m)^{_REQUIREMENT}$")
_FROM = re.compile(r"(?mi)^FROM\s.*$")


class StagingError(Exception):
    """There is nothing to build; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What an engine is given."""

    context: Path
    dockerfile: Path
    mode: Literal["standalone", "in-repo"]


@contextlib.contextmanager
def staged(folder: Path, *, context: Path | None = None, dockerfile: Path | None = None) -> Iterator[Staged]:
    """Copy a package, or another folder that is given as context, and remove the copy in the end.

    In a checkout of this project, under `envs/`, the copy holds the checkout's own `openenv`, and requires that.

    Raises:
        StagingError: The Dockerfile or the context is not there.
    """
    source = (context or folder).resolve()
    if not source.is_dir():
        raise StagingError(f"there is no folder {context or folder}")
    recipe = _recipe(folder, dockerfile)
    with tempfile.TemporaryDirectory(prefix="openenv-build-", ignore_cleanup_errors=True) as home:
        copy = Path(home, source.name or "context")
        shutil.copytree(source, copy, symlinks=True, ignore=_left_out)
        inside = recipe.relative_to(source) if recipe.is_relative_to(source) else None
        if inside is None:
            target = Path(home, "Dockerfile")
            shutil.copyfile(recipe, target)
        else:
            target = copy / inside
        repository = None if context is not None else _repository(source)
        if repository is not None:
            _vendor(repository, copy, target)
        yield Staged(copy, target, "standalone" if repository is None else "in-repo")


def _recipe(folder: Path, given: Path | None) -> Path:
    if given is not None:
        for path in (given, folder / given):
            if path.is_file():
                return path.resolve()
        raise StagingError(f"there is no Dockerfile {given}")
    for name in _DOCKERFILES:
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise StagingError(f"{folder} has no {' and no '.join(_DOCKERFILES)}")


def _left_out(place: str, names: list[str]) -> set[str]:
    """Leave out what no image needs, and what cannot be copied: sockets, pipes, devices."""
    return {name for name in names if name in _NOT_COPIED or name.endswith((".pyc", ".egg-info")) or _odd(place, name)}


def _odd(place: str, name: str) -> bool:
    mode = os.lstat(os.path.join(place, name)).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def _repository(folder: Path) -> Path | None:
    """Return the checkout of this project in whose `envs/` a package lies."""
    for parent in folder.parents:
        if (parent / ".git").exists():
            is_ours = (parent / "src" / "openenv").is_dir() and (parent / "pyproject.toml").is_file()
            return parent if is_ours and folder.is_relative_to(parent / "envs") else None
    return None


def _vendor(repository: Path, copy: Path, dockerfile: Path) -> None:
    """Put the checkout's `openenv` beside the package, and require it instead of a released one."""
    vendored = copy / _VENDORED
    shutil.copytree(repository / "src", vendored / "src", symlinks=True, ignore=_left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (repository / name).is_file():
            shutil.copyfile(repository / name, vendored / name)
    requirement = f"openenv @ file://{_IN_IMAGE}"
    _rewrite(copy / "pyproject.toml", _QUOTED, rf"\g<quote>{requirement}\g<quote>")
    _rewrite(copy / "server" / "requirements.txt", _BARE, requirement)
    _rewrite(dockerfile, _FROM, rf"\g<0>\nCOPY {_VENDORED} {_IN_IMAGE}")  # packages are installed before the rest comes
    (copy / "uv.lock").unlink(missing_ok=True)


def _rewrite(path: Path, pattern: re.Pattern[str], replacement: str) -> None:
    if path.is_file():
        path.write_text(pattern.sub(replacement, path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
