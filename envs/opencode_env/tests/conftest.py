"""Fixtures for the OpenCode environment: scripted models, and a minimal sandbox backend of a user."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import SandboxUnavailable
from openenv.rollout.agents.opencode import OpenCode
from openenv.sandboxes import LocalSandboxes
from openenv.sandboxes.base import ExecResult
from openenv.settings import cache_dir
from openenv.testing import Script, ScriptedModel
from waiting import wait_until


class FolderJob:
    """A background process of a folder sandbox."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired as exc:
            raise TimeoutError(str(exc)) from exc

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


class FolderSandbox:
    """A user's own sandbox: processes of this machine, and a folder as their home. It has no more than that."""

    def __init__(self, home: Path, log: list[str]) -> None:
        self.sandbox_id = home.name
        self.home = home
        self.log = log
        self.is_dead = False
        self.jobs: list[FolderJob] = []
        self.fail: Callable[[str], ExecResult | Exception | None] = lambda cmd: None

    def _environ(self, envs: Mapping[str, str] | None) -> dict[str, str]:
        folder = self.home / "tmp"
        folder.mkdir(exist_ok=True)
        return {"PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(folder), **(envs or {})}

    def exec(
        self, cmd: str, *, envs: Mapping[str, str] | None = None, cwd: str | None = None, timeout: float | None = 60
    ) -> ExecResult:
        self.log.append(f"exec {cmd}")
        failure = self.fail(cmd)
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            return failure
        done = subprocess.run(
            ["/bin/sh", "-c", cmd],
            env=self._environ(envs),
            cwd=cwd or self.home,
            timeout=timeout,
            capture_output=True,
            check=False,
        )
        return ExecResult(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start_bg(self, cmd: str, *, envs: Mapping[str, str] | None = None, cwd: str | None = None) -> FolderJob:
        self.log.append(f"start {cmd}")
        job = FolderJob(
            subprocess.Popen(
                ["/bin/sh", "-c", cmd],
                env=self._environ(envs),
                cwd=cwd or self.home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        self.jobs.append(job)
        return job

    def write_text(self, path: str, content: str) -> None:
        self.log.append(f"write {path}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content, encoding="utf-8")

    def read_text(self, path: str) -> str:
        return Path(path).read_text(encoding="utf-8")

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def kill(self) -> None:
        self.is_dead = True
        for job in self.jobs:
            job.kill()


class FolderBackend:
    """Makes folder sandboxes; all of them are at home in the same place, as in a real one."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log: list[str] = []
        self.made: list[FolderSandbox] = []
        self.asked: list[dict[str, Any]] = []
        self.fail: Callable[[str], ExecResult | Exception | None] = lambda cmd: None

    def create(
        self,
        *,
        timeout_s: int = 900,
        envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> FolderSandbox:
        self.asked.append({"timeout_s": timeout_s, "metadata": dict(metadata or {})})
        sandbox = FolderSandbox(self.home, self.log)
        sandbox.fail = self.fail
        self.made.append(sandbox)
        return sandbox


@pytest.fixture
def folder_backend(tmp_path: Path) -> Iterator[FolderBackend]:
    """A user's own backend; whatever it started is gone in the end."""
    home = tmp_path / "home"
    home.mkdir()
    backend = FolderBackend(home)
    yield backend
    for sandbox in backend.made:
        sandbox.kill()


@pytest.fixture(scope="session")
def opencode() -> Path:
    """The real OpenCode, fetched once per machine."""
    [mount] = OpenCode().install(cache_dir(), lambda message: None).mounts
    return mount.source


@pytest.fixture
def play() -> Iterator[Callable[..., ScriptedModel]]:
    """Start scripted models; all are stopped when the test ends."""
    with contextlib.ExitStack() as stack:

        def start(script: Script, **options: Any) -> ScriptedModel:
            return stack.enter_context(ScriptedModel(script, **options))

        yield start


@pytest.fixture(autouse=True)
def _no_threads_of_models() -> Iterator[None]:
    """No test leaves a scripted model or a proxy running."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("server-", "openenv-capture"))]
    assert left == []


@pytest.fixture(scope="session")
def local_sandboxes() -> None:
    """The local sandbox runs here; where it cannot be made to, tests that need it are left out with the reason."""
    try:
        LocalSandboxes().check()
    except SandboxUnavailable as exc:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip(str(exc))
        subprocess.run(["apt-get", "install", "-y", "-q", "bubblewrap"], check=False, capture_output=True)
        try:
            LocalSandboxes().check()
        except SandboxUnavailable as still:
            pytest.skip(str(still))


@dataclass(frozen=True)
class Served:
    """A server in a process of its own."""

    url: str
    pid: int

    def sandboxed(self) -> list[int]:
        """Return the processes that it, and what it started, has running."""
        parents: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        found, left = [], [self.pid]
        while left:
            parent = left.pop()
            children = [pid for pid, above in parents.items() if above == parent]
            found += children
            left += children
        return found

    def wait_until_free(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing of any sandbox is left, or fail."""
        wait_until(lambda: not self.sandboxed(), timeout_s, lambda: f"processes are left: {self.sandboxed()}")


@pytest.fixture(scope="session")
def served(local_sandboxes: None, opencode: Path) -> Iterator[Served]:
    """The environment, served from its folder; its operator has a key, which must never leave."""
    folder = Path(__file__).parents[1]
    command = [sys.executable, "-m", "openenv", "serve", str(folder), "--port", "0"]
    left_out = {"OPENENV_SANDBOX", "E2B_API_KEY", "OPENENV_ROLLOUTS", "MAX_CONCURRENT_ENVS"}
    environ = {key: value for key, value in os.environ.items() if key not in left_out}
    environ |= {"OPENAI_API_KEY": "sk-operator", "MAX_CONCURRENT_ENVS": "6"}
    process = subprocess.Popen(command, env=environ, cwd=folder.parents[1], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    output = ""
    try:
        for line in process.stderr:
            output += line
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield Served(found.group(), process.pid)
                break
        else:
            pytest.fail(f"the server did not start:\n{output}")
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()
