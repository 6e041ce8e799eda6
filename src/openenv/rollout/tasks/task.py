"""A `Task`, from code or from a file; the `Model` that the agent calls, and its `Budget`.

Knows values and files. Must not know sandboxes, agents or servers.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from openenv.errors import RolloutError
from openenv.rollout.tasks.checks import AS_STORED, expand, runs_nothing
from openenv.rollout.tasks.checks import Check as Check
from openenv.rollout.tasks.model_parameters import NEUTRAL_SAMPLING, check_trainer_parameters
from openenv.rollout.tasks.model_parameters import Dialect as Dialect
from openenv.rollout.tasks.model_parameters import Engine as Engine
from openenv.rollout.tasks.trust_levels import Trust
from openenv.sandboxes.base import HOME, Limits, check_folder

Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
"""A limit of time: an end that comes, at the latest after eleven days."""


def _read_content(value: Any) -> Any:
    """Take the form that bytes have in files: `{"base64": "iVBORw0..."}`."""
    if isinstance(value, Mapping) and set(value) == {"base64"}:
        return base64.b64decode(str(value["base64"]), validate=True)
    return value


def _write_content(value: str | bytes) -> str | dict[str, str]:
    return value if isinstance(value, str) else {"base64": base64.b64encode(value).decode()}


FileContent = Annotated[
    str | bytes,
    BeforeValidator(_read_content),
    PlainSerializer(_write_content, return_type=str | dict[str, str], when_used="json"),
]
"""A text, or bytes, which JSON and YAML have as `{"base64": "..."}`."""


def as_texts(files: Mapping[str, str | bytes]) -> Mapping[str, str]:
    """Return files as texts; bytes that are no UTF-8 are escaped, so that `as_bytes` returns them as they were."""
    return {
        path: content if isinstance(content, str) else content.decode("utf-8", "surrogateescape")
        for path, content in files.items()
    }


def as_bytes(content: str | bytes) -> bytes:
    """Return a file's bytes."""
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")


PROTECTED = (
    "**/sitecustomize.*",
    "**/sitecustomize/**",
    "**/usercustomize.*",
    "**/usercustomize/**",
    "**/*.pth",
    "**/*.dist-info/**",
    "**/*.egg-info/**",
    "**/conftest.*",
    "**/conftest/**",
    "**/pytest.*",
    "**/.pytest.*",
    "**/pytest/**",
    "**/_pytest.*",
    "**/_pytest/**",
    "**/unittest.*",
    "**/unittest/**",
    "**/pluggy.*",
    "**/pluggy/**",
    "**/iniconfig.*",
    "**/iniconfig/**",
    "**/openenv_proof.*",
    "**/openenv_proof/**",
    "**/openenv_imports.*",
    "**/openenv_imports/**",
    "**/tox.ini",
    "**/__pycache__/**",
)
"""What decides how Python and pytest start: the verifier sees these as the setup left them, not as the agent did.
Where there is any pattern, a `pyproject.toml` or `setup.cfg` that the agent changed and that names pytest counts."""


class Task(BaseModel):
    """An instruction, how to prepare for it, and the checks of the result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction: str
    setup: tuple[str, ...] = ()
    """Shell lines that run in the agent's sandbox, all of them before the agent starts."""
    verify: tuple[str | Check, ...] = ()
    """Shell lines, each of which runs in a fresh sandbox with the agent's work tree, or `Check`s, which keep what runs
    apart from what judges; the reward is the share that exits with 0. A blank line or a comment is refused: it would
    pay an agent that does nothing."""
    files: Mapping[str, FileContent] = Field(default_factory=dict)
    """Files for the agent's sandbox, before the setup: texts or bytes; paths below the work folder or absolute."""
    min_trust: Trust | None = None
    """The least that may decide the reward; a task with a weaker check is refused before it runs."""
    verify_files: Mapping[str, FileContent] = Field(default_factory=dict)
    """Files for the verifier's sandbox only, laid over the agent's work tree; the agent never sees them."""
    image: str | None = None
    """The image of the task's sandboxes, the verifier's too; by default the backend's own. For docker, kubernetes."""
    build: str | None = None
    """A folder with a Dockerfile, from which docker builds `image` where it does not have it."""
    build_timeout_s: Seconds = 600.0
    verify_image: str | None = None
    """Another image for the verifier's sandboxes."""
    verify_build: str | None = None
    """A folder with a Dockerfile, from which docker builds `verify_image`."""
    workdir: str | None = None
    """The work folder inside, such as `/app`, which begins with what the image holds there; by default `workdir` in the
    home. It and the home are what the agent can change, and the work folder is what the verifier sees of it."""
    folders: tuple[str, ...] = ()
    """Further folders that can be written inside; they begin empty, and nothing in them reaches the verifier."""
    network: Literal["none", "setup"] = "none"
    """`setup`: the setup lines run in a sandbox with a network. The agent gets another one without, with the files that
    they left in the home and in the work folder; processes and other places do not come along."""
    protected: tuple[str, ...] = PROTECTED
    """Patterns below the work folder that reach the verifier as the setup left them."""
    reward_file: bool | None = None
    """Whether `reward_path` is the reward. None: when a line or a file of the task, or what its setup left, names
    `reward.txt`; code of the agent that a check runs cannot decide to write one."""
    reward_path: str = "logs/verifier/reward.txt"
    """Where a check may write the reward, below the verifier's home or absolute. A `reward.json` beside it, a number or
    an object of numbers, counts where this file is missing; and before it where the task's own files name it."""
    reward_key: str | None = None
    """Which number of a `reward.json` is the reward; by default `reward`, or the only one. Several names with commas
    between them: the first that is there."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest number that a reward file may hold. It includes 0, what a check earns that fails."""
    proof: bool | None = None
    """Whether a verify line must prove that it came to its own end, and was not ended by code that it loaded. None:
    those that run pytest, unittest, `python -c` or a Python script of `verify_files`. True: all must. False: none."""
    solution: tuple[str, ...] = ()
    """Shell lines that solve the task: what the `oracle` agent runs."""
    solution_files: Mapping[str, FileContent] = Field(default_factory=dict)
    """Files that the solution needs; only the `oracle` agent gets them."""
    verify_env: Mapping[str, str] = Field(default_factory=dict)
    """Variables of the checks' commands."""
    solution_env: Mapping[str, str] = Field(default_factory=dict)
    """Variables of the solution's lines."""
    limits: Limits = Field(default_factory=Limits)
    setup_timeout_s: Seconds = 120.0
    agent_timeout_s: Seconds = 600.0
    verify_timeout_s: Seconds = 120.0
    """Limit of each single setup or verify line; of the agent as a whole."""
    task_id: str = ""
    metadata: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("setup", "verify", "solution", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        """Take a single line or check where a list is meant."""
        return (value,) if isinstance(value, str | Check | Mapping) else value

    @field_validator("verify", mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """Take checks that are written in one of the short forms; the last validator of a field is the first to run."""
        return tuple(map(expand, value)) if isinstance(value, list | tuple) else expand(value)

    @field_validator("instruction")
    @classmethod
    def _says_something(cls, value: str, info: ValidationInfo) -> str:
        if not value.strip() and info.context is not AS_STORED:
            raise ValueError("it is empty: say what the agent is to do")
        return value

    @field_validator("verify")
    @classmethod
    def _checks_something(cls, value: tuple[str | Check, ...], info: ValidationInfo) -> tuple[str | Check, ...]:
        for number, check in enumerate(value, 1):
            if isinstance(check, str) and runs_nothing(check) and info.context is not AS_STORED:
                raise ValueError(
                    f"line {number}, {check!r}, is blank or a comment: it would pass whatever the agent did; "
                    "write a command, or leave the line out"
                )
        return value

    @field_validator("workdir")
    @classmethod
    def _is_folder(cls, value: str | None) -> str | None:
        if value is not None:
            check_folder(value)
            if f"{value}/".startswith(f"{HOME}/"):
                raise ValueError(f"it must be outside of {HOME}; leave it out for the work folder there")
        return value

    @field_validator("folders")
    @classmethod
    def _are_folders(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for folder in value:
            check_folder(folder)
        return value

    @model_validator(mode="after")
    def _names_what_it_builds(self) -> Task:
        for build, image in ((self.build, self.image), (self.verify_build, self.verify_image)):
            if build is not None and image is None:
                raise ValueError(f"name the image that is built from {build}")
        return self

    @field_validator("reward_range")
    @classmethod
    def _holds_zero(cls, value: tuple[float, float]) -> tuple[float, float]:
        low, high = value
        if not (math.isfinite(low) and math.isfinite(high) and low <= 0 <= high and low < high):
            raise ValueError(f"two finite numbers, the lower first, with 0 between them or one of them; not {value}")
        return value

    def texts(self) -> tuple[str, ...]:
        """Return the texts that say which files are the agent's to write."""
        own = (text for check in self.verify if isinstance(check, Check) for text in check.files.values())
        solution = (*self.solution, *as_texts(self.solution_files).values())
        return (self.instruction, *self.verify_texts(), *self.verify_sources.values(), *own, *solution)

    @property
    def verify_sources(self) -> Mapping[str, str]:
        """The verifier's files as texts, for what reads them as programs."""
        return as_texts(self.verify_files)

    def verify_texts(self) -> tuple[str, ...]:
        """Return the shell lines of all checks."""
        parts = ((check,) if isinstance(check, str) else (check.run, check.judge) for check in self.verify)
        return tuple(text for part in parts for text in part)


class Budget(BaseModel):
    """What one rollout may spend on its model; None is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_calls: int | None = None
    max_completion_tokens: int | None = None
    max_seconds: float | None = Field(default=None, allow_inf_nan=False)


_COMMON_NAMES = {"repeat_penalty": "repetition_penalty"}
"""What llama.cpp calls otherwise than the others."""


class Sampling(BaseModel):
    """How a trainer wants answers to be sampled, in full: no default of the endpoint or of the agent counts.

    The defaults are the model's own distribution.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """How many tokens are considered; -1 and 0 are all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = Field(default=1.0, gt=0)
    seed: int | None = None

    def parameters(self, dialect: Dialect = "openai_chat", engine: Engine | None = None) -> dict[str, Any]:
        """Return the parameters of a request.

        Raises:
            ValueError: the endpoint has no parameter for a value that is not neutral.
        """
        values = self.model_dump(exclude_none=True)
        values["top_k"] = values["top_k"] or -1
        if engine == "llamacpp":
            values["repeat_penalty"] = values.pop("repetition_penalty")
        known: frozenset[str] = frozenset(values)
        if engine == "anthropic" or dialect == "anthropic":
            known = frozenset({"temperature", "top_k"} if self.top_p == 1.0 else {"temperature", "top_p", "top_k"})
            values = {name: value for name, value in values.items() if name != "top_k" or value != -1}
        elif dialect == "openai_responses":
            known = frozenset({"temperature", "top_p"})
        elif engine == "openai":
            known = frozenset({"temperature", "top_p", "frequency_penalty", "presence_penalty", "seed"})
        for name, value in values.items():
            if name not in known and value != NEUTRAL_SAMPLING.get(_COMMON_NAMES.get(name, name)):
                raise ValueError(f"{name}={value!r} cannot be sent to {engine or dialect}")
        return {name: value for name, value in values.items() if name in known}


class Model(BaseModel):
    """A model endpoint, and what the capture proxy asks of it. The key stays on the host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    name: str
    """The model's full id, as the endpoint knows it."""
    api_key: SecretStr = SecretStr("intercepted")
    dialect: Dialect = "openai_chat"
    top_logprobs: int = 5
    return_token_ids: bool = True
    max_tokens_cap: int | None = 4096
    disable_thinking: bool = False
    request_timeout_s: Seconds = 600.0
    extra_headers: Mapping[str, str] = Field(default_factory=dict)
    engine: Engine | None = None
    """What answers there; where it is named, `sampling` is checked against its parameters."""
    sampling: Mapping[str, Any] = Field(default_factory=dict)
    """How answers are sampled: a `Sampling`, which is complete, or parameters for every call, such as `temperature`, by
    the endpoint's names. What is not here is as the endpoint has it by default, whatever the agent asks for."""
    agent_may_set: tuple[str, ...] = ()
    """Parameters that are the agent's after all, by the agent's names; where it sends none, those of `sampling`
    count. Any that steer what is sampled, such as `response_format`, make its turns ones that are not trained on."""

    base_urls: tuple[str, ...] = ()
    """More replicas of the same model. A rollout keeps to one, whose prefix cache has its conversation, and goes on
    with the next where that cannot be reached."""
    policy_url: str | None = None
    """Asked for the policy's version with each call, where no header of the answer says it."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        """Write a `Sampling` as parameters of the endpoint, and take the first replica for the endpoint itself."""
        if not isinstance(data, Mapping):
            return data
        fields = dict(data)
        sampling = fields.get("sampling")
        if isinstance(sampling, Sampling):
            fields["sampling"] = sampling.parameters(fields.get("dialect") or "openai_chat", fields.get("engine"))
        if "base_url" not in fields and "llm_url" not in fields and fields.get("base_urls"):
            fields["base_url"], *fields["base_urls"] = fields["base_urls"]
        return fields

    @property
    def replicas(self) -> tuple[str, ...]:
        """Return the addresses of all replicas."""
        return (self.base_url, *self.base_urls)

    @model_validator(mode="after")
    def _check_parameters(self) -> Model:
        check_trainer_parameters(self.engine, self.sampling, self.agent_may_set)
        return self


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
    return parse_task(_parse_text(path, text), folder=path.parent, name=path.stem)


def parse_task(data: object, *, folder: Path, name: str = "") -> Task:
    """Build a task from a mapping with the fields of `Task`.

    `files_from` and `verify_files_from` name folders, relative to `folder`, whose files are added.

    Raises:
        RolloutError: it is no task.
    """
    if not isinstance(data, Mapping):
        raise RolloutError(f"The task {name} must be a mapping with at least an 'instruction'")
    fields: dict[str, Any] = {"task_id": name, **data}
    for key, target in _FOLDERS.items():
        if key in fields:
            fields[target] = {**read_folder(folder / str(fields.pop(key))), **(fields.get(target) or {})}
    try:
        return Task.model_validate(fields)
    except ValidationError as exc:
        raise RolloutError(f"The task {name} is not valid: {problems_of(exc)}") from exc


def parse_check(text: str) -> str | Check:
    """Read a check from a command line: a shell line, or a JSON object as a task file has it.

    Raises:
        RolloutError: it is an object, but no check.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if not isinstance(value, dict):
        return text
    try:
        return Check.model_validate(expand(value))
    except ValidationError as exc:
        raise RolloutError(f"{text} is no check: {problems_of(exc)}") from exc
    except ValueError as exc:
        raise RolloutError(f"{text} is no check: {exc}") from exc


def problems_of(exc: ValidationError) -> str:
    """Return what is wrong with values, field by field."""
    return "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors())


def _parse_text(path: Path, text: str) -> object:
    import yaml

    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as exc:
        raise RolloutError(f"The task {path} cannot be read: {exc}") from exc


def read_folder(folder: Path, *, below: str = "") -> dict[str, str | bytes]:
    """Return the files of a folder by their paths in it, with `below` before them; those that are no UTF-8 as bytes.

    Raises:
        RolloutError: there is no such folder, it cannot be read, or a link in it leads out of it.
    """
    if not folder.is_dir():
        raise RolloutError(f"There is no folder {folder}")
    files: dict[str, str | bytes] = {}
    inside = folder.resolve()
    try:
        for path in sorted(folder.rglob("*")):
            if not path.resolve().is_relative_to(inside):
                raise RolloutError(f"{path} is a link that leads out of {folder}: copy what it stands for")
            if path.is_file():
                files[below + path.relative_to(folder).as_posix()] = _read_file(path)
    except OSError as exc:
        raise RolloutError(f"The files in {folder} cannot be read: {exc}") from exc
    return files


def _read_file(path: Path) -> str | bytes:
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content
