"""From what a user names on the command line to an application.

A target is a folder with `openenv.yaml`, a Python file, or a module; `:name` picks something in it. `gymnasium:ID` is
an environment of Gymnasium's. Knows imports and manifests; must not know how the application is run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import settings
from ..author_frames import author_traceback
from ..env.binding import declared_concurrency, factory_class, infer_models, shared_attributes
from ..env.environment import Environment
from ..manifest import DEFAULT_APP, MANIFEST, ManifestError, read_manifest
from .app import create_app

GYMNASIUM = "gymnasium:"
CLASS_SESSIONS = 256  # of a bare class whose sessions are separate; an application says for itself


_EXTRAS = {"gradio": "gradio", "numpy": "numpy", "PIL": "images", "gymnasium": "gymnasium"}
"""Modules that the published package brings, or that environments often import, and the extra that has them here."""


class TargetError(Exception):
    """The target cannot be served; the text says what to do."""


class TargetFailed(TargetError):
    """The target's own code raised while it was loaded or built; `__cause__` is what it raised."""

    def __init__(self, label: str, cause: BaseException, problem: str = "cannot be loaded") -> None:
        hint = ""
        if isinstance(cause, ModuleNotFoundError) and (extra := _EXTRAS.get((cause.name or "").partition(".")[0])):
            hint = f". Install it with: pip install 'openenv[{extra}]'"
        super().__init__(f"{label} {problem}: {type(cause).__name__}: {cause}{hint}")
        self.__cause__ = cause

    def report(self) -> str:
        """Show the traceback of what was raised, from the target's first frame on."""
        assert self.__cause__ is not None
        return author_traceback(self.__cause__)


@contextlib.contextmanager
def _loading(label: str) -> Iterator[None]:
    try:
        yield
    except TargetError:
        raise
    except (Exception, SystemExit) as exc:
        raise TargetFailed(label, exc) from exc


def load_app(target: str) -> Any:
    """Return the ASGI application that a target stands for.

    Raises:
        TargetError: There is nothing to serve.
    """
    if target.startswith(GYMNASIUM):
        return _gymnasium_app(target)
    place, _, name = split_target(target)
    path = Path(place)
    if path.is_dir():
        return _load_package(path, name)
    if path.suffix == ".py":
        if not path.is_file():
            raise TargetError(f"there is no file {path}")
        module = _import_file(path.resolve(), place)
    elif path.is_file() and not place.isidentifier():
        raise TargetError(f"{place} is not a Python file, nor a folder with {MANIFEST}, nor a module")
    else:
        missing = f"there is no folder, file or module {place!r} (looked from {Path.cwd().name}/)"
        module = _import_module(place, place, missing=missing)
    return _to_app(module, place, name)


def _gymnasium_app(target: str) -> Any:
    """Serve an environment by its Gymnasium id, such as `CartPole-v1`; `module:ID` imports a module first."""
    _add_to_path(Path.cwd())
    try:
        from ..gym.served_gymnasium import GymnasiumError, UnsupportedSpace, gymnasium_environment
    except ModuleNotFoundError as exc:
        raise TargetError(f"{target} needs Gymnasium: pip install 'openenv[gymnasium]'") from exc
    with _loading(target):
        try:
            env_cls = gymnasium_environment(target.removeprefix(GYMNASIUM))
        except (GymnasiumError, UnsupportedSpace) as exc:
            raise TargetError(f"{target} cannot be served: {exc}") from exc
    models = (env_cls.action_cls, env_cls.observation_cls)
    return create_app(env_cls, *models, env_name=env_cls.name, max_concurrent_envs=CLASS_SESSIONS)


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
    data = load_manifest(manifest)
    _export_variables(data)
    entry = data.get("app", DEFAULT_APP)
    module_name, _, attribute = str(entry).partition(":")
    if (folder / "__init__.py").is_file():
        _add_to_path(folder.parent)
        module_name = f"{folder.name}.{module_name}"
    else:
        _add_to_path(folder)
    label = f"{folder.name}/{MANIFEST}"
    missing = f"{label} says that the application is {entry!r}, but there is no module {module_name!r}"
    module = _import_module(module_name, label, missing=missing)
    return _to_app(module, module_name, name or attribute or "app")


def load_manifest(path: Path) -> dict[str, Any]:
    """Read an `openenv.yaml`.

    Raises:
        TargetError: It cannot be read, or is not a mapping.
    """
    try:
        return read_manifest(path)
    except ManifestError as exc:
        raise TargetError(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class ManifestSettings:
    """How a package's `openenv.yaml` wants to be served; `notes` are what is wrong with other keys of it."""

    port: int = 8000
    max_sessions: int | None = None
    runner: str | None = None
    workers: str | None = None
    session_timeout: float | None = None
    notes: tuple[str, ...] = ()


def manifest_settings(target: str) -> ManifestSettings:
    """Return what the manifest of a target says about serving it; the defaults where there is none.

    Raises:
        TargetError: A key that serving needs is wrong. Other keys do no harm here.
    """
    path = Path(split_target(target)[0]) / MANIFEST
    if not path.is_file():
        return ManifestSettings()
    from ..manifest_models import EnvManifest, ServeBlock, manifest_problems  # only packages have a manifest

    data = load_manifest(path)
    serving = {"spec_version", "type", "runtime", "app", "port", "variables", "serve"}
    problems = [(problem.key.partition(".")[0], f"{path}: {problem}") for problem in manifest_problems(data)]
    if wrong := [text for key, text in problems if key in serving]:
        raise TargetError("; ".join(wrong))
    notes = tuple(f"{text} (`openenv validate` checks the whole file)" for key, text in problems if key != "validation")
    block = ServeBlock.model_validate(data.get("serve") or {})
    port = data.get("port", EnvManifest.model_fields["port"].default)
    workers = None if block.workers is None else str(block.workers)
    return ManifestSettings(port, block.max_sessions, block.runner, workers, block.session_timeout, notes)


def _export_variables(data: dict[str, Any]) -> None:
    """Set the variables that a manifest declares, as a Space does, unless they are set."""
    variables = data.get("variables")
    if isinstance(variables, dict):
        known = settings.child_environment()
        settings.export({str(name): value for name, value in variables.items() if str(name) not in known})


def _add_to_path(folder: Path, *, last: bool = False) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(len(sys.path) if last else 0, str(folder))


def _import_file(path: Path, label: str) -> ModuleType:
    name = _module_name(path)
    # A file named like a module of Python's comes last on the path, so that others still find Python's.
    _add_to_path(path.parent, last=name != path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _loading(label):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)  # half a module must not be found by the next import
        raise
    return module


def _module_name(path: Path) -> str:
    """Name a file's module after the file, unless that is another module's name."""
    loaded = sys.modules.get(path.stem)
    is_itself = loaded is not None and getattr(loaded, "__file__", None) == str(path)
    if is_itself or (loaded is None and path.stem not in sys.stdlib_module_names):
        return path.stem
    return f"_served_{path.stem}"


def _import_module(name: str, label: str, *, missing: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(missing)
    _add_to_path(Path.cwd())
    with _loading(label):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name is not None and (name == exc.name or name.startswith(exc.name + ".")):
                raise TargetError(missing) from exc
            raise


def _to_app(module: ModuleType, place: str, name: str) -> Any:
    """Find what to serve in a module that the user knows as `place`."""
    if name:
        if not hasattr(module, name):
            raise TargetError(f"{place} has no {name!r}")
        return as_app(getattr(module, name), f"{place}:{name}")
    if hasattr(module, "app"):
        return as_app(module.app, f"{place}:app")
    defined = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Environment) and value.__module__ == module.__name__
    ]
    candidates = [cls for cls in defined if not inspect.isabstract(cls)] or defined[:1]
    if len(candidates) == 1:
        return as_app(candidates[0], candidates[0].__name__)
    if not candidates:
        made = [name for name, value in vars(module).items() if _is_made_elsewhere(value)]
        hint = f"; is it {place}:{made[0]} that you mean?" if made else ""
        raise TargetError(f"{place} has neither an `app` nor an Environment class of its own{hint}")
    names = ", ".join(sorted(cls.__name__ for cls in candidates))
    raise TargetError(f"{place} has several environments ({names}); pick one with {place}:NAME")


def _is_made_elsewhere(value: Any) -> bool:
    """Whether a module has an environment only by name: it was imported, or made by a function."""
    return inspect.isclass(value) and issubclass(value, Environment) and not inspect.isabstract(value)


def as_app(value: Any, label: str) -> Any:
    """Return the ASGI application of an environment class, of a factory of one, or of an application itself.

    Raises:
        TargetError: The value is none of these; `label` names it in the message.
    """
    env_cls = factory_class(value) if callable(value) else None
    if env_cls is not None and issubclass(env_cls, Environment):
        return _app_of(value, env_cls, label)
    if is_asgi(value):
        return value
    if not inspect.isfunction(value) or _needed(value):
        raise TargetError(f"{label} is neither an application nor an Environment class")
    if not _makes_application(value):
        raise TargetError(
            f"{label} does not say what it makes; annotate it: `-> MyEnvironment` if it makes an environment, "
            "`-> FastAPI` if it makes an application"
        )
    with _loading(label):
        app = value()
    if not is_asgi(app):
        raise TargetError(f"{label} has returned something that is no application: {type(app).__name__}")
    return app


def is_asgi(value: Any) -> bool:
    """Say whether something can be called as an ASGI application: with a scope, `receive` and `send`."""
    if not callable(value) or (inspect.isclass(value) and not hasattr(value, "__await__")):
        return False
    return _takes(value, 3)


def _makes_application(function: Callable[..., Any]) -> bool:
    try:
        made = typing.get_type_hints(function).get("return")
    except Exception:  # annotations may name what is not importable here
        return False
    return inspect.isclass(made) and "__call__" in dir(made) and _takes(made.__call__, 4)


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _needed(factory: Callable[..., Any]) -> list[str]:
    """The parameters without which a factory cannot be called."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # builtins do not always have one
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _app_of(value: Any, env_cls: type[Any], label: str) -> Any:
    """Serve a class, or a factory that says which class it makes."""
    missing: frozenset[str] = getattr(env_cls, "__abstractmethods__", frozenset())
    if missing:
        known = [name for name in vars(Environment) if name in missing]
        names = ", ".join([*known, *sorted(missing.difference(known))])
        raise TargetError(f"{env_cls.__name__} does not define {names}")
    if needed := _needed(value):
        arguments = ", ".join(f"{name}=..." for name in needed)
        raise TargetError(
            f"{label} cannot be made without {', '.join(needed)}; give defaults, or serve a function: "
            f"def make() -> {env_cls.__name__}: return {env_cls.__name__}({arguments})"
        )
    models = infer_models(env_cls)
    # A class that says nothing has an instance for each session, so they are separate unless its attributes are shared.
    declared = declared_concurrency(env_cls)
    separate = not shared_attributes(env_cls) if declared is None else declared
    return create_app(
        value,
        models.action,
        models.observation,
        env_name=env_cls.__name__,
        max_concurrent_envs=CLASS_SESSIONS if separate else 1,
        separate_sessions=separate,
    )
