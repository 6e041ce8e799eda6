"""Actions as validators and JSON schemas: open action classes, own validation, the one-pass step parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, RootModel, ValidationError, field_validator

from openenv.protocol.schema import (
    deserialize_action,
    deserialize_action_with_preprocessing,
    json_schema,
    step_frame_parser,
    takes_tool_actions,
)
from openenv.protocol.tool_messages import CallToolAction, ListToolsAction
from openenv.types import Action, Observation


class Move(Action):
    direction: Literal["left", "right"]
    distance: int = Field(default=1, ge=1)


class ToolSubclass(CallToolAction):
    extra_note: str = ""


class Push(BaseModel):
    kind: Literal["push"]
    force: float


class Pull(BaseModel):
    kind: Literal["pull"]


class Either(RootModel[Annotated[Push | Pull, Field(discriminator="kind")]]):
    pass


class Picky(Action):
    word: str

    @field_validator("word")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != "please":
            raise ValueError("say please")
        return value


class OwnValidation(Action):
    word: str

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> OwnValidation:  # type: ignore[override]
        return cls(word=str(obj["word"]).upper())


@dataclass
class PlainAction:
    amount: int


def test_an_action_is_validated_with_its_class() -> None:
    assert deserialize_action({"direction": "left"}, Move) == Move(direction="left")
    with pytest.raises(ValidationError):
        deserialize_action({"direction": "up"}, Move)
    with pytest.raises(ValidationError):
        deserialize_action({"direction": "left", "unknown": 1}, Move)


@pytest.mark.parametrize("action_cls", [Action, ListToolsAction, CallToolAction])
def test_open_action_classes_recognise_tool_actions(action_cls: type[Action]) -> None:
    assert type(deserialize_action({"type": "list_tools"}, action_cls)) is ListToolsAction
    found = deserialize_action({"type": "call_tool", "tool_name": "t", "arguments": {"a": 1}}, action_cls)
    assert type(found) is CallToolAction
    assert found.arguments == {"a": 1}


def test_a_subclass_of_a_tool_action_means_exactly_itself() -> None:
    with pytest.raises(ValidationError):
        deserialize_action({"type": "list_tools"}, ToolSubclass)
    assert type(deserialize_action({"tool_name": "t"}, ToolSubclass)) is ToolSubclass


def test_an_environment_is_stepped_with_tool_calls_where_its_actions_are_those_or_more() -> None:
    assert all(takes_tool_actions(each) for each in (Action, CallToolAction, ToolSubclass))
    assert not any(takes_tool_actions(each) for each in (None, Move, PlainAction))


def test_root_models_and_dataclasses_are_actions_too() -> None:
    assert deserialize_action({"kind": "push", "force": 2}, Either).root == Push(kind="push", force=2.0)
    assert deserialize_action({"amount": "3"}, PlainAction) == PlainAction(3)


@pytest.mark.parametrize("action_cls", [Move, Either, Picky])
def test_the_one_pass_parser_exists_for_ordinary_models(action_cls: type[Any]) -> None:
    assert step_frame_parser(action_cls) is not None


@pytest.mark.parametrize("action_cls", [None, Action, ListToolsAction, PlainAction, OwnValidation])
def test_the_one_pass_parser_is_absent_where_it_would_change_the_meaning(action_cls: type[Any] | None) -> None:
    assert step_frame_parser(action_cls) is None


def test_the_one_pass_parser_returns_the_action_of_a_frame() -> None:
    parse = step_frame_parser(Move)
    assert parse is not None
    assert parse(b'{"type":"step","data":{"direction":"right","distance":2}}') == Move(direction="right", distance=2)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"type":"step"}',
        b'{"type":"reset","data":{"direction":"left"}}',
        b'{"type":"step","data":{"direction":"up"}}',
        b'{"type":"step","data":{"direction":"left"},"timeout_s":1}',
        b'{"type":"step","data":[]}',
        b"nonsense",
    ],
)
def test_the_one_pass_parser_raises_for_everything_else(raw: bytes) -> None:
    parse = step_frame_parser(Move)
    assert parse is not None
    with pytest.raises(ValidationError):
        parse(raw)


def test_form_fields_are_turned_into_what_they_stand_for() -> None:
    class Numbered(Action):
        action_id: int

    class Tokens(Action):
        tokens: Any

    assert deserialize_action_with_preprocessing({"action_id": "-3"}, Numbered).action_id == -3
    assert list(deserialize_action_with_preprocessing({"tokens": "[1, 2]"}, Tokens).tokens) == [1, 2]
    assert list(deserialize_action_with_preprocessing({"tokens": ""}, Tokens).tokens) == []
    call = {"type": "call_tool", "tool_name": "t", "arguments": '{"a": 1}'}
    assert deserialize_action_with_preprocessing(call, CallToolAction).arguments == {"a": 1}
    assert deserialize_action_with_preprocessing({**call, "arguments": " "}, CallToolAction).arguments == {}


def test_a_type_without_a_json_schema_does_not_spoil_the_schema() -> None:
    class Opaque:
        pass

    class WithOpaque(Observation):
        thing: Opaque
        text: str

    schema = json_schema(WithOpaque)
    assert schema["properties"]["text"]["type"] == "string"
    assert "thing" in schema["properties"]


def test_schemas_describe_models_root_models_and_dataclasses() -> None:
    assert json_schema(Move)["properties"]["distance"]["minimum"] == 1
    assert "oneOf" in json_schema(Either)
    assert json_schema(PlainAction)["properties"]["amount"]["type"] == "integer"


def test_a_model_that_writes_its_own_schema_keeps_it() -> None:
    class Renamed(Action):
        where: str = "north"

        @classmethod
        def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"type": "object", "title": "Move", "properties": {"where": {"enum": ["north", "south"]}}}

    class Extended(Action):
        size: int = 1

        @classmethod
        def model_json_schema(cls, by_alias: bool = True, **kwargs: Any) -> dict[str, Any]:
            return {**super().model_json_schema(by_alias, **kwargs), "examples": [{"size": 2}]}

    assert json_schema(Renamed)["properties"]["where"] == {"enum": ["north", "south"]}
    extended = json_schema(Extended)
    assert extended["examples"] == [{"size": 2}]
    assert extended["properties"]["size"]["default"] == 1
