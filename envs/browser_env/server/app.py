"""The application of the Browser environment, and a `main` that serves it."""

from __future__ import annotations

import argparse
import os
from functools import partial

import uvicorn

from browser_env.models import BrowserAction, BrowserObservation
from browser_env.server.browser_environment import BrowserEnvironment
from browser_env.server.chromium import Chromium
from openenv import create_app

chromium = Chromium(os.environ.get("BROWSER_PROGRAM"), os.environ.get("BROWSER_ALLOWED_HOSTS", "").split(","))
environment = partial(BrowserEnvironment, chromium)
app = create_app(environment, BrowserAction, BrowserObservation, env_name="browser_env", max_concurrent_envs=16)


def main() -> None:
    """Serve the application on the address that the command line names."""
    parser = argparse.ArgumentParser(description="Serve the Browser environment.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
