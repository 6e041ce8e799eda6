"""Datasets of Harbor tasks: folders, repositories of the Hugging Face Hub, and Harbor's registry by way of its package.

A dataset is a split of the Task API, and a task's number in it is its place in the order of names.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openenv import settings
from openenv.errors import install_command, message_of
from openenv.rollout.tasks.task_folders import harbor_task_folders

from .harbor_package import harbor_package_name
from .models import HarborTaskRef

# Small files wait for the network most of the time.
_WORKERS = 32
"""Downloads at once: a dataset is thousands of small files."""


def resolve_task_dirs(spec: str, *, refresh: bool = False, tqdm_class: Any = None) -> list[Path]:
    """Return the task folders of a dataset, in the order of their names.

    Args:
        spec: A folder, a dataset repository of the Hub (`org/name`), or a dataset of the registry (`name@version`).
        refresh: Download a dataset of the Hub again, although it is here.
        tqdm_class: Shows the progress of a download from the Hub.

    Raises:
        ValueError: The dataset is unknown or has no tasks.
        ImportError: a package is missing that this kind of dataset needs.
    """
    # A local folder wins, even if its name looks like a repository.
    path = Path(spec).expanduser()
    if path.is_dir():
        folders = harbor_task_folders(path)
    elif _is_hub_repository(spec):
        folders = harbor_task_folders(_download(spec, tqdm_class, refresh=refresh))
    elif "@" in spec:
        folders = _registry_folders(spec)
    else:
        raise ValueError(
            f"unknown dataset {spec!r}: give a folder, `org/name` of the Hub, or `name@version` of the registry"
        )
    # An empty dataset is a mistake in its layout; a server without tasks would hide it.
    if not folders:
        raise ValueError(
            f"no Harbor tasks found for {spec!r}: a dataset is a folder, or a dataset repository of the Hub, with "
            "`tasks/NAME/task.toml`, or `name@version` of Harbor's registry"
        )
    return folders


def prefetch(datasets: Sequence[str]) -> dict[str, Any]:
    """Download missing datasets; return the number of tasks, or the error, of each."""
    report: dict[str, Any] = {}
    for spec in datasets:
        try:
            report[spec] = {"num_tasks": len(resolve_task_dirs(spec))}
        # Datasets come from different places; one outage must not take the others down.
        except Exception as exc:  # one that cannot be had does not hide the others
            report[spec] = {"error": f"{type(exc).__name__}: {message_of(exc)[:200]}"}
    return report


def has_symlinks(task_dir: Path) -> list[Path]:
    """Return the links in a task folder; an engine's build context keeps them as links."""
    return [path for path in task_dir.rglob("*") if path.is_symlink()]


def task_root(spec: str | None, task_dir: Path) -> Path | None:
    """Return the folder that contains all files a task may show; None if a link leaves the dataset."""
    # Task files are shown to callers, so a link must not lead to other files of the server.
    real = task_dir.resolve()
    folder = None if spec is None else _dataset_folder(spec)
    if folder is None:
        return None if task_dir.is_symlink() else real
    return real if real.is_relative_to(folder) else None


def own_file(root: Path | None, name: str) -> Path:
    """Return a file of a task.

    Raises:
        OSError: it is a link that leads out of the task, or the task is outside of its dataset.
    """
    if root is None:
        raise OSError("this task's folder is outside its dataset")
    # The name is fixed, but the file itself may be a link.
    path = root / name
    if not path.resolve().is_relative_to(root):
        raise OSError(f"{name} points outside its task")
    return path


def read_instruction(task_dir: Path, *, limit: int = 4000, spec: str | None = None) -> str:
    """Return the beginning of a task's instruction, for lists; empty if it cannot be shown."""
    try:
        path = own_file(task_root(spec, task_dir), "instruction.md")
        text = path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
    # Lists show the beginning only; instructions can be long documents.
    return text if len(text) <= limit else f"{text[:limit]}\n…"


class HarborTaskProvider:
    """The Task API of Harbor datasets. Each dataset is a split with the dataset's name.

    Args:
        datasets: As `resolve_task_dirs` takes them.
    """

    def __init__(self, datasets: Sequence[str] | None = None) -> None:
        self._datasets = list(datasets or [])

    def list_splits(self) -> list[dict[str, Any]]:
        """Return name and number of tasks of each dataset; one that cannot be had has an error."""
        splits: list[dict[str, Any]] = []
        for spec in self._datasets:
            try:
                splits.append({"name": spec, "num_tasks": len(resolve_task_dirs(spec))})
            except Exception as exc:  # one that cannot be had does not hide the others
                splits.append({"name": spec, "num_tasks": 0, "error": message_of(exc)[:200]})
        return splits

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a dataset has."""
        return len(resolve_task_dirs(self._known(split)))

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all tasks of a dataset."""
        return self.get_task_range(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return a task by its number."""
        return self._reference(self._known(split), index, self.task_dir(split, index))

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the tasks from one number to another."""
        spec = self._known(split)
        # Numbers stay those of the whole dataset, whatever part is asked for.
        numbered = list(enumerate(resolve_task_dirs(spec)))[start:stop]
        return [self._reference(spec, index, folder) for index, folder in numbered]

    def task_dir(self, split: str, index: int) -> Path:
        """Return the folder of a task.

        Raises:
            IndexError: there is no such task.
        """
        # Read again for each call, so that new tasks appear without a restart.
        folders = resolve_task_dirs(self._known(split))
        if not 0 <= index < len(folders):
            raise IndexError(f"task index {index} out of range ({len(folders)} tasks)")
        return folders[index]

    def _known(self, split: str) -> str:
        if not self._datasets:
            raise ValueError("this server was started with no datasets; pass --dataset")
        # Callers may only name served datasets: any other path would be readable through the server.
        if split and split not in self._datasets:
            raise ValueError(f"unknown split {split!r}; served splits are {self._datasets}")
        return split or self._datasets[0]

    def _reference(self, spec: str, index: int, folder: Path) -> dict[str, Any]:
        return HarborTaskRef(
            index=index,
            task_id=str(folder),
            task_name=folder.name,
            dataset=spec,
            instruction=read_instruction(folder, spec=spec),
        ).model_dump()


def _is_hub_repository(spec: str) -> bool:
    # `org/name`, but not a path such as `./name` or `~/name`.
    return spec.count("/") == 1 and "@" not in spec and not spec.startswith((".", "/", "~"))


def _downloaded(spec: str) -> Path:
    return settings.dataset_cache() / spec.replace("/", "__")


def _download(spec: str, tqdm_class: Any, *, refresh: bool) -> Path:
    """Download a dataset as files: the Hub's own cache has links, which no engine can follow in a build context."""
    target = _downloaded(spec)
    # Written last, so an interrupted download is repeated.
    complete = target / ".complete"
    if complete.exists() and not refresh:
        return target
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(f"The dataset {spec} is on the Hub, which needs: {install_command('hub')}") from None
    target.mkdir(parents=True, exist_ok=True)
    snapshot_download(
        spec,
        repo_type="dataset",
        allow_patterns=["tasks/**"],
        local_dir=str(target),
        max_workers=_WORKERS,
        tqdm_class=tqdm_class,
    )
    complete.touch()
    return target


def _registry_folders(spec: str) -> list[Path]:
    """Return the folders of a registry dataset, which the package `harbor` downloads."""
    dataset_config = harbor_package_name("harbor.models.job.config", "DatasetConfig")
    name, _, version = spec.partition("@")
    config = dataset_config(name=name, version=version or None)
    configs: list[Any] = []

    def ask() -> None:
        configs.extend(asyncio.run(config.get_task_configs(disable_verification=True)))

    # `asyncio.run` needs a thread without a running loop.
    thread = threading.Thread(target=ask, name="openenv-harbor-registry")  # the caller may be in an event loop
    thread.start()
    thread.join()
    return sorted(Path(str(task.get_local_path())) for task in configs)


def _dataset_folder(spec: str) -> Path | None:
    path = Path(spec).expanduser()
    if path.is_dir():
        return path.resolve()
    return _downloaded(spec).resolve() if _is_hub_repository(spec) else None
