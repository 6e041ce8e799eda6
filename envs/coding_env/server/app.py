"""The application of the Coding environment, and a `main` that serves it."""

from __future__ import annotations

import argparse
import os
from functools import partial

import uvicorn

from coding_env.models import CodeAction, CodeObservation
from coding_env.server.python_codeact_env import PythonCodeActEnv
from openenv import create_app

# local (the default), docker, kubernetes, e2b; `process` isolates nothing and is for debugging.
environment = partial(PythonCodeActEnv, sandbox=os.environ.get("CODING_ENV_SANDBOX", "local"))
app = create_app(environment, CodeAction, CodeObservation, env_name="coding_env", max_concurrent_envs=64)


def main() -> None:
    """Serve the application on the address that the command line names."""
    parser = argparse.ArgumentParser(description="Serve the Coding environment.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
