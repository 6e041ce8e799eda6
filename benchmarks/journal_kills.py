"""Is each rollout the same after its engine was killed again and again, with no answer sampled twice? Exit 1 if not.

    python benchmarks/journal_kills.py kills --kills 5000 --rollouts 200
    python benchmarks/journal_kills.py kills --kills 50 --rollouts 10 --agent opencode --concurrency 5
    python benchmarks/journal_kills.py kills --kills 20 --rollouts 6 --agent codex --dialect openai_responses
    python benchmarks/journal_kills.py branches
    python benchmarks/journal_kills.py overhead --rollouts 200
    python benchmarks/journal_kills.py repeat --rollouts 1000 --concurrency 64

    this process ──fork──> engine: run_many(resume=True) with its proxy, sandboxes and store
        └── the engine kills itself (signal 9): before, in the middle of, or after a random write to a journal, or at a
            random time; or it kills a worker process (`--how worker`) or a sandbox (`--how sandbox`). Each rollout
            that a kill of an engine interrupts counts, by the last entry of its journal. Then the next engine, until
            all rollouts have ended.

The scripted model is another process, which nobody kills; each of its answers depends on the request's seed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import openenv.rollout.capture.capture_server  # noqa: F401  loaded before the fork, so that no engine loads it
from openenv.rollout import Model, Outcome, RolloutStore, Sampling, StoredRollout, Task, run_many
from openenv.rollout.agents.shell_chat import ShellChat
from openenv.rollout.capture.records import FILE, Recorder, _entries_in
from openenv.rollout.store.comparison import compare_stores
from openenv.rollout.tasks.model_parameters import Dialect
from openenv.sandboxes.local import LocalSandboxes
from openenv.testing.scripted.agent_scripts import AGENTS
from openenv.testing.scripted.script import Script, Turn

How = Literal["before", "torn", "after", "time", "worker", "sandbox"]
COMPLETE = b'"how":"complete"'
PROGRAMS: dict[How, bytes] = {"worker": b"process_engine", "sandbox": b"bwrap"}
"""A part of the command line of a child that is killed."""
CHILD_KILLED = "a child was killed"


@dataclass(slots=True)
class Result:
    """What the kills did."""

    killed: Counter[How] = field(default_factory=Counter)
    """The killed processes."""
    kills: int = 0
    """The rollouts that these kills interrupted."""
    positions: Counter[str] = field(default_factory=Counter)
    """The kills by the last entry of the journal."""
    rollouts: int = 0
    lost: int = 0
    sampled_twice: int = 0
    """Whole answers in the journals beyond those of the undisturbed run."""
    differences: int = 0
    rounds: int = 0

    def is_exact(self) -> bool:
        """Return whether nothing was lost, sampled twice, or different."""
        return self.rollouts > 0 and not self.lost + self.sampled_twice + self.differences


def script_of(agent: str, turns: int, token_delay_s: float = 0.0) -> Script:
    """Return the answers of the model: commands that write down the seed of the answer."""
    delay = {"token_delay_s": token_delay_s}
    lines = [f"echo {number} ${{seed}} >> answers.txt" for number in range(turns)]
    if agent == "shell-chat":
        return Script(name="kills", turns=tuple(Turn(text=line, **delay) for line in lines), ending="exit")
    tools = AGENTS[agent]
    calls = tuple(
        Turn(text=f"Step {number}.", calls=(tools.shell(line),), **delay) for number, line in enumerate(lines)
    )
    last = (Turn(text="That was all.", calls=tools.ending),) if tools.ending else ()
    return Script(name="kills", turns=(*calls, *last), ending="Done.")


@contextmanager
def served(script: Script, folder: Path, dialect: Dialect = "openai_chat") -> Iterator[Model]:
    """Serve a script in another process, to be asked in a dialect; only chat completions have seeds."""
    file = folder / "script.json"
    file.write_text(script.model_dump_json())
    command = [sys.executable, "-m", "openenv.testing.scripted", str(file), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        sampling = Sampling().parameters(dialect)
        yield Model(base_url=url.rstrip(".,:"), name=script.model_name, dialect=dialect, sampling=sampling)
    finally:
        process.kill()
        process.wait()


def tasks_of(count: int, turns: int) -> list[Task]:
    """Return tasks that count the answers of their agents."""
    check = f'[ "$(wc -l < answers.txt)" -eq {turns} ]'
    return [Task(task_id=f"t{number}", instruction=f"Work {number}.", verify=(check,)) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of all engines of a run."""

    model: Model
    agent: str
    tasks: list[Task]
    concurrency: int
    turns: int
    longest_s: float = 1.0
    """The longest time after which an engine kills itself."""
    hows: tuple[How, ...] = ("before", "torn", "after", "time")
    entries: int = 20
    """The entries that a rollout writes, about four for each call and one for each piece of a slow answer."""

    def run(self, folder: Path) -> list[Outcome]:
        """Run all rollouts that have not ended."""
        agent = ShellChat(max_turns=self.turns + 2) if self.agent == "shell-chat" else self.agent
        with RolloutStore(folder) as store:
            return run_many(
                self.tasks,
                agent=agent,
                model=self.model,
                sandbox="local" if "worker" in self.hows else LocalSandboxes(),
                store=store,
                seed=7,
                concurrency=self.concurrency,
                processes=2 if "worker" in self.hows else None,
                validate_checks=False,
                resume=True,
            )


def kill_at(how: How, count: int, seconds: float) -> None:
    """Let this process kill itself at a write to a journal, or itself or one of its children after a time."""
    numbers = itertools.count(1)  # many threads write: each gets its own number, and only one thread kills
    write = Recorder._write

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killing(self: Recorder, data: bytes) -> None:
        is_last = next(numbers) == count
        if is_last and how == "torn":
            write(self, data[: random.randrange(1, len(data))])
        if is_last and how != "after":
            die()
        write(self, data)
        if is_last:
            die()

    if how in ("before", "torn", "after"):
        Recorder._write = killing  # type: ignore[method-assign]
        return
    timer = threading.Timer(seconds, die if how == "time" else partial(kill_child, how))
    timer.daemon = True
    timer.start()


def kill_child(how: How) -> None:
    """Kill a process below this one: a worker with its engine and its proxy, or the first process of a sandbox."""
    children: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        for file in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                waiting += map(int, file.read_text().split())
                children += map(int, file.read_text().split())
    for child in random.sample(children, len(children)):
        with suppress(OSError):
            if PROGRAMS[how] in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, signal.SIGKILL)
                print(CHILD_KILLED, flush=True)
                return


def forked(work: Callable[[], object], log: Path) -> int:
    """Run work in a forked process, which writes its output to a log; return its process ID."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        random.seed(os.getpid())
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_engine(plan: Plan, folder: Path, how: How | None, count: int, seconds: float) -> int:
    """Run an engine in another process; return how it ended, as `waitpid` does."""

    def work() -> None:
        if how is not None:
            kill_at(how, count, seconds)
        plan.run(folder)

    return os.waitpid(forked(work, folder.with_suffix(".log")), 0)[1]


def note_kill(folder: Path, result: Result) -> None:
    """Count the rollouts that a kill interrupted, by the last entries of their journals."""
    if not (folder / "shards").is_dir():
        return
    with RolloutStore(folder) as store:
        interrupted = store.interrupted()
        result.kills += len(interrupted)
        result.positions.update(last_entry(store.captures / each / FILE) for each in interrupted)


def last_entry(journal: Path) -> str:
    """Return the kind of the last entry in a journal, and whether half of another one follows."""
    if not journal.exists():
        return "no journal"
    entries, size = _entries_in(data := journal.read_bytes())
    if not entries:
        return "empty"
    head = entries[-1].head
    kind = f"event of phase {head['phase']}" if head["k"] == "event" else str(head["k"])
    return f"torn after {head['k']}" if size < len(data) else kind


def kill_until_done(plan: Plan, folder: Path, draw: random.Random, most: int, result: Result) -> None:
    """Kill engines until the rollouts have ended, or until enough rollouts were killed; then let the last one end."""
    printed = result.kills // 500
    while True:
        enough = result.kills >= most
        how = None if enough else draw.choice(plan.hows)
        # At most the entries of all rollouts at once: rollouts that replay their answers must come further at times.
        count = draw.randrange(1, plan.concurrency * plan.entries // draw.choice((1, 4, 8)))
        status = run_engine(plan, folder, how, count, draw.uniform(0.0, plan.longest_s))
        log = folder.with_suffix(".log").read_text()
        if how in PROGRAMS:
            result.killed[how] += log.count(CHILD_KILLED)
            result.kills += log.count(CHILD_KILLED)
            folder.with_suffix(".log").write_text("")
        elif how is not None:
            result.killed[how] += 1
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                raise SystemExit(f"an engine failed: {log[-4000:]}")
            return
        note_kill(folder, result)
        if result.kills // 500 > printed:
            printed = result.kills // 500
            print(f"  {sum(result.killed.values())} processes, {result.kills} rollouts", flush=True)


def answers_in(store: RolloutStore) -> int:
    """Return the number of whole answers in all journals."""
    return sum(file.read_bytes().count(COMPLETE) for file in store.captures.glob(f"*/{FILE}"))


def kills(options: argparse.Namespace, folder: Path) -> bool:
    """Compare killed runs with an undisturbed one."""
    draw, result = random.Random(options.seed), Result()
    turns = options.turns
    with served(script_of(options.agent, turns, options.token_delay), folder, options.dialect) as model:
        plan = Plan(model, options.agent, tasks_of(options.rollouts, turns), options.concurrency, turns)
        plan = replace(plan, hows=tuple(options.how.split(",")))
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        if run_engine(plan, folder / "whole", None, 0, 0.0) != 0:
            raise SystemExit((folder / "whole.log").read_text()[-4000:])
        with RolloutStore(folder / "whole") as whole:
            assert [each.outcome.reward for each in whole.records()] == [1.0] * options.rollouts
            assert answers_in(whole) >= options.rollouts * turns
            written = sum(file.read_bytes().count(b'{"c":"') for file in whole.captures.glob(f"*/{FILE}"))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        plan = replace(plan, longest_s=time.monotonic() - began, entries=written // options.rollouts)
        cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        print(f"undisturbed: {options.rollouts} rollouts in {time.monotonic() - began:.1f} s, {cpu_s:.1f} s of CPU")
        while result.kills < options.kills:
            result.rounds += 1
            killed = folder / f"killed{result.rounds}"
            kill_until_done(plan, killed, draw, options.kills, result)
            with RolloutStore(folder / "whole") as whole, RolloutStore(killed) as store:
                comparison = compare_stores(whole, store)
                if comparison.differences and options.keep is not None:
                    shutil.copytree(folder, options.keep / f"{os.getpid()}-{result.rounds}")
                result.rollouts += store.count()
                result.lost += options.rollouts - store.count() + len(store.interrupted())
                result.sampled_twice += answers_in(store) - answers_in(whole)
                result.differences += len(comparison.differences)
                for difference in comparison.differences[:3]:
                    print("DIFFERENT", difference)
                for record in store.records():
                    if record.outcome.status != "ok":
                        print("  ", record.task.task_id, record.outcome.status, record.outcome.reason)
            print(f"round {result.rounds}: {result.kills} kills so far, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{options.agent}: {sum(result.killed.values())} killed processes interrupted rollouts {result.kills} times, "
        f"over {result.rollouts} rollouts with {turns + 1} calls in {result.rounds} rounds: {result.sampled_twice} "
        f"answers sampled twice, {result.lost} lost, {result.differences} different"
    )
    for title, counts in (("killed", result.killed), ("last entry of the journal", result.positions)):
        print(f"\n| {title} | count |\n|---|---:|")
        print("\n".join(f"| {name} | {count} |" for name, count in sorted(counts.items())))
    return result.is_exact()


def branches(options: argparse.Namespace, folder: Path) -> bool:
    """Compare branches at depth 10 of 20 calls, with restored files and with repeated work, with whole rollouts."""
    turns, count = 19, 8
    script = script_of("shell-chat", turns)
    slow = tuple(
        turn.model_copy(
            update={"first_token_delay_s": options.delay, "text": f"sleep {options.command_s}; {turn.text}"}
        )
        for turn in script.turns
    )
    with served(script.model_copy(update={"turns": slow}), folder) as model:
        tasks = tasks_of(1, turns)
        common: dict[str, Any] = {"agent": ShellChat(max_turns=turns + 2), "model": model, "seed": 3}
        with RolloutStore(folder / "store") as store:
            [parent] = run_many(tasks, store=store, record_files=True, **common)
            assert parent.status == "ok", parent.reason
            rollout = StoredRollout(store, parent.rollout_id)
            figures: dict[str, list[tuple[int, float, float]]] = {}
            for way in ("files", "repeated", "whole") * options.rounds:
                before, began, used = answers_in(store), time.monotonic(), cpu_s()
                agent = ShellChat(max_turns=turns + 2) if way != "repeated" else RepeatingChat(max_turns=turns + 2)
                if way == "whole":
                    outcomes = run_many(tasks * count, store=store, concurrency=8, **common)
                else:
                    outcomes = rollout.branch(call=10, samples=count, concurrency=8, **{**common, "agent": agent})
                figure = (answers_in(store) - before, time.monotonic() - began, cpu_s() - used)
                figures.setdefault(way, []).append(figure)
                assert [each.reward for each in outcomes] == [1.0] * count
                assert all(("restored_call" in each.metadata) == (way == "files") for each in outcomes)
    for way, rounds in figures.items():
        calls = rounds[0][0]
        wall_s, used_s = (sorted(each[place] for each in rounds)[len(rounds) // 2] for place in (1, 2))
        print(f"{count} {way:8}: {calls} model calls, {wall_s:.2f} s, {used_s:.2f} s of CPU (medians of {len(rounds)})")
    return all(each[0] == count * (20 if way == "whole" else 10) for way, rounds in figures.items() for each in rounds)


class RepeatingChat(ShellChat):
    """Repeats its commands in branches."""

    def can_skip(self, options: Mapping[str, object]) -> bool:
        """Return False."""
        return False


def overhead(options: argparse.Namespace, folder: Path) -> bool:
    """Measure the share of the journal in the CPU time of rollouts, sandboxes included."""
    spent, inside = 0.0, threading.local()

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal spent
            if getattr(inside, "is_set", False):  # one method calls another
                return method(*arguments, **named)
            inside.is_set, began = True, time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                inside.is_set = False
                spent += time.thread_time() - began

        return call

    for name in ("create", "begin", "resent", "note", "event", "prompt", "append", "replay", "release", "sync"):
        setattr(Recorder, name, timed(getattr(Recorder, name)))
    with served(script_of("shell-chat", options.turns), folder) as model:
        tasks = tasks_of(options.rollouts, options.turns)
        plan = Plan(model, "shell-chat", tasks, options.concurrency, options.turns)
        plan.run(folder / "first")  # loads everything
        spent, before = 0.0, cpu_s()
        plan.run(folder / "second")
        whole = cpu_s() - before
    print(
        f"{options.rollouts} rollouts with {options.turns + 1} calls: journal {1000 * spent / options.rollouts:.2f} ms "
        f"of {1000 * whole / options.rollouts:.1f} ms of CPU each, {100 * spent / whole:.1f} %"
    )
    return spent / whole <= 0.03


def cpu_s() -> float:
    """Return the CPU time of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def repeat(options: argparse.Namespace, folder: Path) -> bool:
    """Compare the digests of two runs, one of them with kills."""
    draw, result = random.Random(options.seed), Result()
    with served(script_of("shell-chat", options.turns), folder) as model:
        tasks = tasks_of(options.rollouts, options.turns)
        plan = Plan(model, "shell-chat", tasks, options.concurrency, options.turns)
        assert run_engine(plan, folder / "one", None, 0, 0.0) == 0
        for _ in range(options.engines):
            count = draw.randrange(1, options.rollouts * 20 // options.engines)
            run_engine(plan, folder / "other", draw.choice(("before", "torn", "after")), count, 0.0)
            note_kill(folder / "other", result)
        assert run_engine(plan, folder / "other", None, 0, 0.0) == 0
        with RolloutStore(folder / "one") as one, RolloutStore(folder / "other") as other:
            comparison = compare_stores(one, other)
    print(
        f"{options.rollouts} rollouts at concurrency {options.concurrency}, the second run with {result.kills} kills:"
    )
    print(f"  {comparison.equal} equal, {len(comparison.differences)} different")
    print("\n".join(f"  sha256 {digest}" for digest in comparison.digests))
    return comparison.digests[0] == comparison.digests[1] and comparison.equal == options.rollouts


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["kills", "branches", "overhead", "repeat"])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--rollouts", type=int, default=50)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--agent", default="shell-chat", choices=["shell-chat", *AGENTS])
    parser.add_argument("--dialect", default="openai_chat", help="the dialect of the endpoint in `kills`")
    parser.add_argument("--token-delay", type=float, default=0.0, help="seconds between the tokens in `kills`")
    parser.add_argument("--concurrency", type=int, default=25)
    parser.add_argument("--engines", type=int, default=12, help="kills of the second run of `repeat`")
    parser.add_argument("--delay", type=float, default=0.2, help="seconds of each answer in `branches`")
    parser.add_argument("--how", default="before,torn,after,time", help=f"kinds of kills: {', '.join(get_args(How))}")
    parser.add_argument("--keep", type=Path, help="a folder for copies of the stores with a difference")
    parser.add_argument("--command-s", type=float, default=0.0, help="seconds of each command in `branches`")
    parser.add_argument("--rounds", type=int, default=1, help="interleaved measurements of `branches`")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    part = {"kills": kills, "branches": branches, "overhead": overhead, "repeat": repeat}[options.part]
    with tempfile.TemporaryDirectory(prefix="journal-kills-") as folder:
        sys.exit(0 if part(options, Path(folder)) else 1)


if __name__ == "__main__":
    main()
