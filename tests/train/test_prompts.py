"""What a model reads of a served environment: description, form of the actions, every field, `to_prompt`, templates."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, Field, RootModel
from typer.testing import CliRunner

from environments import Idle
from openenv import GenericEnvClient, create_app
from openenv.cli.__main__ import build
from openenv.rollout.agents.dialogue import Prompt, TextDialogue, ToolDialogue, WrittenToolDialogue, describe_actions
from openenv.rollout.agents.served_episode import described, served_dialogue, served_prompt
from openenv.rollout.store.exports import recording
from openenv.rollout.store.store import RolloutStore
from openenv.testing import Script, ScriptedModel, serve
from openenv.train.episodes import PlayOptions
from openenv.types import Action, Observation


class Mark(Action):
    """Mark a cell."""

    cell: int = Field(ge=0, le=8, description="The cell to mark")
    piece: Literal["x", "o"] = "x"


class Board(Observation):
    message: str = ""
    board: str = ""
    legal: list[int] = Field(default_factory=list)
    winner: str | None = None


class TicTacToe(Idle):
    """Three in a row win.

    Written for tests.
    """

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Board:
        return Board(message="Your move.", board="x.o\n...\n...", legal=[1, 3])

    def step(self, action: Mark, timeout_s: float | None = None, **kwargs: Any) -> Board:
        return Board(message="Done.", board="xxo\n...\n...", reward=1.0, done=True, winner="x")


OPENING = """Three in a row win.

Answer with one JSON object with these fields:
- cell (integer, 0 to 8): The cell to mark
- piece ("x" or "o", optional)

message: Your move.
board:
x.o
...
...
legal: [1, 3]"""


class Drawn(Board):
    def to_prompt(self) -> str:
        return f"{self.board}\n{self.message} Free: {self.legal}"


class Described(TicTacToe):
    """Three in a row win."""

    PROMPT_TEMPLATE: ClassVar[str] = "{observation}\n--\n{description}"

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Drawn:
        return Drawn(**dict(super().reset()))


def opening(environment: type[Any], observation: type[Any], **form: Any) -> str:
    with serve(create_app(environment, Mark, observation)) as served:
        prompt = served_prompt(served.url, **form)
        dialogue = served_dialogue(served.url, prompt=prompt)
        with GenericEnvClient(served.url).sync() as client:
            (message,) = dialogue.opening(client.reset().observation)
    return str(message["content"])


def test_the_model_sees_the_description_the_actions_and_every_field() -> None:
    assert opening(TicTacToe, Board) == OPENING


def test_an_environment_decides_with_to_prompt_and_a_template() -> None:
    shown = "x.o\n...\n...\nYour move. Free: [1, 3]"
    assert opening(Described, Drawn) == f"{shown}\n--\nThree in a row win."
    assert opening(Described, Drawn, text_only=True) == shown
    assert opening(Described, Drawn, template="Play! {observation}") == f"Play! {shown}"


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_the_text_of_to_prompt_is_in_the_metadata_of_every_encoding(protocol: Any) -> None:
    with serve(create_app(Described, Mark, Drawn)) as served:
        with GenericEnvClient(served.url, protocol=protocol).sync() as client:
            result = client.reset()
            assert (result.metadata or {})["to_prompt"].startswith("x.o\n")
            assert result.observation["message"] == "Your move."


def test_text_only_is_the_text_alone() -> None:
    dialogue = TextDialogue("", {}, Prompt(description="A riddle.", text_only=True))
    assert dialogue.opening({"text": "What?", "tries": 3}) == [{"role": "user", "content": "What?"}]
    assert dialogue.shown({"at": 3, "left": 1}) == '{"at": 3, "left": 1}'


def test_a_lone_text_has_no_name_and_empty_fields_are_left_out() -> None:
    assert TextDialogue().shown({"text": "Hello.", "error": "", "image": None, "metadata": {}}) == "Hello."
    assert TextDialogue().shown({"left": [], "won": False}) == "left: []\nwon: false"


def test_tools_come_with_the_description() -> None:
    tools = [{"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}]
    form = Prompt(description="A calculator.")
    assert ToolDialogue(tools, "", form).opening({})[0]["content"] == "A calculator."
    assert ToolDialogue(tools).opening({})[0]["content"] == "The episode has begun."
    written = WrittenToolDialogue(tools, "", form).opening({"text": "1 + 1?"})[0]["content"]
    assert written.startswith("A calculator.\n\nCall a tool")
    assert written.endswith("\n\n1 + 1?")
    assert '"add"' in WrittenToolDialogue(tools, "", Prompt(text_only=True)).opening({})[0]["content"]


class Go(Action):
    """Go somewhere."""

    kind: Literal["go"] = "go"
    to: str


class Point(BaseModel):
    x: int
    y: int = Field(ge=0)


class Aim(Action):
    kind: Literal["aim"] = "aim"
    at: Point
    with_force: float | None = Field(default=None, le=1)


class Either(RootModel[Annotated[Go | Aim, Field(discriminator="kind")]]):
    """Either."""


def test_unions_and_nested_fields_are_described() -> None:
    assert describe_actions(Either.model_json_schema()).splitlines() == [
        "Answer with one JSON object, in one of these forms:",
        "Go: Go somewhere.",
        '- kind ("go")',
        "- to (string)",
        "Aim:",
        '- kind ("aim")',
        "- at (object with x (integer), y (integer, at least 0))",
        "- with_force (number, at most 1 or null, optional)",
    ]


def test_a_single_text_field_is_the_whole_reply() -> None:
    class Say(Action):
        word: str = Field(description="Five letters.")

    assert describe_actions(Say.model_json_schema()) == "Your whole reply becomes the action's `word`: Five letters."
    assert describe_actions({}) == "Answer with a JSON object."


class Code(Action):
    guess: str = Field(pattern="^[A-F]{4}$", examples=["ABCD"], description="Four letters.")


def test_a_text_has_an_example_or_its_pattern() -> None:
    schema = Code.model_json_schema()
    assert describe_actions(schema).endswith("`guess`: Four letters, for example ABCD.")
    del schema["properties"]["guess"]["examples"]
    assert describe_actions(schema).endswith("`guess`: Four letters, matching ^[A-F]{4}$.")


@pytest.mark.parametrize(
    ("reply", "guess"),
    [
        ("ABCD", "ABCD"),
        (' {"guess": "ABCD"}\n', "ABCD"),
        ('{"guess": 4}', '{"guess": 4}'),
        ('{"guess": "ABCD", "why": ""}', '{"guess": "ABCD", "why": ""}'),
        ('{"other": "ABCD"}', '{"other": "ABCD"}'),
        ("{not JSON", "{not JSON"),
    ],
)
def test_a_single_text_field_may_be_written_as_json(reply: str, guess: str) -> None:
    assert TextDialogue(action_schema=Code.model_json_schema()).action(reply) == {"guess": guess}


def test_a_template_without_the_observation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs \{observation\}"):
        Prompt(template="Play.")
    with pytest.raises(ValueError, match=r"needs \{observation\}"):
        PlayOptions(template="Play.")
    with pytest.raises(ValueError, match="its own form"):
        PlayOptions(dialogue=TextDialogue(), text_only=True)


def test_a_generated_description_is_left_out() -> None:
    assert described({"description": "Maze environment"}) == ""
    assert described({"description": "Find the way out."}) == "Find the way out."


def test_the_command_shows_the_board_and_takes_a_template(tmp_path: Any) -> None:
    template = tmp_path / "first.txt"
    template.write_text("{description} Now: {observation}", encoding="utf-8")
    script = Script(name="player", turns=[], ending='{"cell": 1}')
    contents: list[str] = []
    with serve(create_app(TicTacToe, Mark, Board)) as served, ScriptedModel(script) as model:
        address = model.model()
        command = ["play", served.url, "--llm-url", address["base_url"], "--model", address["name"], "-n", "1"]
        for number, extra in enumerate(([], ["--template", str(template)], ["--text-only"])):
            folder = tmp_path / str(number)
            result = CliRunner().invoke(build(["play"]), [*command, *extra, "--store", str(folder)])
            assert result.exit_code == 0, result.output
            with RolloutStore(folder, create=False) as store:
                captured = recording(store, next(iter(store.records())))
                assert captured is not None
                contents.append(captured.calls[0].request["messages"][-1]["content"])
    assert contents[0] == OPENING
    assert contents[1].startswith("Three in a row win. Now: message: Your move.")
    assert contents[2].startswith('{"message": "Your move."')


class Mute(Board):
    def to_prompt(self) -> Any:
        return None


class Silent(TicTacToe):
    """Three in a row win."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Mute:
        return Mute()


def test_to_prompt_must_return_a_text() -> None:
    with serve(create_app(Silent, Mark, Mute)) as served, GenericEnvClient(served.url).sync() as client:
        with pytest.raises(Exception, match="needs a text to return"):
            client.reset()
