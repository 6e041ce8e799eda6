"""Installing agents: once per machine, never half, and clear about what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from openenv.errors import AgentUnavailable
from openenv.rollout.agents import MiniSweAgent, OpenCode, agent, agent_names
from openenv.rollout.agents.install import NpmProgram, installed, is_native, needs_baseline_build, run_installer

PROGRAM = NpmProgram(
    name="thing", package="thing-{platform}@{version}", folder="thing-{platform}", program="bin/thing", command="thing"
)
FAKE_NPM = """#!/bin/sh
echo "$@" >> "$NPM_LOG"
while [ $# -gt 0 ]; do
  case "$1" in --prefix) prefix="$2"; shift ;; esac
  last="$1"; shift
done
name="${last%@*}"
[ "$NPM_FAILS" = 1 ] && { echo "npm error 404 no such package" >&2; exit 1; }
mkdir -p "$prefix/node_modules/$name/bin"
cp /bin/true "$prefix/node_modules/$name/bin/thing"
"""


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called npm that installs another program; its calls are in the file that is returned."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "npm").write_text(FAKE_NPM)
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("NPM_LOG", str(tmp_path / "npm.log"))
    return tmp_path / "npm.log"


def test_every_agent_has_a_driver() -> None:
    built_in = "claude-code codex mini-swe-agent noop opencode oracle shell shell-chat single-turn"
    assert agent_names() == built_in.split()
    for name in agent_names():
        options = {"lines": ["true"]} if name == "shell" else {}
        assert agent(name, **options).name == name
    assert agent("mini_swe_agent").name == "mini-swe-agent"
    opencode = agent("opencode@1.2.3")
    assert isinstance(opencode, OpenCode)
    assert opencode.version == "1.2.3"
    assert agent(opencode) is opencode


def test_a_program_is_fetched_once_and_mounted(npm: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    for _ in range(2):
        installation = PROGRAM.install(tmp_path / "cache", "1.0", messages.append)
        assert installation.version == "1.0"
        assert is_native(installation.mounts[0].source)
        assert installation.executable == installation.mounts[0].target
    assert messages == ["installing thing 1.0 with npm, once per machine"]
    calls = npm.read_text().splitlines()
    assert len(calls) == 1
    assert "--ignore-scripts" in calls[0]


def test_concurrent_callers_install_once(npm: Path, tmp_path: Path) -> None:
    threads = [threading.Thread(target=PROGRAM.install, args=(tmp_path, "1.0", lambda text: None)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(npm.read_text().splitlines()) == 1


def test_a_failed_installation_leaves_nothing_and_is_tried_again(
    npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPM_FAILS", "1")
    with pytest.raises(AgentUnavailable, match="404 no such package"):
        PROGRAM.install(tmp_path / "cache", "1.0", lambda text: None)
    assert [path.suffix for path in (tmp_path / "cache" / "agents").iterdir()] == [".lock"]
    monkeypatch.setenv("NPM_FAILS", "0")
    assert PROGRAM.install(tmp_path / "cache", "1.0", lambda text: None).executable


def test_a_killed_installation_is_cleared_away(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from openenv.rollout.agents.install import installed\n"
        "def build(draft): (draft / 'half').touch(); os._exit(9)\n"
        "installed(Path(sys.argv[1]) / 'thing', build)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert not (tmp_path / "thing").exists()
    place = installed(tmp_path / "thing", lambda draft: (draft / "whole").touch())
    assert [path.name for path in place.iterdir()] == ["whole"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.lock"]


def test_a_missing_package_manager_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AgentUnavailable, match=r"npm is missing\. It would run `npm install"):
        PROGRAM.install(tmp_path / "cache", "1.0", lambda text: None)


def test_an_installer_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailable, match="took more than"):
        run_installer(["sleep", "60"], cwd=tmp_path, what="It", timeout_s=0.2)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "agents").write_text("a file, not a folder")
    with pytest.raises(AgentUnavailable, match="cannot be used"):
        installed(tmp_path / "agents" / "thing", lambda draft: None)


def test_an_opencode_on_the_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    shutil.copy("/bin/true", there / "real")
    (there / "opencode").symlink_to(there / "real")
    monkeypatch.setenv("PATH", str(there))
    installation = OpenCode().install(tmp_path / "cache", lambda text: None)
    assert installation.mounts[0].source == there / "real"
    (there / "opencode").unlink()
    (there / "opencode").write_text("#!/usr/bin/env node\n")
    (there / "opencode").chmod(0o755)
    with pytest.raises(AgentUnavailable, match="npm is missing"):
        OpenCode().install(tmp_path / "cache", lambda text: None)


def test_processors_without_avx2_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new").write_text("flags : fpu sse avx avx2\n")
    (tmp_path / "old").write_text("flags : fpu sse avx\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert [needs_baseline_build(tmp_path / name) for name in ("new", "old", "nowhere")] == [False, True, False]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not needs_baseline_build(tmp_path / "old")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(AgentUnavailable, match="riscv64"):
        needs_baseline_build(tmp_path / "old")


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(AgentUnavailable, match=r"mini-swe-agent==0\.0\.1"):
        MiniSweAgent(version="0.0.1").install(tmp_path / "cache", lambda text: None)
