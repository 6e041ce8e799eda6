"""Facade: rubrics. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.env.rubrics import ExponentialDiscountingTrajectoryRubric as ExponentialDiscountingTrajectoryRubric
    from openenv.env.rubrics import Gate as Gate
    from openenv.env.rubrics import LLMJudge as LLMJudge
    from openenv.env.rubrics import Rubric as Rubric
    from openenv.env.rubrics import RubricDict as RubricDict
    from openenv.env.rubrics import RubricList as RubricList
    from openenv.env.rubrics import Sequential as Sequential
    from openenv.env.rubrics import TrajectoryRubric as TrajectoryRubric
    from openenv.env.rubrics import WeightedSum as WeightedSum

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.env.rubrics": """
                ExponentialDiscountingTrajectoryRubric Gate LLMJudge Rubric RubricDict RubricList
                Sequential TrajectoryRubric WeightedSum
            """
            }
        ),
    )
