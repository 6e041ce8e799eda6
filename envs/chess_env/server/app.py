"""The application of the Chess environment, and a `main` that serves it."""

from __future__ import annotations

import argparse
import os
from functools import partial

import uvicorn

from chess_env.models import ChessAction, ChessObservation
from chess_env.server.chess_environment import ChessEnvironment
from openenv import create_app

environment = partial(ChessEnvironment, os.environ.get("CHESS_ENGINE"))
app = create_app(environment, ChessAction, ChessObservation, env_name="chess_env", max_concurrent_envs=64)


def main() -> None:
    """Serve the application on the address that the command line names."""
    parser = argparse.ArgumentParser(description="Serve the Chess environment.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
