"""The same containers with podman, where it is installed: in a network and a store of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
SCRIPT = """
import subprocess, sys
from openenv.errors import ProviderError, ServerDied
from openenv.providers import LocalDockerProvider

options = {"run_args": sys.argv[1:]}
provider = LocalDockerProvider(engine="podman", stop_timeout_s=2, ready_timeout_s=100)
def left():
    return subprocess.run(["podman", "ps", "--all", "--quiet"], capture_output=True, check=True).stdout.decode()

try:
    variables = {"GREETING": "a 'b' #c", "LINES": "x\\ny"}
    url = provider.start_container("localhost/tiny-env:1", env_vars=variables, **options)
except ProviderError as error:
    sys.exit(f"unavailable: {error}")
provider.wait_for_ready(url)
print(provider.log())
published = subprocess.run(["podman", "port", provider.container_name], capture_output=True, check=True).stdout.decode()
assert published.strip() == "8000/tcp -> 127.0.0.1:" + url.rpartition(":")[2], published
provider.stop_container()
assert left() == ""
url = provider.start_container("localhost/tiny-env:1", command=["sh", "-c", "sleep 1; echo bye; exit 3"], **options)
try:
    provider.wait_for_ready(url)
except ServerDied as error:
    print(error)
assert left() == ""
"""
RUNC = ["--runtime", "runc", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]


@pytest.mark.slow
def test_podman_starts_containers_on_loopback_and_leaves_none(import_tiny: list[str], tmp_path: Path) -> None:
    missing = [name for name in ("podman", "unshare", "ip") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing)}: apt-get install -y podman util-linux iproute2")
    store = tmp_path / "storage.conf"
    store.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n')
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CONTAINERS_STORAGE_CONF": str(store)}
    subprocess.run(["podman", *import_tiny], check=True, capture_output=True, env=environment)
    output = ""
    for options in ([], RUNC):
        inside = ["sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, "-c", SCRIPT, *options]
        done = subprocess.run(
            ["unshare", "--net", *inside], capture_output=True, text=True, env=environment, timeout=200, check=False
        )
        if done.returncode == 0:
            assert done.stdout.startswith("serving a 'b' #c\n")
            assert "exit code 3.\nThe end of its log:\nbye" in done.stdout
            return
        output = done.stderr
    if "unavailable" in output:
        pytest.skip(output)
    pytest.fail(output)
