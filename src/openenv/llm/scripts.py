"""The former path of `openenv.testing.scripted.agent_scripts`."""

from __future__ import annotations

from openenv.testing.scripted.agent_scripts import AGENTS as AGENTS
from openenv.testing.scripted.agent_scripts import binary_search as binary_search
from openenv.testing.scripted.agent_scripts import run_command as run_command
from openenv.testing.scripted.agent_scripts import write_file as write_file
