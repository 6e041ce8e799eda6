"""Tokens never reach the server's log."""

from __future__ import annotations

import copy
import logging
import logging.config
import subprocess
import sys

import pytest

from openenv.server.run import ServeOptions, log_config


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_tokens_in_messages_addresses_and_tracebacks_are_redacted(
    capfd: pytest.CaptureFixture[str], log_format: str
) -> None:
    before = {name: copy.copy(vars(logging.getLogger(name))) for name in ("uvicorn", "uvicorn.access", "openenv", "")}
    config = log_config(ServeOptions(log_format=log_format))
    try:
        logging.config.dictConfig({**config, "disable_existing_loggers": False})
        access = ("127.0.0.1:9", "GET", "/docs?token=SECRET-1&x=1", "1.1", 200)
        logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *access)
        log = logging.getLogger("openenv.test")
        log.warning("to %s with %s", "https://user:SECRET-2@host/x", {"authorization": "Bearer SECRET-3"})
        try:
            raise ValueError("ws://host/ws?token=SECRET-4")
        except ValueError:
            log.exception("it failed")
    finally:
        for name, state in before.items():
            vars(logging.getLogger(name)).update(state)
    captured = capfd.readouterr()
    text = captured.out + captured.err
    assert "SECRET" not in text
    assert "/docs?token=***&x=1" in text
    assert "https://***@host/x" in text
    assert "it failed" in text


@pytest.mark.parametrize("level", ["trace", "debug", "critical"])
def test_a_process_that_serves_nothing_itself_has_the_same_levels(level: str) -> None:
    program = f"""
import logging.config
import subprocess
import sys
from openenv.server.run import ServeOptions, log_config
logging.config.dictConfig(log_config(ServeOptions(log_level={level!r})))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
