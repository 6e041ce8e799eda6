"""What the page is made of: fields of actions, README, quick start, schema of a reset."""

from __future__ import annotations

import enum
import functools
import json
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ConfigDict, Field

from openenv.core.env_server.web_interface import get_quick_start_markdown, load_environment_metadata
from openenv.env.environment import Environment
from openenv.protocol.schema import deserialize_action
from openenv.protocol.tool_messages import CallToolAction
from openenv.server.web.page_description import action_fields, find_readme, is_chat, readme_html, reset_schema
from openenv.server.web.quickstart import example_action
from openenv.types import Action, EnvironmentMetadata, Observation, State
from program_interpreters import Interpreter

KEYS = [
    "name",
    "type",
    "required",
    "description",
    "default_value",
    "choices",
    "min_value",
    "max_value",
    "min_length",
    "max_length",
    "pattern",
    "placeholder",
    "help_text",
]
SAMPLE = """
from typing import Literal
from pydantic import Field
class Sample(Action):
    word: str
    note: str = Field(default="x", max_length=500, description="A note")
    short: str = Field(min_length=2, max_length=9, pattern="^a")
    message: str
    code: str = ""
    number: int = Field(ge=1, le=9)
    ratio: float = 0.5
    flag: bool = False
    choice: Literal["a", "b"] = "a"
    tokens: list[int] = []
    nested: dict[str, int] = {}
"""


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Sample(Action):
    """One field of each kind."""

    word: str
    note: str = Field(default="x", max_length=500, description="A note")
    short: str = Field(min_length=2, max_length=9, pattern="^a")
    message: str
    code: str = ""
    number: int = Field(ge=1, le=9)
    ratio: float = 0.5
    flag: bool = False
    choice: Literal["a", "b"] = "a"
    tokens: list[int] = Field(default=[])
    nested: dict[str, int] = Field(default={})


class Better(Action):
    """What the incumbent shows as plain text."""

    color: Color
    maybe: int | None = None
    fixed: Literal["only"] = "only"
    above: float = Field(gt=3)
    deep: list[Color] = Field(min_length=2)


def test_fields_have_the_keys_and_kinds_of_the_contract() -> None:
    fields = {field["name"]: field for field in action_fields(Sample)}
    assert all(list(field) == KEYS for field in fields.values())
    assert {name: field["type"] for name, field in fields.items()} == {
        "word": "text",
        "note": "textarea",
        "short": "text",
        "message": "textarea",
        "code": "textarea",
        "number": "number",
        "ratio": "number",
        "flag": "checkbox",
        "choice": "select",
        "tokens": "tensor",
        "nested": "text",
    }
    assert (fields["number"]["min_value"], fields["number"]["max_value"]) == (1, 9)
    assert (fields["short"]["min_length"], fields["short"]["max_length"], fields["short"]["pattern"]) == (2, 9, "^a")
    assert (fields["choice"]["choices"], fields["choice"]["default_value"]) == (["a", "b"], "a")
    assert (fields["note"]["description"], fields["note"]["help_text"]) == ("A note", "A note")


@pytest.mark.slow
@pytest.mark.published
def test_fields_are_those_of_the_published_package_but_for_its_words(published: Interpreter, tmp_path: Path) -> None:
    code = (
        "import json\nfrom openenv.core.env_server.types import Action\n"
        + SAMPLE
        + "from openenv.core.env_server.web_interface import _extract_action_fields\n"
        + "print(json.dumps(_extract_action_fields(Sample)))"
    )
    inherited = published.environment(tmp_path)
    shown = subprocess.run(
        [published.python, "-c", code], capture_output=True, text=True, check=True, timeout=300, env=inherited
    )
    theirs = json.loads(shown.stdout.splitlines()[-1])
    words = ("placeholder", "help_text")
    assert [{key: field[key] for key in KEYS if key not in words} for field in theirs] == [
        {key: field[key] for key in KEYS if key not in words} for field in action_fields(Sample)
    ]


def test_enumerations_optional_numbers_and_constants_are_seen_through() -> None:
    fields = {field["name"]: field for field in action_fields(Better)}
    assert (fields["color"]["type"], fields["color"]["choices"]) == ("select", ["red", "blue"])
    assert fields["maybe"]["type"] == "number"
    assert (fields["fixed"]["type"], fields["fixed"]["choices"]) == ("select", ["only"])
    assert fields["above"]["min_value"] == 3
    assert action_fields(None) == []


def test_a_chat_is_an_action_whose_tokens_are_a_tensor() -> None:
    class Tensor:
        pass

    class Chat(Action):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        tokens: Tensor = None  # type: ignore[assignment]

    assert is_chat(Chat)
    assert not is_chat(Sample)
    assert not is_chat(None)
    assert action_fields(Chat)[0]["type"] == "tensor"


@pytest.mark.parametrize("model", [Sample, Better, CallToolAction])
def test_an_example_fits_its_model(model: type[Any]) -> None:
    deserialize_action(example_action(model), model)


class Place(Environment[Sample, Observation, State]):
    def reset(self, seed: int | None = None, *, level: int, size: list[int] | None = None) -> Observation:  # type: ignore[override]
        return Observation()

    def step(self, action: Sample, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


def test_what_a_reset_takes_is_described_by_its_signature() -> None:
    schema = reset_schema(Place)
    assert list(schema["properties"]) == ["seed", "level", "size"]
    assert (schema["required"], schema["additionalProperties"]) == (["level"], False)
    assert schema["properties"]["size"]["anyOf"][0] == {"type": "array", "items": {"type": "integer"}}
    unknown = reset_schema(None)
    assert (list(unknown["properties"]), unknown["additionalProperties"]) == (["seed", "episode_id"], True)


def test_a_readme_is_looked_for_where_the_contract_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own"
    assert find_readme("place", own) is None
    for place, text in [("src/envs/place", "old"), ("own", "own"), ("envs/place", "new"), ("given", "given")]:
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "README.md").write_text(text)
        if place == "given":
            monkeypatch.setenv("ENV_README_PATH", str(tmp_path / "given/README.md"))
        assert find_readme("place", own) == text
    monkeypatch.setenv("ENV_README_PATH", str(tmp_path / "missing.md"))
    assert find_readme("place", own) == "new"
    assert find_readme("../place") is None
    assert load_environment_metadata(Place, "place").readme_content == "new"


def test_a_readme_is_shown_without_its_settings_and_nothing_of_it_runs() -> None:
    html = readme_html(
        "---\ntitle: Space\n---\n# Hi\n<script>alert(1)</script>\n\n[x](javascript:alert(1)) [y](https://y.example)\n\n"
        "<img src=x onerror=alert(1)>\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    assert html is not None
    assert "title: Space" not in html
    assert "<h1>Hi</h1>" in html
    assert "<table>" in html
    assert "<script" not in html
    assert "<img" not in html
    assert 'href="javascript' not in html
    assert '<a href="https://y.example" target="_blank" rel="noopener noreferrer">' in html
    assert readme_html(None) is None
    assert readme_html("  ") is None


def test_metadata_of_what_is_not_built_has_its_name() -> None:
    def make() -> Place:
        raise AssertionError("nothing is built")

    assert load_environment_metadata(Place).name == "Place"
    assert load_environment_metadata(functools.partial(make)).name == "make"
    assert load_environment_metadata(make, "named").name == "named"
    built = load_environment_metadata(Place())
    assert (built.name, built.description) == ("Place", "Place environment")


def test_the_quick_start_for_custom_pages_is_markdown_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    about = EnvironmentMetadata(name="place", description="")
    assert 'GenericEnvClient("http://localhost:8000")' in get_quick_start_markdown(about, Sample, Observation)
    monkeypatch.setenv("SPACE_HOST", "me-place.hf.space")
    monkeypatch.setenv("SPACE_ID", "me/place")
    text = get_quick_start_markdown(about, Sample, Observation)
    assert "https://me-place.hf.space" in text
    assert "huggingface.co/spaces/me/place" in text
