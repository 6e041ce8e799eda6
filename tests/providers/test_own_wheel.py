"""The wheels of the running version: what pip makes of them, and what is in them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from openenv.providers.own_wheel import write_wheels

VERSION = metadata.version("openenv")


def test_pip_installs_the_wheels_with_every_file_and_command(tmp_path: Path) -> None:
    wheels = write_wheels(tmp_path / "wheels")
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(tmp_path / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels)], check=True)
    site = tmp_path / "site"
    assert {"openenv", "openenv_core", "openenv_taskset.py", "bin"} <= {path.name for path in site.iterdir()}
    assert (site / "openenv" / "server" / "web" / "static").is_dir()
    assert (site / "openenv" / "cli" / "template" / "server" / "Dockerfile.tmpl").is_file()
    installed = {one.metadata["Name"]: one for one in metadata.distributions(path=[str(site)])}
    assert {name: one.version for name, one in installed.items()} == {"openenv": VERSION, "openenv-core": VERSION}
    assert installed["openenv"].requires == metadata.requires("openenv")
    assert {point.name for point in installed["openenv"].entry_points} >= {"build", "docker", "opencode", "openenv"}
    assert installed["openenv-core"].requires == [f"openenv[core]=={VERSION}"]
    assert (site / "bin" / "openenv").is_file()


def test_equal_files_give_equal_wheels_without_compiled_code(tmp_path: Path) -> None:
    first, second = write_wheels(tmp_path / "a")[0], write_wheels(tmp_path / "b")[0]
    assert first.read_bytes() == second.read_bytes()
    names = zipfile.ZipFile(first).namelist()
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert len(names) == len(set(names))
