"""Tasks from files: YAML or JSON with the fields of `Task`; checks from a command line.

Knows files and the shape of a task. Folders named in `files_from` and `verify_files_from` are read beside the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from openenv.errors import RolloutError
from openenv.rollout.task import Check, Task

_FOLDERS = {"files_from": "files", "verify_files_from": "verify_files"}


def load_task(path: str | Path) -> Task:
    """Read a task from a `.yaml` or `.json` file; its `task_id` is the file's name unless it says another.

    Raises:
        RolloutError: there is no such file, or it is no task; the text says what is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise RolloutError(f"The task {path} cannot be read: {exc}") from exc
    return parse_task(_parse(path, text), folder=path.parent, name=path.stem)


def parse_task(data: object, *, folder: Path, name: str = "") -> Task:
    """Build a task from a mapping with the fields of `Task`, or folders to read some of them from.

    Raises:
        RolloutError: it is no task.
    """
    if not isinstance(data, Mapping):
        raise RolloutError(f"The task {name} must be a mapping with at least an 'instruction'")
    fields: dict[str, Any] = {"task_id": name, **data}
    for key, target in _FOLDERS.items():
        if key in fields:
            fields[target] = {**_read_folder(folder / str(fields.pop(key))), **(fields.get(target) or {})}
    try:
        return Task.model_validate(fields)
    except ValidationError as exc:
        problems = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors())
        raise RolloutError(f"The task {name} is not valid: {problems}") from exc


def parse_check(text: str) -> str | Check:
    """Read a check as it is given on a command line: a shell line, or a JSON object with `run` and `judge`.

    Raises:
        RolloutError: it is an object, but no check.
    """
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if not isinstance(found, dict):
        return text
    try:
        return Check.model_validate(found)
    except ValidationError as exc:
        problems = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors())
        raise RolloutError(f"{text} is no check: {problems}") from exc


def _parse(path: Path, text: str) -> object:
    import yaml

    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as exc:
        raise RolloutError(f"The task {path} cannot be read: {exc}") from exc


def _read_folder(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        raise RolloutError(f"There is no folder {folder}")
    try:
        return {
            path.relative_to(folder).as_posix(): path.read_text("utf-8")
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    except (OSError, UnicodeDecodeError) as exc:
        raise RolloutError(f"The files in {folder} cannot be read as text: {exc}") from exc
