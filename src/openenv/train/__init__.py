"""Training on episodes and rollouts: streams of groups, advantages, batches. Imports no training framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Curriculum": "openenv.train.items",
    "Dialogue": "openenv.rollout.agents.dialogue",
    "EpisodeSample": "openenv.train.groups",
    "EpisodeStream": "openenv.train.episodes",
    "Estimate": "openenv.train.evaluation",
    "Evaluation": "openenv.train.evaluation",
    "LengthPenalty": "openenv.train.groups",
    "Mixture": "openenv.train.mixture",
    "Objective": "openenv.train.groups",
    "Player": "openenv.train.self_play",
    "Prompt": "openenv.rollout.agents.dialogue",
    "ReplayDiverged": "openenv.train.branches",
    "RolloutStream": "openenv.train.tasks",
    "SampleGroup": "openenv.train.groups",
    "ServedSessionFactory": "openenv.train.served_session",
    "TextDialogue": "openenv.rollout.agents.dialogue",
    "ToolDialogue": "openenv.rollout.agents.dialogue",
    "TrackedRun": "openenv.train.trackers",
    "Tracker": "openenv.train.trackers",
    "TrainingBatch": "openenv.train.groups",
    "WeightUpdateFailed": "openenv.errors",
    "advantages": "openenv.train.groups",
    "branch": "openenv.train.episodes",
    "collate": "openenv.train.groups",
    "engine_of": "openenv.train.weights",
    "evaluate": "openenv.train.evaluation",
    "group_metrics": "openenv.train.trackers",
    "open_tracker": "openenv.train.trackers",
    "pass_at_k": "openenv.train.evaluation",
    "play": "openenv.train.episodes",
    "rollouts": "openenv.train.tasks",
    "sample_rows": "openenv.train.trackers",
    "self_play": "openenv.train.self_play",
    "shuffled": "openenv.train.items",
    "updating_weights": "openenv.train.weights",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.errors import WeightUpdateFailed as WeightUpdateFailed
    from openenv.rollout.agents.dialogue import Dialogue as Dialogue
    from openenv.rollout.agents.dialogue import Prompt as Prompt
    from openenv.rollout.agents.dialogue import TextDialogue as TextDialogue
    from openenv.rollout.agents.dialogue import ToolDialogue as ToolDialogue
    from openenv.train.branches import ReplayDiverged as ReplayDiverged
    from openenv.train.episodes import EpisodeStream as EpisodeStream
    from openenv.train.episodes import branch as branch
    from openenv.train.episodes import play as play
    from openenv.train.evaluation import Estimate as Estimate
    from openenv.train.evaluation import Evaluation as Evaluation
    from openenv.train.evaluation import evaluate as evaluate
    from openenv.train.evaluation import pass_at_k as pass_at_k
    from openenv.train.groups import EpisodeSample as EpisodeSample
    from openenv.train.groups import LengthPenalty as LengthPenalty
    from openenv.train.groups import Objective as Objective
    from openenv.train.groups import SampleGroup as SampleGroup
    from openenv.train.groups import TrainingBatch as TrainingBatch
    from openenv.train.groups import advantages as advantages
    from openenv.train.groups import collate as collate
    from openenv.train.items import Curriculum as Curriculum
    from openenv.train.items import shuffled as shuffled
    from openenv.train.mixture import Mixture as Mixture
    from openenv.train.self_play import Player as Player
    from openenv.train.self_play import self_play as self_play
    from openenv.train.served_session import ServedSessionFactory as ServedSessionFactory
    from openenv.train.tasks import RolloutStream as RolloutStream
    from openenv.train.tasks import rollouts as rollouts
    from openenv.train.trackers import TrackedRun as TrackedRun
    from openenv.train.trackers import Tracker as Tracker
    from openenv.train.trackers import group_metrics as group_metrics
    from openenv.train.trackers import open_tracker as open_tracker
    from openenv.train.trackers import sample_rows as sample_rows
    from openenv.train.weights import engine_of as engine_of
    from openenv.train.weights import updating_weights as updating_weights

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
