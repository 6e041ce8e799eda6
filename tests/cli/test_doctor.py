"""`openenv doctor` on real conditions: this machine, and what it looks like without its programs and packages."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import openenv
from openenv.cli.doctor import EXTRAS, Diagnosis, missing_for

Doctor = Callable[..., subprocess.CompletedProcess[str]]
SOURCE = Path(openenv.__file__).parents[1]


@pytest.fixture
def doctor(openenv_command: Doctor, tmp_path: Path) -> Callable[..., Any]:
    """Run it with `--json`; gives the findings by name, and the exit code."""
    (tmp_path / "bin").mkdir()

    def run(*arguments: str, **variables: str) -> tuple[dict[str, dict[str, str]], int]:
        environ = {"PATH": str(tmp_path / "bin"), "OPENENV_CACHE": str(tmp_path / "cache"), **variables}
        done = openenv_command("doctor", "--json", *arguments, **environ)
        assert done.stderr == ""
        shown = json.loads(done.stdout)
        assert shown["ok"] == (done.returncode == 0)
        return {one["name"]: one for one in shown["findings"]}, done.returncode

    return run


def program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_servers_need_nothing_but_python_and_their_packages(doctor: Callable[..., Any]) -> None:
    findings, code = doctor()
    assert code == 0
    assert (findings["Python"]["state"], findings["loopback"]["state"]) == ("ok", "ok")
    assert findings["packages"]["state"] in ("ok", "note")


def test_without_programs_each_is_named_with_the_command_that_gets_it(doctor: Callable[..., Any]) -> None:
    findings, code = doctor("--for", "rollouts")
    assert code == 1
    for name, command in (
        ("local sandbox", "install"),
        ("containers", "install"),
        ("npm", "apt-get install -y npm"),
    ):
        assert findings[name]["state"] == "missing", findings[name]
        assert command in findings[name]["advice"]
    assert findings["opencode"]["state"] == "missing"


def test_an_engine_that_does_not_answer_is_distinguished_from_one_that_is_not_there(
    doctor: Callable[..., Any], tmp_path: Path
) -> None:
    program(tmp_path, "docker", "echo 'Cannot connect to the daemon' >&2; exit 1")
    findings, _ = doctor()
    assert "does not answer (Cannot connect to the daemon)" in findings["containers"]["text"]
    assert "dockerd" in findings["containers"]["advice"]
    program(tmp_path, "docker", "echo 27.0")
    findings, _ = doctor()
    assert findings["containers"] == {
        "area": "rollouts",
        "name": "containers",
        "state": "ok",
        "text": "docker answers",
        "advice": "",
    }


@pytest.mark.slow
def test_npm_fetches_opencode_and_what_was_fetched_is_found(doctor: Callable[..., Any], tmp_path: Path) -> None:
    program(tmp_path, "npm", "echo 11.2")
    findings, _ = doctor()
    assert findings["npm"]["text"].startswith("11.2, ")
    assert findings["opencode"]["state"] == "note"
    (tmp_path / "cache/agents/opencode-1.2-linux-x64").mkdir(parents=True)
    (tmp_path / "cache/agents/opencode-1.2-linux-x64.lock").touch()
    findings, _ = doctor()
    assert (findings["opencode"]["state"], findings["opencode"]["text"][-9:]) == ("ok", "linux-x64")
    program(tmp_path, "npm", "echo broken >&2; exit 1")
    findings, _ = doctor()
    assert findings["npm"]["state"] == "missing"
    assert "does not run: broken" in findings["npm"]["text"]


def test_packages_that_are_missing_or_too_old_are_named(doctor: Callable[..., Any], tmp_path: Path) -> None:
    info = tmp_path / "site" / "openenv-9.dist-info"
    info.mkdir(parents=True)
    requirements = ("nothing-like-this>=1", "typer>=999", "pydantic>=2", 'numpy>=999; extra == "numpy"')
    lines = "".join(f"Requires-Dist: {line}\n" for line in requirements)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: openenv\nVersion: 9\n{lines}")
    findings, code = doctor(PYTHONPATH=f"{tmp_path / 'site'}:{SOURCE}")
    assert code == 1
    assert findings["packages"]["state"] == "missing"
    assert re.fullmatch(r"nothing-like-this is not installed, typer [\d.]+ is not >=999", findings["packages"]["text"])


def test_a_port_that_is_taken_is_a_note(doctor: Callable[..., Any]) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another program has it: as good
            holder.bind(("127.0.0.1", 8000))
            holder.listen()
        findings, code = doctor()
    assert code == 0
    assert (findings["port 8000"]["state"], findings["port 8000"]["advice"]) == ("note", "openenv serve --port 0")


def test_the_text_is_for_people_and_fits_the_terminal(openenv_command: Doctor, tmp_path: Path) -> None:
    done = openenv_command("doctor", "--for", "rollouts", COLUMNS="80", PATH=str(tmp_path), OPENENV_CACHE=str(tmp_path))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "To serve and step environments" in lines
    assert re.fullmatch(r"Missing for rollouts: local sandbox,.* containers, npm, opencode\.", lines[-1])
    assert "Traceback" not in done.stderr
    plain = [line for line in lines if "> " not in line and "/" not in line]  # commands and paths stay whole
    assert max(map(len, plain)) <= 80


def test_a_purpose_that_does_not_exist_is_a_wrong_option(openenv_command: Doctor) -> None:
    done = openenv_command("doctor", "--for", "fun")
    assert done.returncode == 2
    assert "'fun' is not one of serve, rollouts" in done.stderr


def test_every_extra_is_looked_at() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    others = {"core", "harbor"}  # gradio under another name, and nothing
    assert set(EXTRAS) == set(re.findall(r"^(\w+) =", section, re.MULTILINE)) - others


@pytest.mark.parametrize(
    ("here", "missing"),
    [
        ({"local sandbox", "control groups", "npm"}, []),
        ({"containers", "opencode"}, []),
        ({"local sandbox", "npm"}, ["control groups", "containers"]),
        ({"containers"}, ["npm"]),
    ],
)
def test_one_kind_of_sandbox_and_one_agent_is_enough(here: set[str], missing: list[str]) -> None:
    names = ("local sandbox", "control groups", "containers", "npm")
    findings = [Diagnosis("rollouts", name, "ok" if name in here else "missing", "") for name in names]
    findings.append(Diagnosis("rollouts", "opencode", "ok" if "opencode" in here else "note", ""))
    assert missing_for(findings, "rollouts") == missing
    assert missing_for(findings, "serve") == []


def test_a_low_limit_of_open_files_is_a_note_with_the_command_that_raises_it(doctor: Callable[..., Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        findings, code = doctor()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert code == 0
    assert (findings["open files"]["state"], findings["open files"]["advice"]) == ("note", "ulimit -n 4096")
    assert "1024" in findings["open files"]["text"]


def test_commands_raise_their_limit_of_open_files() -> None:
    code = """
import resource, sys
from openenv.cli.__main__ import main
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000))
sys.argv = ["openenv", "--version"]
main()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("(1000, 1000)\n")
