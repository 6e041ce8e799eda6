"""The files of an image that runs Python and has this package's dependencies, made of this machine's own.

It stands for `python:3.12-slim`. Its pip is a real one that reaches no network: its index is a folder of the image,
which has other packages called `openenv` and `openenv-core`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PIP = '#!/bin/sh\necho "pip $@" >> /installed.log\nexec python -m pip "$@"\n'
NOTED = '#!/bin/sh\necho "$0 $@" >> /installed.log\n'
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__"}


VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
PROGRAMS = {"pip": PIP, "apt-get": NOTED, "uv": NOTED}
"""Programs for `busybox_archive`; two only note their calls, because they need a network."""
# pip reads "0" as: use the hatchling of this image.
VARIABLES = {"PATH": "/usr/local/bin:/bin", "PIP_INDEX_URL": "file:///index", "PIP_NO_BUILD_ISOLATION": "0"}
"""Environment variables of the image."""
# Large packages that the tests do not use; pip takes them for installed.
_PRETENDED = {
    "uv": "0.9",
    "gradio": "6.5",
    "openai": "2.9",
    "huggingface_hub": "1.30",
    "httpx": "0.28.1",
    "requests": "2.32",
}
# The newest of the other packages; its module cannot be imported.
_OTHERS = {"openenv": "0.10.0", "openenv_core": "0.3.0"}


def add_python(archive: Path) -> None:
    """Add Python, pip, the dependencies and an index to an archive that `docker import` takes."""
    program = Path(sys.executable).resolve()
    standard = Path(sysconfig.get_path("stdlib"))
    with tarfile.open(archive, "a") as tar:
        tar.add(program, f"usr/local/bin/{VERSION}")
        _link(tar, "usr/local/bin/python", VERSION)
        files = {str(path.relative_to(standard)): path for path in _code(standard)}
        installed = [*_dependencies("openenv"), *_dependencies("hatchling", with_itself=True)]
        files |= {f"site-packages/{inside}": path for path, inside in installed}
        pip = Path(str(metadata.distribution("pip").locate_file("pip")))
        files |= {f"site-packages/pip/{path.relative_to(pip)}": path for path in _code(pip)}
        for inside, path in files.items():
            tar.add(path, f"usr/local/lib/{VERSION}/{inside}")
        for library in _libraries({program, *(path for path in files.values() if ".so" in path.suffixes)}):
            tar.add(library.resolve(), str(library).lstrip("/"))
        for name, version in _PRETENDED.items():
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            _write(tar, f"usr/local/lib/{VERSION}/site-packages/{name}-{version}.dist-info/METADATA", text.encode())
        for name, version in _OTHERS.items():
            wheel = f"{name}-{version}-py3-none-any.whl"
            _write(tar, f"index/{name.replace('_', '-')}/index.html", f'<a href="{wheel}">{wheel}</a>'.encode())
            _write(tar, f"index/{name.replace('_', '-')}/{wheel}", _other_wheel(name, version))


def _other_wheel(name: str, version: str) -> bytes:
    """A wheel of another package with one of our names."""
    data = io.BytesIO()
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("openenv/__init__.py", "raise ImportError('the other package')\n")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{about}/RECORD", f"openenv/__init__.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n"
        )
    return data.getvalue()


def _write(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _code(root: Path) -> list[Path]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return [path for path in files if not _LEFT_OUT.intersection(path.relative_to(root).parts)]


def _dependencies(name: str, *, with_itself: bool = False) -> list[tuple[Path, str]]:
    """The files of all distributions that one requires, without its own or with them."""
    waiting = [Requirement(name)]
    known: set[tuple[str, frozenset[str]]] = set()
    files: dict[str, Path] = {}
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        try:
            distribution = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:  # for another platform
            continue
        if key in known:
            continue
        known.add(key)
        if with_itself or key[0] != name:
            listed = [file for file in distribution.files or [] if not {"..", "__pycache__"} & set(file.parts)]
            files |= {str(file): path for file in listed if (path := Path(str(file.locate()))).is_file()}
        for requirement in map(Requirement, distribution.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(requirement)
    return [(path, inside) for inside, path in files.items()]


def _libraries(programs: set[Path]) -> set[Path]:
    """What the dynamic linker loads for programs, and the linker itself."""
    done = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False)
    return {Path(path) for path in re.findall(r"(?:=>\s+|^\s+)(/\S+) \(0x", done.stdout, re.MULTILINE)}
