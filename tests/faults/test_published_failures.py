"""Proof that the faults are faults: each scenario of `pitfalls/` goes well here and goes wrong with openenv 0.10.0.

A scenario is written once, with documented names only, and says what it saw; this table says what that is with either
package. Both play in processes of their own, on real servers.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from program_interpreters import Interpreter

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Row:
    """What is seen with each package in a scenario about one of the known faults."""

    fault: str
    scenario: str
    ours: str
    published: str


ROWS = [
    Row(
        "W1",
        "server.http_episode",
        ours="steps [1, 2], state after step 2",
        published="steps [1, 1], state after step 0",
    ),
    Row("W2", "server.slow_constructor", ours="/health answers 200", published="/health hangs"),
    Row("W2", "server.plain_requests_over_the_limit", ours="1 alive", published="3 alive"),
    Row(
        "W3",
        "server.validator_over_websocket",
        ours="VALIDATION_ERROR, then observation",
        published="SESSION_ERROR, then closed",
    ),
    Row("W3", "server.validator_over_http", ours="422", published="500"),
    Row(
        "W4",
        "sessions.sessions_in_use",
        ours="the long step finishes, the idle client's next step runs on its own environment (observation)",
        published="the long step is closed in mid-step, "
        "the idle client's next step runs on a closed environment (observation)",
    ),
    Row(
        "W5",
        "sessions.cancelled_while_building",
        ours="closed; the next client gets observation",
        published="never closed; the next client gets CAPACITY_REACHED",
    ),
    Row(
        "W6",
        "tools.tool_client_that_dies",
        ours="the next client gets observation",
        published="the next client gets CAPACITY_REACHED",
    ),
    Row("W8", "sessions.threads_after_shutdown", ours="all ended", published="left running"),
    Row(
        "W9",
        "sessions.client_gone_in_mid_step",
        ours="the step is cancelled",
        published="the step runs on without a client",
    ),
    Row(
        "W10",
        "server.frame_that_is_no_object",
        ours="INVALID_JSON, then observation",
        published="SESSION_ERROR, then closed",
    ),
    Row("W11", "server.thread_of_state", ours="on the session's thread", published="on the event loop"),
    Row("W13", "sessions.a_hundred_sessions", ours="few threads", published="a thread each"),
    Row(
        "W15",
        "server.factory_that_fails",
        ours="FACTORY_ERROR with a reason",
        published="FACTORY_ERROR without a reason",
    ),
    Row("W16", "server.foreign_page", ours="refused with 403", published="let in: observation"),
    Row("W16", "server.endless_body", ours="refused", published="read on after 110 MB"),
    Row(
        "W21",
        "imports.what_a_client_loads",
        ours="loads no server",
        published="loads fastapi, fastmcp, gradio, uvicorn",
    ),
    Row(
        "W22",
        "server.observation_with_bytes",
        ours="observation, then step 2",
        published="EXECUTION_ERROR, then step 2",
    ),
    Row(
        "W22",
        "server.reward_that_is_no_number",
        ours="reward None, reported",
        published="reward None, nothing said",
    ),
    Row(
        "W23",
        "server.state_subclass",
        ours="/state shows it, /schema has it",
        published="/state drops it, /schema misses it",
    ),
    Row("W24", "server.factory_function", ours="called 0 times", published="called 1 times"),
    Row("W24", "server.one_thread_for_a_function", ours="1 threads", published="3 threads"),
    Row(
        "W25",
        "server.action_class_in_main",
        ours="starts",
        published="ValueError: __main__.__spec__ is None",
    ),
    Row(
        "W26",
        "client.step_after_a_timeout",
        ours="SessionLost",
        published="step 1 of another environment",
    ),
    Row(
        "W26",
        "client.step_after_a_lost_connection",
        ours="step 4 of the same episode",
        published="step 1 of another environment",
    ),
    Row(
        "W27",
        "client.gathered_steps",
        ours="each gets its own reply",
        published="fail with ConcurrencyError",
    ),
    Row("W28", "tools.tool_without_a_description", ours="2 tools", published="0 tools"),
    Row("W28", "tools.tools_that_cannot_be_listed", ours="an error", published="0 tools"),
    Row("W31", "client.forgotten_await", ours="there is none yet", published="it is, until there is one"),
    Row("W34", "rewards.sequence_inside_a_loop", ours="float and float", published="float and coroutine"),
    Row("W34", "rewards.rubric_in_an_asynchronous_step", ours="reward 0.5", published="reward None"),
    Row("W34", "rewards.replaced_child", ours="scores 0.75", published="scores 0.25"),
    Row("W35", "rewards.judge_answers", ours="0.0, 0.8, 0.9", published="1.0, 1.0, 0.0"),
]

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.fault}-{row.scenario}")


class Player:
    """A process that plays scenarios."""

    def __init__(self, interpreter: Any, log: Path, patience_s: float) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [interpreter.python, "-m", "pitfalls"],
            cwd=log.parent,
            env=interpreter.environment(HERE, {"PITFALLS_PATIENCE_S": str(patience_s)}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def play(self, scenario: str) -> str:
        """Return a scenario's verdict."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(scenario + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, Path(self._log.name).read_text()
        answer: dict[str, str] = json.loads(line)
        assert "verdict" in answer, answer["error"]
        return answer["verdict"]

    def end(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.kill()  # what a scenario has shown to hang may hang still
        self._process.wait()
        self._log.close()


@pytest.fixture(scope="session")
def our_player(ours: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    """A process with this package."""
    player = Player(ours, tmp_path_factory.mktemp("ours") / "log", patience_s=15)
    yield player
    player.end()


@pytest.fixture(scope="session")
def published_player(published: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    """A process with the published package."""
    player = Player(published, tmp_path_factory.mktemp("published") / "log", patience_s=2)
    yield player
    player.end()


@each_row
def test_here_it_goes_well(our_player: Player, row: Row) -> None:
    assert our_player.play(row.scenario) == row.ours


@pytest.mark.slow  # says that the comparison is fair; no change here can break it
@pytest.mark.published
@pytest.mark.timeout(600)  # the package may have to be installed first
@each_row
def test_with_the_published_package_it_goes_wrong(published_player: Player, row: Row) -> None:
    assert published_player.play(row.scenario) == row.published
    assert row.published != row.ours


def test_every_scenario_is_in_the_table() -> None:
    written = {
        (fault, f"{file.stem}.{name}")
        for file in (HERE / "pitfalls").glob("*.py")
        for name, fault in re.findall(r'^def (\w+)\(stage: Stage\).*\n    """(W\d+)', file.read_text(), re.MULTILINE)
    }
    assert written == {(row.fault, row.scenario) for row in ROWS}
