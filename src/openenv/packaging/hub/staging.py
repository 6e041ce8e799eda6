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
from openenv.providers.own_wheel import add_wheels

# Hidden files may hold credentials (.env, .git); the others are made by tools.
DEFAULT_IGNORE = (".*", "__pycache__", "*.pyc", "build/", "*.egg-info")
DEFAULT_PORT = 8000
WEB_VARIABLE = "ENABLE_WEB_INTERFACE"
_DOCKERFILES = ("server/Dockerfile", "Dockerfile")
# <<EOF, <<-EOF, <<"EOF": the lines up to the word are data, not instructions.
_HEREDOC = re.compile(r"<<-?[\"']?([A-Za-z_]\w*)[\"']?")
# A block between two lines `---` at the very beginning of the file.
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
    # The name is the only key that a Space cannot do without: it names the page.
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
    # `True` is an int in Python; `port: yes` in YAML must not become port 1.
    port = manifest.get("port", DEFAULT_PORT)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise PackageStructureError(f"{MANIFEST}: port must be a number from 1 to 65535, not {port!r}")
    return SpacePackage(folder, name, port, _variables(manifest.get("variables")))


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
        text = "" if one is None else str(one)
        variables[str(name)] = text.lower() if isinstance(one, bool) else text
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
        # Empty lines and comments give no rule.
        self._rules = [rule for line in lines if (rule := _ignore_rule(line)) is not None]

    def excludes(self, path: PurePosixPath, *, is_folder: bool) -> bool:
        """Return whether a path, relative to the package, is left out. Callers skip the contents of ignored folders."""
        # As in Git, the last matching pattern decides, so the search runs backwards.
        for rule in reversed(self._rules):
            if (is_folder or not rule.only_folders) and rule.pattern.fullmatch(path.as_posix()):
                return not rule.negated
        return False


def _ignore_rule(line: str) -> _IgnoreRule | None:
    # Examples: `*.pyc` any depth; `/build` only at the top; `docs/` folders only; `!keep.txt` includes again.
    text = line.rstrip("\r\n")
    # A trailing space counts only if it is escaped.
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
    # A slash inside the pattern ties it to the top, as in Git.
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
        # `**/` matches no folder as well: `**/a` finds `a` and `x/y/a`.
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
        # `[!a]` in Git is `[^a]` in a regular expression.
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
        # Changing `folders` in place keeps `os.walk` out of ignored folders.
        folders[:] = sorted(name for name in folders if not rules.excludes(here / name, is_folder=True))
        included = [name for name in files if not rules.excludes(here / name, is_folder=False)]
        for name in [*folders, *included]:
            path = Path(place, name)
            # Links to files inside the package are copied as files.
            if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(source)):
                # A copy of the target could publish a file that has nothing to do with the package.
                raise PackageStructureError(
                    f"{here / name} is a link that leaves the package: copy the file there, or "
                    "leave the link out with --exclude"
                )
        (target / inside).mkdir(parents=True, exist_ok=True)
        for name in included:
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
    # Later patterns win, so the caller's patterns can include a default again.
    rules = IgnoreRules([*DEFAULT_IGNORE, *ignore])
    with tempfile.TemporaryDirectory(prefix="openenv-push-", ignore_cleanup_errors=True) as home:
        copy = Path(home, "space")
        _copy(package.folder, copy, rules)
        dockerfile, readme = copy / "Dockerfile", copy / "README.md"
        # A Space builds the Dockerfile at its top.
        if not dockerfile.is_file() and (copy / _DOCKERFILES[0]).is_file():
            (copy / _DOCKERFILES[0]).rename(dockerfile)
        # The user's patterns may have excluded a required file; say so instead of uploading a broken Space.
        for path in (dockerfile, readme):
            if not path.is_file():
                raise PackageStructureError(f"the ignore rules leave out {path.name}, which a Space needs")
        edit_file(dockerfile, lambda text: _space_dockerfile(text, base_image, interface))
        # The Hub builds the Space, and its index may have another package called openenv.
        add_wheels(copy, dockerfile)
        edit_file(readme, lambda text: space_readme(text, package, interface=interface is not False))
        yield copy


def _space_dockerfile(text: str, base_image: str | None, interface: bool | None) -> str:
    # By default the web UI is on, because visitors of a Space expect a page. The Dockerfile may decide otherwise.
    if interface is None and not sets_interface(text):
        interface = True
    return docker_file(text, base_image=base_image, interface=interface)


def edit_file(path: Path, change: Callable[[str], str]) -> None:
    """Rewrite a text file, with the line ends of Unix.

    Raises:
        PackageStructureError: It is not UTF-8.
    """
    try:
        # A byte order mark before `---` or FROM would break both parsers.
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
    # Only the last stage becomes the image. A CMD of an earlier stage has no effect.
    starts = [each.line for each in instructions if each.word == "FROM"]
    last_stage = starts[-1] if starts else 0
    command = next((each.line for each in instructions if each.word == "CMD" and each.line > last_stage), None)
    setting = f"ENV {WEB_VARIABLE}={str(interface).lower()}"
    # Without CMD the setting goes to the end of the file, after the last text.
    if command is None:
        while lines and not lines[-1].strip():
            lines.pop()
        lines += [setting, ""]
    else:
        # Before CMD, so that the last instruction stays the command.
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
            # A comment is allowed between continued lines and belongs to none of them.
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
        # Here-documents: skip their lines, which may look like instructions.
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
    # A Dockerfile without FROM is invalid; adding one gives a better error from the builder than we could.
    bases = [each for each in instructions if each.word == "FROM"]
    if not bases:
        lines.insert(0, f"FROM {image}")
        return
    for each in instructions:
        # ARG BASE_IMAGE=... before FROM ${BASE_IMAGE}: the author's own way to change the base.
        is_default = each.line < bases[0].line and re.match(r"ARG\s+BASE_IMAGE\b", each.text, re.IGNORECASE)
        if is_default and "BASE_IMAGE" in bases[0].text:
            lines[each.line] = f"ARG BASE_IMAGE={image}"
            return
    former = _image_of(bases[0].text)
    for each in bases:
        if _image_of(each.text) == former:
            # FROM may be continued over lines, which a simple replacement cannot handle.
            if former not in lines[each.line]:
                raise PackageStructureError(f"the Dockerfile's FROM {former} has to be one line, to be replaced")
            lines[each.line] = lines[each.line].replace(former, image, 1)


def _image_of(text: str) -> str:
    """Return the image of `FROM [--platform=P] IMAGE [AS NAME]`."""
    # Options such as --platform come before the image.
    words = [word for word in text.split()[1:] if not word.startswith("--")]
    return words[0] if words else ""


# -- the README -----------------------------------------------------------------------------------------------------


def space_readme(text: str, package: SpacePackage, *, interface: bool = True) -> str:
    """Return a README with the front matter of a Docker Space; the author's text stays.

    Raises:
        PackageStructureError: The front matter is not a YAML mapping, or belongs to another kind of Space.
    """
    match = _FRONT_MATTER.match(text)
    # No front matter: write a complete one.
    if match is None:
        front = yaml.safe_dump(_front_matter(package, interface), sort_keys=False, allow_unicode=True)
        return f"---\n{front}---\n\n{text}"
    try:
        declared = yaml.safe_load(match["block"]) or {}
    except yaml.YAMLError as error:
        raise PackageStructureError(f"the front matter of README.md is not valid YAML: {error}") from error
    if not isinstance(declared, dict):
        raise PackageStructureError("the front matter of README.md must be a mapping of names and values")
    # Gradio and static Spaces cannot run a server of ours.
    if declared.get("sdk", "docker") != "docker":
        raise PackageStructureError(f"README.md says sdk: {declared['sdk']}, but environments run in a docker Space")
    wanted = {**_space_keys(package, interface), "tags": ["openenv"]}
    # Keys of the author win; only missing ones are added at the end of the block.
    missing = {name: value for name, value in wanted.items() if name not in declared}
    added = yaml.safe_dump(missing, sort_keys=False) if missing else ""
    return f"---\n{match['block']}{added}---\n{text[match.end() :]}"


def _front_matter(package: SpacePackage, interface: bool) -> dict[str, Any]:
    # maze_env -> "Maze": the title already ends with "Environment".
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
