"""A copy of an environment package in the form of a Docker Space: which files, which Dockerfile, which README.

Must not know the Hub's API: `spaces` uploads the copy.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from openenv.env.manifest import MANIFEST, ManifestError, read_manifest

DEFAULT_IGNORE = (".*", "__pycache__", "*.pyc", "build/", "*.egg-info")
DEFAULT_PORT = 8000
WEB_VARIABLE = "ENABLE_WEB_INTERFACE"
_DOCKERFILES = ("server/Dockerfile", "Dockerfile")
_HEREDOC = re.compile(r"<<-?[\"']?([A-Za-z_]\w*)[\"']?")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?P<block>.*?)^---[ \t]*$\n?", re.DOTALL | re.MULTILINE)


class PackageStructureError(ValueError):
    """A folder cannot become a Space; the text names the missing or wrong file."""


# -- the package ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpacePackage:
    """An environment package that can be pushed."""

    folder: Path
    name: str
    port: int = DEFAULT_PORT
    variables: dict[str, str] = field(default_factory=dict)
    """The `variables:` of its manifest, as texts."""
    warnings: tuple[str, ...] = ()


def read_package(folder: Path) -> SpacePackage:
    """Check that a folder contains the required files of a Space.

    Raises:
        PackageStructureError: Files are missing, or the manifest is wrong.
    """
    folder = folder.resolve()
    try:
        manifest = read_manifest(folder / MANIFEST)
    except (ManifestError, OSError) as error:
        raise PackageStructureError(str(error)) from error
    name = manifest.get("name")
    if not isinstance(name, str) or not name:
        raise PackageStructureError(f"{MANIFEST} must contain a name, such as name: maze_env")
    needed = ["__init__.py", "client.py", "README.md", "pyproject.toml"]
    if not (folder / "Dockerfile").is_file():  # its own Dockerfile may start anything; ours starts server/app.py
        needed += ["server/__init__.py", "server/app.py"]
    missing = [path for path in needed if not (folder / path).is_file()]
    if not any((folder / path).is_file() for path in _DOCKERFILES):
        missing.append(" or ".join(_DOCKERFILES))
    if missing:
        raise PackageStructureError(
            f"{folder} misses {', '.join(missing)}; `openenv init NAME` makes a package with all files"
        )
    port = manifest.get("port", DEFAULT_PORT)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise PackageStructureError(f"{MANIFEST}: port must be a number from 1 to 65535, not {port!r}")
    warnings = () if (folder / "outputs").is_dir() else ("the package has no folder outputs/",)
    return SpacePackage(folder, name, port, _variables(manifest.get("variables")), warnings)


def _variables(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PackageStructureError(f"{MANIFEST}: variables must be a mapping of NAME: value")
    variables = {}
    for name, one in value.items():
        if isinstance(one, (dict, list)):
            raise PackageStructureError(f"{MANIFEST}: the variable {name} must be a text, a number, true or false")
        # Environment variables are texts: `true` in YAML is written as such, not as Python's True.
        variables[str(name)] = str(one).lower() if isinstance(one, bool) else "" if one is None else str(one)
    return variables


# -- which files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _IgnoreRule:
    pattern: re.Pattern[str]
    only_folders: bool
    negated: bool


class IgnoreRules:
    """Patterns of files to leave out, with the syntax and the meaning of a `.gitignore`: the last match decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules = [rule for line in lines if (rule := _ignore_rule(line)) is not None]

    def excludes(self, path: PurePosixPath, *, is_folder: bool) -> bool:
        """Return whether a path, relative to the package, is left out. Callers skip the contents of ignored folders."""
        for rule in reversed(self._rules):
            if (is_folder or not rule.only_folders) and rule.pattern.fullmatch(path.as_posix()):
                return not rule.negated
        return False


def _ignore_rule(line: str) -> _IgnoreRule | None:
    text = line.rstrip("\r\n")
    text = text if text.endswith("\\ ") else text.rstrip()
    if not text or text.startswith("#"):
        return None
    negated = text.startswith("!")
    text = text.removeprefix("!") if negated else text
    text = text.removeprefix("./")
    only_folders = text.endswith("/")
    text = text.rstrip("/")
    if not text:
        return None
    anchored = "/" in text
    text = text.removeprefix("/")
    expression = _glob(text) if anchored else f"(?:.*/)?{_glob(text)}"
    return _IgnoreRule(re.compile(expression, re.DOTALL), only_folders, negated)


def _glob(text: str) -> str:
    """Translate a pattern of a `.gitignore`: `*` stays within a name, `**` crosses folders."""
    parts, position = [], 0
    while position < len(text):
        rest = text[position:]
        character = text[position]
        step = 1
        if rest.startswith("**/") and (position == 0 or text[position - 1] == "/"):
            parts.append("(?:.*/)?")
            step = 3
        elif rest == "**" and position and text[position - 1] == "/":
            parts.append(".+")
            step = 2
        elif character == "*":
            parts.append("[^/]*")
        elif character == "?":
            parts.append("[^/]")
        elif character == "[" and (closed := re.match(r"\[[!^]?\]?[^\]]*\]", rest)):
            inner = closed.group()[1:-1].replace("\\", "\\\\")
            parts.append(f"[{'^' + inner[1:] if inner[0] in '!^' else inner}]")
            step = len(closed.group())
        elif character == "\\" and len(rest) > 1:
            parts.append(re.escape(rest[1]))
            step = 2
        else:
            parts.append(re.escape(character))
        position += step
    return "".join(parts)


def read_ignore_file(path: Path) -> list[str]:
    """Return the lines of a file of patterns.

    Raises:
        PackageStructureError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PackageStructureError(f"the file of patterns {path} cannot be read: {error}") from error


def _copy(source: Path, target: Path, rules: IgnoreRules) -> None:
    for place, folders, files in os.walk(source):
        inside = Path(place).relative_to(source)
        here = PurePosixPath(inside.as_posix())
        folders[:] = sorted(name for name in folders if not rules.excludes(here / name, is_folder=True))
        kept = [name for name in files if not rules.excludes(here / name, is_folder=False)]
        for name in [*folders, *kept]:
            path = Path(place, name)
            if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(source)):
                # A copy of the target could publish a file that has nothing to do with the package.
                raise PackageStructureError(
                    f"{here / name} is a link that leaves the package: copy the file there, or "
                    "leave the link out with --exclude"
                )
        (target / inside).mkdir(parents=True, exist_ok=True)
        for name in kept:
            path = Path(place, name)
            if path.is_file():  # no sockets and pipes
                shutil.copy2(path, target / inside / name)


# -- the copy -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def staged_space(
    package: SpacePackage,
    *,
    ignore: Iterable[str] = (),
    base_image: str | None = None,
    interface: bool | None = None,
) -> Iterator[Path]:
    """Copy a package into the form of a Docker Space; the copy is removed afterwards.

    Args:
        package: The package to copy.
        ignore: Lines of a `.gitignore` that come after `DEFAULT_IGNORE`.
        base_image: Replaces the base image in the Dockerfile.
        interface: Whether the server has its web page; by default it has one unless the Dockerfile decides it.

    Raises:
        PackageStructureError: The Dockerfile or the README cannot be used.
    """
    rules = IgnoreRules([*DEFAULT_IGNORE, *ignore])
    with tempfile.TemporaryDirectory(prefix="openenv-push-", ignore_cleanup_errors=True) as home:
        copy = Path(home, "space")
        _copy(package.folder, copy, rules)
        dockerfile, readme = copy / "Dockerfile", copy / "README.md"
        if not dockerfile.is_file() and (copy / _DOCKERFILES[0]).is_file():
            (copy / _DOCKERFILES[0]).rename(dockerfile)
        for path in (dockerfile, readme):
            if not path.is_file():
                raise PackageStructureError(f"the ignore rules leave out {path.name}, which a Space needs")
        edit_file(dockerfile, lambda text: _space_dockerfile(text, base_image, interface))
        edit_file(readme, lambda text: space_readme(text, package, interface=interface is not False))
        yield copy


def _space_dockerfile(text: str, base_image: str | None, interface: bool | None) -> str:
    if interface is None and not sets_interface(text):
        interface = True
    return docker_file(text, base_image=base_image, interface=interface)


def edit_file(path: Path, change: Callable[[str], str]) -> None:
    """Rewrite a text file, with the line ends of Unix.

    Raises:
        PackageStructureError: It is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise PackageStructureError(f"{path.name} is not UTF-8: {error}") from error
    path.write_text(change(text), encoding="utf-8", newline="\n")


# -- the Dockerfile -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Instruction:
    line: int
    word: str
    text: str


def docker_file(text: str, *, base_image: str | None = None, interface: bool | None = None) -> str:
    """Return a Dockerfile with another base image, and with the web page on or off; None leaves either as it is.

    The variable of the page stands before the CMD of the last stage, the one that becomes the image.
    """
    lines = text.split("\n")
    if base_image is not None:
        _set_base_image(lines, base_image)
    if interface is None or (interface is False and not sets_interface(text)):  # off is the server's default
        return "\n".join(lines)
    instructions = _instructions(lines)
    starts = [each.line for each in instructions if each.word == "FROM"]
    last_stage = starts[-1] if starts else 0
    command = next((each.line for each in instructions if each.word == "CMD" and each.line > last_stage), None)
    setting = f"ENV {WEB_VARIABLE}={str(interface).lower()}"
    if command is None:
        while lines and not lines[-1].strip():
            lines.pop()
        lines += [setting, ""]
    else:
        lines.insert(command, setting)
    return "\n".join(lines)


def sets_interface(text: str) -> bool:
    """Return whether a Dockerfile decides itself if the server has its web page."""
    instructions = _instructions(text.split("\n"))
    return any(each.word in ("ENV", "ARG") and WEB_VARIABLE in each.text for each in instructions)


def _instructions(lines: list[str]) -> list[_Instruction]:
    """Return the instructions of a Dockerfile; continued lines and here-documents belong to the one they began with.

    `HEALTHCHECK \\` followed by a line `CMD ...` is one HEALTHCHECK.
    """
    instructions, position = [], 0
    while position < len(lines):
        start, parts = position, []
        while position < len(lines):
            line = lines[position].strip()
            position += 1
            if not line.startswith("#"):  # a comment between continued lines does not end them
                parts.append(line.removesuffix("\\"))
                if not line.endswith("\\"):
                    break
            elif not parts:
                break
        text = " ".join(parts).strip()
        if not text:
            continue
        word = text.split(maxsplit=1)[0].upper()
        if word in ("RUN", "COPY", "ADD"):
            rest = [line.strip() for line in lines]
            for end in _HEREDOC.findall(text):
                if end in rest[position:]:
                    position = rest.index(end, position) + 1
        instructions.append(_Instruction(start, word, text))
    return instructions


def _set_base_image(lines: list[str], image: str) -> None:
    """Change the base image: as the default of BASE_IMAGE if the Dockerfile has one, else in FROM.

    Stages that start from the same image as the first one change with it; names of stages and platforms stay.
    """
    instructions = _instructions(lines)
    bases = [each for each in instructions if each.word == "FROM"]
    if not bases:
        lines.insert(0, f"FROM {image}")
        return
    for each in instructions:
        is_default = each.line < bases[0].line and re.match(r"ARG\s+BASE_IMAGE\b", each.text, re.IGNORECASE)
        if is_default and "BASE_IMAGE" in bases[0].text:
            lines[each.line] = f"ARG BASE_IMAGE={image}"
            return
    former = _image_of(bases[0].text)
    for each in bases:
        if _image_of(each.text) == former:
            if former not in lines[each.line]:
                raise PackageStructureError(f"the Dockerfile's FROM {former} has to be one line, to be replaced")
            lines[each.line] = lines[each.line].replace(former, image, 1)


def _image_of(text: str) -> str:
    """Return the image of `FROM [--platform=P] IMAGE [AS NAME]`."""
    words = [word for word in text.split()[1:] if not word.startswith("--")]
    return words[0] if words else ""


# -- the README -----------------------------------------------------------------------------------------------------


def space_readme(text: str, package: SpacePackage, *, interface: bool = True) -> str:
    """Return a README with the front matter of a Docker Space; the author's text stays.

    Raises:
        PackageStructureError: The front matter is not a YAML mapping, or belongs to another kind of Space.
    """
    match = _FRONT_MATTER.match(text)
    if match is None:
        front = yaml.safe_dump(_front_matter(package, interface), sort_keys=False, allow_unicode=True)
        return f"---\n{front}---\n\n{text}"
    try:
        declared = yaml.safe_load(match["block"]) or {}
    except yaml.YAMLError as error:
        raise PackageStructureError(f"the front matter of README.md is not valid YAML: {error}") from error
    if not isinstance(declared, dict):
        raise PackageStructureError("the front matter of README.md must be a mapping of names and values")
    if declared.get("sdk", "docker") != "docker":
        raise PackageStructureError(f"README.md says sdk: {declared['sdk']}, but environments run in a docker Space")
    wanted = {**_space_keys(package, interface), "tags": ["openenv"]}
    missing = {name: value for name, value in wanted.items() if name not in declared}
    added = yaml.safe_dump(missing, sort_keys=False) if missing else ""
    return f"---\n{match['block']}{added}---\n{text[match.end() :]}"


def _front_matter(package: SpacePackage, interface: bool) -> dict[str, Any]:
    title = package.name.replace("_", " ").replace("-", " ").title().removesuffix(" Env")
    return {
        "title": f"{title} Environment",
        "emoji": "🧩",
        "colorFrom": "blue",
        "colorTo": "green",
        **_space_keys(package, interface),
        "pinned": False,
        "tags": ["openenv"],
    }


def _space_keys(package: SpacePackage, interface: bool) -> dict[str, Any]:
    """Return the front-matter keys of a Docker Space: its SDK, the port, and the path of the web UI."""
    return {"sdk": "docker", "app_port": package.port, **({"base_path": "/web"} if interface else {})}
