"""A server from a project with its own dependencies: `uv run uvicorn` in an environment that uv makes for it.

The project is a folder, or a commit of a Git repository: `git+URL`, with `@REF` and `#subdirectory=FOLDER` as in pip.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv import settings
from openenv.errors import ProviderError, ProviderUnavailable
from openenv.providers.own_wheel import write_wheels
from openenv.providers.provider import announce_if_slow, refuse_unknown
from openenv.providers.server_process import ChildProcessProvider, ServerProcess

GIT_PREFIX = "git+"


@dataclass(frozen=True, slots=True)
class GitProject:
    """A project in a Git repository; only the one commit is fetched."""

    url: str
    ref: str = "HEAD"
    folder: str = ""

    @property
    def shown(self) -> str:
        """The address without a password."""
        return re.sub(r"//[^/@]*@", "//", self.url)

    @classmethod
    def parse(cls, text: str) -> GitProject:
        """Parse `git+URL[@REF][#subdirectory=FOLDER]`."""
        url, _, fragment = text.removeprefix(GIT_PREFIX).partition("#")
        folder = next((part.partition("=")[2] for part in fragment.split("&") if part.startswith("subdirectory=")), "")
        start = url.find("://") + 3 if "://" in url else 0
        slash = url.find("/", start)
        at = url.rfind("@")
        if slash != -1 and at > slash:  # an @ before the path belongs to a user name
            return cls(url[:at], url[at + 1 :], folder)
        return cls(url, folder=folder)

    def fetch(self, into: Path, *, environ: Mapping[str, str], timeout_s: float) -> Path:
        """Put the commit into a folder and return the project's folder.

        Raises:
            ProviderUnavailable: Git is not installed.
            ProviderError: The fetch failed, or the folder does not exist.
        """
        git = shutil.which("git", path=environ.get("PATH"))
        if git is None:
            raise ProviderUnavailable(
                f"`git` executable not found; {self.shown} cannot be fetched. Install it: apt-get install -y git"
            )
        no_prompt = {**environ, "GIT_TERMINAL_PROMPT": "0"}
        steps = (
            ["init", "--quiet", str(into)],
            ["-C", str(into), "remote", "add", "origin", self.url],
            ["-C", str(into), "fetch", "--quiet", "--depth", "1", "origin", self.ref],
            ["-C", str(into), "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"],
        )
        with announce_if_slow(f"fetching {self.shown}"):
            for step in steps:
                self._run([git, *step], no_prompt, timeout_s)
        project = into / self.folder
        if not project.is_dir():
            raise ProviderError(f"{self.shown} has no folder '{self.folder}'.")
        return project

    def _run(self, command: list[str], environ: Mapping[str, str], timeout_s: float) -> None:
        try:
            done = subprocess.run(
                command,
                env=dict(environ),
                capture_output=True,
                timeout=timeout_s,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise ProviderError(
                f"Timed out cloning {self.shown} after {timeout_s:g} s; allow more with context_timeout_s."
            ) from error
        if done.returncode != 0:
            words = done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.returncode}"
            raise ProviderError(f"Failed to clone {self.shown} ({self.ref}): {words.replace(self.url, self.shown)}")


_SLOW_S = 10.0


class UVProvider(ChildProcessProvider):
    """Serves a project's application with `uv run uvicorn`. The server ends with this process.

    Args:
        project_path: The project's folder, or `git+URL`; `@REF` and `#subdirectory=FOLDER` may follow. Each start
            fetches one commit.
        app: The application in uvicorn's syntax; looked up from the project's folder.
        host: The address to listen on. The default lets other machines in.
        reload: Whether it restarts when a source file changes.
        env_vars: Variables to add to those of this process.
        context_timeout_s: The longest time for the fetch, and until it answers.
        log_path: Where its output is kept; by default a temporary file that is removed with it.

    Raises:
        ProviderUnavailable: uv is not installed.
    """

    def __init__(
        self,
        *,
        project_path: str,
        app: str = "server.app:app",
        host: str = "0.0.0.0",
        reload: bool = False,
        env_vars: dict[str, str] | None = None,
        context_timeout_s: float = 60.0,
        log_path: str | Path | None = None,
    ) -> None:
        super().__init__(host=host, log_path=log_path)
        text = str(project_path)
        self.project_path = text if text.startswith(GIT_PREFIX) else str(Path(text).absolute())
        self.app = app
        self.reload = reload
        self.env_vars = env_vars
        self.context_timeout_s = context_timeout_s
        self._uv = find_uv()

    def start(
        self, port: int | None = None, env_vars: dict[str, str] | None = None, workers: int = 1, **kwargs: Any
    ) -> str:
        """Start the server and return its address; uv prepares the environment in the meantime.

        Args:
            port: The port to listen on; by default any free one.
            env_vars: More variables.
            workers: Number of uvicorn processes; a session stays in the process that opened it.
            kwargs: None are accepted.

        Raises:
            ValueError: An option is unknown.
            RuntimeError: It already runs, the project does not exist, or the start failed.
        """
        refuse_unknown(self, kwargs, UVProvider.start)
        environ = settings.child_environment({"PYTHONUNBUFFERED": "1", **(self.env_vars or {}), **(env_vars or {})})
        return self._launch(port, lambda chosen: self._process(chosen, workers, environ))

    def wait_for_ready(self, timeout_s: float | None = None) -> None:
        """Return as soon as the server answers; stop it if it ends or does not answer.

        Raises:
            ServerDied: It ended; the text has the end of its log.
            ServerNotReady: It did not answer in time, by default `context_timeout_s`.
        """
        timeout_s = self.context_timeout_s if timeout_s is None else timeout_s
        with announce_if_slow(f"uv prepares {self.project_path} (log: {self.log_path})", after_s=_SLOW_S):
            self._await(timeout_s, "The uv process")

    def _process(self, port: int, workers: int, environ: Mapping[str, str]) -> ServerProcess:
        folder = Path(tempfile.mkdtemp(prefix="openenv-uv-"))
        try:
            project = self._project(folder, environ)
            # The project requires openenv, and an index may have another package of that name.
            write_wheels(folder / "wheels")
            links = ",".join(filter(None, (environ.get("UV_FIND_LINKS"), str(folder / "wheels"))))
            environ = {**environ, "UV_FIND_LINKS": links}
            command = [self._uv, "run", "--isolated", "--project", str(project), "--", "uvicorn", self.app]
            command += ["--host", self.host, "--port", str(port), "--workers", str(workers)]
            command += ["--reload"] if self.reload else []
            return ServerProcess(command, environ=environ, cwd=project, log_path=self._log_path, folder=folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _project(self, folder: Path, environ: Mapping[str, str]) -> Path:
        if not self.project_path.startswith(GIT_PREFIX):
            if not Path(self.project_path).is_dir():
                raise ProviderError(f"project folder {self.project_path} does not exist")
            return Path(self.project_path)
        source = GitProject.parse(self.project_path)
        return source.fetch(folder / "project", environ=environ, timeout_s=self.context_timeout_s)


def find_uv() -> str:
    """Return the path of uv: on PATH, or beside the running Python.

    Raises:
        ProviderUnavailable: It is not installed.
    """
    program = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if program is None:
        raise ProviderUnavailable("`uv` executable not found. Install it: pip install uv")
    return program
