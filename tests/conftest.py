"""Fixtures for all tests: real servers on free loopback ports, stopped when the test ends, and two interpreters.

One is that of the tests, the other has the published package, in a virtual environment of its own:
`OPENENV_PUBLISHED_PYTHON`, or `.bench/published`, which is made when it is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import importlib.util
import io
import os
import random
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import openenv
from openenv.errors import SandboxUnavailable
from openenv.sandboxes import LocalSandboxes
from program_interpreters import NOT_INHERITED, Interpreter
from servers import Serve, running_server

SOURCE = Path(openenv.__file__).resolve().parent.parent
PUBLISHED_VENV = Path(__file__).resolve().parents[1] / ".bench" / "published"
PUBLISHED_REQUIREMENTS = ["openenv==0.10.0", "uvloop", "httptools"]
IS_PUBLISHED = "from importlib.metadata import version; assert version('openenv') == '0.10.0'"
_LONG_S = 900  # a test with such a time limit takes many minutes


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without the garbage collector, and keep it away from what they are made of.

    Collecting makes a million objects that all stay: searching them for garbage took half of the time.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `slow_but_for` does not name; give tests of the published package time.

    That package may have to be installed first, and takes long to import.
    """
    for item in items:
        quick = item.get_closest_marker("slow_but_for")
        if quick is not None and item.name.partition("[")[2].removesuffix("]") not in quick.args:
            item.add_marker(pytest.mark.slow)
        wants_it = item.get_closest_marker("published") or "published" in getattr(item, "fixturenames", ())
        if wants_it and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
    _spread_long_tests(items)


def _spread_long_tests(items: list[pytest.Item]) -> None:
    """Move the tests that take many minutes apart, so that no worker gets several of them and ends long after the rest.

    Each worker begins with neighbours: a quarter of the tests for one of four.
    """
    times = {item: marker.args[0] for item in items if (marker := item.get_closest_marker("timeout")) and marker.args}
    long = sorted((item for item in times if times[item] >= _LONG_S), key=lambda item: -times[item])
    others = [item for item in items if times.get(item, 0) < _LONG_S]
    half = (len(long) + 1) // 2
    longest_first = [item for pair in zip_longest(long[:half], long[half:]) for item in pair if item is not None]
    stride = len(others) // max(len(long), 1)
    for number, item in enumerate(longest_first):
        others.insert(number * (stride + 1), item)
    items[:] = others


@pytest.fixture(scope="session", autouse=True)
def episode_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what servers record out of the user's own data folder."""
    folder = tmp_path_factory.mktemp("episodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENENV_EPISODES", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def validates_no_checks() -> Iterator[None]:
    """Run the thousands of small tasks of the tests without a validation each; its own tests ask for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENENV_VALIDATE_CHECKS", "0")
        yield


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers; all are stopped when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda app, **settings: stack.enter_context(running_server(app, **settings))


@pytest.fixture(scope="session")
def serve_once() -> Iterator[Serve]:
    """Start servers that tests share; all are stopped at the very end."""
    with contextlib.ExitStack() as stack:
        yield lambda app, **settings: stack.enter_context(running_server(app, **settings))


@contextlib.contextmanager
def _in_a_hurry(client: Any, message_timeout_s: float) -> Iterator[None]:
    client = getattr(client, "async_client", client)
    usual = client._options
    client._options = dataclasses.replace(usual, message_timeout_s=message_timeout_s)
    vars(client).pop("_tool_requests", None)  # it has the time of before
    try:
        yield
    finally:
        client._options = usual
        vars(client).pop("_tool_requests", None)


@pytest.fixture
def in_a_hurry() -> Callable[[Any, float], contextlib.AbstractContextManager[None]]:
    """Let a client wait only so long for a reply; requests before and after have their time on a busy machine too."""
    return _in_a_hurry


def _free_port() -> int:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Find ports to bind later, below those that the system hands out: another test is not given them meanwhile."""
    return _free_port


@pytest.fixture(scope="session")
def local() -> LocalSandboxes:
    """The `local` backend; `make test` installs bubblewrap where it can."""
    backend = LocalSandboxes()
    try:
        backend.check()
    except SandboxUnavailable as exc:
        pytest.skip(f"no local sandboxes here: {exc}")
    return backend


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def ours() -> Interpreter:
    """The interpreter that runs these tests."""
    return Interpreter("ours", sys.executable, SOURCE)


@pytest.fixture(scope="session")
def published() -> Interpreter:
    """An interpreter with the published package."""
    given = os.environ.get("OPENENV_PUBLISHED_PYTHON")
    if given:
        return Interpreter("published", given)
    python = PUBLISHED_VENV / "bin" / "python"
    PUBLISHED_VENV.parent.mkdir(exist_ok=True)
    with (PUBLISHED_VENV.parent / "published.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers may come here at once
        if not _has_published(python):
            _install_published(python)
    return Interpreter("published", str(python))


def _has_published(python: Path) -> bool:
    return python.exists() and subprocess.run([str(python), "-c", IS_PUBLISHED], check=False).returncode == 0


def _install_published(python: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(PUBLISHED_VENV)], check=True, env=environment)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PUBLISHED_REQUIREMENTS], check=True, env=environment)
    (PUBLISHED_VENV / "complete").touch()


@pytest.fixture(scope="session")
def docker_engines() -> Any:
    """The module that starts Docker engines which tests own."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "docker_engine.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def busybox_archive(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write the files of an image with nothing but busybox, and the folders and programs that are named."""
    program = shutil.which("busybox")
    if program is None or b"/ld-linux" in Path(program).read_bytes():
        pytest.skip("there is no static busybox: apt-get install -y busybox-static")
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()

    def write(*folders: str, **programs: str) -> Path:
        archive = tmp_path_factory.mktemp("image") / "root.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(program, "bin/busybox")
            for applet in set(applets) - {"busybox"}:
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
            for folder in folders:
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            for name, text in programs.items():
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.size, entry.mode = len(text), 0o755
                tar.addfile(entry, io.BytesIO(text.encode()))
        return archive

    return write
