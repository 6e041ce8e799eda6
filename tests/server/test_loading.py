"""From a target on the command line to an application: folders, files, modules, classes, and mistakes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv.env.manifest import read_manifest
from openenv.server.fast.upgrade import UpgradeProtocol
from openenv.server.loading import CLASS_SESSIONS, TargetError, TargetFailed, load_app
from openenv.server.run import ServeOptions, environment_server, prepare, serve, uvicorn_settings

ENV = """
from openenv import Action, Environment, Observation, State

class Go(Action):
    where: str = "north"

class Seen(Observation):
    place: str = ""

class Walk(Environment[Go, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, **kwargs):
        return Seen()
    def step(self, action, **kwargs):
        return Seen(place=action.where)
    @property
    def state(self):
        return State()
"""
SECOND = """
import json
import fastapi
from openenv import create_app
class Run(Walk):
    SUPPORTS_CONCURRENT_SESSIONS = False
def make() -> Walk:
    return Walk()
def make_unnamed():
    return Walk()
def make_app() -> fastapi.FastAPI:
    return create_app(Walk, Go, Seen, max_concurrent_envs=4)
def make_nothing() -> fastapi.FastAPI:
    return None
class Half(Environment[Go, Seen, State]):
    def reset(self, **kwargs):
        return Seen()
class Sized(Walk):
    def __init__(self, size, *, depth, colour="red"):
        super().__init__()
number = 7
"""
APP = ENV + "from openenv import create_app\napp = create_app(Walk, Go, Seen, max_concurrent_envs=3)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)) or name in ("server", "server.app"):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def sessions(app: Any) -> int:
    server = environment_server(app)
    assert server is not None
    return server.max_concurrent_envs


def test_a_file_with_one_environment_class_needs_nothing_else(folder: Path) -> None:
    app = load_app(str(write(folder, "walk_one.py", ENV)))
    server = environment_server(app)
    assert server is not None
    assert server.service.env_name == "Walk"
    assert server.action_cls is not None
    assert server.action_cls.__name__ == "Go"
    assert sessions(app) == CLASS_SESSIONS


def test_a_class_that_cannot_share_gets_one_session(folder: Path) -> None:
    assert sessions(load_app(f"{write(folder, 'walk_two.py', ENV + SECOND)}:Run")) == 1


def test_a_factory_that_says_what_it_returns_is_served(folder: Path) -> None:
    assert sessions(load_app(f"{write(folder, 'walk_three.py', ENV + SECOND)}:make")) == CLASS_SESSIONS


def test_an_application_is_taken_as_it_is(folder: Path) -> None:
    write(folder, "walk_app.py", APP)
    for target in ("walk_app.py", "walk_app.py:app", "walk_app", "walk_app:app"):
        assert sessions(load_app(target)) == 3


def test_a_dotted_module_is_found_from_the_working_folder(folder: Path) -> None:
    write(folder, "walking/__init__.py", "")
    write(folder, "walking/app.py", APP)
    assert sessions(load_app("walking.app:app")) == 3


def test_a_folder_with_a_manifest_is_served_as_its_package(folder: Path) -> None:
    write(folder, "walk_env/__init__.py", "")
    write(folder, "walk_env/openenv.yaml", "name: walk\napp: server.app:app\n")
    write(folder, "walk_env/server/__init__.py", "")
    write(folder, "walk_env/server/app.py", "from ..models import *  # noqa\n" + APP)
    write(folder, "walk_env/models.py", "x = 1\n")
    assert sessions(load_app("walk_env")) == 3


def test_a_folder_that_is_no_package_is_put_on_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "loose/openenv.yaml", "name: loose\n")
    write(folder, "loose/server/app.py", APP)
    assert sessions(load_app("loose")) == 3


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("missing.py", "no file"),
        ("no_such_module", "no folder, file or module 'no_such_module'"),
        ("no_such.module:app", "no folder, file or module"),
        ("empty", "has no openenv.yaml"),
        ("several.py", r"several environments \(Run, Sized, Walk\); pick one with several.py:NAME"),
        ("several.py:Half", "^Half does not define step$"),
        ("half.py", "^Half does not define step$"),
        ("several.py:Sized", r"cannot be made without size, depth; .* -> Sized: return Sized\(size=..., depth=...\)"),
        ("several.py:json", "neither an application nor"),
        ("several.py:make_nothing", "not NoneType"),
        ("json:loads", "neither an application nor an Environment class"),
        ("five.py", "five.py:app is neither an application nor an Environment class"),
        ("notes.txt", "notes.txt is not a Python file"),
        (".relative", "no folder, file or module '.relative'"),
        ("astray", r"astray/openenv.yaml says that the application is 'server.ap:app', but no module 'server.ap'"),
        ("nothing.py", "neither an `app` nor an Environment class"),
        ("several.py:Nobody", "has no 'Nobody'"),
        ("several.py:number", "neither an application nor an Environment class"),
        ("several.py:make_unnamed", "several.py:make_unnamed has no return annotation; write"),
        ("bad_yaml", "not valid YAML"),
        ("list_yaml", "must be a mapping"),
    ],
)
def test_a_target_that_cannot_be_served_says_what_to_do(folder: Path, target: str, said: str) -> None:
    write(folder, "several.py", ENV + SECOND)
    write(folder, "nothing.py", "x = 1\n")
    write(folder, "half.py", ENV.replace("    def step", "    def leap").replace("def state", "def stage"))
    (folder / "half.py").write_text((folder / "half.py").read_text().replace("Walk", "Half"))
    write(folder, "five.py", "app = 5\n")
    write(folder, "notes.txt", "x\n")
    write(folder, "astray/openenv.yaml", "name: astray\napp: server.ap:app\n")
    (folder / "empty").mkdir()
    write(folder, "bad_yaml/openenv.yaml", "a: [1\n")
    write(folder, "list_yaml/openenv.yaml", "- 1\n")
    with pytest.raises(TargetError, match=said):
        load_app(target)


def test_an_import_error_inside_the_users_code_is_not_disguised(folder: Path) -> None:
    write(folder, "needs_more.py", "import a_package_nobody_has\n")
    for target in ("needs_more.py", "needs_more"):
        with pytest.raises(TargetFailed, match="a_package_nobody_has") as caught:
            load_app(target)
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_the_report_of_a_failure_begins_in_the_users_code(folder: Path) -> None:
    write(folder, "deep.py", "import deeper\n")
    write(folder, "deeper.py", "def fail():\n    raise ValueError('too deep')\nfail()\n")
    for target in ("deep.py", "deep"):
        with pytest.raises(TargetFailed, match=f"^{target} cannot be loaded: ValueError: too deep$") as caught:
            load_app(target)
        report = caught.value.report()
        frames = [line for line in report.splitlines() if line.startswith("  File")]
        assert "deep.py" in frames[0]
        assert "importlib" not in report
        assert "loading.py" not in report
        assert report.rstrip().endswith("ValueError: too deep")


@pytest.mark.parametrize(
    ("text", "said"),
    [("def broken(:\n", "SyntaxError"), ("import sys\nsys.exit(3)\n", "SystemExit: 3"), ("1 / 0\n", "ZeroDivision")],
)
def test_any_failure_of_the_users_code_is_reported(folder: Path, text: str, said: str) -> None:
    write(folder, "failing.py", text)
    with pytest.raises(TargetFailed, match=said) as caught:
        load_app("failing.py")
    assert "failing.py" in caught.value.report()


def test_a_function_that_makes_an_application_is_called(folder: Path) -> None:
    assert sessions(load_app(f"{write(folder, 'walk_maker.py', ENV + SECOND)}:make_app")) == 4


def test_every_kind_of_asgi_application_is_taken(folder: Path) -> None:
    write(
        folder,
        "kinds.py",
        """
        import functools

        async def plain(scope, receive, send): pass

        async def configured(setting, scope, receive, send): pass
        partial = functools.partial(configured, 1)

        class Instance:
            async def __call__(self, scope, receive, send): pass
        instance = Instance()

        class Awaited:
            def __init__(self, scope, receive, send): pass
            def __await__(self): yield
        """,
    )
    for name in ("plain", "partial", "instance", "Awaited"):
        assert load_app(f"kinds.py:{name}") is not None


def test_a_file_named_like_another_module_replaces_nothing(folder: Path) -> None:
    import colorsys
    import random

    for name, known in (("random", random), ("colorsys", colorsys)):
        app = load_app(str(write(folder, f"{name}.py", ENV)))
        assert sessions(app) == CLASS_SESSIONS
        assert sys.modules[name] is known
    assert sys.path[0] != str(folder), "modules of Python's that are loaded later are still Python's"


def test_a_manifest_is_read(folder: Path) -> None:
    assert read_manifest(write(folder, "openenv.yaml", "name: x\napp: a:b\n")) == {"name": "x", "app": "a:b"}


def test_options_of_the_command_line_are_applied(folder: Path) -> None:
    write(folder, "walk_opts.py", APP)
    app = prepare("walk_opts.py", ServeOptions(server={"sessions": 5, "session_timeout_s": 9.0, "runner": "inline"}))
    server = environment_server(app)
    assert server is not None
    assert (server.max_concurrent_envs, server.manager.limits.idle_s) == (5, 9.0)
    assert server.manager.runner.name == "inline"


def test_without_options_the_applications_own_are_kept(folder: Path) -> None:
    write(folder, "walk_keep.py", APP)
    assert sessions(prepare("walk_keep.py", ServeOptions())) == 3


def test_options_for_an_application_of_another_kind_are_refused(folder: Path) -> None:
    write(folder, "other_app.py", "async def app(scope, receive, send): pass\n")
    assert environment_server(prepare("other_app.py", ServeOptions())) is None
    with pytest.raises(TargetError, match="not made by create_app"):
        prepare("other_app.py", ServeOptions(server={"sessions": 2}))


def test_more_sessions_than_a_class_allows_is_refused(folder: Path) -> None:
    write(folder, "walk_single.py", ENV + SECOND)
    with pytest.raises(TargetError, match=r"--max-sessions 2 .* SUPPORTS_CONCURRENT_SESSIONS") as refused:
        prepare("walk_single.py:Run", ServeOptions(server={"sessions": 2}))
    assert "max_concurrent_envs" not in str(refused.value)


def test_a_port_that_is_taken_is_reported_before_anything_is_loaded(folder: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TargetError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve("missing.py", ServeOptions(port=port), lambda app, actual: None)


@pytest.mark.parametrize("host", ["300.1.1.1", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_not_blamed_on_the_port(folder: Path, host: str) -> None:
    with pytest.raises(TargetError, match="--host") as caught:
        serve("missing.py", ServeOptions(host=host, port=0), lambda app, actual: None)
    assert "--port" not in str(caught.value)


def test_the_settings_of_uvicorn_ask_for_the_fast_websocket() -> None:
    settings = uvicorn_settings(ServeOptions(port=1, log_level="debug"))
    assert settings["ws"] is UpgradeProtocol
    assert settings["access_log"] is True
    assert uvicorn_settings(ServeOptions())["access_log"] is False
