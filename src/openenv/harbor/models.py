"""Facade: the published path of `openenv.adapters.harbor.models`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.models import HarborConversation as HarborConversation
from openenv.adapters.harbor.models import HarborRolloutResult as HarborRolloutResult
from openenv.adapters.harbor.models import HarborState as HarborState
from openenv.adapters.harbor.models import HarborStepResult as HarborStepResult
from openenv.adapters.harbor.models import HarborTaskRef as HarborTaskRef
from openenv.adapters.harbor.models import HarborTurn as HarborTurn
from openenv.adapters.harbor.models import conversations_from_document as conversations_from_document
from openenv.adapters.harbor.models import turns_from_document as turns_from_document

export_imports(__name__)
