"""The reference pages agree with the code: variables, options, error codes, routes, names and links."""

from __future__ import annotations

import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import openenv
from environments import Idle
from openenv import errors, settings
from openenv.cli.__main__ import build
from openenv.client.env_client import EnvClient
from openenv.errors import OpenEnvError
from openenv.protocol import json_values as codec
from openenv.rollout.tasks.task import Task
from openenv.server.options import ServerArguments
from openenv.types import Action, Observation, WSErrorCode
from turn_environments import talking_app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_pages_of_commands_and_variables_are_generated_from_the_code() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_every_environment_variable_is_documented() -> None:
    read = set(re.findall(r'"((?:OPENENV|ENABLE|ENV|SPACE)_\w+)"', inspect.getsource(settings)))
    documented = set(re.findall(r"^\| `(\w+)`", page("reference/settings.md"), re.MULTILINE))
    assert read <= documented


def test_every_argument_of_a_server_is_documented_and_there_is_no_other() -> None:
    table = page("howto/serve.md").partition("## Options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE)
    documented = {name.strip("`") for row in rows for name in row.split(", ")}
    assert documented <= set(inspect.signature(openenv.create_app).parameters)
    assert documented >= set(ServerArguments.__annotations__)


def test_pages_name_no_variable_that_is_not_read() -> None:
    read = set(re.findall(r'"(OPENENV_\w+)"', inspect.getsource(settings)))
    for file in PAGES:
        named = set(re.findall(r"\b(OPENENV_[A-Z_]+)\b", file.read_text(encoding="utf-8")))
        others = {"OPENENV_ENGINE_PYTHON", "OPENENV_MCP_URL"}  # of a test that needs an engine; for agents to read
        assert named <= read | others, file.name


def test_pages_name_no_option_that_a_command_does_not_have() -> None:
    group = typer.main.get_command(build())
    for file in PAGES:
        for line in file.read_text(encoding="utf-8").splitlines():
            for name, rest in re.findall(r"\bopenenv (\w+)((?: [^`#|&]*)?)", line):
                command = group.commands.get(name)  # type: ignore[attr-defined]
                if command is None:
                    continue
                parts = [command, *getattr(command, "commands", {}).values()]
                options = {one for part in parts for param in part.params for one in param.opts + param.secondary_opts}
                assert set(re.findall(r"(?<!\S)(--[a-z-]+)", rest)) <= options | {"--help"}, (file.name, line)


def test_every_error_code_is_documented() -> None:
    text = page("howto/errors.md")
    public = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, OpenEnvError)]
    internal = {"OpenEnvError", "ServerError", "SessionNotFoundError", "SessionClosedError", "SessionCreationError"}
    for cls in public:
        if cls.__name__ not in internal:
            assert f"`{cls.__name__}`" in text
            assert f"`{cls.code}`" in text
    for code in WSErrorCode:
        assert f"| `{code.value}` |" in page("reference/protocol.md")


def test_every_route_is_documented_and_every_documented_route_is_there() -> None:
    from openenv import create_app

    applications = [create_app(Idle, Action, Observation), talking_app()]  # one has turns
    routes = [route for application in applications for route in application.routes]
    paths = {route.path for route in routes} - {"/docs/oauth2-redirect"}  # type: ignore[attr-defined]
    section = (
        page("reference/protocol.md").partition("## Routes")[2].partition("\n## ")[0].replace("{name}", "{env_name}")
    )
    documented = set(re.findall(r"(?:`|GET |POST |WS |DELETE )(/[\w/{}.]*)`", section))
    # The Task API's later routes are written without their common beginning.
    spelled = {
        f"/{{env_name}}{path}" if path in ("/num_tasks", "/task", "/task_range") else path for path in documented
    }
    assert spelled == paths


def test_every_name_of_the_package_is_documented() -> None:
    text = page("reference/api.md")
    for name in set(openenv.__all__) - {"__version__", "core", "cli"}:
        assert f"`{name}`" in text, name


def test_every_option_of_a_client_is_documented() -> None:
    table = page("howto/clients.md").partition("## Options")[2]
    for name in set(inspect.signature(EnvClient.__init__).parameters) - {"self"}:
        assert f"`{name}`" in table, name


def test_the_encodings_are_those_of_the_codec() -> None:
    kinds = re.findall(r"^\| (\S.*?)\s+\|", inspect.getdoc(codec) or "", re.MULTILINE)[2:]
    shown = re.findall(r"^\| (\S.*?)\s+\|", page("topics/encodings.md"), re.MULTILINE)[2:]
    assert [kind.replace("`", "") for kind in shown] == kinds


@pytest.mark.parametrize("file", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(file: Path) -> None:
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        page = (file.parent / path).resolve() if path else file
        assert page.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}, target


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set(re.findall(r'"([\w/]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_versions_agree() -> None:
    projects = [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("envs/*/pyproject.toml")]
    versions = {re.search(r'^version = "(.+)"', path.read_text("utf-8"), re.MULTILINE)[1] for path in projects}  # type: ignore[index]
    assert len(versions) == 1
    assert f"## [{versions.pop()}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_field_of_a_task_is_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)`", page("reference/tasks.md"), re.MULTILINE)) - {
        "files_from"
    }  # files only
    assert documented == set(Task.model_fields)


def test_every_page_is_listed_for_language_models(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "llms_txt.py", tmp_path], check=True)
    text = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert "- [Write an environment](howto/environment/): " in text
    assert len(re.findall(r"^- \[.+\]\(.*\): .+$", text, re.MULTILINE)) == text.count("\n- ")
    assert "class GuessTheNumber" in (tmp_path / "llms-full.txt").read_text(encoding="utf-8")


def test_what_the_python_pages_name_is_there() -> None:
    for file in (DOCS / "reference" / "python").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE):
            assert pkgutil.resolve_name(name) is not None


def test_the_docs_fail_the_check_above_their_limit_of_words(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "prose.py", tmp_path / "scripts")
    (tmp_path / "page.md").write_text("One two three four.\n", encoding="utf-8")
    printed = {}
    for words in (4, 3):
        group = f'[tool.prose]\ndocs = {{ paths = ["page.md"], limit = 3.0, words = {words} }}\n'
        (tmp_path / "pyproject.toml").write_text(group, encoding="utf-8")
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        printed[words] = (done.returncode, "1 words above the limit of 3" in done.stdout)
    assert printed == {4: (0, False), 3: (1, True)}
