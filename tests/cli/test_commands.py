"""The commands on the module paths of the published package."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

NAMES = {
    "build": "app build",
    "catalog": "app build catalog discover inspect",
    "collect": "app collect",
    "fork": "app fork",
    "harbor": "app harbor info push rollout serve",
    "import_env": "import_env",
    "init": "app init",
    "push": "app push",
    "serve": "app serve",
    "skills": "app skills skills_add skills_preview",
    "validate": "validate",
}
HERE = [name for name in NAMES if find_spec(f"openenv.cli.{name}")]


@pytest.mark.parametrize("name", NAMES)
def test_every_module_lists_its_names(name: str) -> None:
    module = importlib.import_module(f"openenv.cli.commands.{name}")
    assert sorted(module.__all__) == NAMES[name].split()
    assert set(NAMES[name].split()) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize("name", HERE)
def test_every_name_is_there_and_app_runs_the_command(name: str) -> None:
    module = importlib.import_module(f"openenv.cli.commands.{name}")
    for attribute in NAMES[name].split():
        assert getattr(module, attribute) is not None
    if "app" in NAMES[name].split():
        shown = CliRunner().invoke(module.app, ["--help"])
        assert (shown.exit_code, shown.output.startswith("Usage: ")) == (0, True)


def test_importing_the_paths_loads_no_command() -> None:
    script = (
        "import sys\n"
        "from openenv.cli.commands import build, catalog, collect, fork, harbor, import_env, init, push, serve\n"
        "from openenv.cli.commands import skills, validate\n"
        "assert 'openenv.cli.collect' not in sys.modules and 'fastapi' not in sys.modules\n"
        "assert collect.collect.__module__ == 'openenv.cli.collect'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
