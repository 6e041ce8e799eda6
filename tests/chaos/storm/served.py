"""The counting environment for `openenv serve`, in a process of its own; STORM_BOOK names the folder of its book."""

from __future__ import annotations

import os
from pathlib import Path

from openenv.core.env_server.http_server import create_app
from storm.books import filed_counting
from storm.environment import Inner, Move, Seen

app = create_app(
    filed_counting(Path(os.environ["STORM_BOOK"]), coroutine=False),
    Move,
    Seen,
    env_name="counting",
    max_concurrent_envs=256,
    state_cls=Inner,
)
