"""A project from a Git repository: `git+URL`, with `@REF` and `#subdirectory=FOLDER` as pip has them.

Only the one commit is fetched. Knows the command line of Git.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from openenv.errors import ProviderError, ProviderUnavailable
from openenv.providers.progress import told_when_slow

GIT_PREFIX = "git+"


@dataclass(frozen=True, slots=True)
class GitProject:
    """Where a project is."""

    url: str
    ref: str = "HEAD"
    folder: str = ""

    @property
    def shown(self) -> str:
        """The address without a password."""
        return re.sub(r"//[^/@]*@", "//", self.url)

    @classmethod
    def parse(cls, text: str) -> GitProject:
        """Read what follows `git+`."""
        url, _, fragment = text.removeprefix(GIT_PREFIX).partition("#")
        folder = next((part.partition("=")[2] for part in fragment.split("&") if part.startswith("subdirectory=")), "")
        start = url.find("://") + 3 if "://" in url else 0
        slash = url.find("/", start)
        at = url.rfind("@")
        if slash != -1 and at > slash:  # an @ before the path is of a user
            return cls(url[:at], url[at + 1 :], folder)
        return cls(url, folder=folder)

    def fetch(self, into: Path, *, environ: Mapping[str, str], timeout_s: float) -> Path:
        """Put the commit into a folder and return the project's folder.

        Raises:
            ProviderUnavailable: Git is not installed.
            ProviderError: It could not be fetched, or there is no such folder.
        """
        git = shutil.which("git", path=environ.get("PATH"))
        if git is None:
            raise ProviderUnavailable(
                f"`git` executable not found; {self.shown} cannot be fetched. Install it: apt-get install -y git"
            )
        asks_nobody = {**environ, "GIT_TERMINAL_PROMPT": "0"}
        steps = (
            ["init", "--quiet", str(into)],
            ["-C", str(into), "remote", "add", "origin", self.url],
            ["-C", str(into), "fetch", "--quiet", "--depth", "1", "origin", self.ref],
            ["-C", str(into), "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"],
        )
        with told_when_slow(f"fetching {self.shown}"):
            for step in steps:
                self._run([git, *step], asks_nobody, timeout_s)
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
