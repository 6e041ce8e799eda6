"""The talking agent as an application that `openenv serve` can load by its path."""

from __future__ import annotations

from turn_environments import talking_app

app = talking_app(max_concurrent_envs=8)
