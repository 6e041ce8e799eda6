"""Files of a Git repository at one commit; reads objects only, so that nothing of the work tree counts or runs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from openenv import settings

from .models import CatalogError, github_repository, relative_path

MAX_METADATA_BYTES = 1024 * 1024
MAX_TREE_BYTES = 16 * 1024 * 1024
MAX_ENVIRONMENTS = 10_000
GIT_TIMEOUT_SECONDS = 30
_SYMLINK = "120000"
# Replaced objects and partial clones would add content from outside the commit. A question would wait for ever.
_GIT_VARIABLES = {"GIT_NO_REPLACE_OBJECTS": "1", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


class MetadataError(CatalogError):
    """The metadata of one environment cannot be used; `code` says in what way."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class GitFile(NamedTuple):
    """A file of a commit."""

    mode: str
    oid: str
    size: int


class GitMetadataSource:
    """Metadata of the environments in a folder of a repository, at one commit.

    Args:
        repository: The local clone.
        repository_uri: Where others find it: `https://github.com/OWNER/NAME.git`.
        revision: A commit, branch or tag.
        root: The folder; each environment is a folder in it with an `openenv.yaml`.

    Raises:
        CatalogError: There is no such repository, commit or folder, or it has too many files.
    """

    def __init__(self, repository: Path, repository_uri: str, revision: str, root: str) -> None:
        try:
            self.repository_id = github_repository(repository_uri)
            self.root = relative_path(root)
        except ValueError as error:
            raise CatalogError(str(error)) from error
        self.repository = repository
        self.uri = repository_uri
        # `--end-of-options` keeps a revision such as `--output=x` from becoming an option of git.
        commit = self._git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}", limit=256)
        self.revision = commit.decode("ascii").strip()
        # One listing for the whole commit; single files are read by their object ID.
        self.files = dict(self._tree())
        prefix = "" if self.root == "." else f"{self.root}/"
        if not any(path.startswith(prefix) for path in self.files):
            raise CatalogError(f"{self.root} does not exist at {self.revision}: choose another --root")
        # An environment is a folder with an openenv.yaml, directly in the root.
        folders = [
            folder
            for folder, slash, name in (path.rpartition("/") for path in self.files)
            if name == "openenv.yaml" and slash and f"{folder}/".startswith(prefix) and folder != self.root
        ]
        self.environments = sorted(folder for folder in folders if "/" not in folder.removeprefix(prefix))
        if len(self.environments) > MAX_ENVIRONMENTS:
            raise CatalogError(f"there are more than {MAX_ENVIRONMENTS} environments in {self.root}")

    def read(self, path: str, *, required: bool = False) -> str | None:
        """Return the text of a file, or None if the commit lacks it.

        Raises:
            MetadataError: It is required and missing, a link, too large, or not UTF-8.
        """
        file = self.files.get(relative_path(path))
        if file is None:
            if required:
                raise MetadataError("missing_metadata", f"{path} does not exist")
            return None
        # Git stores a link's target as its content; reading it as YAML would confuse everybody.
        if file.mode == _SYMLINK:
            raise MetadataError("symlink_metadata", f"{path} is a link; it has to be a file")
        if file.size > MAX_METADATA_BYTES:
            raise MetadataError("metadata_limit", f"{path} is larger than {MAX_METADATA_BYTES // 1024} KiB")
        try:
            return self._git("cat-file", "blob", file.oid, limit=MAX_METADATA_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise MetadataError("invalid_metadata", f"{path} is not UTF-8") from error

    def url(self, path: str) -> str:
        """Return the address of a file's page at this commit."""
        return f"https://github.com/{self.repository_id}/blob/{self.revision}/{quote(relative_path(path), safe='/')}"

    def _tree(self) -> list[tuple[str, GitFile]]:
        files = []
        # -z: names are raw bytes between zeros, without quoting.
        for row in self._git("ls-tree", "-r", "-l", "-z", self.revision, limit=MAX_TREE_BYTES).split(b"\0"):
            facts, _, name = row.partition(b"\t")
            words = facts.decode("ascii").split()
            if len(words) == 4 and words[1] == "blob":  # submodules are commits
                size = int(words[3]) if words[3].isdigit() else 0  # of an object that a partial clone does not have
                try:
                    files.append((name.decode("utf-8"), GitFile(words[0], words[2], size)))
                except UnicodeDecodeError as error:
                    raise CatalogError(f"the name of a file is not UTF-8: {name!r}") from error
        return files

    def _git(self, *arguments: str, limit: int) -> bytes:
        """Return what git prints, at most `limit` bytes."""
        # No shell and no pager; questions are disabled by the environment.
        command = ["git", "--no-pager", "-C", str(self.repository), *arguments]
        environment = settings.child_environment(_GIT_VARIABLES)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=GIT_TIMEOUT_SECONDS
            )
        except FileNotFoundError as error:
            raise CatalogError("git is not installed: apt-get install -y git") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CatalogError(f"git failed: {error}") from error
        if done.returncode != 0:
            reason = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise CatalogError(f"git cannot read {self.repository}: {reason[-1] if reason else 'it says no reason'}")
        # Checked after the fact: git has no limit of its output.
        if len(done.stdout) > limit:
            raise CatalogError(f"`git {arguments[0]}` printed more than {limit} bytes")
        return done.stdout
