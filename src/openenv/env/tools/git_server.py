"""`GitServerClient`: the repositories of a Gitea server, cloned into a workspace and reset between episodes.

Speaks Gitea's HTTP API and runs the `git` command. The password reaches git through its credential protocol: it is in
no argument list, no URL and no file.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2

from openenv import settings
from openenv.errors import OpenEnvError, message_of

_REQUEST_S = 10.0
_POLL_S = 0.2
_PAGE = 50
"""How many repositories a request asks for; Gitea gives no more than 50 by default."""
_FULL_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_CREDENTIAL_HELPER = (
    '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n" "$_GIT_USER" "$_GIT_PASSWORD"; }; f'
)


class GitServerError(OpenEnvError, RuntimeError):
    """The git server or a git command failed; the text says how."""

    code = "GIT_SERVER_ERROR"


@dataclass
class RepoInfo:
    """A repository and the commit that its default branch is at."""

    name: str
    url: str
    commit: str
    clone_url: str


class GitServerClient:
    """A user's repositories on a Gitea server, and a workspace with clones of them.

    Args:
        gitea_url: The server, such as `http://gitea:3000`.
        username: The owner of the repositories; also the author of commits made here.
        password: The user's password or access token.
        workspace_dir: The folder of the clones; it is made if it is not there.
        timeout_s: How long one git command may take.

    Raises:
        ValueError: `gitea_url` is not an HTTP address.
    """

    def __init__(
        self,
        gitea_url: str,
        username: str,
        password: str,
        workspace_dir: str | Path = "/workspace",
        *,
        timeout_s: float = 600.0,
    ) -> None:
        parts = urlsplit(gitea_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"gitea_url must be an address such as http://gitea:3000, not {gitea_url!r}")
        if parts.username or parts.password:
            raise ValueError("gitea_url must hold no user name or password: pass username and password")
        self.gitea_url = gitea_url.rstrip("/")
        self.username = username
        self.password = password
        self.workspace_dir = Path(workspace_dir).absolute()
        self.domain = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.is_ready = False
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._timeout_s = timeout_s
        self.workspace_dir.mkdir(parents=True, exist_ok=True)

    def wait_for_ready(self, timeout: float = 30) -> bool:
        """Wait until the server answers; return whether it did within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                answer = httpx2.get(f"{self.gitea_url}/", timeout=min(_REQUEST_S, max(left, 0.1)), trust_env=False)
                self.is_ready = answer.status_code < 400
            except httpx2.HTTPError:
                self.is_ready = False
            if self.is_ready or deadline - time.monotonic() < _POLL_S:
                return self.is_ready
            time.sleep(_POLL_S)

    def list_repositories(self) -> list[dict[str, str]]:
        """Return the user's repositories, all pages of them: `name`, `full_name`, `clone_url`, `description`.

        Raises:
            GitServerError: The server refuses, or answers something else.
        """
        self._require_ready()
        repositories: dict[str, dict[str, str]] = {}
        page = 1
        while True:
            listed = self._api("user/repos", page=page, limit=_PAGE)
            if not isinstance(listed, list):
                raise GitServerError(f"{self.gitea_url} lists no repositories: {str(listed)[:200]}")
            known = len(repositories)
            for one in listed:
                repositories[_field(one, "full_name")] = {
                    **{name: _field(one, name) for name in ("name", "full_name", "clone_url")},
                    "description": str(one.get("description") or ""),
                }
            if len(repositories) == known:  # the page is empty, or the server has no pages and repeats the first
                return list(repositories.values())
            page += 1

    def repo_info(self, repo_name: str) -> RepoInfo:
        """Return a repository with the commit that its default branch is at.

        Args:
            repo_name: The repository; `owner/name` for another user's.

        Raises:
            GitServerError: There is no such repository, or it has no commit.
        """
        self._require_ready()
        owner, name = self._owner_and_name(repo_name)
        path = f"repos/{quote(owner)}/{quote(name)}"
        about = self._api(path)
        branch = self._api(f"{path}/branches/{quote(_field(about, 'default_branch'), safe='')}")
        commit = _field(branch.get("commit") or {}, "id")
        return RepoInfo(_field(about, "name"), _field(about, "html_url"), commit, _field(about, "clone_url"))

    def clone_to_workspace(self, repo_name: str, target_dir: str | None = None, commit: str = "main") -> str:
        """Clone a repository into the workspace, replacing the old folder; return the clone's path.

        The old folder stays if the clone fails.

        Args:
            repo_name: The repository; `owner/name` for another user's.
            target_dir: The folder in the workspace; by default the repository's name.
            commit: A commit, tag or branch. `main` means the default branch if no branch has that name.

        Raises:
            GitServerError: The server is not ready, or there is no such repository or commit.
            ValueError: The folder is not in the workspace.
        """
        self._require_ready()
        owner, name = self._owner_and_name(repo_name)
        target = self._folder(target_dir or name)
        with tempfile.TemporaryDirectory(prefix=".clone-", dir=self.workspace_dir) as scratch:
            draft = Path(scratch, "repository")
            url = f"{self.gitea_url}/{quote(owner)}/{quote(name)}.git"
            self._git("clone", "--quiet", url, str(draft), online=True, what="Clone")
            self._go_to(draft, commit)
            if target.exists():
                target.rename(Path(scratch, "replaced"))
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.rename(target)
        return str(target)

    def reset_workspace(self, repo_name: str, commit: str = "main") -> bool:
        """Put a clone back to a commit, as the server has it: local commits, changes and untracked files are removed.

        Much faster than a new clone; a full hash that the clone has needs no server.

        Args:
            repo_name: The folder in the workspace.
            commit: A commit, tag or branch, as in `clone_to_workspace`.

        Raises:
            GitServerError: There is no such clone or commit, or the server cannot be reached.
        """
        path = self._clone(repo_name)
        is_here = _FULL_HASH.fullmatch(commit) is not None and self._resolve(path, commit) is not None
        if not is_here:
            self._git("fetch", "--quiet", "--all", "--tags", "--force", "--prune", cwd=path, online=True, what="Fetch")
        self._go_to(path, commit)
        return True

    def execute_git_command(self, command: str, working_dir: str = "") -> tuple[int, str, str]:
        """Run a git command in the workspace; return its exit code, output and errors.

        The command has the server's credentials, and may be anything that git can do.

        Args:
            command: The command without `git`, quoted as in a shell: `commit -m "a message"`.
            working_dir: Where to run it, relative to the workspace.
        """
        try:
            folder = self._folder(working_dir) if working_dir else self.workspace_dir
            words = shlex.split(command)
        except ValueError as exc:
            return 1, "", str(exc)
        if not folder.is_dir():
            return 1, "", f"Working directory does not exist: {folder}"
        done = self._run(words, cwd=folder, online=True)
        return done.returncode, self._redacted(done.stdout), self._redacted(done.stderr)

    def get_current_commit(self, repo_name: str) -> str:
        """Return the hash of the commit that a clone is at.

        Raises:
            GitServerError: There is no such clone, or it has no commit.
        """
        return self._git("rev-parse", "HEAD", cwd=self._clone(repo_name), what="Reading the commit").strip()

    def workspace_exists(self, repo_name: str) -> bool:
        """Say whether the workspace has a folder of this name."""
        return self._folder(repo_name).exists()

    # -- the server's API -------------------------------------------------------------------------------------------

    def _api(self, path: str, **query: int) -> Any:
        try:
            answer = httpx2.get(
                f"{self.gitea_url}/api/v1/{path}",
                params=query,
                auth=(self.username, self.password),
                timeout=_REQUEST_S,
                trust_env=False,
            )
            answer.raise_for_status()
            return answer.json()
        except httpx2.HTTPStatusError as exc:
            text = self._redacted(exc.response.text[:200])
            raise GitServerError(f"{self.gitea_url} answers {path} with {exc.response.status_code}: {text}") from None
        except (httpx2.HTTPError, ValueError) as exc:
            raise GitServerError(f"{self.gitea_url} does not answer {path}: {message_of(exc)}") from exc

    def _owner_and_name(self, repo_name: str) -> tuple[str, str]:
        owner, _, name = repo_name.rpartition("/")
        return owner or self.username, name.removesuffix(".git")

    def _require_ready(self) -> None:
        if not self.is_ready:
            raise GitServerError("Gitea server is not ready: call wait_for_ready() first")

    # -- the workspace ----------------------------------------------------------------------------------------------

    def _folder(self, name: str) -> Path:
        """Return a folder of the workspace.

        Raises:
            ValueError: It is not below the workspace: a name from an agent must not reach other files.
        """
        folder = self.workspace_dir / name
        root = self.workspace_dir.resolve()
        if root not in folder.resolve().parents:
            raise ValueError(f"{name!r} is not a folder in the workspace {self.workspace_dir}")
        return folder

    def _clone(self, repo_name: str) -> Path:
        path = self._folder(repo_name)
        if not path.is_dir():
            raise GitServerError(f"Repository not found in workspace: {repo_name}")
        return path

    def _go_to(self, path: Path, commit: str) -> None:
        """Check a commit out and remove everything that is not in it."""
        # Prefer the server's branch to a local one, which may have later commits.
        remote = self._resolve(path, f"refs/remotes/origin/{commit}")
        target = remote or self._resolve(path, commit)
        if target is None and commit == "main":
            target = self._resolve(path, "refs/remotes/origin/HEAD")
        if target is None:
            raise GitServerError(f"Checkout failed: {path.name} has no commit or branch {commit!r}")
        # A lock or a merge that an episode left half done would stop the checkout.
        (path / ".git" / "index.lock").unlink(missing_ok=True)
        place = ("-B", commit) if remote else ("--detach",)
        self._git("reset", "--quiet", "--hard", cwd=path, what="Reset")
        self._git("checkout", "--quiet", "--force", *place, target, cwd=path, what="Checkout")
        self._git("clean", "--quiet", "-ffdx", cwd=path, what="Clean")

    def _resolve(self, path: Path, name: str) -> str | None:
        done = self._run(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"], cwd=path)
        return done.stdout.strip() if done.returncode == 0 else None

    def _git(self, *words: str, what: str, cwd: Path | None = None, online: bool = False) -> str:
        done = self._run(words, cwd=cwd or self.workspace_dir, online=online)
        if done.returncode != 0:
            raise GitServerError(f"{what} failed: {self._redacted(done.stderr).strip() or done.returncode}")
        return done.stdout

    def _run(self, words: Any, *, cwd: Path, online: bool = False) -> subprocess.CompletedProcess[str]:
        environment = settings.untrusted_environment(self._git_variables(online=online))
        try:
            return subprocess.run(
                ["git", *words],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
            )
        except FileNotFoundError as exc:
            raise GitServerError("The program git is not installed: apt-get install git") from exc
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess([], 124, "", f"git did not end within {self._timeout_s:g} s")

    def _git_variables(self, *, online: bool) -> dict[str, str]:
        """Return the variables that configure git: neither the user's own configuration nor a prompt plays a part."""
        config = {
            "user.name": self.username,
            "user.email": f"{self.username}@local.env",
            "init.defaultBranch": "main",
            "advice.detachedHead": "false",
            "credential.helper": "",  # an empty one removes the system's helpers
        }
        variables = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "", "LC_ALL": "C"}
        if online:  # for this host only: a submodule or a redirect to another host does not get the password
            config[f"credential.{self._origin}.helper"] = _CREDENTIAL_HELPER
            variables |= {"_GIT_USER": self.username, "_GIT_PASSWORD": self.password}
        else:  # hooks that an episode left in a clone
            config["core.hooksPath"] = "/dev/null"
        variables["GIT_CONFIG_COUNT"] = str(len(config))
        for number, (key, value) in enumerate(config.items()):
            variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
        return variables

    def _redacted(self, text: str) -> str:
        return text.replace(self.password, "***") if self.password else text


def _field(document: Any, name: str) -> str:
    value = document.get(name) if isinstance(document, dict) else None
    if not isinstance(value, str):
        raise GitServerError(f"The server names no {name}: {str(document)[:200]}")
    return value
