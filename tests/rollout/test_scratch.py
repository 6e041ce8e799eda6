"""Scratch folders: removed by their engine, or by the next one where it died."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from openenv.sandboxes.host import scratch, sweep

DIES = """
import os, sys
from pathlib import Path
from openenv.sandboxes.host import scratch
with scratch(Path(sys.argv[1])) as folder:
    (folder / "left").write_text("x")
    print(folder, flush=True)
    os._exit(9)
"""


def test_a_folder_is_gone_with_everything_in_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with scratch(root) as folder:
        (folder / "closed").mkdir()
        (folder / "closed" / "file").write_text("x")
        (folder / "closed").chmod(0o500)
        with scratch(root) as other:
            assert other != folder
        assert folder.is_dir()
    assert not root.exists()


def test_the_folder_of_a_dead_engine_is_swept_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    root = tmp_path / "root"
    done = subprocess.run(
        [sys.executable, "-c", DIES, str(root)], capture_output=True, text=True, timeout=60, check=False
    )
    left = Path(done.stdout.strip())
    assert (left / "left").exists()
    with scratch(root) as folder:
        assert not left.exists()
        assert sweep(root) == []
        assert folder.is_dir()
    assert not root.exists()
