"""A capture server of whichever package the interpreter has: `python serve_sessions.py LLM_URL PORT`."""

from __future__ import annotations

import signal
import sys

from openenv.core.harness.capture import CaptureServer

if __name__ == "__main__":
    server = CaptureServer(llm_url=sys.argv[1], model="m", port=int(sys.argv[2]), admin_key="the-admin-key")
    server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        signal.pause()
    finally:
        server.stop()
