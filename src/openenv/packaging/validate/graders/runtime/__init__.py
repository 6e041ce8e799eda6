"""Graders that judge what was seen of a served package."""

from .basic import ObservationSchemaGrader as ObservationSchemaGrader
from .basic import RewardWellFormedGrader as RewardWellFormedGrader
from .basic import StateContractGrader as StateContractGrader
from .network import NetworkPolicyGrader as NetworkPolicyGrader

__all__ = ["NetworkPolicyGrader", "ObservationSchemaGrader", "RewardWellFormedGrader", "StateContractGrader"]
