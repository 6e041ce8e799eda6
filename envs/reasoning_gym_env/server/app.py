"""The application of the Reasoning Gym environment, and a `main` that serves it."""

from __future__ import annotations

import argparse
import os
from functools import partial

import uvicorn

from openenv import create_app
from reasoning_gym_env.models import ReasoningGymAction, ReasoningGymObservation
from reasoning_gym_env.server.reasoning_gym_environment import DEFAULT_DATASET, DEFAULT_SIZE, ReasoningGymEnvironment

environment = partial(
    ReasoningGymEnvironment,
    os.environ.get("REASONING_GYM_DATASET", DEFAULT_DATASET),
    int(os.environ.get("REASONING_GYM_SIZE", DEFAULT_SIZE)),
)
app = create_app(
    environment,
    ReasoningGymAction,
    ReasoningGymObservation,
    env_name="reasoning_gym_env",
    max_concurrent_envs=256,
)


def main() -> None:
    """Serve the application on the address that the command line names."""
    parser = argparse.ArgumentParser(description="Serve the Reasoning Gym environment.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
