"""`PreparedTool`: arguments checked by a validator that environments share, and which tools may be called directly."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, Optional

import pytest
from fastmcp import Context, FastMCP
from fastmcp.dependencies import Depends
from fastmcp.server.middleware import Middleware
from fastmcp.tools.function_tool import FunctionTool
from pydantic import BaseModel, Field

from openenv.env.tools import function_tools as module
from openenv.env.tools.function_tools import EnvContext, PreparedTool, ServerTools
from openenv.env.tools.source import ToolOutcome
from openenv.errors import ToolArgumentsError


def prepare(function: Any) -> PreparedTool:
    return PreparedTool(FunctionTool.from_function(function))


def make_tool(default: Any = 1, kind: Any = int) -> PreparedTool:
    def scale(value: Any, by: Any = default) -> Any:
        return value * by

    scale.__annotations__ = {"value": kind, "by": kind}
    return prepare(scale)


def check(tool: PreparedTool, **arguments: Any) -> dict[str, Any]:
    args, kwargs = tool.check(arguments)
    assert args == ()
    return kwargs


def test_environments_share_the_validator_of_a_function() -> None:
    assert make_tool()._calling is make_tool()._calling


def test_wrapped_functions_share_the_validator_of_their_code_only() -> None:
    def make(label: str) -> PreparedTool:
        def echo(text: str) -> str:
            return text

        @functools.wraps(echo)
        def labelled(*args: Any, **kwargs: Any) -> str:
            return label + echo(*args, **kwargs)

        return prepare(labelled)

    first, second = make("a"), make("b")
    assert first._calling.validate == second._calling.validate
    assert first._calling is not second._calling
    arguments = second.check({"text": "x"})
    with EnvContext(FastMCP("tools"), "session", None) as context:
        assert second.run(arguments, context).data == "bx"


def test_a_function_that_is_offered_with_fewer_parameters_is_called_in_another_way() -> None:
    tool = FunctionTool.from_function(with_default)
    hidden = tool.model_copy(update={"parameters": {**tool.parameters, "properties": {"text": {"type": "string"}}}})
    assert PreparedTool(tool).is_plain
    assert not PreparedTool(hidden).is_plain


def test_functions_of_one_source_that_differ_have_validators_of_their_own() -> None:
    assert check(make_tool(default=2), value=1) == {"value": 1, "by": 2}
    assert check(make_tool(default=3), value=1) == {"value": 1, "by": 3}
    assert check(make_tool(kind=str, default="x"), value="1") == {"value": "1", "by": "x"}
    assert check(make_tool(default=1.0, kind=float), value=1)["value"] == 1.0
    with pytest.raises(ToolArgumentsError):
        make_tool(kind=str, default="x").check({"value": 1})


def test_annotations_and_defaults_made_by_each_constructor_are_not_kept() -> None:
    """They may refer to the environment whose constructor it was."""

    def make() -> PreparedTool:
        class Point(BaseModel):
            x: int

        def double(point: Any) -> int:
            return int(point.x * 2)

        double.__annotations__ = {"point": Point}
        return prepare(double)

    tools = [make() for _ in range(3)]
    assert tools[0].tool.fn.__code__ not in module._VALIDATORS
    code = make_tool(kind=list, default=[1]).tool.fn.__code__
    assert not any([1] in built.defaults for built in module._VALIDATORS.get(code, []))
    for tool in tools:
        assert check(tool, point={"x": 1})["point"].x == 1


def test_constraints_of_an_annotation_hold() -> None:
    def pick(count: Annotated[int, Field(ge=1, le=3)], colour: Literal["red", "blue"] = "red") -> str:
        return colour * count

    pick.__annotations__ = {"count": Annotated[int, Field(ge=1, le=3)], "colour": Literal["red", "blue"]}
    tool = prepare(pick)
    assert check(tool, count="2") == {"count": 2, "colour": "red"}
    with pytest.raises(ToolArgumentsError, match="count"):
        tool.check({"count": 4})
    with pytest.raises(ToolArgumentsError, match="colour"):
        tool.check({"count": 1, "colour": "green"})


def test_the_message_names_every_argument_that_does_not_fit() -> None:
    with pytest.raises(ToolArgumentsError) as refused:
        make_tool().check({"by": "x", "more": 1})
    assert all(name in str(refused.value) for name in ("value", "by", "more"))
    assert refused.value.tool_name == "scale"


def with_default(text: str, times: int = 1) -> str:
    return text * times


def with_context(text: str, ctx: Context) -> str:
    return text


def with_optional_context(text: str, ctx: Optional[Context] = None) -> str:  # noqa: UP045
    return text


def with_dependency(text: str, more: int = Depends(lambda: 1)) -> str:
    return text


def with_both(text: str, ctx: Context, more: int = Depends(lambda: 1)) -> str:
    return text


@pytest.mark.parametrize(
    ("function", "is_plain"),
    [(with_context, True), (with_optional_context, True), (with_dependency, False), (with_both, False)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_context_can_be_given_directly_and_other_things_are_fastmcps(function: Any, is_plain: bool) -> None:
    tool = prepare(function)
    assert tool.is_plain is is_plain
    assert check(tool, text="x") == {"text": "x"}


class Nothing(Middleware):
    """Passes everything on."""


def test_only_a_server_with_nothing_in_between_is_plain() -> None:
    assert ServerTools(FastMCP("plain")).is_plain
    guarded, outer = FastMCP("guarded"), FastMCP("outer")
    guarded.add_middleware(Nothing())
    outer.mount(FastMCP("inner"))
    assert not ServerTools(guarded).is_plain
    assert not ServerTools(outer).is_plain
    assert not ServerTools(FastMCP("strict", strict_input_validation=True)).is_plain


def test_a_server_that_gets_middleware_later_is_plain_no_more() -> None:
    server = FastMCP("tools")
    tools = ServerTools(server)
    assert tools.is_plain
    server.add_middleware(Nothing())
    assert not tools.is_plain


def test_a_tool_is_prepared_once_and_again_after_it_was_replaced() -> None:
    server = FastMCP("tools", on_duplicate="replace")
    server.tool(with_context, name="tool")
    tools = ServerTools(server)
    first = tools.find("tool")
    assert tools.find("tool") is first
    server.tool(with_dependency, name="tool")
    assert tools.find("tool") is not first
    assert tools.find("nothing") is None
    assert not tools.has("nothing")


@pytest.mark.parametrize("text", ["", "plain", "zwölf €", "\x00", '{"a": 1}'])
def test_plain_text_is_converted_as_fastmcp_does(text: str) -> None:
    def say() -> str:
        return text

    tool = FunctionTool.from_function(say)
    slow = ToolOutcome.from_result(tool.convert_result(text), wraps_result=True)
    assert PreparedTool(tool).convert(text) == slow
