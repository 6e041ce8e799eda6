"""The application of the Notes environment, and a `main` that serves it."""

from __future__ import annotations

import argparse

import uvicorn

from notes_env.models import NotesObservation
from notes_env.server.notes_environment import NotesEnvironment
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

app = create_app(
    NotesEnvironment,
    CallToolAction,
    CallToolObservation,
    env_name="notes_env",
    max_concurrent_envs=256,
    reset_observation_cls=NotesObservation,
)


def main() -> None:
    """Serve the application on the address that the command line names."""
    parser = argparse.ArgumentParser(description="Serve the Notes environment.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
