"""Loads the application for a target on the command line.

A target is a folder with `openenv.yaml`, a Python file, or a module; `:name` picks an object in it. `gymnasium:ID` is a
Gymnasium environment, `pettingzoo:ID` one of PettingZoo. Knows imports and manifests; must not know how the application
is run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from openenv import settings
from openenv._lazy import load_plugin, plugin_names
from openenv.env.binding import declared_concurrency, factory_class, infer_models, shared_attributes
from openenv.env.environment import Environment
from openenv.env.manifest import DEFAULT_APP, MANIFEST, ManifestError

from .app import create_app
from .author_frames import author_traceback, install_hint
from .folders import ABOVE, FolderApp, FolderError, dotted_name, find_app
from .module_finder import ModuleTableFinder

TARGETS = "openenv.targets"  # entry points: functions that make an environment class from `SCHEME:text`
CLASS_SESSIONS = 256  # the session limit for a bare class with separate sessions; applications set theirs
_APP = "app"
_OURS = str(Path(__file__).parents[1])


class TargetError(Exception):
    """The target cannot be served; the text says what to do."""


class TargetFailed(TargetError):
    """The target's code raised while it was loaded or built; `__cause__` is the exception."""

    # `is_logged`: the log has the traceback already, so that nobody prints it again.
    def __init__(
        self, label: str, cause: BaseException, problem: str = "cannot be loaded", *, is_logged: bool = False
    ) -> None:
        super().__init__(f"{label} {problem}: {type(cause).__name__}: {cause}{install_hint(cause)}")
        self.__cause__ = cause
        self.is_logged = is_logged

    def report(self) -> str:
        """Return the traceback from the target's first frame on."""
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
    """Return the ASGI application of a target.

    Raises:
        TargetError: The target has no application or environment.
    """
    scheme, separator, rest = target.partition(":")
    if separator and scheme in plugin_names(TARGETS):
        return _plugin_app(target, scheme, rest)
    place, _, name = split_target(target)
    path = Path(place)
    if path.is_dir():
        return _load_package(path, name)
    if path.suffix == ".py":
        if not path.is_file():
            raise TargetError(f"no file {path}")
        module = _import_file(path.resolve(), place)
    elif path.is_file() and not place.isidentifier():
        raise TargetError(f"{place} is not a Python file, nor a folder with {MANIFEST}, nor a module")
    else:
        missing = f"no folder, file or module {place!r} (looked from {Path.cwd().name}/)"
        module = _import_module(place, place, missing=missing)
    return _to_app(module, place, name)


def _plugin_app(target: str, scheme: str, rest: str) -> Any:
    """Serve a target of another interface, such as `gymnasium:CartPole-v1`, with the class its plugin makes."""
    _add_to_path(Path.cwd())
    try:
        make_class = load_plugin(TARGETS, scheme)
    except ModuleNotFoundError as exc:  # the plugin's own package is missing; its message says how to install it
        raise TargetError(f"{target} cannot be served: {exc}") from exc
    with _loading(target):
        try:
            env_cls = make_class(rest)
        except ValueError as exc:
            raise TargetError(f"{target} cannot be served: {exc}") from exc
        models = (env_cls.action_cls, env_cls.observation_cls)
        return create_app(env_cls, *models, env_name=env_cls.name, max_concurrent_envs=CLASS_SESSIONS)


def split_target(target: str) -> tuple[str, str, str]:
    """Cut `place:name` into place, colon and name; the latter two may be empty."""
    head, separator, tail = target.rpartition(":")
    if separator and tail.isidentifier() and head:
        return head, separator, tail
    return target, "", ""


def enter_folder(target: str) -> str:
    """Change to the folder of a package, as its image does; return the target relative to it.

    Environments open data by relative paths, which `uvicorn server.app:app` resolves inside the folder.
    """
    place, colon, name = split_target(target)
    if not Path(place).is_dir():
        return target
    folder = package_app(Path(place)).folder
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]  # added by `python -m openenv`; a package in it may have the same name as the folder
    os.chdir(folder)
    return f"{folder}{colon}{name}"


def _load_package(folder: Path, name: str) -> Any:
    app = package_app(folder)
    _export_variables(app.manifest)
    module = _import_from_folder(app)
    # Without a name in the manifest, the module may define a class instead of an application.
    name = name or app.name or (_APP if hasattr(module, _APP) or _APP in app.manifest else "")
    return _to_app(module, module.__name__, name)


def package_app(folder: Path) -> FolderApp:
    """Find the application of a folder.

    Raises:
        TargetError: The folder has no application or several, or the manifest cannot be read.
    """
    try:
        return find_app(folder)
    except (FolderError, ManifestError, OSError) as exc:
        raise TargetError(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One way to import the application of a folder.

    Args:
        module: The module's name.
        path: Folders to put first on the path.
        package: The folder for the first part of the name; it wins over all other folders of that name.
        names: More package names and their folders; used if no other finder knows the name.
        last: Folders to put last on the path.
    """

    module: str
    path: tuple[Path, ...] = ()
    package: Path | None = None
    names: dict[str, str] = field(default_factory=dict)
    last: tuple[Path, ...] = ()


def _attempts(app: FolderApp) -> Iterator[_Attempt]:
    """List the ways to import the application of a folder, in the order to try them.

    1. by the name in the manifest, if that package is installed from this folder
    2. as `uvicorn server.app:app` does inside the folder, with the folder first on the path
    3. the same inside the package, if it is deeper in the folder (`src/my_env`)
    4. as a part of its package: `..models` needs `my_env.server.app`
    5. as 2 and 4, with all names that the code could use for itself

    Each way adds only the names it needs, until the import is done.
    """
    folder, file, package = app.folder, app.file, app.package
    places = _places_of(app.module.partition(".")[0])
    is_from_here = "." in app.module and any(_is_own(place, folder) for place in places)
    if file is None or is_from_here or (app.note is not None and places):
        yield _Attempt(app.module, (folder,))
    if file is None:
        return
    source = folder / "src"
    root = source if file.is_relative_to(source) and not app.module.startswith("src.") else folder
    yield _Attempt(dotted_name(file, root), (root, folder))
    if package not in (root, folder):
        yield _Attempt(dotted_name(file, package), (package, folder))
    own = app.own_names()
    # A folder may have the name of an installed package that other code imports.
    free = (name for name in own if all(place == package for place in _places_of(name)))
    in_package = f"{next(free, 'served_package')}.{dotted_name(file, package)}"
    yield _Attempt(in_package, package=package)
    names = {name: str(package) for name in own}
    names |= {place.name: str(place) for place in package.parents[:ABOVE] if place.name.isidentifier()}
    last = tuple(place for place in (source, file.parent, folder.parent) if place.is_dir())
    yield _Attempt(dotted_name(file, root), (root, folder), names=names, last=last)
    yield _Attempt(in_package, (folder,), package, names, last)


def _import_from_folder(app: FolderApp) -> ModuleType:
    """Import the application of a folder in the first way that works.

    Raises:
        TargetError: The module in the manifest is neither in the folder nor installed.
        TargetFailed: No way works; the cause is the exception of the likeliest way.
    """
    failures: list[ImportError] = []
    with _loading(app.label):
        for attempt in _attempts(app):
            try:
                module = _attempt_import(attempt, app.folder)
                if not attempt.names:  # methods may import the package by its name, long after this
                    own = {name: str(app.package) for name in app.own_names()}
                    sys.meta_path.insert(0, ModuleTableFinder(own, yields=True))
                return module
            except ImportError as exc:
                failures.append(exc)
                if not _is_about_names(exc, app) and not _names_module(exc, attempt.module):
                    raise
        if app.file is None and _names_module(failures[0], app.module):
            entry = app.manifest.get("app", DEFAULT_APP)
            raise TargetError(
                f"{app.label} says that the application is {entry!r}, but no module {app.module!r} exists"
            ) from failures[0]
        # Code that imports `..models` always fails as a top-level module, so a later exception says more.
        raise next((exc for exc in failures if "relative import" not in str(exc)), failures[0])


def _attempt_import(attempt: _Attempt, folder: Path) -> ModuleType:
    path, finders, known = list(sys.path), list(sys.meta_path), set(sys.modules)
    first, last = (list(dict.fromkeys(map(str, places))) for places in (attempt.path, attempt.last))
    sys.path[:] = [*first, *(place for place in path if place not in first)]
    sys.path += [place for place in last if place not in sys.path]
    for place in attempt.path:
        _forget_others({entry.stem for entry in place.iterdir() if entry.suffix == ".py" or entry.is_dir()}, folder)
    if attempt.package is not None:
        top = attempt.module.partition(".")[0]
        _forget_others({top}, folder)
        sys.meta_path.insert(0, ModuleTableFinder({top: str(attempt.package)}))
    if attempt.names:
        sys.meta_path.insert(0, ModuleTableFinder(attempt.names, yields=True))
    importlib.invalidate_caches()  # the folder may have been written a moment ago
    try:
        return importlib.import_module(attempt.module)
    except BaseException:
        sys.path[:], sys.meta_path[:] = path, finders
        for name in set(sys.modules) - known:
            if (loaded := _place_of(sys.modules[name])) is not None and _is_own(loaded, folder):
                del sys.modules[name]  # the next attempt must not see modules of this one
        raise


def _is_about_names(exc: ImportError, app: FolderApp) -> bool:
    """Return whether another way to import the folder could find the missing module."""
    if not isinstance(exc, ModuleNotFoundError) or exc.name is None:
        return True
    missing = exc.name.partition(".")[0]
    if missing in app.own_names() or any(missing == place.name for place in app.package.parents[:ABOVE]):
        return True
    inside = [app.folder, app.folder / "src", app.package, app.folder.parent]
    inside += [] if app.file is None else [app.file.parent]
    return any((place / missing).is_dir() or (place / f"{missing}.py").is_file() for place in inside)


def _forget_others(names: set[str], folder: Path) -> None:
    """Forget modules of other folders that have the names of this folder's modules, such as `server` and `models`.

    Installed modules and the standard library stay: other code uses them.
    """
    for name, loaded in list(sys.modules.items()):
        place = _place_of(loaded) if name.partition(".")[0] in names else None
        if place is not None and not _is_own(place, folder) and not _is_installed(place):
            del sys.modules[name]


def _place_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return Path(file)
    try:
        return next((Path(place) for place in module.__path__), None)
    except (AttributeError, TypeError, KeyError):  # not a package, or its parent was removed
        return None


def _is_own(place: Path, folder: Path) -> bool:
    """Return whether a module belongs to a folder, and not to a virtual environment inside it."""
    return place.resolve().is_relative_to(folder) and not _is_installed(place)


def _is_installed(place: Path) -> bool:
    standard = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    roots = {*standard, *site.getsitepackages(), site.getusersitepackages(), _OURS}
    return any(place.is_relative_to(root) for root in roots)


def _places_of(name: str) -> list[Path]:
    """Return the folders of an importable package, or the file of a module; empty if the name is unknown."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    return [Path(place).resolve() for place in spec.submodule_search_locations or [spec.origin or ""]]


@dataclass(frozen=True, slots=True)
class ManifestSettings:
    """The serving options in a package's `openenv.yaml`; `notes` are the problems of its other keys."""

    port: int = 8000
    max_sessions: int | None = None
    runner: str | None = None
    workers: str | None = None
    session_timeout: float | None = None
    notes: tuple[str, ...] = ()


def manifest_settings(target: str) -> ManifestSettings:
    """Return the serving options in a target's manifest; the defaults if it has no manifest.

    Raises:
        TargetError: A key for serving is invalid. Problems of other keys become notes.
    """
    place = Path(split_target(target)[0])
    if not place.is_dir():
        return ManifestSettings()
    app = package_app(place)
    path, data = app.folder / MANIFEST, app.manifest
    if not path.is_file():
        return ManifestSettings()
    from openenv.env.manifest import EnvManifest, ServeBlock, manifest_problems  # only packages have a manifest

    if isinstance(port := data.get("port"), str) and port.isdecimal():
        data = {**data, "port": int(port)}
    serving = {"port", "serve"}
    problems = [(problem.key.partition(".")[0], f"{path}: {problem}") for problem in manifest_problems(data)]
    if wrong := [text for key, text in problems if key in serving]:
        raise TargetError("; ".join(wrong))
    notes = tuple(f"{text} (`openenv validate` checks the whole file)" for key, text in problems if key != "validation")
    notes += () if app.note is None else (app.note,)
    block = ServeBlock.model_validate(data.get("serve") or {})
    port = data.get("port", EnvManifest.model_fields["port"].default)
    workers = None if block.workers is None else str(block.workers)
    return ManifestSettings(port, block.max_sessions, block.runner, workers, block.session_timeout, notes)


def _export_variables(data: dict[str, Any]) -> None:
    """Set the variables that a manifest declares, as a Space does; keep those that are already set."""
    variables = data.get("variables")
    if isinstance(variables, dict):
        known = settings.child_environment()
        settings.export({str(name): value for name, value in variables.items() if str(name) not in known})


def _add_to_path(folder: Path, *, last: bool = False) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(len(sys.path) if last else 0, str(folder))


def _import_file(path: Path, label: str) -> ModuleType:
    name = _module_name(path)
    # If the file is named like a standard module, put its folder last, so that other code still finds the standard one.
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
        sys.modules.pop(name, None)  # the next import must not find a partial module
        raise
    return module


def _module_name(path: Path) -> str:
    """Name a module after its file, unless another module has that name."""
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
            if _names_module(exc, name):
                raise TargetError(missing) from exc
            raise


def _names_module(exc: ImportError, name: str) -> bool:
    """Return whether the missing module is `name` itself or a parent package, and not one that it imports."""
    is_missing = isinstance(exc, ModuleNotFoundError) and exc.name is not None
    return is_missing and (name == exc.name or name.startswith(f"{exc.name}."))


def _to_app(module: ModuleType, place: str, name: str) -> Any:
    """Return the application of a module; messages call the module `place`."""
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
        hint = f"; did you mean {place}:{made[0]}?" if made else ""
        raise TargetError(f"{place} defines neither an `app` nor an Environment class{hint}")
    names = ", ".join(sorted(cls.__name__ for cls in candidates))
    raise TargetError(f"{place} has several environments ({names}); pick one with {place}:NAME")


def _is_made_elsewhere(value: Any) -> bool:
    """Return whether a name is an environment class defined in another module or made by a function."""
    return inspect.isclass(value) and issubclass(value, Environment) and not inspect.isabstract(value)


def as_app(value: Any, label: str) -> Any:
    """Return the ASGI application of an environment class, a factory of one, or an application.

    Raises:
        TargetError: The value is something else; messages call it `label`.
    """
    env_cls = factory_class(value) if callable(value) else None
    if env_cls is not None and issubclass(env_cls, Environment):
        return _app_of(value, env_cls, label)
    if is_asgi(value):
        return value
    if not inspect.isfunction(value) or _needed(value):
        raise TargetError(f"{label} is neither an application nor an Environment class")
    with _loading(label):
        app = value()  # as uvicorn does with a factory
    if is_asgi(app):
        return app
    if isinstance(app, Environment):
        app.close()
        raise TargetError(
            f"{label} has no return annotation; write `-> {type(app).__name__}`, so that it is called for every session"
        )
    raise TargetError(f"{label} must return an ASGI application or an Environment, not {type(app).__name__}")


def is_asgi(value: Any) -> bool:
    """Return whether a value can be called as an ASGI application: with a scope, `receive` and `send`."""
    if not callable(value) or (inspect.isclass(value) and not hasattr(value, "__await__")):
        return False
    return _takes(value, 3)


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _needed(factory: Callable[..., Any]) -> list[str]:
    """Return the required parameters of a factory."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # builtins do not always have one
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _app_of(value: Any, env_cls: type[Any], label: str) -> Any:
    """Serve a class, or a factory with an annotated return type."""
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
    # A class without a declaration has one instance per session, so sessions are separate unless class attributes
    # are shared.
    declared = declared_concurrency(env_cls)
    separate = not shared_attributes(env_cls) if declared is None else declared
    return create_app(
        value,
        models.action,
        models.observation,
        env_name=env_cls.__name__,
        reset_observation_cls=models.reset_observation,
        max_concurrent_envs=CLASS_SESSIONS if separate else 1,
        separate_sessions=separate,
    )
