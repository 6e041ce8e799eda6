"""What a trainer needs of played episodes: groups of samples, advantages, batches. Imports no training framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Dialogue": "openenv.train.dialogue",
    "EpisodeSample": "openenv.train.groups",
    "EpisodeStream": "openenv.train.episodes",
    "SampleGroup": "openenv.train.groups",
    "TextDialogue": "openenv.train.dialogue",
    "ToolDialogue": "openenv.train.dialogue",
    "TrainingBatch": "openenv.train.groups",
    "advantages": "openenv.train.baselines",
    "collate": "openenv.train.groups",
    "play": "openenv.train.episodes",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.train.baselines import advantages as advantages
    from openenv.train.dialogue import Dialogue as Dialogue
    from openenv.train.dialogue import TextDialogue as TextDialogue
    from openenv.train.dialogue import ToolDialogue as ToolDialogue
    from openenv.train.episodes import EpisodeStream as EpisodeStream
    from openenv.train.episodes import play as play
    from openenv.train.groups import EpisodeSample as EpisodeSample
    from openenv.train.groups import SampleGroup as SampleGroup
    from openenv.train.groups import TrainingBatch as TrainingBatch
    from openenv.train.groups import collate as collate

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
