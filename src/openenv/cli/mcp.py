"""`openenv mcp`: an environment's tools for a desktop agent, over standard input and output."""

from __future__ import annotations

import logging

import typer

from openenv import settings
from openenv.protocol.redaction import redact_handlers

from .command import check_choice, target_failures


def mcp(
    target: str = typer.Argument(
        ".", metavar="TARGET", help="The environment to offer; by default the current folder."
    ),
    mode: str = typer.Option(
        "simulation", metavar="MODE", help="simulation or production: some tools exist in one only."
    ),
    log_level: str = typer.Option(
        "warning", metavar="LEVEL", help="critical, error, warning, info or debug; logs go to standard error."
    ),
) -> None:
    """Offer an environment's tools to an MCP client that starts it.

    TARGET is what `openenv serve` takes: a folder, a Python file or a module. The client and
    this process share one session; it begins with a reset and ends with the client. In a desktop agent's
    configuration:

      {"mcpServers": {"notes": {"command": "openenv",
                                "args": ["mcp", "/path/to/envs/notes_env"]}}}

    Agents that speak HTTP connect to `/mcp` of a running `openenv serve` instead.
    """
    #   desktop agent ──starts──> openenv mcp
    #        │                        │
    #        └── stdin: requests ────>│ one session of the environment
    #        <── stdout: replies ─────┘
    #            stderr: logs, and everything that the environment prints
    from openenv.server.app import parse_mode  # servers load only for this command
    from openenv.server.loading import TargetError, enter_folder, load_app
    from openenv.server.mcp.stdio import serve_stdio
    from openenv.server.run import check_closed, environment_server

    check_choice("--mode", mode, ("simulation", "production"))
    check_choice("--log-level", log_level, ("critical", "error", "warning", "info", "debug"))
    # `basicConfig` writes to standard error; a log line on standard output would break the protocol.
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    redact_handlers([""], settings.secret_values())
    with target_failures():
        server = environment_server(load_app(enter_folder(target)))
        if server is None:
            raise TargetError(f"{target} was not made by create_app, so its environment is unknown")
        server.service.mode = parse_mode(mode)
        serve_stdio(server.service)
        # Exits with a failure if an environment could not be closed, as `openenv serve` does.
        check_closed(server.manager)
