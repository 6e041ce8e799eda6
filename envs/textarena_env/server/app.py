"""The application of the TextArena environment, and a `main` that serves it."""

from __future__ import annotations

import argparse
import os
import pkgutil

import uvicorn

from openenv import create_app
from textarena_env.models import TextArenaAction, TextArenaObservation
from textarena_env.server.textarena_environment import DEFAULT_GAME, TextArenaEnvironment


def environment() -> TextArenaEnvironment:
    """Make an environment as the variables of the server say."""
    players, opponent = os.environ.get("TEXTARENA_NUM_PLAYERS"), os.environ.get("TEXTARENA_OPPONENT")
    return TextArenaEnvironment(
        os.environ.get("TEXTARENA_ENV_ID", DEFAULT_GAME),
        num_players=None if players is None else int(players),
        opponent=None if opponent is None else pkgutil.resolve_name(opponent),
    )


app = create_app(environment, TextArenaAction, TextArenaObservation, env_name="textarena_env", max_concurrent_envs=128)


def main() -> None:
    """Serve the application on the address that the command line names."""
    parser = argparse.ArgumentParser(description="Serve the TextArena environment.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
