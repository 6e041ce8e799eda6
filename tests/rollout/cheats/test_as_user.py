"""Cheating does not pay where a user without rights runs the rollouts: another kind of sandbox, the same cheats."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import openenv

AS_A_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all")
SUITE = """
import json, sys
from openenv.sandboxes import LocalSandboxes
from openenv.testing import all_cheats, run_cheats
report = run_cheats(LocalSandboxes(require_cgroup=False), cheats=all_cheats(), concurrency=4, quick=True)
json.dump(report.document(), sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a user already")
def test_no_cheat_pays_for_a_user_without_rights(tmp_path: Path) -> None:
    python = f"/usr/bin/python3.{sys.version_info.minor}"
    if not os.path.exists(python) or shutil.which("setpriv") is None:
        pytest.skip("there is no such Python, or no setpriv, that a user without rights can run")
    # Binary packages fit: the version is the same.
    paths = [sysconfig.get_path("purelib"), str(Path(openenv.__file__).parents[1])]
    readable = subprocess.run(
        [*AS_A_USER, python, "-c", "import pydantic, yaml, httpx2, openenv.testing.cheats"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
    )
    if readable.returncode != 0:
        pytest.skip(f"a user without rights cannot load the package here: {readable.stderr.splitlines()[-1]}")
    done = subprocess.run(
        [*AS_A_USER, python, "-c", SUITE],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(paths), "HOME": "/tmp"},
        capture_output=True,
        text=True,
        cwd="/tmp",
    )
    if "user namespaces" in done.stderr:
        pytest.skip("this machine forbids user namespaces")
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert (report["wins"], report["dodges"]) == ([], [])
    assert len(report["cheats"]) >= 200
