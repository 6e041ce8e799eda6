"""More than sixty folders with one and the same environment, in the layouts that environments have.

A row of `LAYOUTS` says what differs from the usual package: where the files are, how they import each other, and what
`openenv.yaml` says. The rules check that actions are of their own class, so a module that is imported twice shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

MODELS = """\
from openenv.core.env_server.types import Action, Observation

class Move(Action):
    where: str = "north"

class Seen(Observation):
    place: str = ""
"""
RULES = """\
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State
{imports}

class Walk(Environment[Move, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="none", step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        {at_reset}
        self._state = State(episode_id=episode_id or "one", step_count=0)
        return Seen(place="start", reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        if not isinstance(action, Move):
            raise TypeError(f"{{type(action).__module__}} is not {{Move.__module__}}")
        self._state.step_count += 1
        return Seen(place=action.where, reward=1.0, done=True)

    @property
    def state(self):
        return self._state
"""
APP = """\
from openenv.core.env_server.http_server import create_app
{imports}

app = create_app(Walk, Move, Seen, env_name="maze", max_concurrent_envs=2)

def main():
    import uvicorn
    uvicorn.run(app, port=8000)

if __name__ == "__main__":
    main()
"""
MADE = """\
from openenv.core.env_server.http_server import create_app as make
{imports}

def create_app():
    return make(Walk, Move, Seen, env_name="maze", max_concurrent_envs=2)
"""
LAZY = """\
import importlib

def __getattr__(name):
    if name in ("Move", "Seen"):
        return getattr(importlib.import_module(f"{__name__}.models"), name)
    raise AttributeError(name)
"""
MANIFEST = "spec_version: 1\nname: maze_env\ntype: space\nruntime: fastapi\napp: {app}\nport: 8000\n"
PROJECT = '[project]\nname = "openenv-maze-env"\nversion = "0.1.0"\ndependencies = ["openenv>=0.2"]\n'
MAPPED = PROJECT + '[tool.setuptools]\npackages = ["maze_env"]\npackage-dir = { "maze_env" = "." }\n'

# How the application imports the models and the rules; the rules import the models likewise.
RELATIVE = ("from ..models import Move, Seen", "from .rules import Walk")
TOP = ("from models import Move, Seen", "from server.rules import Walk")
PACKAGE = ("from maze_env.models import Move, Seen", "from maze_env.server.rules import Walk")
FLAT = ("from models import Move, Seen", "from rules import Walk")
FLAT_RELATIVE = ("from .models import Move, Seen", "from .rules import Walk")
SRC = ("from src.models import Move, Seen", "from src.server.rules import Walk")


def first(*ways: tuple[str, str], error: str = "ImportError") -> tuple[str, str]:
    """Import in the first of some ways that works, each statement by itself."""
    lines = []
    for statements in zip(*ways, strict=True):
        *tried, last = statements
        text = last
        for one in reversed(tried):
            text = f"try:\n    {one}\nexcept {error}:\n    " + text.replace("\n", "\n    ")
        lines.append(text)
    models, rules = lines
    return models, rules


def within(package: str) -> tuple[str, str]:
    """Import from a package by its name."""
    return f"from {package}.models import Move, Seen", f"from {package}.server.rules import Walk"


@dataclass(frozen=True)
class Layout:
    """A folder: see the defaults for the usual one.

    Args:
        folder: Its path; what is served is `target`, or this.
        code: Where in it the package is.
        imports: How the application imports models and rules; `rules_import` is how the rules import models.
        packages: Which folders have an `__init__.py`.
        app, rules, models: The files.
        named: What the manifest says of the application; None for a manifest that says nothing.
        manifest: The manifest's text; empty for none.
        files: Further ones.
        installed: Modules in a folder that is on PYTHONPATH, as installed ones are; `linked` is one that links here.
    """

    folder: str = "maze_env"
    code: str = ""
    imports: tuple[str, str] = TOP
    rules_import: str | None = None
    packages: tuple[str, ...] = ("", "server")
    app: str = "server/app.py"
    rules: str = "server/rules.py"
    models: str = "models.py"
    text: str = APP
    at_reset: str = "pass"
    named: str | None = "server.app:app"
    manifest: str | None = None
    manifest_in: str = ""
    project: str = PROJECT
    files: dict[str, str] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=dict)
    linked: str | None = None
    target: str | None = None

    def write(self, home: Path) -> Path:
        """Write the folder below another one; return what is served."""
        folder = home / self.folder
        code = folder / self.code
        models, rules = self.imports
        texts = {
            code / self.models: MODELS,
            code / self.rules: RULES.format(imports=self.rules_import or models, at_reset=self.at_reset),
            code / self.app: self.text.format(imports=f"{models}\n{rules}"),
            folder / "pyproject.toml": self.project,
            folder / "README.md": "# Maze\n",
        }
        texts |= {code / package / "__init__.py": "" for package in self.packages}
        manifest = MANIFEST.format(app=self.named) if self.manifest is None else self.manifest
        if self.named is None and self.manifest is None:
            manifest = "name: maze_env\n"
        if manifest:
            texts[folder / self.manifest_in / "openenv.yaml"] = manifest
        texts |= {folder / name: text for name, text in self.files.items()}
        texts |= {home / "installed" / name: text for name, text in self.installed.items()}
        (home / "installed").mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if self.linked is not None:
            (home / "installed" / self.linked).symlink_to(folder)
        return home / (self.folder if self.target is None else self.target)


# Loads folders, each in a process of its own: a copy of one that has loaded the server once. It reads
# [[name, folder on the path, folder that is loaded], ...]; a fourth word is a folder that is first copied to the third,
# as `COPY` of a Dockerfile does.
LOAD = """
import json, os, shutil, sys
from openenv.server.loading import enter_folder, load_app, manifest_settings

def play(installed, target, source=None):
    if source is not None:
        shutil.rmtree("/app", ignore_errors=True)
        shutil.copytree(source, target, symlinks=True)
        os.chdir(target)
    sys.path.insert(1, installed)
    manifest_settings(target)
    server = load_app(enter_folder(target)).state.openenv_server
    env = server.service.factory()
    env.reset()
    return env.step(server.action_cls(where="south")).place

for name, *places in json.loads(sys.stdin.read()):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            answer = play(*places)
        except BaseException as exc:
            answer = f"{type(exc).__name__}: {exc}"
        print(json.dumps([name, answer]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def not_played(printed: str, names: Iterable[str]) -> dict[str, str | None]:
    """The answers of those folders that `LOAD` could not load or play; None where it gave none."""
    answers: dict[str, str] = dict(json.loads(line) for line in printed.splitlines() if line.startswith('["'))
    return {name: answers.get(name) for name in names if answers.get(name) != "south"}


def _rows() -> dict[str, Layout]:
    usual = Layout()
    dashed = replace(usual, folder="maze-env")
    program = replace(usual, packages=())
    return {
        # a package with an __init__.py; its own name is an identifier
        "top": usual,
        "relative": replace(usual, imports=RELATIVE),
        "relative or top": replace(usual, imports=first(RELATIVE, TOP)),
        "relative or top, module error": replace(usual, imports=first(RELATIVE, TOP, error="ModuleNotFoundError")),
        "top or relative": replace(usual, imports=first(TOP, RELATIVE)),
        "own name": replace(usual, imports=PACKAGE),
        "own name or top": replace(usual, imports=first(PACKAGE, TOP)),
        "own name or relative": replace(usual, imports=first(PACKAGE, RELATIVE)),
        "relative, own name or top": replace(usual, imports=first(RELATIVE, PACKAGE, TOP)),
        "application relative, rules top": replace(
            usual, imports=first(RELATIVE, TOP), rules_import="from models import Move, Seen"
        ),
        "application by own name, rules top": replace(
            usual, imports=first(PACKAGE, TOP), rules_import="from models import Move, Seen"
        ),
        # a folder whose name is no identifier
        "dash, top": dashed,
        "dash, relative": replace(dashed, imports=RELATIVE),
        "dash, relative or top": replace(dashed, imports=first(RELATIVE, TOP)),
        "dash, own name": replace(dashed, imports=PACKAGE),
        "dash, own name or top": replace(dashed, imports=first(PACKAGE, TOP)),
        "dash, own name that pyproject maps": replace(
            dashed, folder="the-repo", imports=PACKAGE, project=MAPPED, manifest="name: a maze\n"
        ),
        "space and digit, top": replace(usual, folder="2048 game"),
        "space and digit, relative": replace(usual, folder="2048 game", imports=RELATIVE),
        "dot": replace(usual, folder="maze.v2", imports=first(RELATIVE, TOP)),
        # no package at the top, or none in server/
        "no package, top": program,
        "no package, relative or top": replace(program, imports=first(RELATIVE, TOP)),
        "no package, relative": replace(program, imports=RELATIVE),
        "server is no package, top": replace(usual, packages=("",)),
        "server is no package, relative": replace(usual, packages=("",), imports=RELATIVE),
        "only server is a package": replace(usual, packages=("server",), imports=first(RELATIVE, TOP)),
        # the manifest names the package
        "names the package": replace(usual, imports=PACKAGE, named="maze_env.server.app:app"),
        "names the package, relative": replace(usual, imports=RELATIVE, named="maze_env.server.app:app"),
        "names the package, top": replace(usual, named="maze_env.server.app:app"),
        "names the package, dash": replace(dashed, imports=PACKAGE, named="maze_env.server.app:app"),
        "names the package, installed from here": replace(
            dashed, imports=RELATIVE, named="maze_env.server.app:app", linked="maze_env"
        ),
        "names an installed package": replace(
            usual,
            code="../installed/hall_env",
            imports=RELATIVE,
            named="hall_env.server.app:app",
        ),
        # code under src/
        "src, package": replace(usual, code="src/maze_env", imports=PACKAGE, named="maze_env.server.app:app"),
        "src, package, dash": replace(dashed, code="src/maze_env", imports=RELATIVE, named="maze_env.server.app:app"),
        "src, named with src": replace(
            usual, code="src/maze_env", imports=RELATIVE, named="src.maze_env.server.app:app"
        ),
        "src, not named": replace(usual, code="src/maze_env", imports=PACKAGE, named=None),
        "src itself is the package": replace(usual, code="src", imports=SRC, named="src.server.app:app"),
        "src itself is on the path": replace(usual, code="src", named="src.server.app:app"),
        "src without a manifest": replace(usual, code="src/maze_env", imports=RELATIVE, manifest=""),
        # the application at the top
        "app.py": replace(program, app="app.py", rules="rules.py", imports=FLAT, named="app:app"),
        "app.py, relative": replace(
            usual, packages=("",), app="app.py", rules="rules.py", imports=FLAT_RELATIVE, named="app:app"
        ),
        "main.py, not named": replace(program, app="main.py", rules="rules.py", imports=FLAT, named=None),
        "app.py without a manifest": replace(program, app="app.py", rules="rules.py", imports=FLAT, manifest=""),
        "app.py imports the one in server": replace(
            usual, files={"app.py": "from server.app import app\n"}, named="app:app"
        ),
        "main.py is another program": replace(usual, files={"main.py": "print('hello')\n"}, manifest=""),
        "env/ holds the rules": replace(
            program,
            rules="env/rules.py",
            models="env/models.py",
            imports=("from env.models import Move, Seen", "from env.rules import Walk"),
        ),
        # what the manifest names is no application, and how it names it
        "a function": replace(usual, text=MADE, named="server.app:create_app"),
        "a function that is not named": replace(usual, text=MADE, named=None),
        "a class": replace(usual, named="server.rules:Walk"),
        "a path": replace(usual, named="server/app.py:app"),
        "no attribute": replace(usual, named="server.app"),
        "not named": replace(usual, imports=first(RELATIVE, TOP), named=None),
        "no manifest": replace(usual, imports=first(RELATIVE, TOP), manifest=""),
        "a module that is not there": replace(usual, named="maze.main:app"),
        "other keys": replace(
            usual, manifest='spec_version: "1.0"\nname: maze\ntype: env\nruntime: python\nport: "8000"\ntags: [a]\n'
        ),
        # deeper, and among others
        "repository around it": replace(
            usual, folder="repo", code="maze_env", manifest_in="maze_env", imports=RELATIVE
        ),
        "repository with envs": replace(
            usual, folder="repo/envs/maze_env", target="repo", imports=first(RELATIVE, TOP)
        ),
        "manifest above the package": replace(usual, folder="repo", code="maze_env", imports=PACKAGE),
        "package below, no manifest": replace(usual, folder="repo", code="maze_env", imports=PACKAGE, manifest=""),
        "by the name of the folder above": replace(usual, folder="envs/maze_env", imports=within("envs.maze_env")),
        "by the names of two above": replace(usual, folder="src/envs/maze_env", imports=within("src.envs.maze_env")),
        # names that others have, too
        "named like an installed package": replace(
            usual, folder="repo/yaml", imports=("import yaml\nyaml.safe_load('a: 1')\n" + TOP[0], TOP[1])
        ),
        "named like an installed package, relative": replace(
            usual, folder="repo/yaml", imports=("import yaml\nyaml.safe_load('a: 1')\n" + RELATIVE[0], RELATIVE[1])
        ),
        "models and server are installed, too": replace(
            usual, installed={"models.py": "raise SystemExit('wrong')\n", "server/__init__.py": ""}
        ),
        # what shows only later
        "data by a relative path": replace(
            usual, at_reset='open("data/words.txt").close()', files={"data/words.txt": "word\n"}
        ),
        "imports in a method": replace(usual, imports=first(RELATIVE, TOP), at_reset="from models import Move"),
        "its package in a method": replace(usual, at_reset=f"{PACKAGE[0]} as Again; assert Again is Seen"),
        "its package in a method, dash": replace(
            usual,
            folder="maze-env",
            at_reset=f"import maze_env.server.rules as rules; {PACKAGE[0]}; assert rules.Seen is Seen is type(Seen())",
        ),
        "lazy names of its package": replace(
            usual, files={"__init__.py": LAZY}, at_reset="import maze_env; assert maze_env.Seen is Seen"
        ),
        "lazy names at once": replace(
            usual, imports=("from maze_env import Move, Seen", TOP[1]), files={"__init__.py": LAZY}
        ),
        "rules import beside themselves": replace(usual, imports=(TOP[0], "from rules import Walk")),
    }


LAYOUTS = _rows()
