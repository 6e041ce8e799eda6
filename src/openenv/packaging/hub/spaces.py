"""Spaces of the Hugging Face Hub through `huggingface_hub` (extra `hub`): make, upload, configure, copy.

The library is imported by the first `Spaces`. Every failure is a `HubError` that names the remedy.

`openenv push` and `openenv fork` use `HfApi`, `whoami` and `login` through their published modules, such as
`openenv.cli.commands.push`, because existing tests patch these names there.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from openenv.errors import OpenEnvError, install_command

# Free; the Hub's default for new Spaces as well.
DEFAULT_HARDWARE = "cpu-basic"
_REPO_ID = re.compile(r"(?:[\w.-]+/)?[\w.-]+", re.ASCII)
_SETTINGS = "https://huggingface.co/settings/tokens"


class HubError(OpenEnvError, RuntimeError):
    """The Hub refuses a request or cannot be reached; the text names the remedy."""

    code = "HUB_ERROR"


@dataclass(frozen=True, slots=True)
class SpaceSettings:
    """The settings of a Space. Unset fields stay unchanged on the Hub."""

    private: bool = False
    hardware: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Upload:
    """A folder that becomes the files of a Space."""

    folder: Path
    delete: Sequence[str] = ()
    """Patterns of files that the same commit removes from the Space; files of the folder are never removed."""
    message: str = "Push an OpenEnv environment"


class Spaces:
    """The Spaces that the user of a token may write.

    Args:
        hub: Has `HfApi`, `whoami` and `login`; by default `huggingface_hub`.

    Raises:
        HubError: `huggingface_hub` is not installed.
    """

    def __init__(self, hub: ModuleType | None = None) -> None:
        try:
            self._errors: Any = import_module("huggingface_hub.errors")
        except ImportError as error:
            raise HubError(f"the Hub needs huggingface_hub ({error}): {install_command('hub')}") from error
        self._hub = hub or import_module("huggingface_hub")
        self._api: Any = self._hub.HfApi(library_name="openenv")
        self._username: str | None = None

    @property
    def username(self) -> str:
        """The user of the token: `HF_TOKEN`, or the one that `hf auth login` stored. A terminal without one logs in."""
        # Asked once: every request counts against the rate limit.
        if self._username is None:
            with self._failures("Authentication failed"):
                try:
                    user = self._hub.whoami()
                except self._errors.LocalTokenNotFoundError:
                    if not sys.stdin.isatty():  # `login` would wait for a browser
                        raise
                    self._hub.login()
                    user = self._hub.whoami()
                self._username = _username(user)
        return self._username

    def full_id(self, repo_id: str) -> str:
        """Return `owner/name`; a bare name is the user's."""
        return repo_id if "/" in repo_id else f"{self.username}/{repo_id}"

    def url(self, repo_id: str) -> str:
        """Return the address of a Space's page."""
        return f"{self._api.endpoint}/spaces/{repo_id}"

    def deploy(self, repo_id: str, upload: Upload, settings: SpaceSettings) -> str:
        """Make a Docker Space or update it, and upload its files; return the address of its page.

        Settings come before files: the build that the files start has all variables, and files never reach a Space
        that should be private before it is.

        Raises:
            HubError: The Hub refused one of these steps, which the text names.
        """
        repo_id = self.full_id(repo_id)
        # Order: Space, variables, secrets, files. The upload starts the build, which then sees all settings.
        self._prepare(repo_id, settings)
        for name, value in settings.variables.items():
            with self._failures(f"Failed to set variable {name}", settings.secrets):
                self._api.add_space_variable(repo_id=repo_id, key=name, value=value)
        for name, value in settings.secrets.items():
            with self._failures(f"Failed to set secret {name}", settings.secrets):
                self._api.add_space_secret(repo_id=repo_id, key=name, value=value)
        self._upload(repo_id, upload)
        return self.url(repo_id)

    def delete(self, repo_id: str) -> None:
        """Delete a Space with its variables and secrets; one that does not exist is fine.

        Raises:
            HubError: The Hub refused.
        """
        repo_id = self.full_id(repo_id)
        with self._failures(f"Failed to delete {repo_id}"):
            self._api.delete_repo(repo_id, repo_type="space", missing_ok=True)

    def open_pull_request(self, repo_id: str, upload: Upload) -> str | None:
        """Upload files as a pull request to a Space that exists; return its address, or None if no file differs.

        Raises:
            HubError: There is no such Space, or the Hub refused.
        """
        url: str | None = self._upload(self.full_id(repo_id), upload, create_pr=True).pr_url
        return url

    def fork(self, source: str, target: str | None, settings: SpaceSettings) -> str:
        """Copy a Space with its history into another namespace; return the address of the copy.

        A copy is private if its source is, or if the settings say so. The Hub does not copy secrets.

        Raises:
            HubError: The source does not exist, the target does, or the Hub refused.
        """
        target = self.full_id(target or source.partition("/")[2])
        options = {
            "hardware": settings.hardware or DEFAULT_HARDWARE,  # the Hub wants one named for every copy
            "variables": _pairs(settings.variables),
            "secrets": _pairs(settings.secrets),
        }
        # None keeps the privacy of the source.
        copy = {"from_id": source, "to_id": target, "private": settings.private or None}
        with self._failures(f"Failed to copy {source} to {target}", settings.secrets):
            if hasattr(self._api, "duplicate_space"):  # huggingface_hub below 2
                self._api.duplicate_space(**copy, **options)
            else:
                named = {f"space_{name}": value for name, value in options.items()}
                self._api.duplicate_repo(**copy, repo_type="space", **named)
        return self.url(target)

    def _prepare(self, repo_id: str, settings: SpaceSettings) -> None:
        """Make the Space; one that exists gets the hardware and the privacy that are asked for."""
        hardware = settings.hardware
        with self._failures(f"Failed to create the Space {repo_id}"):
            self._api.create_repo(
                repo_id=repo_id,
                repo_type="space",
                space_sdk="docker",
                private=settings.private or None,  # None: the organization's default
                exist_ok=True,
                **({} if hardware is None else {"space_hardware": hardware}),
            )
        if hardware is None and not settings.private:
            return
        with self._failures(f"Failed to look at {repo_id}"):
            space = self._api.space_info(repo_id)
        # Never make a private Space public here: that is a decision for the Hub's page.
        if settings.private and not space.private:
            with self._failures(f"Failed to make {repo_id} private"):
                self._api.update_repo_settings(repo_id, repo_type="space", private=True)
        if hardware not in (None, getattr(space.runtime, "requested_hardware", None)):
            with self._failures(f"Failed to request the hardware {hardware} for {repo_id}"):
                self._api.request_space_hardware(repo_id, hardware)

    def _upload(self, repo_id: str, upload: Upload, *, create_pr: bool = False) -> Any:
        with self._failures(f"Failed to upload to {repo_id}"):
            return self._api.upload_folder(
                repo_id=repo_id,
                folder_path=upload.folder,
                repo_type="space",
                commit_message=upload.message,
                create_pr=create_pr,
                # An empty list would delete nothing, but the library expects None.
                delete_patterns=list(upload.delete) or None,
            )

    @contextlib.contextmanager
    def _failures(self, failed: str, secrets: Mapping[str, str] | None = None) -> Iterator[None]:
        """Raise an error of the Hub, the connection or the library as a `HubError` without secrets."""
        # The boundary of a request. The library's errors depend on its version: httpx or httpx2, Xet, or the login.
        try:
            yield
        except Exception as error:
            text = f"{failed}: {self._reason(error)}"
            # The Hub may repeat the request in its message, with the value of a secret.
            for value in (secrets or {}).values():
                text = text.replace(value, "***") if value else text
            raise HubError(text) from None  # the cause may hold the request, and so the secret

    def _reason(self, error: Exception) -> str:
        if isinstance(error, self._errors.LocalTokenNotFoundError):
            return f"there is no token. Run `hf auth login`, or set HF_TOKEN to a token with write access ({_SETTINGS})"
        # Errors without a response come from the connection or from the library's checks.
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is None:
            if isinstance(error, (self._errors.HTTPError, ConnectionError)):
                return f"{self._api.endpoint} cannot be reached ({error}). Is this machine connected to the network?"
            return str(error)
        return f"{_ADVICE.get(status, _SERVER_FAILED if status >= 500 else '')}{_said(error, status)}"


_ADVICE = {
    401: "the Hub does not accept the token. Run `hf auth login`, or set HF_TOKEN to a valid one. ",
    402: "the Hub asks for payment: this hardware or kind of Space needs a subscription or credits. ",
    403: f"the token may not do this. It needs write access to that namespace: {_SETTINGS}. ",
    404: "there is no such Space, or the token may not see it. ",
    409: "the Hub has a conflict: it exists already, or changed meanwhile. Choose another name, or try again. ",
    429: "too many requests: the Hub limits them. Try again in a few minutes. ",
}
_SERVER_FAILED = "the Hub itself failed. Try again later. "


def _username(user: Any) -> str:
    """Return the name in an answer of `whoami`: a mapping, or an object with attributes."""
    fields = user if isinstance(user, Mapping) else vars(user)
    name = fields.get("name") or fields.get("username")
    if not name:
        raise ValueError("could not extract the username from the answer of whoami")
    return str(name)


def _said(error: Any, status: int) -> str:
    """Return the status and the Hub's own words, in one line."""
    # The Hub's text may span lines; errors on a terminal should be one line.
    words = " ".join(str(getattr(error, "server_message", None) or "").split())
    return f"(status {status}{': ' + words if words else ''})"


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]] | None:
    return [{"key": name, "value": value} for name, value in values.items()] or None


def check_repo_id(repo_id: str) -> None:
    """Raise unless the text is `name` or `owner/name`.

    Raises:
        ValueError: It is something else.
    """
    if not _REPO_ID.fullmatch(repo_id):
        raise ValueError(f"Invalid repo-id format: {repo_id!r} is neither NAME nor OWNER/NAME")
