"""`Task`, written in code or read from a file, and its commands; the `Model` that the agent calls, and its `Budget`.

Knows values, files, and the interface of sandboxes. Must not know agents, verdicts or servers.
"""

from __future__ import annotations

import base64
import json
import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
from openenv.protocol.schema import problems_of
from openenv.rollout.tasks.checks import AS_STORED, expand, runs_nothing
from openenv.rollout.tasks.checks import Check as Check
from openenv.rollout.tasks.model_parameters import NEUTRAL_SAMPLING, check_trainer_parameters
from openenv.rollout.tasks.model_parameters import Dialect as Dialect
from openenv.rollout.tasks.model_parameters import Engine as Engine
from openenv.sandboxes.base import HOME, ExecResult, Limits, Sandbox, SandboxSpec, check_folder

Trust = Literal["judged", "isolated", "shared"]
"""How far a verdict can be trusted."""
TRUSTS: tuple[Trust, ...] = ("shared", "isolated", "judged")
"""From the weakest to the strongest."""


def weakest(trusts: Iterable[Trust]) -> Trust | None:
    """Return the weakest trust level; None for an empty list."""
    return min(trusts, key=TRUSTS.index, default=None)


def reaches(trust: Trust | None, minimum: Trust) -> bool:
    """Return whether `trust` is at least `minimum`. Old records have None, which never is."""
    return trust is not None and TRUSTS.index(trust) >= TRUSTS.index(minimum)


_DEEPEST = 32
_MOST_VALUES = 1_000_000
"""The most values in the document of a task."""
Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
"""A time limit: at most eleven days."""


def _read_content(value: Any) -> Any:
    """Convert bytes from their form in files: `{"base64": "iVBORw0..."}`."""
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
"""A text, or bytes. In JSON and YAML bytes are `{"base64": "..."}`."""


def as_texts(files: Mapping[str, str | bytes]) -> Mapping[str, str]:
    """Return files as texts. Bytes that are not UTF-8 are escaped, and `as_bytes` restores them."""
    return {
        path: content if isinstance(content, str) else content.decode("utf-8", "surrogateescape")
        for path, content in files.items()
    }


def as_bytes(content: str | bytes) -> bytes:
    """Return a file's bytes."""
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")


def writable(value: Any, depth: int = 0) -> Any:
    """Return a value that can be written as JSON; agents choose file names and can make endpoints quote anything.

    Characters that UTF-8 cannot encode become escapes. Values that are nested too deeply become an ellipsis.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict | list | tuple) and depth >= _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {writable(key): writable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [writable(item, depth + 1) for item in value]
    return value


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
"""Files that decide how Python and pytest start: the verifier sees the baseline's version, never the agent's.
If a task has any pattern, this includes a `pyproject.toml` or `setup.cfg` that the agent changed and that names
pytest."""


class Patterns:
    """Path patterns: `*` stays within a folder, `**` crosses them, a pattern covers a folder and all below it."""

    def __init__(self, patterns: Sequence[str]) -> None:
        # Readers may ignore the case: Python accepts `X.DIST-INFO`.
        self._regex = re.compile("|".join(_translate(pattern) for pattern in patterns) or r"(?!)", re.IGNORECASE)

    def cover(self, name: str) -> bool:
        """Return whether a relative path is covered."""
        return bool(self._regex.fullmatch(name))


@lru_cache(maxsize=4096)  # every task has the same few dozen, besides its own
def _translate(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    expressions = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    return "(?s:" + "".join(expressions.get(part, re.escape(part)) for part in parts) + ")"


class Task(BaseModel):
    """An instruction, its setup, and the checks of the result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction: str
    setup: tuple[str, ...] = ()
    """Shell lines that run in the agent's sandbox before the agent starts."""
    verify: tuple[str | Check, ...] = ()
    """Shell lines, or `Check`s. A shell line runs in a fresh sandbox with the agent's work tree. A `Check` runs the
    agent's code and the judge in separate sandboxes. The reward is the share that exits with 0. A blank line or a
    comment is refused, because it would pay an agent that does nothing."""
    files: Mapping[str, FileContent] = Field(default_factory=dict)
    """Files for the agent's sandbox, written before the setup. Paths are absolute, or relative to the work folder."""
    min_trust: Trust | None = None
    """The lowest trust level of a check; a task with a weaker check is refused before it runs."""
    verify_files: Mapping[str, FileContent] = Field(default_factory=dict)
    """Files for the verifier's sandboxes only, written over the agent's work tree. The agent never sees them."""
    image: str | None = None
    """The image of all sandboxes of the task; by default the backend chooses one. Docker and Kubernetes only."""
    build: str | None = None
    """A folder with a Dockerfile. Docker builds `image` with it if the image is missing."""
    build_timeout_s: Seconds = 600.0
    verify_image: str | None = None
    """The image for verifier sandboxes, if it differs from `image`."""
    verify_build: str | None = None
    """A folder with a Dockerfile for `verify_image`."""
    workdir: str | None = None
    """The work folder inside, such as `/app`, which starts with the image's files; by default `workdir` in the home.
    The agent can change the work folder and the home. The verifier sees only the agent's work folder."""
    folders: tuple[str, ...] = ()
    """More writable folders inside. They start empty, and the verifier does not see their files."""
    network: Literal["none", "setup"] = "none"
    """`setup`: the setup lines run in a sandbox with a network. The agent then gets a fresh sandbox without a network.
    Only the files in the home and the work folder move there; processes and other folders do not."""
    protected: tuple[str, ...] = PROTECTED
    """Patterns below the work folder; the verifier sees the baseline's version of these files. They extend the default
    patterns; an empty tuple turns all protection of names off."""
    keeps_links: tuple[str, ...] = ()
    """Patterns below the work folder, for tasks about links. The verifier sees links of the agent at these paths. All
    other links that the setup did not make are replaced by copies, or removed if they lead out of the work folder."""
    reward_file: bool | None = None
    """Whether a reward file counts. None: it counts if a line or a file of the task, or a file that the setup wrote,
    names `reward.txt`. So the agent's code cannot invent one."""
    reward_path: str = "logs/verifier/reward.txt"
    """The reward file of checks: absolute, or relative to the verifier's home. If the file is missing, a `reward.json`
    beside it counts: a number or an object of numbers. If the task's files name `reward.json`, it counts first."""
    reward_key: str | None = None
    """The name of the reward in a `reward.json`; by default `reward`, or the only number. Separate several names with
    commas: the first one in the file counts."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest valid reward. The range includes 0, the reward of a failed check."""
    on_missing: float | None = None
    """The reward of a check that crashes, hangs, or writes an invalid reward, or none. None: the lowest of
    `reward_range`."""
    proof: bool | None = None
    """Whether a verify line must prove that it reached its end, and was not ended by code that it loaded. None: lines
    that run pytest, unittest, `python -c` or a Python script of `verify_files` must. True: all must. False: none."""
    solution: tuple[str, ...] = ()
    """Shell lines that solve the task; the `oracle` agent runs them."""
    solution_files: Mapping[str, FileContent] = Field(default_factory=dict)
    """Files for the solution; only the `oracle` agent gets them."""
    verify_env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of the checks."""
    solution_env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of the solution."""
    limits: Limits = Field(default_factory=Limits)
    setup_timeout_s: Seconds = 120.0
    agent_timeout_s: Seconds = 600.0
    verify_timeout_s: Seconds = 120.0
    """`setup_timeout_s` and `verify_timeout_s` limit each single line, `agent_timeout_s` the whole agent."""
    task_id: str = ""
    metadata: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("setup", "verify", "solution", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        """Accept a single line or check instead of a list."""
        return (value,) if isinstance(value, str | Check | Mapping) else value

    @field_validator("verify", mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """Expand checks in a short form. Pydantic runs the last validator of a field first."""
        return tuple(map(expand, value)) if isinstance(value, list | tuple) else expand(value)

    @field_validator("instruction")
    @classmethod
    def _says_something(cls, value: str, info: ValidationInfo) -> str:
        if not value.strip() and info.context is not AS_STORED:
            raise ValueError("it is empty; describe the work of the agent")
        return value

    @field_validator("verify")
    @classmethod
    def _checks_something(cls, value: tuple[str | Check, ...], info: ValidationInfo) -> tuple[str | Check, ...]:
        for number, check in enumerate(value, 1):
            if isinstance(check, str) and runs_nothing(check) and info.context is not AS_STORED:
                raise ValueError(
                    f"line {number}, {check!r}, is blank or a comment and would always pass; "
                    "write a command, or remove the line"
                )
        return value

    @field_validator("workdir")
    @classmethod
    def _is_folder(cls, value: str | None) -> str | None:
        if value is not None:
            check_folder(value)
            if f"{value}/".startswith(f"{HOME}/"):
                raise ValueError(f"it must be outside of {HOME}; omit `workdir` to use the work folder there")
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
                raise ValueError(f"set the image name for the build folder {build}")
        return self

    @field_validator("reward_range")
    @classmethod
    def _holds_zero(cls, value: tuple[float, float]) -> tuple[float, float]:
        low, high = value
        if not (math.isfinite(low) and math.isfinite(high) and low <= 0 <= high and low < high):
            raise ValueError(f"it must be two finite numbers, low <= 0 <= high and low < high, not {value}")
        return value

    @model_validator(mode="after")
    def _misses_within_the_range(self) -> Task:
        low, high = self.reward_range
        if self.on_missing is not None and not low <= self.on_missing <= high:
            raise ValueError(f"on_missing must be from {low:g} to {high:g}, the reward_range, not {self.on_missing}")
        return self

    @property
    def missing_reward(self) -> float:
        """The reward of a check without a valid result."""
        return self.reward_range[0] if self.on_missing is None else self.on_missing

    def texts(self) -> tuple[str, ...]:
        """Return all texts of the task; the agent may write the files that they name."""
        checks = (text for check in self.verify if isinstance(check, Check) for text in check.files.values())
        solution = (*self.solution, *as_texts(self.solution_files).values())
        return (self.instruction, *self.verify_texts(), *self.verify_sources.values(), *checks, *solution)

    @property
    def verify_sources(self) -> Mapping[str, str]:
        """The verifier's files as texts."""
        return as_texts(self.verify_files)

    def verify_texts(self) -> tuple[str, ...]:
        """Return the shell lines of all checks."""
        parts = ((check,) if isinstance(check, str) else (check.run, check.judge) for check in self.verify)
        return tuple(text for part in parts for text in part)


class Budget(BaseModel):
    """The spending limits of a rollout for its model; None means unlimited."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_calls: int | None = None
    max_completion_tokens: int | None = None
    max_seconds: float | None = Field(default=None, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The start of a rollout at a call of another one: its agent gets the recorded answers up to that call again."""

    rollout_id: str
    call: int | None = None
    """0 for none of them, None for all."""
    is_branch: bool = True
    """Whether the new rollout goes another way; if not, it takes over the answers of a cancelled or failed one."""


_COMMON_NAMES = {"repeat_penalty": "repetition_penalty"}
"""Parameters with a different name in llama.cpp."""


class Sampling(BaseModel):
    """The complete sampling parameters of a trainer; defaults of the endpoint and the agent do not count.

    The defaults here sample from the model's unmodified distribution.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """The number of candidate tokens; -1 and 0 mean all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = Field(default=1.0, gt=0)
    seed: int | None = None

    def parameters(self, dialect: Dialect = "openai_chat", engine: Engine | None = None) -> dict[str, Any]:
        """Return the parameters of a request.

        Raises:
            ValueError: the endpoint lacks a parameter for a value that is not neutral.
        """
        values = self.model_dump(exclude_none=True)
        values["top_k"] = values["top_k"] or -1
        if engine == "llamacpp":
            values["repeat_penalty"] = values.pop("repetition_penalty")
        supported: frozenset[str] = frozenset(values)
        if engine == "anthropic" or dialect == "anthropic":
            supported = frozenset({"temperature", "top_k"} if self.top_p == 1.0 else {"temperature", "top_p", "top_k"})
            values = {name: value for name, value in values.items() if name != "top_k" or value != -1}
        elif dialect == "openai_responses":
            supported = frozenset({"temperature", "top_p"})
        elif engine == "openai":
            supported = frozenset({"temperature", "top_p", "frequency_penalty", "presence_penalty", "seed"})
        for name, value in values.items():
            if name not in supported and value != NEUTRAL_SAMPLING.get(_COMMON_NAMES.get(name, name)):
                raise ValueError(f"{name}={value!r} cannot be sent to {engine or dialect}")
        return {name: value for name, value in values.items() if name in supported}


class Model(BaseModel):
    """A model endpoint, and the capture proxy's requests to it. The key stays on the host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    name: str
    """The model ID at the endpoint."""
    api_key: SecretStr = SecretStr("intercepted")
    dialect: Dialect = "openai_chat"
    top_logprobs: int = 5
    return_token_ids: bool = True
    max_tokens_cap: int | None = 4096
    disable_thinking: bool = False
    request_timeout_s: Seconds = 600.0
    extra_headers: Mapping[str, str] = Field(default_factory=dict)
    engine: Engine | None = None
    """The engine at the endpoint. If set, `sampling` may contain only its parameters."""
    sampling: Mapping[str, Any] = Field(default_factory=dict)
    """A `Sampling`, or parameters of every call, such as `temperature`, by the endpoint's names. Missing parameters
    have the values of `Sampling()`, so answers can be trained on; the agent cannot set them. An endpoint that does not
    know a parameter without effect gets requests without it. `{}` leaves all of them to the endpoint."""
    agent_may_set: tuple[str, ...] = ()
    """Parameters that the agent may set, by the agent's names. If it sends none, `sampling` counts. Turns with a
    parameter that steers sampling, such as `response_format`, are excluded from training."""

    seed: int | None = None
    """The seed of a rollout: call number n, counted from 1, is sampled with `derived_seed(seed, n)`. Only the dialect
    `openai_chat` has seeds. `EngineOptions.seed` sets a different one for each rollout."""
    content_schemes: tuple[str, ...] = ("data",)
    """URL schemes of the images, files and videos in an agent's messages; other requests get a 400. The endpoint would
    fetch `https` URLs for the agent, outside of its sandbox. `file` allows paths, and `file_id` the account's files."""

    token_in: bool = True
    """Whether a call that continues a recorded answer sends its token IDs instead of messages, if `engine` is `vllm`,
    `sglang` or `llamacpp`. Such an answer comes whole."""
    routed_experts: bool = False
    """Whether the engine is asked for the experts of each token. vLLM and SGLang need `--enable-return-routed-experts`.
    Answers then come whole."""
    base_urls: tuple[str, ...] = ()
    """More replicas of the same model. A rollout stays with one replica, because its prefix cache has the
    conversation. If that replica cannot be reached, the rollout continues with the next one."""
    policy_url: str | None = None
    """A URL that returns the policy's version; requested with each call if responses have no version header."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        """Complete the parameters in `sampling`. The default of `base_url` is the first replica."""
        if not isinstance(data, Mapping):
            return data
        fields = dict(data)
        fields["sampling"] = _sampling_of(fields)
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
        if self.seed is not None and "seed" in (*self.sampling, *self.agent_may_set):
            raise ValueError("`seed` and a seed in `sampling` or `agent_may_set` exclude each other")
        return self


def _sampling_of(fields: Mapping[str, Any]) -> Any:
    """Return the sampling parameters of a model's fields, completed by those of `Sampling()`."""
    sampling, engine = fields.get("sampling"), fields.get("engine")
    dialect: Any = fields.get("dialect") or "openai_chat"
    if isinstance(sampling, Sampling):
        return sampling.parameters(dialect, engine)
    if sampling is not None and (not isinstance(sampling, Mapping) or not sampling):
        return sampling  # none, or a mistake that the field's check refuses
    if dialect == "anthropic" and sampling and "top_p" in sampling:
        return sampling  # Anthropic refuses `temperature` beside it
    return {**Sampling().parameters(dialect, engine), **(sampling or {})}


_FOLDERS = {"files_from": "files", "verify_files_from": "verify_files"}


def load_task(path: str | Path) -> Task:
    """Read a task from a `.yaml` or `.json` file. Its `task_id` defaults to the file's name.

    Raises:
        RolloutError: the file cannot be read or is not a valid task; the text lists the problems.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise RolloutError(f"The task {path} cannot be read: {exc}") from exc
    return parse_task(_parse_text(path, text), folder=path.parent, name=path.stem)


def parse_task(data: object, *, folder: Path, name: str = "") -> Task:
    """Build a task from a mapping with the fields of `Task`.

    `files_from` and `verify_files_from` are folders relative to `folder`; their files are added.

    Raises:
        RolloutError: the mapping is not a valid task.
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
    """Read a check from a command line: a shell line, or a JSON object in the form of a task file.

    Raises:
        RolloutError: the text is an object, but not a valid check.
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
        raise RolloutError(f"{text} is not a valid check: {problems_of(exc)}") from exc
    except ValueError as exc:
        raise RolloutError(f"{text} is not a valid check: {exc}") from exc


def _parse_text(path: Path, text: str) -> object:
    import yaml

    try:
        document: object = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        count = _count_values(document, {})
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        raise RolloutError(f"The task {path} cannot be read: {exc}") from exc
    if count > _MOST_VALUES:  # a few lines with YAML aliases (`b: [*a, *a]`, `c: [*b, *b]`), or a value in itself
        raise RolloutError(f"The task {path} has more than {_MOST_VALUES:,} values")
    return document


def _count_values(value: object, counted: dict[int, int]) -> int:
    """Count the values of a document with all its repetitions, each shared one only once."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in counted:
        counted[id(value)] = _MOST_VALUES + 1  # until it is counted: a value may contain itself
        inner = value.values() if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_count_values(each, counted) for each in inner)
    return counted[id(value)]


def read_folder(folder: Path, *, below: str = "") -> dict[str, str | bytes]:
    """Return the files of a folder by their paths in it, prefixed with `below`. Files that are not UTF-8 are bytes.

    Raises:
        RolloutError: the folder is missing, cannot be read, or contains a link that leads out of it.
    """
    if not folder.is_dir():
        raise RolloutError(f"The folder {folder} does not exist")
    files: dict[str, str | bytes] = {}
    inside = folder.resolve()
    try:
        for path in sorted(folder.rglob("*")):
            if not path.resolve().is_relative_to(inside):
                raise RolloutError(f"{path} is a link that leads out of {folder}; copy its target into the folder")
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


# ---- a task's sandbox: its specification, its files, and shell lines ----
#
# Setup lines, checks and solutions all run through `run_line`.

MAX_OUTPUT = 256 * 1024
"""Bytes of each output stream that a `CommandResult` keeps."""


class CommandResult(BaseModel):
    """The result of a setup line, a verify line or the `judge` of a check. A failed check never has exit code 0."""

    cmd: str
    exit_code: int
    stdout: str = ""
    stderr: str = ""
    duration_s: float = 0.0
    run: CommandResult | None = None
    """The result of `Check.run`, for a judge."""
    score: float | None = None
    """The reward that the judge wrote, or None. A written reward counts instead of the exit code."""
    note: str | None = None
    """Why the check counts differently from its exit code."""
    trust: Trust | None = None
    """The trust level of a check; None for other commands."""
    name: str = ""
    """The name of a `Check`; empty for shell lines, whose name is `cmd`."""

    @property
    def title(self) -> str:
        """The check as its author wrote it."""
        return self.name or self.cmd


@dataclass(frozen=True, slots=True)
class CommandRun:
    """One run of a shell line."""

    result: CommandResult
    crash: str | None = None
    """Why the line did not end by itself; None if it did."""
    timed_out: bool = False


def run_line(
    sandbox: Sandbox, line: str, *, timeout: float, envs: Mapping[str, str] | None = None, cmd: str | None = None
) -> CommandRun:
    """Run a shell line in the work folder; the result shows `cmd` instead of `line` if it is set."""
    done = sandbox.exec(line, envs=envs, cwd=sandbox.workdir, timeout=timeout, max_output=MAX_OUTPUT)
    result = CommandResult(
        cmd=cmd or line, exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr, duration_s=done.duration_s
    )
    return CommandRun(result, crash_of(done, timeout), done.timed_out)


def crash_of(done: ExecResult, timeout: float) -> str | None:
    """Return why a command did not end by itself, or None if it did."""
    if done.timed_out:
        return f"did not end within {timeout:g} s"
    if 128 < done.exit_code <= 192:
        return f"was ended by signal {done.exit_code - 128}"
    return None


def lay_files(sandbox: Sandbox, files: Mapping[str, str | bytes]) -> None:
    """Write files, relative paths below the work folder."""
    for path, content in files.items():
        sandbox.write_bytes(posixpath.join(sandbox.workdir, path), as_bytes(content))


def lay_outer_files(sandbox: Sandbox, task: Task) -> None:
    """Write the task's files outside the home and the work folder; archives contain the others."""
    inner = (f"{sandbox.home}/", f"{sandbox.workdir}/")
    outer = {path: text for path, text in task.files.items() if path.startswith("/")}
    lay_files(sandbox, {path: text for path, text in outer.items() if not posixpath.normpath(path).startswith(inner)})


def sandbox_spec(task: Task, *, verifies: bool = False) -> SandboxSpec:
    """Return the specification of the sandboxes of a task, or of its verifier."""
    image, build = task.image, task.build
    if verifies and task.verify_image is not None:
        image, build = task.verify_image, task.verify_build
    return SandboxSpec(
        limits=task.limits,
        image=image,
        build=None if build is None else Path(build),
        build_timeout_s=task.build_timeout_s,
        workdir=task.workdir,
        folders=task.folders,
    )
