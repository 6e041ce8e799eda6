"""Commands of other packages: found by entry points, listed in the help, loaded alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

COMMANDS = '''
import typer

def greet(name: str = typer.Argument(..., metavar="NAME", help="Whom to greet.")) -> None:
    """Greet somebody."""
    typer.echo(f"hello {name}")

tools = typer.Typer(help="Tools of a lab.")

@tools.command()
def count() -> None:
    """Count to two."""
    typer.echo("one two")

@tools.command()
def stop() -> None:
    """Do nothing."""

def serve() -> None:
    """Take the place of a built-in command."""
    typer.echo("not the built-in one")
'''
ENTRY_POINTS = """[openenv.commands]
greet = lab_commands:greet
lab = lab_commands:tools
serve = lab_commands:serve
broken = lab_missing:command
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `openenv` beside an installed package that registers commands."""
    (tmp_path / "lab_commands.py").write_text(COMMANDS)
    info = tmp_path / "lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)

    def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, "-m", "openenv", *arguments],
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run_command


def test_a_command_of_another_package_runs(run: Run) -> None:
    done = run("greet", "world")
    assert (done.returncode, done.stdout) == (0, "hello world\n")


def test_a_group_of_another_package_runs(run: Run) -> None:
    done = run("lab", "count")
    assert (done.returncode, done.stdout) == (0, "one two\n")


def test_the_help_lists_commands_of_other_packages_and_names_broken_ones(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "Greet somebody." in done.stdout
    assert "Tools of a lab." in done.stdout
    assert "the command 'broken' cannot be loaded: No module named 'lab_missing'" in done.stderr


def test_another_package_cannot_replace_a_built_in_command(run: Run) -> None:
    assert "--max-sessions" in run("serve", "--help").stdout
    assert "Take the place" not in run("--help").stdout


def test_a_broken_command_does_not_disturb_the_others(run: Run) -> None:
    done = run("greet", "world")
    assert done.stderr == ""
