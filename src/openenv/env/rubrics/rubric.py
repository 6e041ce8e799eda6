"""The rubric: a callable that scores one (action, observation) pair, with hooks and child rubrics; or a whole episode.

Knows calling, hooks and the tree of children. Must not know how children's scores are combined, nor any event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from inspect import iscoroutine, iscoroutinefunction
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from openenv._notebook import html_table

T = TypeVar("T")

ForwardPreHook = Callable[["Rubric", Any, Any], object]
"""Called as `hook(rubric, action, observation)`; may be async on a rubric that is awaited."""

ForwardHook = Callable[["Rubric", Any, Any, float], object]
"""Called as `hook(rubric, action, observation, score)`; may be async on a rubric that is awaited."""

# Identifies the shape of all trees, and is replaced when any of them changes: a cached property of a tree is valid
# while this is the same object. Not a number, which could repeat: a deep copy or a pickle has no valid cache.
_generation = object()

DECISIVE = frozenset({"is_async", "_rubric_children", "last_score", "__setattr__", "__delattr__"})
"""Names that a subclass must not override if `is_async` of its tree is to be cached and its score stored directly."""


NUMBERED = "rubric_"
"""How the names of children begin that have only a number."""


class RubricNode:
    """Mark possible children; `isinstance` with a class that is not an ABC is several times faster, on every call."""


class Rubric(RubricNode, ABC):
    """Score an action and the observation it led to.

    Subclasses write `forward`, as `def` or as `async def`. A rubric assigned to an attribute is a child: the
    instance's attributes are the only record of its children, so replacing or deleting one takes effect everywhere.
    The children form a tree; keep a reference back to a parent out of the attributes.
    """

    # Class-level and immutable, so that a subclass which forgets super().__init__() still works.
    last_score: float | None = None
    _forward_pre_hooks: tuple[ForwardPreHook, ...] = ()
    _forward_hooks: tuple[ForwardHook, ...] = ()
    # The attributes that are children. One that was set past `__setattr__` (`object.__setattr__(self, ...)`) is not.
    _child_names: frozenset[str] = frozenset()
    # The generation and the value of a cached `is_async`; one tuple, so that threads never see half of an update.
    _known_is_async: tuple[object, bool] = (None, False)
    _forward_is_async: ClassVar[bool] = False
    _is_plain: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._forward_is_async = iscoroutinefunction(cls.forward)
        # A subclass may decide these at each call, or intercept the setting of its score.
        strangers = [base for base in cls.__mro__ if base not in (Rubric, object)]
        cls._is_plain = all(vars(base).keys().isdisjoint(DECISIVE) for base in strangers)

    if not TYPE_CHECKING:  # To a type checker, these two would allow any attribute.

        def __setattr__(self, name: str, value: object) -> None:
            if isinstance(value, RubricNode):
                self._set_child(name, value)
                forget_trees()
                return
            super().__setattr__(name, value)
            self._forget_child(name)

        def __delattr__(self, name: str) -> None:
            super().__delattr__(name)
            self._forget_child(name)

    def _set_child(self, name: str, rubric: Rubric) -> None:
        """Keep a rubric that was assigned to an attribute."""
        super().__setattr__(name, rubric)
        self.__dict__["_child_names"] = self._child_names | {name}

    def _forget_child(self, name: str) -> None:
        """Note that an attribute holds no child any more."""
        if name in self._child_names:
            self.__dict__["_child_names"] = self._child_names - {name}
            forget_trees()

    @abstractmethod
    def forward(self, action: Any, observation: Any) -> float | Awaitable[float]:
        """Compute the score."""

    @property
    def is_async(self) -> bool:
        """Whether calling this rubric gives a coroutine: some `forward` in its tree is a coroutine function.

        A subclass must set `is_async = True` if its plain `forward` returns an awaitable that it makes itself.
        """
        generation, is_async = self._known_is_async
        return is_async if generation is _generation else self._find_is_async()

    def _find_is_async(self) -> bool:
        """Search the tree, and cache the result unless a rubric in it is not plain."""
        # Read first: a change that another thread makes meanwhile outdates the answer.
        generation = _generation
        is_async, lasting = self._forward_is_async, self._is_plain
        if not is_async:
            for child in self._rubric_children.values():
                is_async = child.is_async
                lasting = lasting and child._known_is_async[0] is generation
                if is_async:
                    break
        if lasting:
            self.__dict__["_known_is_async"] = (generation, is_async)
        return is_async

    def __call__(self, action: Any, observation: Any) -> float | Coroutine[Any, Any, float]:
        """Score the pair: a float, or a coroutine of one where `is_async`, independent of the score and the event loop.

        Raises:
            TypeError: something in a rubric that is not async returned an awaitable.
        """
        generation, is_async = self._known_is_async
        if is_async if generation is _generation else self.is_async:
            return self.acall(action, observation)
        for pre_hook in self._forward_pre_hooks:
            settled(pre_hook(self, action, observation), "forward pre-hook", self)
        score = self.forward(action, observation)
        if type(score) is not float:
            score = settled(score, "forward", self)
        if self._is_plain:
            self.__dict__["last_score"] = score
        else:
            self.last_score = score
        for hook in self._forward_hooks:
            settled(hook(self, action, observation, score), "forward hook", self)
        return score

    async def acall(self, action: Any, observation: Any) -> float:
        """Score the pair; can be awaited whether the rubric is async or not, and awaits async hooks."""
        for pre_hook in self._forward_pre_hooks:
            await awaited(pre_hook(self, action, observation))
        score = await awaited(self.forward(action, observation))
        self.last_score = score
        for hook in self._forward_hooks:
            await awaited(hook(self, action, observation, score))
        return score

    def register_forward_pre_hook(self, hook: ForwardPreHook) -> None:
        """Run `hook(rubric, action, observation)` before each `forward`."""
        self._forward_pre_hooks = (*self._forward_pre_hooks, hook)

    def register_forward_hook(self, hook: ForwardHook) -> None:
        """Run `hook(rubric, action, observation, score)` after each `forward`; its return value is ignored."""
        self._forward_hooks = (*self._forward_hooks, hook)

    def named_children(self) -> Iterator[tuple[str, Rubric]]:
        """Iterate over the direct children with their names."""
        yield from self._rubric_children.items()

    def children(self) -> Iterator[Rubric]:
        """Iterate over the direct children."""
        yield from self._rubric_children.values()

    def named_rubrics(self, prefix: str = "") -> Iterator[tuple[str, Rubric]]:
        """Iterate depth first over all descendants with their dotted paths, each path starting with `prefix`."""
        for name, child in self.named_children():
            path = f"{prefix}.{name}" if prefix else name
            yield path, child
            yield from child.named_rubrics(path)

    def rubrics(self) -> Iterator[Rubric]:
        """Iterate depth first over all descendants."""
        for _, rubric in self.named_rubrics():
            yield rubric

    def get_rubric(self, path: str) -> Rubric:
        """Return the descendant at a path as `named_rubrics` gives it, such as `"code.syntax"`.

        Raises:
            KeyError: no descendant has that path.
        """
        for name, rubric in self.named_rubrics():
            if name == path:
                return rubric
        raise KeyError(f"no rubric at path {path!r} in {type(self).__name__}")

    def _repr_html_(self) -> str:
        rows = [("score", self.last_score), *((path, rubric.last_score) for path, rubric in self.named_rubrics())]
        return html_table(f"{type(self).__name__}: last scores", rows)

    @contextmanager
    def part_scores(self) -> Iterator[dict[str, float]]:
        """Yield a dict that has, at the end of the block, the scores that parts gave in it, by their paths.

        A part that another holds by number is named after its class. A rubric without parts is its own only part.
        """
        parts = dict(_named_parts(self)) or {type(self).__name__: self}
        parts = {name: part for name, part in parts.items() if part._is_plain}  # others keep scores in their own way
        before = {name: part.last_score for name, part in parts.items()}
        for part in parts.values():
            part.last_score = None
        scores: dict[str, float] = {}
        try:
            yield scores
        finally:
            for name, part in parts.items():
                if part.last_score is None:  # it was not asked
                    part.last_score = before[name]
                else:
                    scores[name] = part.last_score

    def reset(self) -> None:
        """Forget the state of the episode, here and in the children."""
        for child in self.children():
            child.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return this rubric's own configuration, without the children's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over configuration that `state_dict` gave; keys that are missing keep their values."""

    @property
    def _rubric_children(self) -> Mapping[str, Rubric]:
        """Collect the direct children."""
        return self._collect_children()

    def _collect_children(self) -> dict[str, Rubric]:
        """Collect the direct children; overrides call `forget_trees` after each change that no attribute shows."""
        # Copied at once, because another thread's call may set an attribute meanwhile.
        attributes, names = list(vars(self).items()), self._child_names
        return {name: value for name, value in attributes if name in names}


def _named_parts(rubric: Rubric, prefix: str = "") -> Iterator[tuple[str, Rubric]]:
    """Iterate over the descendants of a rubric with paths for readers."""
    children = list(rubric.named_children())
    kinds = [type(child).__name__ for _, child in children]
    for name, child in children:
        kind = type(child).__name__
        if name.startswith(NUMBERED):
            name = kind if kinds.count(kind) == 1 else f"{kind}_{name.removeprefix(NUMBERED)}"
        path = f"{prefix}{name}"
        yield path, child
        yield from _named_parts(child, f"{path}.")


def forget_trees() -> None:
    """Invalidate the cached values of all trees; call it after a child was added, replaced or removed."""
    global _generation
    _generation = object()


def settled(outcome: T | Awaitable[T], role: str, rubric: Rubric) -> T:
    """Return an outcome that must not be awaitable.

    Raises:
        TypeError: it is; the reward would be an object that is never awaited.
    """
    if isinstance(outcome, Awaitable):
        if iscoroutine(outcome):
            outcome.close()
        # The tree may have been changed through `vars`, unnoticed; the next call then searches again.
        forget_trees()
        raise TypeError(
            f"the {role} of {type(rubric).__name__} gave an awaitable in a synchronous call: "
            "await rubric.acall(action, observation) instead, or make the rubric's forward 'async def'"
        )
    return outcome


async def awaited(outcome: T | Awaitable[T]) -> T:
    """Return an outcome, awaiting it first where needed."""
    return await outcome if isinstance(outcome, Awaitable) else outcome


# -- whole episodes ---------------------------------------------------------------------------------------------------


class TrajectoryRubric(Rubric):
    """Collect the steps of an episode; give `intermediate_reward` for each until one is done, then the score.

    Both methods to write are synchronous. `reset` must be called between episodes.
    """

    def __init__(self, intermediate_reward: float = 0.0) -> None:
        super().__init__()
        self.intermediate_reward = intermediate_reward
        self._trajectory: list[tuple[Any, Any]] = []

    @abstractmethod
    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        """Score the (action, observation) pairs of an episode."""

    @abstractmethod
    def compute_step_rewards(self) -> list[float]:
        """Spread the score over the steps collected so far."""

    def forward(self, action: Any, observation: Any) -> float:
        """Collect the step, and score the episode if the observation is done."""
        self._trajectory.append((action, observation))
        if getattr(observation, "done", False):
            return self.score_trajectory(self.trajectory)
        return self.intermediate_reward

    @property
    def trajectory(self) -> list[tuple[Any, Any]]:
        """Return a copy of the steps collected so far."""
        return list(self._trajectory)

    def reset(self) -> None:
        """Forget the episode, here and in the children."""
        super().reset()
        self._trajectory = []

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration; the steps are not part of it."""
        return {**super().state_dict(), "intermediate_reward": self.intermediate_reward}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the configuration."""
        super().load_state_dict(state)
        self.intermediate_reward = state.get("intermediate_reward", self.intermediate_reward)


class ExponentialDiscountingTrajectoryRubric(TrajectoryRubric):
    """Give step t of T the episode's score times `gamma ** (T - 1 - t)`: the last step gets all of it.

    Raises:
        ValueError: `gamma` is outside [0, 1].
    """

    def __init__(self, gamma: float = 0.99, intermediate_reward: float = 0.0) -> None:
        super().__init__(intermediate_reward)
        self.gamma = _checked_gamma(gamma)

    def compute_step_rewards(self) -> list[float]:
        """Discount the score of the steps collected so far; no steps, no rewards."""
        steps = len(self._trajectory)
        if steps == 0:
            return []
        score = self.score_trajectory(self.trajectory)
        return [self.gamma ** (steps - 1 - step) * score for step in range(steps)]

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration; the steps are not part of it."""
        return {**super().state_dict(), "gamma": self.gamma}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the configuration."""
        gamma = _checked_gamma(state.get("gamma", self.gamma))
        super().load_state_dict(state)
        self.gamma = gamma


def _checked_gamma(gamma: float) -> float:
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], not {gamma}")
    return gamma
