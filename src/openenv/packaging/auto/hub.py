"""Environments of the Hugging Face Hub: their names, the consent to run their code, and their installation.

Code of a Space runs with the user's rights once it is imported, so nothing is installed without consent. It goes into a
separate folder, last on the path: it can hide no installed package, and its requirement of
`openenv` cannot replace this package.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from openenv import settings

from .installed import (
    EnvironmentInfo,
    environments_in,
    get_discovery,
    hub_repo_of,
    imported_folder,
    short_name,
)

InstallInto = Literal["own", "current"]
HUB = "https://huggingface.co"
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_PROJECT_OWNER = "openenv"
"""The owner whose Spaces are also packages `openenv-NAME` of an index or a checkout."""
_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})


class InstallationFailed(ValueError):
    """An environment of the Hub could not be installed, or its user did not agree to it."""


def repo_of(name: str) -> str | None:
    """Return the repository that a name or an address of the Hub means; None for the name of a package.

    Raises:
        ValueError: It is an address, but none of a Space.
    """
    if "://" in name:
        parts = urlsplit(name)
        words = [word for word in parts.path.split("/") if word]
        if words[:1] == ["spaces"]:
            words = words[1:]
        if parts.hostname not in _HOSTS or len(words) < 2:
            raise ValueError(f"{name!r} must be the address of a Space: {HUB}/spaces/OWNER/NAME")
        return "/".join(words[:2])
    if "/" not in name:
        return None
    repo = name.removeprefix("spaces/")
    # `--` separates owner and name of a folder; the Hub has no such names.
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise ValueError(f"{name!r} must be the name of a Space: OWNER/NAME")
    return repo


def installed_from_hub(
    repo: str, *, trust_remote_code: bool = False, install_into: InstallInto = "own"
) -> EnvironmentInfo:
    """Return an environment of the Hub; install it first if necessary.

    Raises:
        InstallationFailed: The user did not consent, or pip failed.
    """
    if install_into not in ("own", "current"):
        raise ValueError(f"install_into must be 'own' or 'current', not {install_into!r}")
    discovery = get_discovery()
    folder = settings.cache_dir() / "environments" / repo.replace("/", "--")
    _add_to_path(folder)
    info = _installed_from(repo, folder)
    if info is not None:
        return info
    # Before anything is downloaded: installing a package can already run its code.
    _require_consent(repo, trust_remote_code)
    _install(repo, folder if install_into == "own" else None)
    _add_to_path(folder)
    # The cached list was read before the installation.
    discovery.clear_cache()
    info = _installed_from(repo, folder)
    if info is None:
        environments = ", ".join(discovery.discover()) or "none"
        raise InstallationFailed(
            f"Installation failed: {repo} has no package with a name such as openenv-{repo.partition('/')[2]}. "
            f"Installed environments: {environments}"
        )
    return info


# Two owners may have a Space of one name, and both packages have the same module. The name alone decides nothing:
#
#   alice/pond_env   CACHE/environments/alice--pond_env/pond_env     the folder is the owner's
#   bob/pond_env     site-packages/pond_env, and direct_url.json     installed with install_into="current"
#   openenv/echo_env site-packages/echo_env without a Space's URL    from an index or a checkout
#
def _installed_from(repo: str, folder: Path) -> EnvironmentInfo | None:
    """Return the environment that was installed from a Space, under any name; None if it is not installed.

    Args:
        repo: The Space.
        folder: Its separate folder.

    Raises:
        InstallationFailed: Another package has the same module, which this process would import instead.
    """
    owner, _, name = repo.lower().partition("/")
    info = next(iter(environments_in(folder)), None)
    if info is not None:
        other = imported_folder(info)
        if other != info.folder:
            raise InstallationFailed(
                f"{repo} is installed in {info.folder}, but this process imports its module from {other}, which is "
                "another package. Use a process for each of them, or pass base_url and skip_install=True"
            )
        return info
    environments = get_discovery().discover()
    for each in environments.values():
        if hub_repo_of(each) == repo.lower():
            return each
    same_name = environments.get(short_name(name))
    if same_name is not None and owner == _PROJECT_OWNER and hub_repo_of(same_name) is None:
        return same_name
    return None


def _add_to_path(folder: Path) -> None:
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
        get_discovery().clear_cache()


def _require_consent(repo: str, trusted: bool) -> None:
    if trusted or settings.trust_remote_code():
        return
    advice = "pass trust_remote_code=True, or set OPENENV_TRUST_REMOTE_CODE=1"
    if not sys.stdin.isatty():
        raise InstallationFailed(
            f"{repo} is not installed, and installing it runs its code on this machine. No terminal is open to ask: "
            f"read the code at {HUB}/spaces/{repo}, then {advice}"
        )
    answer = input(f"Install {repo} from the Hub? Its code will run on this machine with your rights. [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise InstallationFailed(f"{repo} was not installed: you did not agree. To agree without a question, {advice}")


def _install(repo: str, folder: Path | None) -> None:
    """Install the package of a Space without its dependencies, which this package mostly has already."""
    source = f"git+{HUB}/spaces/{repo}"
    target: Sequence[str] = () if folder is None else ("--target", str(folder))
    uv = shutil.which("uv")
    if uv is not None:
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", *target, source]
    else:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += [*target, source]
    if folder is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # half of a package is found, and fails later
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise InstallationFailed(f"Installation failed: {' '.join(command)}\n{last}")
