"""From what a user names on the command line to an application.

A target is a folder with `openenv.yaml`, a Python file, or a module; `:name` picks something in it. Knows imports and
manifests; must not know how the application is run.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..env.binding import factory_class, infer_models
from ..env.environment import Environment
from .app import create_app

MANIFEST = "openenv.yaml"
CLASS_SESSIONS = 256  # of a bare class that supports several; an application says for itself


class TargetError(Exception):
    """The target cannot be served; the text says what to do."""


def load_app(target: str) -> Any:
    """Return the ASGI application that a target stands for.

    Raises:
        TargetError: There is nothing to serve.
    """
    place, _, name = split_target(target)
    path = Path(place)
    if path.is_dir():
        return _load_package(path, name)
    if path.suffix == ".py":
        if not path.is_file():
            raise TargetError(f"there is no file {path}")
        module = _import_file(path.resolve())
    else:
        module = _import_module(place)
    return _to_app(module, name)


def split_target(target: str) -> tuple[str, str, str]:
    """Cut `place:name` into place, colon and name; the latter two may be empty."""
    head, separator, tail = target.rpartition(":")
    if separator and tail.isidentifier() and head:
        return head, separator, tail
    return target, "", ""


def _load_package(folder: Path, name: str) -> Any:
    folder = folder.resolve()
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise TargetError(f"{folder} has no {MANIFEST}; name a file or a module to serve a class without one")
    entry = read_manifest(manifest).get("app", "server.app:app")
    module_name, _, attribute = str(entry).partition(":")
    if (folder / "__init__.py").is_file():
        _add_to_path(folder.parent)
        module_name = f"{folder.name}.{module_name}"
    else:
        _add_to_path(folder)
    return _to_app(_import_module(module_name), name or attribute or "app")


def read_manifest(path: Path) -> dict[str, Any]:
    """Read an `openenv.yaml`.

    Raises:
        TargetError: It is not a mapping.
    """
    import yaml  # only folders have a manifest

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as exc:
        raise TargetError(f"{path} is not valid YAML: {exc}") from exc
    if not isinstance(data, dict):
        raise TargetError(f"{path} must be a mapping with at least a name")
    return data


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import_file(path: Path) -> ModuleType:
    _add_to_path(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem, None)  # half a module must not be found by the next import
        raise
    return module


def _import_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(exc.name + ".")):
            raise TargetError(f"there is no folder, file or module {name!r} (looked from {Path.cwd().name}/)") from exc
        raise


def _to_app(module: ModuleType, name: str) -> Any:
    if name:
        if not hasattr(module, name):
            raise TargetError(f"{module.__name__} has no {name!r}")
        return _as_app(getattr(module, name), f"{module.__name__}:{name}")
    if hasattr(module, "app"):
        return module.app
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Environment)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(found) == 1:
        return _as_app(found[0], found[0].__name__)
    if not found:
        raise TargetError(f"{module.__name__} has neither an `app` nor an Environment class")
    names = ", ".join(sorted(cls.__name__ for cls in found))
    raise TargetError(f"{module.__name__} has several environments ({names}); pick one with {module.__name__}:NAME")


def _as_app(value: Any, label: str) -> Any:
    env_cls = factory_class(value) if callable(value) else None
    if env_cls is None or not issubclass(env_cls, Environment):
        if callable(value):
            if inspect.isfunction(value) and not inspect.signature(value).parameters:
                raise TargetError(f"{label} does not say which environment it makes; annotate it: -> MyEnvironment")
            return value
        raise TargetError(f"{label} is neither an application nor an Environment class")
    models = infer_models(env_cls)
    sessions = CLASS_SESSIONS if env_cls.SUPPORTS_CONCURRENT_SESSIONS else 1
    return create_app(value, models.action, models.observation, env_name=env_cls.__name__, max_concurrent_envs=sessions)
