"""`openenv skills`: the text that agents read, and where it is written and linked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner, Result

from openenv import LocalEnv
from openenv.cli.__main__ import build
from openenv.cli.command import shown_names
from openenv.cli.skills import skill_text


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project and a home folder of the test's own."""
    for name in ("project", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def skills(*arguments: str) -> Result:
    return CliRunner().invoke(build(["skills"]), ["skills", *arguments])


def commands(group: Any, path: tuple[str, ...] = ("openenv",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def options(command: Any) -> set[str]:
    parts = [command, *getattr(command, "commands", {}).values()]
    return {name for part in parts for one in part.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}


# -- the text -------------------------------------------------------------------------------------------------------


def test_the_overview_has_every_command_and_every_option() -> None:
    text = skill_text()
    sections = dict(
        re.findall(r"^### `?(openenv [a-z0-9_ -]*[a-z0-9])(.*?)(?=^### |\Z)", text, re.DOTALL | re.MULTILINE)
    )
    all_commands = list(commands(typer.main.get_command(build())))
    assert set(sections) == {" ".join(path) for path, _ in all_commands}
    for path, command in all_commands:
        if hasattr(command, "commands"):
            continue
        named = set(re.findall(r"`(--[a-z-]+)`", sections[" ".join(path)].partition("Options: ")[2]))
        visible = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
        assert named == {shown_names(one)[0] for one in visible} - {"--help"}


def test_the_guide_names_no_command_or_option_that_is_not_there() -> None:
    group: Any = typer.main.get_command(build())
    guide = skill_text().partition("## Commands")[0]
    lines = re.findall(r"`openenv ([a-z]+)([^`]*)`", guide)
    assert len(lines) > 8
    for name, rest in lines:
        assert name in group.commands, name
        assert set(re.findall(r"--[a-z-]+", rest)) <= options(group.commands[name]), (name, rest)
    assert set(re.findall(r"`(--[a-z-]+)[^`]*`", guide)) <= options(group.commands["serve"]) | {"--json"}


def test_the_front_matter_says_when_to_use_it() -> None:
    _, front_matter, _ = skill_text().split("---\n", 2)
    fields = yaml.safe_load(front_matter)
    assert fields["name"] == "openenv-cli"
    assert 50 < len(fields["description"]) < 1024


def test_the_example_in_it_works() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", skill_text(), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "guess"}
    exec(source, namespace)
    with LocalEnv(namespace["GuessTheNumber"]) as env:
        assert env.reset(seed=4).observation.text.startswith("Guess")
        assert env.step(namespace["Guess"](number=9)).observation.text == "lower"
        last = env.step(namespace["Guess"](number=5))
        assert (last.reward, last.done) == (1.0, True)


def test_a_preview_prints_it() -> None:
    shown = skills("preview")
    assert (shown.exit_code, shown.output) == (0, skill_text())


# -- where it goes --------------------------------------------------------------------------------------------------


def test_a_project_has_one_copy_and_agents_have_links() -> None:
    result = skills("add", "--claude", "--codex", "--cursor", "--opencode")
    assert result.exit_code == 0, result.output
    skill = Path(".agents/skills/openenv-cli/SKILL.md")
    assert skill.read_text() == skill_text()
    for agent in ("claude", "codex", "cursor", "opencode"):
        link = Path(f".{agent}/skills/openenv-cli")
        assert link.is_symlink()
        assert link.readlink() == Path("../../.agents/skills/openenv-cli")
        assert (link / "SKILL.md").read_text() == skill.read_text()


def test_the_home_folder_has_its_own_places(tmp_path: Path) -> None:
    assert skills("add", "-g", "--opencode", "--claude").exit_code == 0
    home = tmp_path / "home"
    assert (home / ".agents/skills/openenv-cli/SKILL.md").is_file()
    assert (home / ".config/opencode/skills/openenv-cli/SKILL.md").is_file()
    assert (home / ".claude/skills/openenv-cli").is_symlink()
    assert list((tmp_path / "project").iterdir()) == []


def test_another_destination_excludes_the_others(tmp_path: Path) -> None:
    for more in ("--claude", "--codex", "--cursor", "--opencode", "--global"):
        refused = skills("add", "--dest", "place", more)
        assert refused.exit_code == 1
        assert "--dest cannot be combined" in refused.output
    assert skills("add", "--dest", "~/place").exit_code == 0
    assert (tmp_path / "home/place/openenv-cli/SKILL.md").is_file()


def test_what_is_there_is_replaced_only_by_force() -> None:
    assert skills("add").exit_code == 0
    skill = Path(".agents/skills/openenv-cli/SKILL.md")
    skill.write_text("old")
    refused = skills("add", "--claude")
    assert refused.exit_code == 1
    assert "--force" in refused.output
    assert skill.read_text() == "old"
    assert not Path(".claude").exists(), "nothing is written where something is in the way"
    Path(".claude/skills/openenv-cli").mkdir(parents=True)
    Path(".claude/skills/openenv-cli/SKILL.md").write_text("a copy")
    assert skills("add", "--claude", "--force").exit_code == 0
    assert skill.read_text() == skill_text()
    assert Path(".claude/skills/openenv-cli").is_symlink()
    assert skills("add", "--claude", "--force").exit_code == 0


def test_files_of_others_are_never_removed() -> None:
    notes = Path(".agents/skills/openenv-cli/notes.md")
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    refused = skills("add", "--force")
    assert refused.exit_code == 1
    assert "files that this command did not write" in refused.output
    assert notes.read_text() == "mine"
