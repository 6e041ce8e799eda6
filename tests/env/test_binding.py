"""How a class is called: keyword filtering, sync or async, factories, and the models an environment declares."""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import pytest

from openenv.env.binding import bind, bind_instance, factory_class, factory_name, infer_models
from openenv.env.environment import Environment
from openenv.types import Action, Observation, State


class Move(Action):
    to: int = 0


class Sight(Observation):
    at: int = 0


class Place(State):
    at: int = 0


class Declared(Environment[Move, Sight, Place]):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Sight:
        return Sight()

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Sight:
        return Sight(at=action.to)

    @property
    def state(self) -> Place:
        return Place()


class Bare(Declared):
    def reset(self) -> Sight:  # type: ignore[override]
        return Sight()

    def step(self, action: Move) -> Sight:  # type: ignore[override]
        return Sight()


class WithTask(Declared):
    def reset(self, task_id: str = "", *, level: int = 1) -> Sight:  # type: ignore[override]
        return Sight()


class PositionalOnly(Declared):
    def reset(self, seed: int = 0, /, extra: int = 1) -> Sight:  # type: ignore[override]
        return Sight()


class Asynchronous(Declared):
    async def reset_async(self, seed: int | None = None) -> Sight:  # type: ignore[override]
        return Sight()

    async def step_async(self, action: Move, hint: str = "") -> Sight:  # type: ignore[override]
        return Sight()


class HalfAsynchronous(Declared):
    async def step_async(self, action: Move, **kwargs: Any) -> Sight:  # type: ignore[override]
        return Sight()


class CoroutineStep(Declared):
    async def step(self, action: Move) -> Sight:  # type: ignore[override]
        return Sight()


GIVEN = {"seed": 1, "episode_id": "e", "task_id": "t", "level": 2, "other": 3, "self": 5}


@pytest.mark.parametrize(
    ("env_cls", "kept"),
    [
        (Declared, {"seed", "episode_id", "task_id", "level", "other"}),
        (Bare, set()),
        (WithTask, {"task_id", "level"}),
        (PositionalOnly, set()),
        (Asynchronous, {"seed"}),
        (HalfAsynchronous, {"seed", "episode_id", "task_id", "level", "other"}),
    ],
)
def test_reset_gets_the_keywords_that_its_signature_names(env_cls: type[Any], kept: set[str]) -> None:
    assert set(bind(env_cls).reset.accept(GIVEN)) == kept


def test_step_never_gets_action_or_self_by_keyword() -> None:
    assert bind(Bare).step.accept({"action": 1, "self": 2, "timeout_s": 3}) == {}
    assert bind(Declared).step.accept({"action": 1, "self": 2, "timeout_s": 3}) == {"timeout_s": 3}
    assert bind(Asynchronous).step.accept({"hint": "h", "timeout_s": 3}) == {"hint": "h"}


@pytest.mark.parametrize(
    ("env_cls", "reset", "step"),
    [
        (Declared, ("reset", False), ("step", False)),
        (Asynchronous, ("reset_async", True), ("step_async", True)),
        (HalfAsynchronous, ("reset", False), ("step_async", True)),
        (CoroutineStep, ("reset", False), ("step", True)),
    ],
)
def test_overriding_the_async_method_selects_it(
    env_cls: type[Any], reset: tuple[str, bool], step: tuple[str, bool]
) -> None:
    binding = bind(env_cls)
    assert (binding.reset.name, binding.reset.is_async) == reset
    assert (binding.step.name, binding.step.is_async) == step
    assert binding.async_kinds == {kind for kind, taken in (("reset", reset), ("step", step)) if taken[1]}


def test_an_override_is_found_in_a_parent_class() -> None:
    class Child(Asynchronous):
        pass

    assert bind(Child).reset.is_async


def test_a_class_is_inspected_once() -> None:
    assert bind(Declared) is bind(Declared)


def test_an_environment_that_is_no_environment_class_can_be_bound() -> None:
    class Duck:
        def reset(self, task: str) -> dict[str, Any]:
            return {}

        def step(self, action: Any, **anything: Any) -> dict[str, Any]:
            return {}

    assert bind(Duck).reset.accept(GIVEN | {"task": 1}) == {"task": 1}
    assert not bind(Duck).async_kinds


def make_it() -> Declared:
    return Declared()


def make_something():  # type: ignore[no-untyped-def]
    return Declared()


def make_abstract() -> Environment[Any, Any, Any]:
    return Declared()


class Builder:
    def __call__(self) -> Declared:
        return Declared()


@pytest.mark.parametrize(
    ("factory", "expected", "name"),
    [
        (Declared, Declared, "Declared"),
        (functools.partial(Declared, None), Declared, "Declared"),
        (functools.partial(functools.partial(make_it)), Declared, "make_it"),
        (make_it, Declared, "make_it"),
        (make_something, None, "make_something"),
        (make_abstract, None, "make_abstract"),
        (lambda: Declared(), None, "<lambda>"),
    ],
    ids=["class", "partial", "partial of function", "annotated", "unannotated", "abstract", "lambda"],
)
def test_the_class_of_a_factory_is_found_without_calling_it(factory: Any, expected: Any, name: str) -> None:
    assert factory_class(factory) is expected
    assert factory_name(factory) == name


def test_a_factory_object_is_named_after_its_class() -> None:
    assert factory_name(Builder()) == "Builder"
    assert factory_class(Builder()) in (None, Declared)


def test_a_factory_whose_annotation_cannot_be_resolved_is_just_unknown() -> None:
    def make() -> NotImportableHere:  # type: ignore[name-defined]  # noqa: F821
        return None

    assert factory_class(make) is None


A = TypeVar("A", bound=Action)
O = TypeVar("O", bound=Observation)  # noqa: E741


class Middle(Environment[A, Sight, Place], Generic[A]):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Sight:
        return Sight()

    def step(self, action: A, timeout_s: float | None = None, **kwargs: Any) -> Sight:
        return Sight()

    @property
    def state(self) -> Place:
        return Place()


class Swapped(Environment[A, O, State], Generic[O, A]):
    pass


class Leaf(Middle[Move]):
    pass


class SwappedLeaf(Swapped[Sight, Move]):
    pass


class Grandchild(Leaf):
    pass


class Mixin:
    pass


class WithMixin(Mixin, Declared):
    pass


class Annotated(Environment):  # type: ignore[type-arg]
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Sight:
        return Sight()

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Sight:
        return Sight()

    @property
    def state(self) -> Place:
        return Place()


class AnnotatedAsync(Annotated):
    async def step_async(self, action: Move, **kwargs: Any) -> Sight:  # type: ignore[override]
        return Sight()


@pytest.mark.parametrize("env_cls", [Declared, Bare, Leaf, Grandchild, WithMixin, Annotated, AnnotatedAsync])
def test_models_are_found_in_generic_parameters_parents_or_annotations(env_cls: type[Any]) -> None:
    models = infer_models(env_cls)
    assert (models.action, models.observation, models.state) == (Move, Sight, Place)


def test_generic_parameters_are_followed_by_name_and_not_by_place() -> None:
    models = infer_models(SwappedLeaf)
    assert (models.action, models.observation, models.state) == (Move, Sight, State)


def test_without_any_declaration_the_base_models_are_meant() -> None:
    class Silent(Environment):  # type: ignore[type-arg]
        def reset(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return None

        def step(self, action, **kwargs):  # type: ignore[no-untyped-def]
            return None

        @property
        def state(self):  # type: ignore[no-untyped-def]
            return None

    models = infer_models(Silent)
    assert (models.action, models.observation, models.state) == (Action, Observation, State)


def test_an_open_type_variable_falls_back_to_annotations_or_the_base() -> None:
    models = infer_models(Middle)
    assert models.action is Action
    assert models.observation is Sight


def test_methods_that_an_instance_sets_itself_are_used() -> None:
    class Plain(Environment[Move, Sight, State]):
        def reset(self, seed: int | None = None) -> Sight:  # type: ignore[override]
            return Sight()

        def step(self, action: Move) -> Sight:  # type: ignore[override]
            return Sight()

        @property
        def state(self) -> State:
            return State()

    async def go(depth: int, action: Move, hurry: bool = False) -> Sight:
        return Sight()

    env = Plain()
    assert bind_instance(env) is bind(Plain)
    env.step_async = functools.partial(go, 3)  # type: ignore[method-assign, assignment]
    binding = bind_instance(env)
    assert (binding.step.name, binding.step.is_async) == ("step_async", True)
    assert binding.step.keywords == {"hurry"}
    assert binding.reset is bind(Plain).reset
    assert binding.async_kinds == {"step"}
    assert bind_instance(Plain()) is bind(Plain)
