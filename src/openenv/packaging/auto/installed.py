"""Which environments are installed: distributions named `openenv-...`, their manifests and their classes.

Reads metadata and manifests, and keeps the result in a file until something on the path changes; imports a package only
when one of its classes is asked for.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import stat
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openenv import settings
from openenv.client.mcp_client import MCPClientBase
from openenv.env.manifest import MANIFEST, ManifestError, read_manifest
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation

logger = logging.getLogger(__name__)

_PREFIX = "openenv-"
# Starts with the prefix, but is the framework's older distribution name.
_NOT_ENVIRONMENTS = frozenset({"openenv-core"})
_SPACE_URL = re.compile(r"https://(?:www\.)?(?:huggingface\.co|hf\.co)/spaces/([^/?#]+/[^/?#]+?)(?:\.git)?/?")
# Increase it when the entries change; older files are then ignored.
_CACHE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """An installed environment, and the names of its classes."""

    env_key: str
    """Its short name: `echo` for the package `echo_env`."""
    name: str
    package_name: str
    version: str
    description: str
    client_module_path: str
    client_class_name: str
    action_class_name: str
    observation_class_name: str
    default_image: str
    spec_version: int | None = None
    manifest: dict[str, Any] | None = None
    folder: Path | None = None
    """Where its package is; what `openenv serve` can serve, if there is a manifest."""

    def get_client_class(self) -> type[Any]:
        """Import and return the client class."""
        return self._find_class(self.client_class_name)

    def get_action_class(self) -> type[Any]:
        """Import and return the action class; tool environments use `CallToolAction`."""
        return self._find_model(self.action_class_name, CallToolAction)

    def get_observation_class(self) -> type[Any]:
        """Import and return the observation class; tool environments use `CallToolObservation`."""
        return self._find_model(self.observation_class_name, CallToolObservation)

    def _find_model(self, name: str, of_tools: type[Any]) -> type[Any]:
        try:
            return self._find_class(name)
        except ImportError:
            # A package that names its classes must have them. Only inferred names may be replaced by the tool action.
            if _names_classes(self.manifest) or not issubclass(self.get_client_class(), MCPClientBase):
                raise
            return of_tools

    def _find_class(self, name: str) -> type[Any]:
        """Search the client's module, then the models', then the package.

        A name that was inferred may differ in its capitals: `OpenCodeEnv` of the package `opencode_env`.

        Raises:
            ImportError: the package cannot be imported, or has no such class.
        """
        package = self.client_module_path.rpartition(".")[0]
        # Packages of the older layout define their models in the client's module or in the package.
        for module_name in (self.client_module_path, f"{package}.models", package):
            try:
                module = importlib.import_module(module_name)
            except ModuleNotFoundError as exc:
                # Missing in this package: try the next module. Missing elsewhere: a dependency is not installed.
                if exc.name is not None and (module_name == exc.name or module_name.startswith(f"{exc.name}.")):
                    continue  # this package has no such module
                raise ImportError(
                    f"The environment {self.env_key!r} needs {exc.name}, which is not installed: "
                    f"pip install {exc.name}, or install {self.package_name} with its dependencies"
                ) from exc
            # The exact name first, then names that differ in capitals only.
            for spelled in (name, *(each for each in dir(module) if each.lower() == name.lower())):
                result = getattr(module, spelled, None)
                if isinstance(result, type):
                    return result
        raise ImportError(f"The package {package} has no class {name}: name its classes in openenv.yaml")


class EnvironmentDiscovery:
    """The installed environments, read once and kept until `clear_cache`; a file keeps them for other processes."""

    def __init__(self) -> None:
        self._known: dict[str, EnvironmentInfo] | None = None

    def discover(self, use_cache: bool = True) -> dict[str, EnvironmentInfo]:
        """Return the installed environments by their short names; without the cache they are searched again."""
        if self._known is None or not use_cache:
            # The cache saves the search over all distributions, which takes most of the time of a short script.
            environments = _read_cache() if use_cache else None
            if environments is None:
                environments = _installed()
                _write_cache(environments)
            self._known = environments
        return dict(self._known)

    def get_environment(self, env_key: str) -> EnvironmentInfo | None:
        """Return an environment by its short name, or None."""
        return self.discover().get(env_key)

    def get_environment_by_name(self, name: str) -> EnvironmentInfo | None:
        """Return an environment by any form of its name (`echo`, `echo-env`, `echo_env`), or None."""
        return self.get_environment(short_name(name))

    def require(self, name: str) -> EnvironmentInfo:
        """Return an environment by any form of its name.

        Raises:
            ValueError: It is not installed; the text has names that are near.
        """
        info = self.get_environment_by_name(name)
        if info is not None:
            return info
        environments = list(self.discover())
        if not environments:
            raise ValueError(
                f"Unknown environment {name!r}: no environments are installed. Install one with `pip install "
                "openenv-NAME`, or give the name of a Space, such as 'openenv/echo_env'"
            )
        # Suggestions come from the standard library: near in spelling.
        near = difflib.get_close_matches(short_name(name), environments, n=3)
        hint = f" Did you mean: {', '.join(near)}?" if near else ""
        raise ValueError(f"Unknown environment {name!r}.{hint} Available environments: {', '.join(environments)}")

    def list_environments(self) -> None:
        """Print the installed environments."""
        environments = self.discover()
        print_table(
            "Environments", [(key, f"{each.description} ({each.version})") for key, each in environments.items()]
        )

    def clear_cache(self) -> None:
        """Look again next time, after something was installed or removed."""
        # Import keeps lists of folders. Without this, a package installed a moment ago would not be found.
        self._known = None
        importlib.invalidate_caches()
        with contextlib.suppress(OSError):
            cache_file().unlink()


@functools.cache
def get_discovery() -> EnvironmentDiscovery:
    """Return the one discovery of this process."""
    return EnvironmentDiscovery()


def reset_discovery() -> None:
    """Forget what `get_discovery` has found."""
    get_discovery().clear_cache()


def short_name(name: str) -> str:
    """Return the short form of a name: `echo-env`, `echo_env` and `Echo` are `echo`."""
    return name.strip().lower().replace("-", "_").removesuffix("_env")


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print names with a text each, and how many there are."""
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows]
    print("\n".join([f"{title}: {len(rows)}", *(lines or ["  none: pip install openenv-NAME"])]))  # noqa: T201


def _installed() -> dict[str, EnvironmentInfo]:
    # If a package stands in two places of the path, `import` uses the first, so this does too.
    result: dict[str, EnvironmentInfo] = {}
    # Reads metadata only; importing every package could take seconds and run any code.
    for distribution in importlib.metadata.distributions():
        info = _describe(distribution)
        if info is not None:
            result.setdefault(info.env_key, info)
    return dict(sorted(result.items()))


def environments_in(folder: Path) -> list[EnvironmentInfo]:
    """Return the environments installed in a folder, even if others on the path hide their modules."""
    place = [str(folder)]
    described = (_describe(each, place) for each in importlib.metadata.distributions(path=place))
    return [info for info in described if info is not None and info.folder is not None]


def hub_repo_of(info: EnvironmentInfo) -> str | None:
    """Return the Space that an environment was installed from, in small letters; None for another source."""
    # PEP 610: pip and uv record the URL of a direct installation, {"url": "https://huggingface.co/spaces/OWNER/NAME"}.
    try:
        text = importlib.metadata.distribution(info.package_name).read_text("direct_url.json")
        url = json.loads(text or "{}").get("url")
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError, OSError):
        return None
    match = _SPACE_URL.fullmatch(str(url))
    return None if match is None else match[1].lower()


def imported_folder(info: EnvironmentInfo) -> Path | None:
    """Return the folder that `import` takes an environment's package from."""
    return _folder_of(info.client_module_path.partition(".")[0])


def _describe(distribution: importlib.metadata.Distribution, path: list[str] | None = None) -> EnvironmentInfo | None:
    """Describe the environment in a distribution, or return None if it has none.

    Args:
        distribution: The distribution.
        path: Where its package is; by default anywhere on `sys.path`.
    """
    metadata = distribution.metadata
    package_name = str((metadata.get_all("Name") or [""])[0])  # none in a folder that pip left half removed
    # The canonical form of PEP 503: `OpenEnv_Echo.Env` and `openenv-echo-env` are one distribution.
    canonical = re.sub(r"[-_.]+", "-", package_name).lower()
    if not canonical.startswith(_PREFIX) or canonical in _NOT_ENVIRONMENTS:
        return None
    module = canonical.removeprefix(_PREFIX).replace("-", "_")
    folder = _folder_of(module, path)
    manifest = _read_manifest(folder) if folder is not None else None
    declared = manifest or {}
    # coding_env -> CodingEnv, CodingAction: class names by convention, unless the manifest names them.
    words = [word for word in short_name(module).split("_") if word]
    prefix = "".join(word[:1].upper() + word[1:] for word in words)
    summary = (metadata.get_all("Summary") or [""])[0]
    # The older form of the manifest names both; one alone says nothing about the other.
    has_names = _names_classes(manifest)
    return EnvironmentInfo(
        env_key=short_name(module),
        name=str(declared.get("name") or module),
        package_name=package_name,
        version=str(declared.get("version") or distribution.version),
        description=str(declared.get("description") or summary or f"{module} environment"),
        client_module_path=f"{module}.client",
        client_class_name=f"{prefix}Env",
        action_class_name=str(declared["action"]) if has_names else f"{prefix}Action",
        observation_class_name=str(declared["observation"]) if has_names else f"{prefix}Observation",
        default_image=f"{module.replace('_', '-')}:latest",
        spec_version=declared["spec_version"] if isinstance(declared.get("spec_version"), int) else None,
        manifest=manifest,
        folder=folder,
    )


def _names_classes(manifest: dict[str, Any] | None) -> bool:
    return bool(manifest and manifest.get("action") and manifest.get("observation"))


def _folder_of(module: str, path: list[str] | None = None) -> Path | None:
    """Return the folder of a package without importing it."""
    try:
        # For a top-level name, `find_spec` imports nothing.
        if path is None:
            spec = importlib.util.find_spec(module)
        else:
            spec = importlib.machinery.PathFinder.find_spec(module, path)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(folder / MANIFEST)
    except FileNotFoundError:
        return None
    # One broken manifest must not hide the other environments.
    except (OSError, ManifestError) as exc:
        logger.warning("the manifest in %s cannot be read: %s", folder, exc)
        return None


# -- the cache ------------------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Return the path of the cached list: `openenv/discovery_cache.json` in the user's cache folder."""
    return settings.cache_dir() / "discovery_cache.json"


def _read_cache() -> dict[str, EnvironmentInfo] | None:
    """Read the cached list, or return None if it is missing, out of date, or owned by another user."""
    try:
        # Entries name modules to import: a file that others can write, or a link that they set, is not read.
        handle = os.open(cache_file(), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with open(handle, encoding="utf-8") as file:
            if not _is_own(os.fstat(file.fileno())):
                logger.warning("%s belongs to somebody else or can be written by others: it is ignored", cache_file())
                return None
            data = json.load(file)
        environments = {
            key: EnvironmentInfo(**{**fields, "folder": Path(fields["folder"]) if fields["folder"] else None})
            for key, fields in data["environments"].items()
        }
        # The file belongs to a certain state of the path; any change makes it stale.
        return environments if data["state"] == _path_state(environments) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # an older or a damaged file is as none
        return None


def _write_cache(known: dict[str, EnvironmentInfo]) -> None:
    path = cache_file()
    environments = {key: {**asdict(info), "folder": str(info.folder or "")} for key, info in known.items()}
    try:
        text = json.dumps({"state": _path_state(known), "environments": environments})
        path.parent.mkdir(parents=True, exist_ok=True)
        # A reader that comes between sees half a file, which is as none.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            path.chmod(0o600)  # one that was there before keeps its mode otherwise
            file.write(text)
    except (OSError, TypeError, ValueError) as error:  # a full disk; a manifest with values that are not JSON
        logger.debug("what was discovered is not kept in %s: %s", path, error)


def _path_state(environments: dict[str, EnvironmentInfo]) -> list[Any]:
    """Return what changes when a package is installed or removed, or a manifest is edited."""
    # Folder times change when packages are installed or removed; manifest times when one is edited.
    manifests = [info.folder / MANIFEST for info in environments.values() if info.folder is not None]
    places = [*sys.path, *map(str, manifests)]
    return [_CACHE_FORMAT, sys.version, *([place, _changed(place)] for place in places)]


def _changed(place: str) -> int:
    try:
        # An empty entry of the path is the working directory.
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0


def _is_own(facts: os.stat_result) -> bool:
    # A file that others can write could make this process import any module.
    others = stat.S_IWGRP | stat.S_IWOTH
    is_mine = not hasattr(os, "geteuid") or facts.st_uid == os.geteuid()
    return stat.S_ISREG(facts.st_mode) and is_mine and not facts.st_mode & others
