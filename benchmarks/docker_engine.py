"""A Docker engine of one's own: `dockerd` as a child process with its own folder and socket, ended by its pid.

For benchmarks and tests. It touches no firewall, no bridge of another engine and no image store but its own, needs root
and the packages `docker.io`, `runc`, `containerd` and `iproute2`, and pulls nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

INSTALL = "apt-get install -y --no-install-recommends docker.io runc containerd iptables iproute2"
_START_S = 60.0
_PR_SET_PDEATHSIG = 1


class EngineUnavailable(RuntimeError):
    """No engine can be started here; the text says why."""


@contextlib.contextmanager
def docker_engine(folder: Path | None = None, *, bridge: str = "none") -> Iterator[str]:
    """Run `dockerd` and give its address, such as `unix:///tmp/x/docker.sock`; it and its files are gone afterwards.

    Containers have no network by default, or that of a `bridge` which is there already.

    Raises:
        EngineUnavailable: a program or a right is missing, or it did not start.
    """
    missing = [name for name in ("dockerd", "docker", "runc", "containerd") if shutil.which(name) is None]
    if missing:
        raise EngineUnavailable(f"{', '.join(missing)} not installed: {INSTALL}")
    if os.geteuid() != 0:
        raise EngineUnavailable("dockerd needs root")
    home = Path(tempfile.mkdtemp(prefix="docker-engine-", dir=folder))
    process = _start(home, bridge)
    try:
        _wait(process, home)
        yield f"unix://{home}/docker.sock"
    finally:
        _stop(process)
        _remove(home)


def _start(home: Path, bridge: str) -> subprocess.Popen[bytes]:
    options = {
        "--data-root": home / "data",
        "--exec-root": home / "exec",
        "--pidfile": home / "pid",
        "--host": f"unix://{home}/docker.sock",
        "--storage-driver": "overlay2",
        "--bridge": bridge,
        "--shutdown-timeout": "5",
    }
    argv = ["dockerd", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    argv += [str(word) for pair in options.items() for word in pair]
    with (home / "log").open("wb") as log:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent
        )


def _end_with_parent() -> None:
    """Have the kernel end this process when the one that starts the engine is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], home: Path) -> None:
    deadline = time.monotonic() + _START_S
    ask = ["docker", "--host", f"unix://{home}/docker.sock", "version"]
    while subprocess.run(ask, capture_output=True, check=False).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            tail = (home / "log").read_text(errors="replace").strip().splitlines()[-1:]
            raise EngineUnavailable(f"dockerd did not start: {''.join(tail)[:500]}")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _remove(home: Path) -> None:
    """Unmount what the engine left mounted (the namespaces of its networks) and remove its folder."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((place for place in mounted if place.startswith(f"{home}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)
    shutil.rmtree(home, ignore_errors=True)
