"""Dockerfiles as far as clouds need them: the final command, the copied files, and simpler equivalent forms.

Knows no cloud: `DockerfileSource` is what providers build images from.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = re.compile(
    r"^([ \t]*RUN)(?:(?:[ \t]|\\[ \t]*\n(?:[ \t]*#[^\n]*\n)*)+--mount=\S+)+", re.IGNORECASE | re.MULTILINE
)
_MOUNT = re.compile(r"--mount=(\S+)")
_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)(?:\s+(.*))?$", re.DOTALL)
_FLAG = re.compile(r"--[a-z]+(?:=\S*)?\s+")
_HEREDOC = re.compile(r"(?:^|\s)<<-?['\"]?[A-Za-z_]")
_CONTEXT = "#context="


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, with its continued lines joined."""

    keyword: str
    flags: tuple[str, ...]
    rest: str

    def words(self) -> list[str] | None:
        """Return the words of the JSON form; None for the shell form."""
        try:
            parts = json.loads(self.rest) if self.rest.startswith("[") else None
        except ValueError:
            return None
        is_words = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
        return parts if is_words else None

    def __str__(self) -> str:
        return " ".join((self.keyword, *self.flags, self.rest))


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile, without comments."""
    pending = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or (not pending and not line.strip()):
            continue
        if line.rstrip().endswith("\\"):
            pending += f"{line.rstrip()[:-1]} "
            continue
        instruction = _instruction(pending + line)
        pending = ""
        if instruction is not None:
            yield instruction
    last = _instruction(pending) if pending.strip() else None
    if last is not None:
        yield last


def _instruction(text: str) -> Instruction | None:
    parts = _INSTRUCTION.match(text.strip())
    if parts is None:
        return None
    rest, flags = (parts[2] or "").strip(), []
    while (flag := _FLAG.match(rest)) is not None:
        flags.append(flag[0].strip())
        rest = rest[flag.end() :]
    return Instruction(parts[1].upper(), tuple(flags), rest)


@dataclass(slots=True)
class BuildStage:
    """One build stage, which starts with `FROM`."""

    base: str
    name: str
    body: list[Instruction]


def stages(text: str) -> list[BuildStage]:
    """Split a Dockerfile at its `FROM` lines. Lines before the first one belong to no stage."""
    listed: list[BuildStage] = []
    for one in instructions(text):
        if one.keyword == "FROM":
            base, _, name = _as_split(one.rest)
            listed.append(BuildStage(base, name, []))
        elif listed:
            listed[-1].body.append(one)
    return listed


def _as_split(reference: str) -> tuple[str, str, str]:
    parts = re.split(r"\s+(as)\s+", reference, maxsplit=1, flags=re.IGNORECASE)
    return (parts[0], parts[1], parts[2].strip()) if len(parts) == 3 else (reference, "", "")


def server_command(text: str) -> str | None:
    """Return the container's command as a shell command; None if the base image decides.

    A stage has the command, the entrypoint and the folder of the stage that it begins from.
    """
    commands: dict[str, dict[str, Instruction]] = {}
    ending: dict[str, Instruction] = {}
    for stage in stages(text):
        ending = dict(commands.get(stage.base.lower(), {}))
        for one in stage.body:
            if one.keyword == "ENTRYPOINT":
                ending.pop("CMD", None)  # docker does the same: a new entrypoint discards the command before it
            if one.keyword in {"CMD", "ENTRYPOINT", "WORKDIR"} and one.rest:
                ending[one.keyword] = one
        commands[stage.name.lower()] = ending
    command = _command(ending.get("ENTRYPOINT"), ending.get("CMD"))
    folder = ending.get("WORKDIR")
    if command is None or folder is None or not folder.rest.startswith("/"):
        return command
    return f"cd {shlex.quote(folder.rest)} && {command}"


def _command(entrypoint: Instruction | None, command: Instruction | None) -> str | None:
    if entrypoint is None:
        return None if command is None else _shell_form(command)
    words = entrypoint.words()
    if words is None or command is None:
        return _shell_form(entrypoint)  # a shell form ignores the command
    return f"{shlex.join(words)} {_shell_form(command)}"


def _shell_form(one: Instruction) -> str:
    words = one.words()
    return one.rest if words is None else shlex.join(words)


def strip_mounts(text: str) -> str:
    """Remove BuildKit's `--mount` flags from `RUN`; everything else stays as it is."""
    return _MOUNTS.sub(r"\1", text)


def mount_types(text: str) -> set[str]:
    """Return the types of the mounts of `RUN`. Without a type it is `bind`, as in BuildKit."""
    types = set()
    for run in _MOUNTS.finditer(text):
        for spec in _MOUNT.findall(run[0]):
            options = dict(option.partition("=")[::2] for option in spec.split(","))
            types.add(options.get("type", "bind").lower())
    return types


@dataclass(frozen=True, slots=True)
class DockerfileSource:
    """A Dockerfile and the folder that its `COPY` reads from.

    A reference is `dockerfile:PATH`, or `dockerfile:PATH#context=FOLDER` if the folder is not the default. The default
    is the grandparent of the Dockerfile, which is the layout of `openenv init`.
    """

    path: Path
    context: Path

    @classmethod
    def of(cls, path: str | Path, context: str | Path | None = None) -> DockerfileSource:
        """Find a Dockerfile, and check that the folder contains the files that it copies.

        Raises:
            FileNotFoundError: The Dockerfile does not exist.
            ValueError: The folder or a copied file does not exist.
        """
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            raise FileNotFoundError(f"Dockerfile not found: {path}")
        folder = file.parent.parent if context is None else Path(context).expanduser().resolve()
        if not folder.is_dir():
            raise ValueError(f"context_dir does not exist: {context}")
        source = cls(file, folder)
        source._check_copies()
        return source

    @classmethod
    def parse(cls, text: str) -> DockerfileSource:
        """Read the part of a reference after `dockerfile:`."""
        path, _, context = text.partition(_CONTEXT)
        return cls.of(path, context or None)

    def __str__(self) -> str:
        return f"{self.path}{'' if self.context == self.path.parent.parent else f'{_CONTEXT}{self.context}'}"

    @property
    def text(self) -> str:
        """The Dockerfile."""
        return self.path.read_text()

    def _check_copies(self) -> None:
        for one in instructions(self.text):
            if one.keyword not in {"COPY", "ADD"} or any(flag.startswith("--from") for flag in one.flags):
                continue
            sources = (one.words() or one.rest.split())[:-1]
            for name in sources:
                if "$" in name or "://" in name or name.startswith(("/", "<<", "git@")):
                    continue  # docker resolves these itself
                if not (self.context / name).exists() and not any(self.context.glob(name)):
                    raise ValueError(
                        f"Dockerfile {one.keyword} source {name!r} is not in the build context {self.context}. "
                        "Pass the folder that it is relative to: context_dir=."
                    )


def flatten(text: str) -> str:
    """Write a Dockerfile of several stages as one of a single stage, for builders that know only one.

    That works if all stages begin from one image: the steps run one after the other, and `COPY --from` becomes `cp`.
    `ARG` defaults in `FROM` are filled in, and `--platform` and cache mounts are left out.

    Raises:
        ValueError: It cannot be written that way.
    """
    advice = "Build it with `openenv build`, push the image, and give its name instead."
    foreign = mount_types(text) - {"cache"}
    if foreign:
        kinds = ", ".join(sorted(foreign))
        raise ValueError(f"Only cache mounts can be left out of a Dockerfile, and RUN mounts {kinds}. {advice}")
    if any(one.keyword in {"RUN", "COPY", "ADD"} and _HEREDOC.search(one.rest) for one in instructions(text)):
        raise ValueError(f"The Dockerfile has here-documents (<<), which this cannot read. {advice}")
    listed = stages(_fill_arguments(strip_mounts(text)))
    if not listed:
        raise ValueError(f"The Dockerfile has no FROM. {advice}")
    names: dict[str, str] = {}
    for number, stage in enumerate(listed):
        base = names.get(stage.base.lower(), stage.base)
        names.update({str(number): base, stage.name.lower() or str(number): base})
    if len(set(names.values())) != 1:
        bases = ", ".join(sorted(set(names.values())))
        raise ValueError(f"The stages of the Dockerfile begin from different images ({bases}). {advice}")
    lines = [f"FROM {names['0']}"]
    for stage in listed:
        for one in stage.body:
            origin = next((flag.partition("=")[2] for flag in one.flags if flag.startswith("--from=")), None)
            if one.keyword == "COPY" and origin is not None:
                if origin.lower() not in names:
                    raise ValueError(f"COPY --from={origin} does not name a stage of this Dockerfile. {advice}")
                lines.extend(_copy_inside(one))
            else:
                lines.append(str(one))
    return "\n".join(lines) + "\n"


def _copy_inside(copy: Instruction) -> list[str]:
    *sources, target = copy.words() or copy.rest.split()
    moved = [source for source in sources if source.rstrip("/") != target.rstrip("/")]
    if not moved:
        return []
    into = shlex.quote(target)
    folder = into if target.endswith("/") or len(moved) > 1 else f"$(dirname {into})"
    # Docker copies the content of a folder, not the folder itself.
    steps = [
        f"if [ -d {name} ]; then mkdir -p {into} && cp -a {name}/. {into}; else cp -a {name} {into}; fi"
        for name in (shlex.quote(source.rstrip("/") or "/") for source in moved)
    ]
    return [f"RUN mkdir -p {folder} && {' && '.join(steps)}"]


def _fill_arguments(text: str) -> str:
    """Put the defaults of the arguments before the first `FROM` into the `FROM` lines."""
    defaults: dict[str, str] = {}
    lines: list[str] = []
    has_begun = False
    for one in instructions(text):
        if one.keyword == "ARG" and not has_begun:
            name, _, value = one.rest.partition("=")
            defaults[name.strip()] = value.strip().strip("\"'")
        elif one.keyword == "FROM":
            has_begun = True
            lines.append(f"FROM {_expand(one.rest, defaults)}")
        else:
            lines.append(str(one))
    return "\n".join(lines)


def _expand(text: str, values: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        known = values.get(found[1] or found[3])
        return known or (found[2] or found[0])

    return re.sub(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))", value, text)
