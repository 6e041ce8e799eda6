"""Images for the cluster of `scripts/k8s_up.py`, made without a registry or an engine: an archive like `docker save`'s.

Layers: `debian.tar` is a small Debian with Python, which `scripts/k8s-build` makes; `packages-*.tar` has what openenv
needs, as requirements.lock pins it, and is kept until that changes; `source.tar` is src/openenv, its entry points and
gridworld.
"""

from __future__ import annotations

import compileall
import hashlib
import io
import json
import platform
import py_compile
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHON = "3.11"
"""Debian 12's."""
PACKAGES = f"usr/local/lib/python{PYTHON}/dist-packages"
PAUSE, SANDBOX = "pause:1", "sandbox:1"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class ArchivedImage:
    """An image of the archive."""

    name: str
    layers: Sequence[Path]
    command: Sequence[str]
    label: str = ""
    """Makes images of the same files different."""


def write_images(folder: Path, *, report: bool = True) -> Path:
    """Write all images into one archive and return it; `folder` has `debian.tar`, and keeps the layers."""
    base = folder / "debian.tar"
    packages = _packages_layer(folder, report=report)
    source = _source_layer(folder)
    serve = ["python3", "-m", "openenv", "serve", "gridworld_env.server.app:app", "--host", "0.0.0.0", "--no-token"]
    layers = [base, packages, source]
    images = [
        ArchivedImage(PAUSE, [base], ["sleep", "infinity"]),
        ArchivedImage(SANDBOX, [base], ["/bin/sh"]),
        ArchivedImage("gridworld:1", layers, serve, "1"),
        ArchivedImage("gridworld:2", layers, serve, "2"),
        ArchivedImage("gridworld:crash", layers, ["sh", "-c", "echo no such map; exit 4"]),
    ]
    archive = folder / "images.tar"
    _write_archive(archive, images)
    return archive


def _packages_layer(folder: Path, *, report: bool) -> Path:
    lock = (REPOSITORY / "requirements.lock").read_text()
    pins = [line.rstrip(" \\") for line in lock.splitlines() if line[:1].isalnum()]
    wanted = sorted(_requirements())
    key = hashlib.sha256("\n".join([*pins, *wanted, PYTHON, sys.version]).encode()).hexdigest()[:12]
    layer = folder / f"packages-{key}.tar"
    if layer.exists():
        return layer
    if report:
        print("k8s-up: fetching the Python packages of the images", flush=True)
    for old in folder.glob("packages-*.tar"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        (Path(scratch) / "pins").write_text("\n".join(pins))
        target = Path(scratch) / "target"
        machine = platform.machine()
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]
        pip += ["--target", str(target), "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
        for tag in ("manylinux_2_17", "manylinux2014", "manylinux_2_28", "manylinux_2_34"):
            pip += ["--platform", f"{tag}_{machine}"]
        subprocess.run([*pip, "--constraint", str(Path(scratch) / "pins"), *wanted], check=True)
        shutil.rmtree(target / "bin", ignore_errors=True)  # scripts that name this machine's Python
        _compile(target)
        _write_layer(Path(scratch) / "layer", {PACKAGES: target})
        (Path(scratch) / "layer").rename(layer)
    return layer


def _project() -> dict[str, Any]:
    """Return the part of pyproject.toml that describes the package."""
    project: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return project


def _requirements() -> list[str]:
    """Return what openenv needs in a cluster."""
    project = _project()
    return [*project["dependencies"], *project["optional-dependencies"]["kubernetes"]]


def _source_layer(folder: Path) -> Path:
    layer = folder / "source.tar"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for package in (REPOSITORY / "src" / "openenv", REPOSITORY / "envs" / "gridworld_env"):
            shutil.copytree(package, Path(scratch) / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        _compile(Path(scratch))
        _write_metadata(Path(scratch))
        _write_layer(layer, {PACKAGES: Path(scratch)})
    return layer


def _write_metadata(folder: Path) -> None:
    """Write what an installation would: commands and backends are found through entry points."""
    project = _project()
    about = folder / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("\n".join(groups))


def _compile(tree: Path) -> None:
    """Compile modules, where this is the images' Python: without that, each start of a server takes long."""
    if "{}.{}".format(*sys.version_info) == PYTHON:
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH  # layers keep no times
        compileall.compile_dir(tree, quiet=2, invalidation_mode=unchecked, workers=0)


def _write_layer(path: Path, trees: dict[str, Path]) -> None:
    """Write files as a layer: owned by root, of no particular time."""

    def tidy(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = "root"
        return entry

    with tarfile.open(path, "w") as tar:
        for name, tree in trees.items():
            tar.add(tree, name, filter=tidy)


def _write_archive(path: Path, images: Sequence[ArchivedImage]) -> None:
    digests = {layer: _digest(layer) for image in images for layer in image.layers}
    entries = []
    with tarfile.open(path, "w") as tar:
        for layer, digest in digests.items():
            tar.add(layer, f"{digest}.tar")
        for image in images:
            config = {
                "architecture": _ARCHITECTURES[platform.machine()],
                "os": "linux",
                "config": {
                    "Cmd": list(image.command),
                    "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "PYTHONUNBUFFERED=1"],
                    "WorkingDir": "/",
                    "Labels": {"version": image.label},
                },
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digests[layer]}" for layer in image.layers]},
            }
            name = f"{image.name.replace(':', '-')}.json"
            _add(tar, name, json.dumps(config).encode())
            files = [f"{digests[layer]}.tar" for layer in image.layers]
            entries.append({"Config": name, "RepoTags": [image.name], "Layers": files})
        _add(tar, "manifest.json", json.dumps(entries).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _digest(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            total.update(part)
    return total.hexdigest()
