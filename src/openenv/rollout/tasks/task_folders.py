"""Tasks by path or name: `load_tasks`, which reads task files and Harbor's task folders, and draws from task sets.

Knows the layout of a Harbor task folder and turns it into a `Task`. Must not know backends or agents.
"""

# The files of a Harbor task folder, and the fields of `Task` that they become:
#
#   task.toml                      timeouts, resources, images, variables -> fields of Task; [metadata] -> metadata
#   instruction.md                 instruction
#   environment/Dockerfile         build, image (named after the folder's content) and workdir (its last WORKDIR)
#   tests/test.sh and others       verify_files below /tests: only the verifier's sandbox has them
#   tests/Dockerfile               verify_build, verify_image, if `[verifier] environment_mode = "separate"`
#   solution/solve.sh and others   solution_files below /solution: only the oracle's sandbox has them
#   /logs/verifier/reward.txt      reward_path; reward.json beside it
#
# Harbor runs tests in the agent's container. Here they run in a fresh sandbox that gets only the agent's work folder
# and has no network: the image must contain everything that the tests need.

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openenv.errors import RolloutError
from openenv.protocol.schema import problems_of
from openenv.rollout.tasks.task import Task, load_task, read_folder
from openenv.rollout.tasks.task_sets import DEFAULT_COUNT, SET_PREFIX, task_set, task_set_names
from openenv.sandboxes.base import Limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

HARBOR_PREFIX = "harbor:"
MAX_DEPTH = 6
"""The number of folder levels that are searched for tasks."""
_TASK_FILES = (".yaml", ".yml", ".json")
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
_SIZE = re.compile(r"\s*([0-9.]+)\s*([KMG])B?\s*", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_DEFAULT_WORKDIR = "/app"
_FOLDERS = ("/tests", "/logs", "/solution")


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _EnvironmentSection(_Section):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = None
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None


class _VerifierSection(_Section):
    timeout_sec: float = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: str | None = None
    environment: _EnvironmentSection | None = None


class _AgentSection(_Section):
    timeout_sec: float | None = None


class _SolutionSection(_Section):
    env: dict[str, str] = Field(default_factory=dict)


class HarborTaskConfig(_Section):
    """The parts of a `task.toml` that a rollout reads."""

    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: _VerifierSection = Field(default_factory=_VerifierSection)
    agent: _AgentSection = Field(default_factory=_AgentSection)
    environment: _EnvironmentSection = Field(default_factory=_EnvironmentSection)
    solution: _SolutionSection = Field(default_factory=_SolutionSection)
    steps: list[dict[str, Any]] | None = None


def load_tasks(path: str | Path, *, count: int = DEFAULT_COUNT, seed: int = 0) -> list[Task]:
    """Read all tasks at a path, in the order of their names, or draw tasks from a set.

    Args:
        path: A task file; a Harbor task folder (with a `task.toml`); a folder of task files; or a folder of Harbor
            task folders, which may be grouped in subfolders. `harbor:PATH` takes only Harbor task folders. The name of
            a task set, such as `arithmetic`, if no such file or folder exists; `set:arithmetic` in any case.
        count: The number of tasks from a set; files and folders give all their tasks.
        seed: The seed of a set.

    Raises:
        RolloutError: the path has no tasks, or a task cannot be read; the text names it and the reason.
    """
    text = str(path)
    if text.startswith(SET_PREFIX) or (text in task_set_names() and not Path(text).exists()):
        return task_set(text.removeprefix(SET_PREFIX)).tasks(count, seed=seed)
    only_harbor = text.startswith(HARBOR_PREFIX)
    place = Path(text.removeprefix(HARBOR_PREFIX)).expanduser()
    if not place.exists():
        sets = ", ".join(task_set_names())
        raise RolloutError(f"The task {place} cannot be read: no such file, folder or task set; the sets are {sets}")
    if place.is_file() and not only_harbor:
        return [load_task(place)]
    folders = harbor_task_folders(place)
    if folders:
        return [load_harbor_task(folder) for folder in folders]
    files = [] if only_harbor else sorted(file for file in place.glob("*") if file.suffix in _TASK_FILES)
    if not files:
        wanted = "task.toml" if only_harbor else "task.toml, *.yaml or *.json"
        raise RolloutError(f"Found no tasks in {place}: it needs {wanted}, or folders with them")
    return [load_task(file) for file in files]


def harbor_task_folders(place: Path) -> list[Path]:
    """Return the Harbor task folders at a path by name: the path itself, or folders below it or below its `tasks`.

    Links to folders are not followed: they may lead out of the dataset, or back into it.
    """
    if (place / "task.toml").is_file():
        return [place]
    base = place / "tasks" if (place / "tasks").is_dir() else place
    return list(_below(base, 1)) if base.is_dir() else []


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_symlink() or not path.is_dir():
            continue
        if (path / "task.toml").is_file():
            yield path
        elif depth < MAX_DEPTH:
            yield from _below(path, depth + 1)


def load_harbor_task(folder: str | Path) -> Task:
    """Read a Harbor task folder as a task.

    Raises:
        RolloutError: it is none, or needs what rollouts do not have: several steps, Windows, GPUs, several containers.
    """
    folder = Path(folder).expanduser().resolve()
    config = read_task_config(folder)
    _require_supported(folder, config)
    tests, solution, environment = folder / "tests", folder / "solution", folder / "environment"
    image, build = _image(folder, environment, config.environment)
    fields: dict[str, Any] = {
        "instruction": _instruction(folder),
        "verify": f"{_shell(tests / 'test.sh')} /tests/test.sh",
        "verify_files": read_folder(tests, below="/tests/"),
        "image": image,
        "build": build,
        "build_timeout_s": config.environment.build_timeout_sec,
        "workdir": _workdir(environment, config.environment),
        "folders": _FOLDERS,
        "reward_file": True,
        "reward_path": "/logs/verifier/reward.txt",
        "limits": _limits(folder, config.environment),
        "verify_timeout_s": config.verifier.timeout_sec,
        "verify_env": _variables(folder, {**config.environment.env, **config.verifier.env}),
        "task_id": str(config.task.get("name") or folder.name),
        "metadata": {**config.metadata, "harbor": {"folder": str(folder), "task": config.task}},
    }
    if config.agent.timeout_sec is not None:
        fields["agent_timeout_s"] = config.agent.timeout_sec
    if config.verifier.environment_mode == "separate":
        verifier = config.verifier.environment or _EnvironmentSection()
        fields["verify_image"], fields["verify_build"] = _image(folder, tests, verifier, kind="verifier")
    if (solution / "solve.sh").is_file():
        fields["solution"] = f"{_shell(solution / 'solve.sh')} /solution/solve.sh"
        fields["solution_files"] = read_folder(solution, below="/solution/")
        fields["solution_env"] = _variables(folder, {**config.environment.env, **config.solution.env})
    try:
        return Task.model_validate(fields)
    except ValidationError as exc:
        raise RolloutError(f"The Harbor task {folder} is not valid: {problems_of(exc)}") from exc


def read_task_config(folder: Path) -> HarborTaskConfig:
    """Return the configuration in a folder's `task.toml`.

    Raises:
        RolloutError: there is none, or it cannot be read.
    """
    path = folder / "task.toml"
    try:
        return HarborTaskConfig.model_validate(tomllib.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        raise RolloutError(f"{folder} is not a Harbor task: task.toml is missing") from None
    except ValidationError as exc:
        raise RolloutError(f"{path} is not valid: {problems_of(exc)}") from exc
    except (OSError, ValueError) as exc:
        raise RolloutError(f"{path} cannot be read: {exc}") from exc


def _instruction(folder: Path) -> str:
    path = folder / "instruction.md"
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise RolloutError(f"The instruction {path} cannot be read: {exc}") from exc


def _require_supported(folder: Path, config: HarborTaskConfig) -> None:
    missing = [name for name in ("tests/test.sh",) if not (folder / name).is_file()]
    if missing and not config.steps:
        raise RolloutError(f"The Harbor task {folder} cannot be verified: {', '.join(missing)} is missing")
    unsupported = {
        "several steps": bool(config.steps),
        "Windows": config.environment.os.lower() != "linux",
        "GPUs": bool(config.environment.gpus),
        "several containers (docker-compose.yaml)": (folder / "environment" / "docker-compose.yaml").is_file(),
    }
    needs = [feature for feature, is_needed in unsupported.items() if is_needed]
    if needs:
        raise RolloutError(
            f"The Harbor task {folder} needs {' and '.join(needs)}, which rollouts do not support; remove the task"
        )


def _shell(script: Path) -> str:
    """Return the shell in the first line of a script; small images lack bash."""
    first = script.read_text("utf-8", "replace").partition("\n")[0]
    return "sh" if re.fullmatch(r"#!\s*(/\S*/)?(env\s+)?(/\S*/)?sh\b.*", first) else "bash"


def _image(folder: Path, context: Path, section: _EnvironmentSection, *, kind: str = "task") -> tuple[str, str | None]:
    """Return the name of an image and its build folder, if any. Tasks with equal folders share an image."""
    if section.docker_image is not None:
        return section.docker_image, None
    if not (context / "Dockerfile").is_file():
        raise RolloutError(
            f"The Harbor task {folder} has no image; add {context.name}/Dockerfile, or docker_image in task.toml"
        )
    return f"openenv-{kind}:{_digest(context)}", str(context)


def _digest(context: Path) -> str:
    """Return a hash of the content of a folder, so that a changed file builds a new image."""
    content = hashlib.sha256()
    for path in sorted(context.rglob("*")):
        if path.is_file() or path.is_symlink():
            body = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
            mode = 0 if path.is_symlink() else path.stat().st_mode & 0o111
            content.update(f"{path.relative_to(context).as_posix()}\0{mode}\0{len(body)}\0".encode() + body)
    return content.hexdigest()[:16]


def _workdir(environment: Path, section: _EnvironmentSection) -> str:
    """Return the work folder of the agent: from task.toml, the Dockerfile, or `/app`."""
    if section.workdir is not None:
        return posixpath.normpath(section.workdir)
    recipe = environment / "Dockerfile"
    places = _WORKDIR.findall(recipe.read_text("utf-8", "replace")) if recipe.is_file() else []
    workdir = "/"
    for place in places:
        workdir = posixpath.normpath(posixpath.join(workdir, place.strip("\"'")))
    if not places or "$" in workdir or workdir == "/":
        return _DEFAULT_WORKDIR
    return workdir


def _limits(folder: Path, section: _EnvironmentSection) -> Limits:
    memory = section.memory_mb or _megabytes(folder, section.memory)
    storage = section.storage_mb or _megabytes(folder, section.storage)
    values = {"memory_mb": memory, "disk_mb": storage, "cpus": section.cpus}
    try:
        return Limits(**{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]
    except ValueError as exc:
        raise RolloutError(f"The resources in {folder / 'task.toml'} are not valid: {exc}") from exc


def _megabytes(folder: Path, size: str | None) -> int | None:
    if size is None:
        return None
    match = _SIZE.fullmatch(size)
    if match is None:
        raise RolloutError(f"{size!r} in {folder / 'task.toml'} is not a size; write one such as 2G or 512M")
    return max(1, int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[match[2].upper()]))


def _variables(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Replace `${NAME:-default}` by the default. Host variables are never read: the agent's code may see them."""

    def fill(match: re.Match[str]) -> str:
        if match[2] is None:
            raise RolloutError(
                f"{folder / 'task.toml'} asks for the host variable {match[1]}, which no sandbox gets; add a default: "
                f"${{{match[1]}:-...}}"
            )
        return match[2]

    return {name: _VARIABLE.sub(fill, value) for name, value in variables.items()}
