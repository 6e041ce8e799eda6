"""`openenv.yaml`: its schema, its documentation, and what `openenv serve` takes from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from openenv.env.manifest import EnvManifest, ServeBlock, ValidationBlock, manifest_problems, manifest_schema
from openenv.server.loading import ManifestSettings, TargetError, load_app, manifest_settings

ROOT = Path(__file__).parents[1]
FILES = [*sorted((ROOT / "envs").glob("*/openenv.yaml")), ROOT / "src/openenv/cli/template/openenv.yaml.tmpl"]
APP = """
import os
from openenv import Action, Environment, Observation, State

class Maze(Environment[Action, Observation, State]):
    size = os.environ["MAZE_SIZE"]
    def reset(self):
        return Observation(metadata={"size": self.size})
    def step(self, action):
        return Observation()
"""


@pytest.fixture
def package(tmp_path: Path) -> Any:
    def write(manifest: str) -> str:
        (tmp_path / "openenv.yaml").write_text(manifest, encoding="utf-8")
        (tmp_path / "maze_rules.py").write_text(APP, encoding="utf-8")
        return str(tmp_path)

    return write


@pytest.mark.parametrize("place", ["src/openenv/env", "docs/reference"])
def test_the_published_schema_is_that_of_the_models(place: str) -> None:
    text = (ROOT / place / "openenv.schema.json").read_text(encoding="utf-8")
    assert json.loads(text) == manifest_schema(), "run python scripts/manifest_schema.py"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_manifests_of_this_repository_fit_the_schema_and_the_models(file: Path) -> None:
    data = yaml.safe_load(file.read_text(encoding="utf-8").replace("__ENV_NAME__", "maze_env"))
    jsonschema.Draft202012Validator(manifest_schema()).validate(data)
    assert manifest_problems(data) == []


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs/reference/manifest.md").read_text(encoding="utf-8")
    tables = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", page)) | {"": page.partition("\n## ")[0]}
    for title, model in (("", EnvManifest), ("serve", ServeBlock), ("validation", ValidationBlock)):
        rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", tables[title], re.MULTILINE)
        assert {name.strip("`") for row in rows for name in row.split(", ")} == set(model.model_fields)
    example = page.partition("```yaml\n")[2].partition("```")[0]
    assert manifest_problems(yaml.safe_load(example)) == []


def test_serving_takes_what_the_manifest_says(package: Any) -> None:
    block = "serve: {max_sessions: 3, runner: inline, workers: auto, session_timeout: 7}\n"
    target = package(f"name: maze\nport: 9123\n{block}")
    assert manifest_settings(target) == ManifestSettings(9123, 3, "inline", "auto", 7.0)
    assert manifest_settings("nowhere.py") == ManifestSettings(8000)


def test_serving_refuses_what_it_needs_and_notes_the_rest(package: Any) -> None:
    for wrong in ("port: many", "app: 7", "serve: {max_sessions: 0}"):
        with pytest.raises(TargetError, match=wrong.partition(":")[0]):
            manifest_settings(package(f"name: maze\n{wrong}\n"))
    (note,) = manifest_settings(package("name: maze\ncolour: red\nvalidation: {}\n")).notes
    assert "colour: unknown key" in note
    others = manifest_settings(package('name: maze\nruntime: node\nspec_version: 9\nport: "8123"\n'))
    assert [note.partition(": ")[2].partition(":")[0] for note in others.notes] == ["spec_version", "runtime"]
    assert others.port == 8123


def test_variables_are_set_unless_they_are(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAZE_SIZE", "4")
    monkeypatch.delenv("MAZE_NAME", raising=False)
    app = load_app(package("name: maze\napp: maze_rules:Maze\nvariables: {MAZE_SIZE: 9, MAZE_NAME: minos}\n"))
    import os

    assert app.state.openenv_server.service.factory.size == "4"
    assert os.environ["MAZE_NAME"] == "minos"
    monkeypatch.delenv("MAZE_NAME")
