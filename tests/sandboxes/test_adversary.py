"""What an adversary tried against sandboxes: each of these once failed, or failed now and then."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from openenv.errors import SandboxError, SandboxTreeError
from openenv.sandboxes.base import Limits, Sandboxes, SandboxSpec


def test_an_archive_with_much_padding_is_unpacked(local: Sandboxes, tmp_path: Path) -> None:
    archive = tmp_path / "padded.tar"
    with tarfile.open(archive, "w") as out:
        out.addfile(tarfile.TarInfo("file"))
    with archive.open("ab") as file:
        file.write(bytes(1 << 20))
    with local.open() as sandbox:
        sandbox.unpack(archive, "there")
        assert sandbox.exists("there/file")


@pytest.mark.parametrize(
    "make", ["truncate -s 1T huge", "python3 -c \"import os\nfor _ in range(3000): os.mkdir('ddd'); os.chdir('ddd')\""]
)
def test_a_tree_that_cannot_be_taken_is_distinguished_from_a_sandbox_that_failed(
    local: Sandboxes, tmp_path: Path, make: str
) -> None:
    with local.open() as sandbox:
        assert sandbox.exec(make).exit_code == 0
        with pytest.raises(SandboxTreeError):
            sandbox.pack(".", tmp_path / "tree.tar", max_bytes=1 << 20)
        sandbox.kill()
        with pytest.raises(SandboxError) as gone:
            sandbox.pack(".", tmp_path / "tree.tar")
        assert not isinstance(gone.value, SandboxTreeError)


def test_pipes_loops_and_shut_folders_do_not_hold_up_packing(local: Sandboxes, tmp_path: Path) -> None:
    with local.open() as sandbox:
        sandbox.exec("mkfifo pipe; ln -s pipe link; ln -s loop loop; mkdir -m 000 shut; echo x > file; chmod 000 file")
        sandbox.pack(".", tmp_path / "tree.tar")
    with tarfile.open(tmp_path / "tree.tar") as tree:
        assert set(tree.getnames()) == {".", "link", "loop", "shut", "file"}


@pytest.mark.parametrize("name", ["memory_mb", "pids", "cpus", "disk_mb"])
def test_limits_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SandboxSpec(limits=Limits(**{name: 0}))
