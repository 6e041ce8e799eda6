"""The capture proxy as a process: `python -m openenv.rollout.capture --root DIR`.

The first line of its output is JSON: the addresses, and the admin key if it made one.
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import signal
import sys
import threading
from collections.abc import Sequence

from openenv import settings
from openenv.errors import CaptureError
from openenv.protocol.addresses import is_loopback
from openenv.protocol.redaction import redact_handlers
from openenv.sandboxes.host import raise_file_limit

from .capture_server import CaptureOptions, CaptureServer


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m openenv.rollout.capture", description=__doc__)
    parser.add_argument("--root", required=True, help="folder of the records, with a folder per rollout")
    parser.add_argument("--host", default="127.0.0.1", help="if not loopback, set OPENENV_CAPTURE_ADMIN_KEY")
    parser.add_argument("--port", type=int, default=8100, help="0 for a free port")
    parser.add_argument("--policy-header", default="x-policy-version", help="header with the policy's version")
    parser.add_argument("--max-body-mb", type=float, default=64.0, help="the largest request")
    options = parser.parse_args(arguments)
    # A connection per agent and per call: hundreds of rollouts exceed the usual limit of 1024 files.
    raise_file_limit()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")  # to standard error
    redact_handlers([""], settings.secret_values())
    chosen_key = settings.capture_admin_key()
    # If other machines reach the proxy, the admin must choose the key: a printed key ends up in logs.
    made_key = secrets.token_urlsafe(32) if is_loopback(options.host) else None
    try:
        server = CaptureServer(
            options.root,
            CaptureOptions(
                host=options.host,
                port=options.port,
                admin_key=chosen_key or made_key,
                policy_header=options.policy_header,
                max_body=int(options.max_body_mb * 1024 * 1024),
            ),
        )
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        with server:
            about = {"url": server.url, "socket": str(server.socket)}
            if not chosen_key and made_key:
                about["admin_key"] = made_key
            # One line, flushed: a parent process reads it to find the addresses.
            sys.stdout.write(json.dumps(about) + "\n")
            sys.stdout.flush()
            stopped.wait()
    except CaptureError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
