"""The application of the Gymnasium environment, and a `main` that serves it."""

from __future__ import annotations

import argparse
import os
from functools import partial

import uvicorn

from gymnasium_env.models import GymnasiumAction, GymnasiumObservation
from gymnasium_env.server.gymnasium_environment import DEFAULT_ENV_ID, GymnasiumEnvironment
from openenv import create_app

environment = partial(GymnasiumEnvironment, os.environ.get("GYMNASIUM_ENV_ID", DEFAULT_ENV_ID))
app = create_app(environment, GymnasiumAction, GymnasiumObservation, env_name="gymnasium_env", max_concurrent_envs=256)


def main() -> None:
    """Serve the application on the address that the command line names."""
    parser = argparse.ArgumentParser(description="Serve the Gymnasium environment.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
