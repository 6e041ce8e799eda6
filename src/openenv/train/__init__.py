"""Training on episodes and rollouts: streams of groups, advantages, batches. Imports no training framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Curriculum": "openenv.train.items",
    "Dialogue": "openenv.rollout.agents.dialogue",
    "EpisodeSample": "openenv.train.groups",
    "EpisodeStream": "openenv.train.episodes",
    "LengthPenalty": "openenv.train.groups",
    "Objective": "openenv.train.groups",
    "RolloutStream": "openenv.train.tasks",
    "SampleGroup": "openenv.train.groups",
    "ServedSessionFactory": "openenv.train.served_session",
    "TextDialogue": "openenv.rollout.agents.dialogue",
    "ToolDialogue": "openenv.rollout.agents.dialogue",
    "TrainingBatch": "openenv.train.groups",
    "advantages": "openenv.train.groups",
    "collate": "openenv.train.groups",
    "play": "openenv.train.episodes",
    "rollouts": "openenv.train.tasks",
    "shuffled": "openenv.train.items",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.rollout.agents.dialogue import Dialogue as Dialogue
    from openenv.rollout.agents.dialogue import TextDialogue as TextDialogue
    from openenv.rollout.agents.dialogue import ToolDialogue as ToolDialogue
    from openenv.train.episodes import EpisodeStream as EpisodeStream
    from openenv.train.episodes import play as play
    from openenv.train.groups import EpisodeSample as EpisodeSample
    from openenv.train.groups import LengthPenalty as LengthPenalty
    from openenv.train.groups import Objective as Objective
    from openenv.train.groups import SampleGroup as SampleGroup
    from openenv.train.groups import TrainingBatch as TrainingBatch
    from openenv.train.groups import advantages as advantages
    from openenv.train.groups import collate as collate
    from openenv.train.items import Curriculum as Curriculum
    from openenv.train.items import shuffled as shuffled
    from openenv.train.served_session import ServedSessionFactory as ServedSessionFactory
    from openenv.train.tasks import RolloutStream as RolloutStream
    from openenv.train.tasks import rollouts as rollouts

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
