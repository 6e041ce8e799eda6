"""The application of the OpenCode environment, and a `main` that serves it.

Importing it reads the operator's variables and changes nothing.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping

import uvicorn
from fastapi import FastAPI

from opencode_env.models import OpenCodeState
from opencode_env.server.gradio_ui import gradio_builder
from opencode_env.server.opencode_environment import OpenCodeEnvironment
from opencode_env.server.settings import ServerSettings
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


def make_app(environ: Mapping[str, str] | None = None) -> FastAPI:
    """Build the application for these variables; by default those of this process."""
    settings = ServerSettings.from_environ(environ)
    return create_app(
        functools.partial(OpenCodeEnvironment, settings),
        CallToolAction,
        CallToolObservation,
        env_name="opencode_env",
        max_concurrent_envs=settings.max_concurrent_envs,
        state_cls=OpenCodeState,
        gradio_builder=gradio_builder,
        rollout_store=settings.store,
    )


app = make_app()


def main() -> None:
    """Serve the application on the address that the command line names."""
    parser = argparse.ArgumentParser(description="Serve the OpenCode environment.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
