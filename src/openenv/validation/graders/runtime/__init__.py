"""Facade: the published path of `openenv.packaging.validate.graders`. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.packaging.validate.graders import NetworkPolicyGrader as NetworkPolicyGrader
    from openenv.packaging.validate.graders import ObservationSchemaGrader as ObservationSchemaGrader
    from openenv.packaging.validate.graders import RewardWellFormedGrader as RewardWellFormedGrader
    from openenv.packaging.validate.graders import StateContractGrader as StateContractGrader

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.packaging.validate.graders": """
                NetworkPolicyGrader ObservationSchemaGrader RewardWellFormedGrader
                StateContractGrader
            """
            }
        ),
    )
