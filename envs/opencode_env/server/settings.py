"""The operator's settings of this server: read once, from what is passed in, and never written.

Knows the names of variables; must not know who uses the values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openenv import settings

DEFAULT_SANDBOX = "local"
OFFERED_SANDBOXES = ("local", "docker", "e2b")
"""Backends that a caller may name; `process` isolates nothing, so only the operator may choose it."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How rollouts are run on this server.

    Args:
        sandbox: The backend for rollouts that name none.
        e2b_api_key: The key of the E2B account.
        store: Where rollouts are kept; None keeps nothing.
        max_concurrent_envs: Sessions held at once.
        environ: Where the catalog of endpoints looks for its variables.
    """

    sandbox: str = DEFAULT_SANDBOX
    e2b_api_key: str | None = field(default=None, repr=False)
    store: Path | None = None
    max_concurrent_envs: int = 4
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> ServerSettings:
        """Read the settings.

        Raises:
            ValueError: `MAX_CONCURRENT_ENVS` is no positive number.
        """
        values = os.environ if environ is None else environ
        limit = values.get("MAX_CONCURRENT_ENVS", "").strip() or "4"
        if not limit.isdigit() or int(limit) < 1:
            raise ValueError(f"MAX_CONCURRENT_ENVS must be a positive number, not {limit!r}")
        keeps = bool(values.get("OPENENV_ROLLOUTS", "").strip())
        return cls(
            sandbox=settings.sandbox_name(values) or DEFAULT_SANDBOX,
            e2b_api_key=settings.e2b_api_key(values),
            store=settings.rollout_store(values) if keeps else None,
            max_concurrent_envs=int(limit),
            environ=values,
        )

    def choose_sandbox(self, asked: str, template: str) -> str:
        """Return the backend for a rollout: the one asked for, E2B where a template can be used, else the default.

        Raises:
            ValueError: Callers may not choose that one.
        """
        if not asked:
            return "e2b" if template and self.e2b_api_key else self.sandbox
        if asked not in (*OFFERED_SANDBOXES, self.sandbox):
            raise ValueError(f"unknown sandbox {asked!r}: choose one of {', '.join(OFFERED_SANDBOXES)}")
        return asked
