"""Facade: collecting episodes as a dataset. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.run.collect import METADATA_FILENAME as METADATA_FILENAME
from openenv.rollout.run.collect import README_FILENAME as README_FILENAME
from openenv.rollout.run.collect import RESULTS_FILENAME as RESULTS_FILENAME
from openenv.rollout.run.collect import CollectResult as CollectResult
from openenv.rollout.run.collect import CollectRunner as CollectRunner
from openenv.rollout.run.collect import EpisodeRecord as EpisodeRecord
from openenv.rollout.run.collect import RolloutSerializer as RolloutSerializer
from openenv.rollout.run.collect import build_dataset_readme as build_dataset_readme
from openenv.rollout.run.collect import build_model_step as build_model_step
from openenv.rollout.run.collect import push_to_hf_hub as push_to_hf_hub

export_imports(__name__)
