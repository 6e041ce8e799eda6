"""A small trainer on this machine: a language model of transformers that samples, answers requests and learns.

`train_policy(TrainingRun(...))` is a whole run; `openenv train` calls it. The other names are its parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Learner": "openenv.train.learner.learner",
    "LearnerOptions": "openenv.train.learner.learner",
    "Policy": "openenv.train.learner.policy",
    "PolicyEndpoint": "openenv.train.learner.endpoint",
    "PolicyOptions": "openenv.train.learner.policy",
    "Sampler": "openenv.train.learner.sampler",
    "TrainingRun": "openenv.train.learner.recipe",
    "train_policy": "openenv.train.learner.recipe",
}

if TYPE_CHECKING:  # the table above, for type checkers
    from openenv.train.learner.endpoint import PolicyEndpoint as PolicyEndpoint
    from openenv.train.learner.learner import Learner as Learner
    from openenv.train.learner.learner import LearnerOptions as LearnerOptions
    from openenv.train.learner.policy import Policy as Policy
    from openenv.train.learner.policy import PolicyOptions as PolicyOptions
    from openenv.train.learner.recipe import TrainingRun as TrainingRun
    from openenv.train.learner.recipe import train_policy as train_policy
    from openenv.train.learner.sampler import Sampler as Sampler

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
