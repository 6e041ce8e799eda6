"""The wheel of the running `openenv`, for images, Spaces and the environments that uv makes.

    write_wheels(FOLDER)         two wheels from the files of this process
    add_wheels(CONTEXT, FILE)    the wheels beside a package, and a Dockerfile whose pip and uv find them

An index may have no `openenv` of this version, or another package of that name. So an image never asks it: the files of
a package require exactly the running version, and the wheels are found before any index. Must not know container
engines or the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

# Below the context, and in the image.
FOLDER = "openenv-wheels"
IN_IMAGE = f"/opt/{FOLDER}"
# Each FROM begins with an empty file system, so these lines follow each of them.
INSTRUCTIONS = f"COPY {FOLDER} {IN_IMAGE}\nENV PIP_FIND_LINKS={IN_IMAGE} UV_FIND_LINKS={IN_IMAGE}"
_PARTS = ("openenv", "openenv_core", "openenv_taskset.py")
# Zip files store times since 1980. A fixed one gives equal wheels of equal files, so engines find their cached layers.
_TIME = (1980, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: openenv\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# The older name has no files: it requires this package, so nothing installs the published one beside it.
_OLD_NAME = "openenv-core"
_OLD_METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Provides-Extra: core
Requires-Dist: openenv[core]=={version}
"""
# A requirement of ours in any spelling: openenv, openenv-core[core]>=0.2, openenv @ git+https://...
_REQUIREMENT = r"openenv(?:[-_]core)?\s*(?P<extras>\[[^\]]*\])?\s*(?:[<>=!~@][^\"'\n]*)?"
# In pyproject.toml: "openenv>=0.2", with either quote.
_QUOTED = re.compile(rf"""(?P<quote>["']){_REQUIREMENT}(?P=quote)""")
# In requirements.txt: a whole line.
BARE_REQUIREMENT = re.compile(rf"(?m)^{_REQUIREMENT}$")
# Each FROM line: FROM python:3.12-slim AS build
_FROM = re.compile(r"(?mi)^FROM\s.*$")
# RUN pip install uv && \
#     pip install openenv
_RUN = re.compile(r"(?mi)^RUN\s(?:.*\\\n)*.*$")  # with the lines that continue it
# In a RUN instruction: pip install openenv[core]>=0.2, with or without quotes.
_INSTALLED = re.compile(
    r"""(?<=\s)(?P<quote>["']?)openenv(?:[-_]core)?(?P<extras>\[[^\]\s]*\])?(?:[<>=!~][^\s"']*)?(?P=quote)(?=\s|$)"""
)


def add_wheels(context: Path, dockerfile: Path) -> None:
    """Let a Dockerfile install the running version, whatever the package in the context requires of `openenv`.

    Changes the files in the context: call it with a copy of a package.
    """
    write_wheels(context / FOLDER)
    # The package's own patterns may leave out wheels; the last match decides.
    ignored = context / ".dockerignore"
    if ignored.is_file():
        _rewrite(ignored, lambda text: f"{text.rstrip()}\n!{FOLDER}\n")
    exact = rf"openenv\g<extras>=={_version()}"
    _rewrite(context / "pyproject.toml", lambda text: _QUOTED.sub(rf"\g<quote>{exact}\g<quote>", text))
    for name in ("server/requirements.txt", "requirements.txt"):
        _rewrite(context / name, lambda text: BARE_REQUIREMENT.sub(exact, text))
    _rewrite(dockerfile, lambda text: _FROM.sub(rf"\g<0>\n{INSTRUCTIONS}", _RUN.sub(_install_ours, text)))
    # The lock names another version, and its hashes.
    (context / "uv.lock").unlink(missing_ok=True)


def _install_ours(command: re.Match[str]) -> str:
    """Make an instruction that installs `openenv`, or `openenv-core`, install the running version."""
    text = command.group()
    # `RUN pip install "openenv-core[core]>=0.2"` becomes `RUN pip install "openenv[core]==0.11.0"`.
    return _INSTALLED.sub(rf"\g<quote>openenv\g<extras>=={_version()}\g<quote>", text) if "install" in text else text


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    if path.is_file():
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")


def write_wheels(folder: Path) -> list[Path]:
    """Write the wheel of the running version, and one of `openenv-core` that requires it; return both files.

    The files come from the folder that this process imports, so an editable installation gives its present code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    version = _version()
    ours = _write_wheel(folder, "openenv", _metadata_files(), _own_files())
    description = _OLD_METADATA.format(name=_OLD_NAME, version=version).encode()
    return [ours, _write_wheel(folder, _OLD_NAME, {"METADATA": description}, ())]


def _version() -> str:
    return metadata.version("openenv")


def _metadata_files() -> dict[str, bytes]:
    """Return the files of the installed metadata that describe the package, not its installation."""
    installed = metadata.distribution("openenv")
    texts = {name: installed.read_text(name) for name in ("METADATA", "entry_points.txt")}
    return {name: text.encode() for name, text in texts.items() if text}


def _own_files() -> Iterator[tuple[str, bytes]]:
    # In site-packages, or in the `src` of a checkout.
    root = Path(__file__).resolve().parents[2]
    for part in _PARTS:
        place = root / part
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                yield path.relative_to(root).as_posix(), path.read_bytes()


def _write_wheel(
    folder: Path, name: str, described: dict[str, bytes], files: Iterator[tuple[str, bytes]] | tuple[()]
) -> Path:
    stem = f"{name.replace('-', '_')}-{_version()}"
    path = folder / f"{stem}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(path, "w") as archive:
        about = {**described, "WHEEL": _WHEEL.encode()}
        for inside, data in (*files, *((f"{stem}.dist-info/{file}", data) for file, data in about.items())):
            _add(archive, inside, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{inside},sha256={digest},{len(data)}\n")
        record.append(f"{stem}.dist-info/RECORD,,\n")
        _add(archive, f"{stem}.dist-info/RECORD", "".join(record).encode())
    return path


def _add(archive: zipfile.ZipFile, inside: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(inside, _TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, data)
