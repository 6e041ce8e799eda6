"""The files of an image that runs Python and has this package's dependencies, made of this machine's own.

It stands for `python:3.12-slim`: its `pip` copies packages from folders and installs nothing else.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
from importlib import metadata
from pathlib import Path

PIP = """#!/bin/sh
echo "pip $@" >> /installed.log
for word; do
  folder=${word%%[*}
  if [ -d "$folder/src" ]; then cp -r "$folder"/src/* /usr/local/lib/PYTHON/site-packages/; fi
done
"""
NOTED = '#!/bin/sh\necho "$0 $@" >> /installed.log\n'
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__"}


VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
PROGRAMS = {"pip": PIP.replace("PYTHON", VERSION), "apt-get": NOTED, "uv": NOTED}
"""What stands for programs that need a network, for `busybox_archive`."""


def add_python(archive: Path) -> None:
    """Add Python and the dependencies to an archive that `docker import` takes."""
    program = Path(sys.executable).resolve()
    standard = Path(sysconfig.get_path("stdlib"))
    with tarfile.open(archive, "a") as tar:
        tar.add(program, f"usr/local/bin/{VERSION}")
        _link(tar, "usr/local/bin/python", VERSION)
        files = {str(path.relative_to(standard)): path for path in _code(standard)}
        files |= {f"site-packages/{inside}": path for path, inside in _dependencies("openenv")}
        # Commands are found by entry points, which `pip` of this image cannot write.
        files |= {
            f"site-packages/{file}": Path(str(file.locate()))
            for file in metadata.files("openenv") or ()
            if file.parent.suffix == ".dist-info" and file.name in ("METADATA", "entry_points.txt")
        }
        for inside, path in files.items():
            tar.add(path, f"usr/local/lib/{VERSION}/{inside}")
        for library in _libraries({program, *(path for path in files.values() if ".so" in path.suffixes)}):
            tar.add(library.resolve(), str(library).lstrip("/"))


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _code(root: Path) -> list[Path]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return [path for path in files if not _LEFT_OUT.intersection(path.relative_to(root).parts)]


def _dependencies(name: str) -> list[tuple[Path, str]]:
    """The files of all distributions that one requires, without its own."""
    known, waiting = {name.lower()}, [name]
    files: list[tuple[Path, str]] = []
    while waiting:
        distribution = metadata.distribution(waiting.pop())
        if distribution.metadata["Name"].lower() != name:
            listed = [file for file in distribution.files or [] if not {"..", "__pycache__"} & set(file.parts)]
            files += [(Path(str(file.locate())), str(file)) for file in listed if Path(str(file.locate())).is_file()]
        for requirement in distribution.requires or []:
            other = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
            if "extra ==" in requirement or other in known:
                continue
            known.add(other)
            try:
                metadata.distribution(other)
            except metadata.PackageNotFoundError:  # for another platform
                continue
            waiting.append(other)
    return files


def _libraries(programs: set[Path]) -> set[Path]:
    """What the dynamic linker loads for programs, and the linker itself."""
    done = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False)
    return {Path(path) for path in re.findall(r"(?:=>\s+|^\s+)(/\S+) \(0x", done.stdout, re.MULTILINE)}
