"""The application of the Echo environment, and a `main` that serves it."""

from __future__ import annotations

import argparse

import uvicorn

from echo_env.models import EchoStepAction
from echo_env.server.echo_environment import EchoEnvironment
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolObservation

app = create_app(
    EchoEnvironment,
    EchoStepAction,
    CallToolObservation,
    env_name="echo_env",
    max_concurrent_envs=256,
)


def main() -> None:
    """Serve the application on the address that the command line names."""
    parser = argparse.ArgumentParser(description="Serve the Echo environment.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
