"""`HarnessProcess`: lines in, lines out, and nothing left of it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from openenv.adapters.turns import HarnessProcess
from openenv.errors import HarnessNotRunningError, HarnessStartupError
from waiting import holds_for_async, wait_until, wait_until_async

pytestmark = pytest.mark.anyio

ECHO = "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print('got ' + line.strip(), flush=True)"


def python(code: str, **options: Any) -> HarnessProcess:
    return HarnessProcess([sys.executable, "-S", "-c", code], **{"cwd": "/", **options})


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_lines_go_in_and_come_out() -> None:
    process = python(ECHO)
    assert not process.is_running()
    assert await process.read_line(0.1) is None
    await process.start(lambda line: line == "ready")
    assert process.is_running()
    await process.write_line("one")
    assert await process.read_line(10) == "got one"
    assert await process.read_line(0.05) is None
    assert not process.is_at_end
    await process.stop()
    assert not process.is_running()
    assert await process.read_line(1) is None
    assert process.is_at_end
    with pytest.raises(HarnessNotRunningError):
        await process.write_line("two")
    await process.stop()


async def test_a_process_cannot_be_started_twice_at_once_but_again_after_its_end() -> None:
    process = python(ECHO)
    await process.start()
    with pytest.raises(HarnessStartupError, match="already running"):
        await process.start()
    await process.stop()
    await process.start(lambda line: line == "ready")
    await process.write_line("again")
    assert await process.read_line(10) == "got again"
    await process.stop()


@pytest.mark.parametrize(
    ("command", "options", "text"),
    [
        (["/no/such/program"], {}, "failed to spawn"),
        ([sys.executable], {"cwd": "/no/such/folder"}, "failed to spawn"),
        ([sys.executable, "-S", "-c", "import sys; sys.exit('sorry')"], {}, "exited with code 1 .*sorry"),
        (["sleep", "60"], {"startup_timeout_s": 0.2}, "ready within 0.2s"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    command: list[str], options: dict[str, Any], text: str
) -> None:
    process = HarnessProcess(command, **{"cwd": "/", **options})
    with pytest.raises(HarnessStartupError, match=text):
        await process.start(lambda line: line == "ready")
    assert not process.is_running()


async def test_stop_ends_children_and_what_ignores_sigterm(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "while True: signal.pause()"
    )
    process = python(code, terminate_grace_s=0.1)
    pids: list[str] = []

    def ready(line: str) -> bool:
        pids.append(line)
        return True

    await process.start(ready)
    await process.stop()
    wait_until(lambda: is_gone(int(pids[0])))


async def test_children_that_outlive_the_process_are_ended_by_stop() -> None:
    code = (
        "import os, signal\n"
        "child = os.fork()\n"
        "if not child: os.close(1); os.close(2); signal.pause()\n"
        "print(child, flush=True)"
    )
    process = python(code)
    await process.start()
    child = int(await process.read_line(10) or 0)
    assert await process.read_line(10) is None
    assert not is_gone(child)
    await process.stop()
    wait_until(lambda: is_gone(child))


async def test_a_cancelled_start_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    code = f"import os, signal; open({str(path)!r}, 'w').write(str(os.getpid())); signal.pause()"
    starting = asyncio.ensure_future(python(code).start(lambda line: False))
    await wait_until_async(lambda: path.exists() and path.read_text())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    wait_until(lambda: is_gone(int(path.read_text())))


async def test_the_last_lines_of_standard_error_are_kept() -> None:
    process = python("import sys\nfor n in range(60): print(n, file=sys.stderr)")
    await process.start()
    while await process.read_line(10) is not None:
        pass
    await process.stop()
    assert process.drain_stderr().splitlines() == [str(n) for n in range(10, 60)]


async def test_an_agent_that_prints_faster_than_it_is_read_waits() -> None:
    process = python("import sys\nfor n in range(20000): print(n)\nprint('end', flush=True)")
    await process.start()
    await holds_for_async(0.3, lambda: process._lines.qsize() <= 4096)
    last = ""
    while (line := await process.read_line(10)) is not None:
        last = line
    assert last == "end"
    assert await process.wait(10) == 0
    await process.stop()


async def test_it_may_be_stopped_on_another_loop_than_it_was_started_on() -> None:
    process = python(ECHO)
    await asyncio.to_thread(lambda: asyncio.run(process.start(lambda line: line == "ready")))
    await process.write_line("here")
    assert await process.read_line(10) == "got here"
    await asyncio.to_thread(lambda: asyncio.run(process.stop()))
    assert not process.is_running()


async def test_the_agent_does_not_see_the_tokens_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", "secret-token")
    monkeypatch.setenv("SOME_SETTING", "kept")
    process = python("import os\nfor item in os.environ.items(): print(*item)", env_vars={"EXTRA": "more"})
    await process.start()
    lines = []
    while (line := await process.read_line(10)) is not None:
        lines.append(line)
    await process.stop()
    assert {"SOME_SETTING kept", "EXTRA more"} <= set(lines)
    assert "secret-token" not in "".join(lines)
    assert os.environ["OPENENV_TOKEN"] == "secret-token"
