"""The form: every shape of schema becomes fields that step an environment, and errors are shown where they belong."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from environments import Idle
from openenv import Action, Observation

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect


class Colour(str, Enum):
    RED = "red"
    GREEN = "green"


class Point(BaseModel):
    x: float = Field(ge=-10, le=10)
    y: float = 0.0


class Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    radius: float = Field(gt=0)


class Square(BaseModel):
    kind: Literal["square"] = "square"
    side: int


class Everything(Action):
    """One field of each kind."""

    text: str
    code: str = Field(default="print(1)", description="Some source", max_length=2000)
    short: str = Field(default="abc", max_length=5)
    number: int = Field(ge=0, le=1000)
    share: float = 0.5
    small: int = Field(default=1, ge=0, le=3)
    flag: bool = False
    maybe_flag: bool | None = None
    level: Literal["low", "high"] = "low"
    colour: Colour | None = None
    many: Literal["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india"]
    note: str | None = None
    point: Point
    extra_point: Point | None = None
    tags: list[str] = Field(default_factory=list)
    points: list[Point] = Field(default_factory=list)
    pair: tuple[int, str]
    scores: dict[str, int] = Field(default_factory=dict)
    shape: Annotated[Circle | Square, Field(discriminator="kind")]
    either: int | str = 0
    anything: Any = None


class Echoed(Observation):
    echoed: str = ""


class Mirror(Idle):
    """Returns the action that it got."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Echoed:
        return Echoed(echoed=f"seed {seed}")

    def step(self, action: Everything, timeout_s: float | None = None, **kwargs: Any) -> Echoed:
        return Echoed(echoed=action.model_dump_json(exclude={"metadata"}))


@pytest.fixture
def page(site: Callable[..., Any], visit: Callable[..., Any]) -> Any:
    """The page of the mirror."""
    return visit(site(Mirror, Everything, Echoed).url).page()


def field(page: Any, name: str) -> Any:
    """The field of a name, on the first tab."""
    return page.locator(f".action [data-field={name}]").first


def echoed(page: Any) -> Any:
    """Return the action of the last step, as the environment got it."""
    text = page.locator(".seen .text").last
    expect(text).to_contain_text("{")
    return json.loads(text.text_content())


def fill_required(page: Any) -> None:
    """Fill in what has to be."""
    field(page, "text").locator("input, textarea").fill("hello")
    field(page, "number").locator("input").fill("12")
    field(page, "many").locator("select").select_option(label="hotel")
    field(page, "point").locator("[data-field=x] input").fill("2.5")
    field(page, "pair").locator("input[type=number]").fill("3")
    field(page, "pair").locator("input[type=text]").fill("three")
    field(page, "shape").locator("[data-field=radius] input").fill("1.5")


def step(page: Any) -> None:
    """Press the button."""
    page.locator(".action").get_by_role("button", name="Step").click()


def test_a_form_with_only_what_is_required_sends_the_defaults_with_it(page: Any) -> None:
    fill_required(page)
    step(page)
    assert echoed(page) == {
        "text": "hello",
        "code": "print(1)",
        "short": "abc",
        "number": 12,
        "share": 0.5,
        "small": 1,
        "flag": False,
        "maybe_flag": None,
        "level": "low",
        "colour": None,
        "many": "hotel",
        "note": None,
        "point": {"x": 2.5, "y": 0.0},
        "extra_point": None,
        "tags": [],
        "points": [],
        "pair": [3, "three"],
        "scores": {},
        "shape": {"kind": "circle", "radius": 1.5},
        "either": 0,
        "anything": None,
    }


def test_every_kind_of_field_can_be_filled_in(page: Any) -> None:
    fill_required(page)
    field(page, "code").locator("textarea").fill("a\nb")
    field(page, "share").locator("input").fill("0.25")
    field(page, "small").get_by_label("3", exact=True).check(force=True)
    field(page, "flag").locator("input").check()
    field(page, "maybe_flag").get_by_label("true", exact=True).check(force=True)
    field(page, "level").get_by_label("high", exact=True).check(force=True)
    field(page, "colour").get_by_label("green", exact=True).check(force=True)
    field(page, "note").locator("input, textarea").fill("noted")
    field(page, "extra_point").locator("input[type=checkbox]").check()
    field(page, "extra_point").locator("[data-field=x] input").fill("-1")
    tags = field(page, "tags")
    for tag in ("one", "two", "three"):
        tags.get_by_role("button", name="Add").click()
        tags.locator("input").last.fill(tag)
    tags.get_by_role("button", name="Remove Tags 2").click()
    points = field(page, "points")
    points.get_by_role("button", name="Add").click()
    points.locator("[data-field=x] input").fill("7")
    scores = field(page, "scores")
    scores.get_by_role("button", name="Add").click()
    scores.get_by_label("Scores: name").fill("best")
    scores.locator("input[type=number]").fill("9")
    field(page, "shape").locator("select").select_option(label="Square")
    field(page, "shape").locator("[data-field=side] input").fill("4")
    field(page, "either").locator("select").select_option(label="text")
    field(page, "either").locator(".variant input, .variant textarea").fill("word")
    field(page, "anything").locator("textarea").fill('{"deep": [1, null]}')
    step(page)
    sent = echoed(page)
    assert (sent["code"], sent["share"], sent["small"], sent["flag"], sent["maybe_flag"]) == (
        "a\nb",
        0.25,
        3,
        True,
        True,
    )
    assert (sent["level"], sent["colour"], sent["note"]) == ("high", "green", "noted")
    assert sent["extra_point"] == {"x": -1.0, "y": 0.0}
    assert sent["tags"] == ["one", "three"]
    assert sent["points"] == [{"x": 7.0, "y": 0.0}]
    assert sent["scores"] == {"best": 9}
    assert sent["shape"] == {"kind": "square", "side": 4}
    assert sent["either"] == "word"
    assert sent["anything"] == {"deep": [1, None]}


def test_a_field_shows_the_servers_error_and_nothing_is_lost(page: Any) -> None:
    fill_required(page)
    field(page, "number").locator("input").fill("5000")
    field(page, "short").locator("input").fill("too long")
    field(page, "point").locator("[data-field=x] input").fill("99")
    field(page, "shape").locator("[data-field=radius] input").fill("-1")
    step(page)
    expect(field(page, "number").locator(".field-error").first).to_contain_text("less than or equal to 1000")
    expect(field(page, "short").locator(".field-error").first).to_contain_text("at most 5")
    expect(field(page, "point").locator("[data-field=x] .field-error")).to_contain_text("less than or equal to 10")
    expect(field(page, "shape").locator("[data-field=radius] .field-error")).to_contain_text("greater than 0")
    expect(field(page, "number").locator("input")).to_have_attribute("aria-invalid", "true")
    assert field(page, "text").locator("input, textarea").input_value() == "hello"
    assert field(page, "many").locator("select").evaluate("list => list.selectedOptions[0].text") == "hotel"
    field(page, "number").locator("input").fill("1")
    expect(field(page, "number").locator(".field-error").first).to_be_hidden()
    field(page, "short").locator("input").fill("ok")
    field(page, "point").locator("[data-field=x] input").fill("9")
    field(page, "shape").locator("[data-field=radius] input").fill("1")
    step(page)
    assert echoed(page)["point"] == {"x": 9.0, "y": 0.0}


def test_a_missing_field_shows_its_error(page: Any) -> None:
    fill_required(page)
    field(page, "number").locator("input").fill("")
    step(page)
    expect(field(page, "number").locator(".field-error").first).to_contain_text("required")
    expect(field(page, "number").locator("input")).to_be_focused()


def test_an_expert_writes_json_and_goes_back_to_the_form(page: Any) -> None:
    fill_required(page)
    switch = page.locator(".action").get_by_role("button", name="JSON")
    switch.click()
    text = page.locator(".action").get_by_label("Value as JSON")
    value = json.loads(text.input_value())
    assert value["text"] == "hello"
    text.fill("{not json")
    step(page)
    expect(page.locator(".action .form > .field-error")).to_contain_text("not JSON")
    text.fill(json.dumps({**value, "number": 5000}))
    step(page)
    expect(page.locator(".action .form > .field-error")).to_contain_text("number")
    text.fill(json.dumps({**value, "number": 77, "tags": ["a", "b"], "shape": {"kind": "square", "side": 2}}))
    switch.click()
    expect(field(page, "number").locator("input")).to_have_value("77")
    expect(field(page, "tags").locator("input")).to_have_count(2)
    step(page)
    assert echoed(page)["shape"] == {"kind": "square", "side": 2}


class Tree(Action):
    name: str = "root"
    children: list[Tree] = Field(default_factory=list)
    left: Tree | None = None


class Counted(Observation):
    echoed: str = ""


class Forest(Mirror):
    """Takes trees."""

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Echoed:
        return Echoed(echoed=json.dumps(action.model_dump(mode="json")))


def test_a_schema_that_contains_itself_grows_as_far_as_it_is_filled_in(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = visit(site(Forest, Tree, Echoed).url).page()
    children = field(page, "children")
    children.get_by_role("button", name="Add").first.click()
    children.locator("[data-field=name] input").first.fill("child")
    step(page)
    sent = echoed(page)
    assert [child["name"] for child in sent["children"]] == ["child"]
    assert sent["left"] is None
