"""`python -m openenv.llm.cassettes record|play ...`: a recorder or player as a process."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from typing import get_args

from ... import settings
from .matching import Mode
from .servers import CassettePlayer, CassetteRecorder


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m openenv.llm.cassettes", description="Record or play model calls.")
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="pass calls on to an endpoint and record them")
    record.add_argument("cassette")
    record.add_argument("--upstream", required=True, help="the endpoint's address, such as https://api.openai.com/v1")
    record.add_argument("--api-key-env", help="the variable that holds the endpoint's key; without it, the caller's")
    play = commands.add_parser("play", help="answer from a cassette")
    play.add_argument("cassette")
    play.add_argument("--mode", choices=get_args(Mode), default="strict")
    play.add_argument("--speed", type=float, default=0.0, help="1 keeps the recorded times, 0 does not wait")
    for command in (record, play):
        command.add_argument("--host", default="127.0.0.1")
        command.add_argument("--port", type=int, default=0, help="0 is any free one")
    given = parser.parse_args(arguments)
    served: CassetteRecorder | CassettePlayer
    try:
        if given.command == "record":
            key = None if given.api_key_env is None else settings.secret(given.api_key_env)
            served = CassetteRecorder(given.upstream, given.cassette, api_key=key, host=given.host, port=given.port)
        else:
            served = CassettePlayer(
                given.cassette, mode=given.mode, speed=given.speed, host=given.host, port=given.port
            )
    except (OSError, ValueError) as exc:
        parser.exit(2, f"{given.cassette}: {exc}\n")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with served:
        sys.stdout.write(f"{given.command} {given.cassette} at {served.url}\n")
        sys.stdout.flush()
        ended.wait()
    if isinstance(served, CassettePlayer):
        for miss in served.misses:
            sys.stderr.write(f"{miss}\n")
        return 1 if served.misses else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
