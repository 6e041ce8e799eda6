"""What an import costs: clients load no server, and the command line only what its command needs."""

from __future__ import annotations

from typing import Any

import pytest

from servers import Serve

SERVER_SIDE = ("fastapi", "starlette", "uvicorn", "gradio", "fastmcp", "pandas", "numpy", "torch", "openai", "docker")

PROGRAM = """
import sys
before = set(sys.modules)
{statement}
print(*sorted(set(sys.modules) - before))
"""


def loaded(run_script: Any, statement: str) -> list[str]:
    """The modules that a statement loads in a fresh interpreter."""
    printed: str = run_script(PROGRAM.format(statement=statement))
    return printed.split()


@pytest.mark.parametrize(
    "statement",
    [
        "import openenv",
        "from openenv.core import GenericEnvClient",
        "from openenv import GenericEnvClient",
        pytest.param("from openenv.core.env_client import EnvClient", marks=pytest.mark.slow),
        "from openenv.core.env_server.types import Action, Observation, State",
        "from openenv.core.env_server.interfaces import Environment",
        pytest.param("from openenv.core.client_types import StepResult", marks=pytest.mark.slow),
        "from openenv.core import EnvClient, SyncEnvClient, GenericAction",
    ],
)
def test_clients_and_types_load_no_server(run_script: Any, statement: str) -> None:
    """W21: no web framework, no MCP, no page, and few modules."""
    modules = loaded(run_script, statement)
    heavy = {module.partition(".")[0] for module in modules} & set(SERVER_SIDE)
    assert not heavy
    assert len(modules) <= 350


def test_importing_the_package_itself_loads_next_to_nothing(run_script: Any) -> None:
    """W21: `import openenv` alone loads little beyond the standard library's `typing`."""
    assert len(loaded(run_script, "import openenv")) <= 50


def test_a_client_works_where_no_server_package_is_installed(serve: Serve, probe: Any, run_script: Any) -> None:
    """W21: with every server package made unimportable a client plays an episode."""
    server = serve(probe.app())
    program = f"""
import sys
for name in {SERVER_SIDE!r}:
    sys.modules[name] = None
from openenv.core import GenericEnvClient
with GenericEnvClient(base_url={server.url!r}) as env:
    env.reset()
    print(env.step({{"number": 3}}).observation["number"])
"""
    assert run_script(program).strip() == "3"


def test_the_command_line_shows_its_help_without_loading_a_server(run_script: Any) -> None:
    """W21: `openenv --help` and `--version` do not pay for what `serve` needs."""
    modules = loaded(run_script, "from openenv.cli.__main__ import build; build()")
    assert not {module.partition(".")[0] for module in modules} & {"fastapi", "starlette", "uvicorn", "gradio"}
