"""Checks: background jobs, the end of all processes, the end of the sandbox, and many threads."""

from __future__ import annotations

import concurrent.futures
import threading
import time

from openenv.errors import SandboxGone
from openenv.sandboxes.base import BgJob
from openenv.sandboxes.checks.bench import Bench, Check, eventually, holds, raises, running, same, seconds

_HIDING = """
for each in 1 2 3; do
  (setsid sh -c "trap '' TERM HUP INT; (sleep {0}; sleep {0}) & sleep {0}" </dev/null >/dev/null 2>&1 &)
done
"""


def wait(bench: Bench) -> None:
    """Wait for a job."""
    job = bench.box.start_bg("sleep 0.3; exit 6")
    holds(isinstance(job, BgJob), "a job is not a BgJob")
    holds(job.pid > 0, "a job has no process id")
    same(job.wait(30), 6, "the exit code")
    same(job.wait(), 6, "the exit code when asked again")


def not_yet(bench: Bench) -> None:
    """Wait for a job that does not end, and kill it."""
    word = seconds()
    job = bench.box.start_bg(f"sleep {word} & sleep {word}")
    with raises(TimeoutError):
        job.wait(0.2)
    job.kill()
    same(job.wait(30), 137, "the exit code of a killed job")
    eventually(lambda: not running(bench.box, word), "a child of the job still runs")
    job.kill()


def job_output(bench: Bench) -> None:
    """Read a job's output while it runs."""
    seen: list[bytes] = []
    arrived = threading.Event()

    def take(stream: str, data: bytes) -> None:
        seen.append(data)
        arrived.set()

    job = bench.box.start_bg('printf "%s" "$WORD"; sleep 30', envs={"WORD": "begun"}, cwd="/", on_output=take)
    holds(arrived.wait(20), "no output came")
    same(seen, [b"begun"], "the output")
    job.kill()


def job_and_files(bench: Bench) -> None:
    """See what a job writes."""
    bench.box.exec(["rm", "-f", "from-job"])
    job = bench.box.start_bg("echo yes > from-job; sleep 30")
    eventually(lambda: bench.box.exists("from-job"), "the job wrote nothing")
    job.kill()


def stop(bench: Bench) -> None:
    """Stop daemons that hide, and go on."""
    box = bench.open()
    box.write_text("kept.txt", "kept")
    word = seconds()
    box.exec(_HIDING.format(word))
    job = box.start_bg(f"sleep {word}")
    eventually(lambda: running(box, word), "the daemons did not start")
    box.stop_processes()
    same(job.wait(10), 137, "the exit code of a job that was stopped")
    holds(not running(box, word), "a process survived")
    same(box.read_text("kept.txt"), "kept", "a file from before")
    same(box.exec("echo on").stdout, "on\n", "the next command's output")
    box.stop_processes()


def stop_under_exec(bench: Bench) -> None:
    """Stop all processes while another thread waits for a command."""
    box = bench.open()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        word = seconds()
        pending = pool.submit(box.exec, f"sleep {word}")
        eventually(lambda: running(box, word), "the command did not start")
        box.stop_processes()
        same(pending.result(30).exit_code, 137, "the exit code of the command that was stopped")


def kill(bench: Bench) -> None:
    """Kill the sandbox while another thread waits for a command."""
    box = bench.open()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(box.exec, "sleep 100", timeout=None)
        time.sleep(0.3)
        started = time.monotonic()
        box.kill()
        with raises(SandboxGone):
            pending.result(30)
        holds(time.monotonic() - started < 15, "the command went on for long")


def gone(bench: Bench) -> None:
    """Use a sandbox that is gone."""
    box = bench.open()
    job = box.start_bg("sleep 100")
    box.kill()
    box.kill()
    box.close()
    folder = bench.folder()
    (folder / "file").write_text("x")
    for use in (
        lambda: box.exec("true"),
        lambda: box.start_bg("true"),
        lambda: box.read_bytes("x"),
        lambda: box.write_bytes("x", b""),
        lambda: box.exists("x"),
        lambda: box.stop_processes(),
        lambda: box.upload(folder / "file", "x"),
        lambda: box.pack("/tmp", folder / "x.tar"),
    ):
        with raises(SandboxGone):
            use()
    with raises(SandboxGone):
        job.wait(20)


def threads(bench: Bench) -> None:
    """Use one sandbox from 16 threads."""
    box = bench.open()

    def work(number: int) -> None:
        for turn in range(4):
            word = f"{number}-{turn}"
            box.write_text(f"t/{word}", word)
            result = box.exec(f"cat t/{word}; echo {word} >&2; exit {number}")
            same((result.exit_code, result.stdout, result.stderr), (number, word, f"{word}\n"), "the result")
            same(box.read_text(f"t/{word}"), word, "the file")

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(work, number) for number in range(16)]:
            done.result(240)


CHECKS = (
    Check("job.wait", "A job's exit code can be waited for.", wait),
    Check("job.kill", "A job can be killed with its children; waiting has a limit.", not_yet),
    Check("job.output", "A job's output is passed on while it runs.", job_output),
    Check("job.files", "What a job writes can be read while it runs.", job_and_files),
    Check("stop.daemons", "All processes can be killed, those that hide too; files stay.", stop, "trees"),
    Check("stop.exec", "A command that is stopped so has exit code 137.", stop_under_exec),
    Check("kill.exec", "Killing a sandbox ends the command under way.", kill),
    Check("kill.gone", "A sandbox that is gone says so at every use.", gone),
    Check("use.threads", "Many threads can use one sandbox, and nothing is mixed up.", threads),
)
