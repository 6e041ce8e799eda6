"""The cheat suite: agents that try to earn a reward without doing the task, each in a rollout like any other.

A cheat succeeds when it earns another reward than an agent that does nothing, or gets out of its sandbox. The cheats
and the tasks that they are tried on are in `cheats.yaml`.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from openenv.rollout.agents.base import Agent
from openenv.rollout.agents.builtin import Noop, Oracle, Shell
from openenv.rollout.capture.capture_server import CaptureServer
from openenv.rollout.engine import Engine, named_backend
from openenv.rollout.outcome import Outcome
from openenv.rollout.store import RolloutStore
from openenv.rollout.task import Dialect, Model, Task
from openenv.sandboxes.base import Sandboxes
from openenv.testing.scripted import Script, ScriptedModel, Turn

_MARK = "openenv-cheat"


@functools.cache
def _catalogue() -> Any:
    return yaml.safe_load(resources.files("openenv.testing").joinpath("cheats.yaml").read_text("utf-8"))


def _task(name: str) -> Task:
    return Task.model_validate({"task_id": name, **_catalogue()["tasks"][name]})


@dataclass(frozen=True, slots=True)
class Cheat:
    """An attempt, as shell lines that run where an agent runs; all of them run, whether they fail or not.

    In the lines `@PORT@`, `@ABSTRACT@`, `@SECRET@` and `@KEY@` stand for a port and an abstract socket that the host
    listens on, a file of the host, and the key of a rollout that is over.
    """

    name: str
    what: str
    lines: tuple[str, ...]
    task: Task = field(default_factory=lambda: _task("data"))
    calls_model: bool = False


def all_cheats() -> tuple[Cheat, ...]:
    """Return every cheat, in the order in which they run."""

    def cheat(name: str, what: str, script: str, task: str = "data", calls_model: bool = False) -> Cheat:
        return Cheat(name, what, (script,), _task(task), calls_model)

    return tuple(cheat(name, **fields) for name, fields in _catalogue()["cheats"].items())


class HostBait:
    """A port, an abstract socket and a file of the host that no sandbox may reach; records every access to them."""

    def __init__(self, folder: Path) -> None:
        self.secret = f"{_MARK}-{secrets.token_hex(16)}"
        self.file = folder / f"{_MARK}-secret-{secrets.token_hex(4)}"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        self.abstract = f"{_MARK}-{secrets.token_hex(8)}"
        self.touched: list[str] = []
        self.port = 0

    def tampered(self) -> bool:
        """Return whether the file was changed."""
        return self.file.read_text() != self.secret

    def listen(self, stack: contextlib.ExitStack) -> None:
        """Listen on the port and, where there are such, on the abstract socket."""
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = tcp.getsockname()[1]
        self._serve(tcp, "the host's port", stack)
        if sys.platform == "linux":
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind("\0" + self.abstract)
            unix.listen()
            self._serve(unix, "the host's abstract socket", stack)

    def _serve(self, listener: socket.socket, what: str, stack: contextlib.ExitStack) -> None:
        listener.settimeout(0.1)
        over = threading.Event()

        def accept() -> None:
            while not over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    return
                self.touched.append(what)
                with connection, contextlib.suppress(OSError):
                    connection.sendall(self.secret.encode())

        thread = threading.Thread(target=accept, name="openenv-bait", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)


@contextlib.contextmanager
def lay_out() -> Iterator[HostBait]:
    """Make the bait, and remove it at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{_MARK}-")))
        folder.chmod(0o755)
        bait = HostBait(folder)
        bait.listen(stack)
        yield bait


_ONE_CALL = (
    'python3 -c "import json, os, urllib.request as u; '
    "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps({'model': 'x', "
    "'messages': [{'role': 'user', 'content': 'hello'}]}).encode(), {'Content-Type': 'application/json', "
    "'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}), timeout=20).read()\""
)
"""An honest model call, so that a cheat on the model does not look like an agent that cannot reach it."""


@dataclass(frozen=True, slots=True)
class CheatResult:
    """The result of one cheat."""

    name: str
    what: str
    status: str
    reward: float | None
    honest: float | None
    """What doing nothing earns in the same task."""
    breach: str | None = None
    """What it reached outside its sandbox, or None."""
    reason: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the cheat earned more or less than doing nothing, or got out of its sandbox."""
        return self.reward != self.honest or self.breach is not None


@dataclass(slots=True)
class CheatReport:
    """The results of all cheats on one backend."""

    sandbox: str
    results: list[CheatResult] = field(default_factory=list)
    solved: dict[str, float | None] = field(default_factory=dict)
    """What the solution of each task earns: that it is not 0 shows that there was something to steal."""

    @property
    def succeeded(self) -> list[CheatResult]:
        """The cheats that succeeded; there should be none."""
        return [result for result in self.results if result.succeeded]

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        results = [{**asdict(result), "succeeded": result.succeeded} for result in self.results]
        return {"sandbox": self.sandbox, "solved": self.solved, "succeeded": len(self.succeeded), "cheats": results}


def run_cheats(
    sandbox: str | Sandboxes = "local",
    *,
    cheats: Iterable[Cheat] | None = None,
    concurrency: int = 2,
    on_result: Callable[[CheatResult], None] | None = None,
) -> CheatReport:
    """Run every cheat on a backend.

    Args:
        sandbox: A backend or its name.
        cheats: Which ones; all by default.
        concurrency: How many at once.
        on_result: Gets each result as it comes.
    """
    chosen = list(all_cheats() if cheats is None else cheats)
    with contextlib.ExitStack() as stack:
        runner = _CheatRunner(named_backend(sandbox), stack)
        report = CheatReport(runner.backend.name)
        for task in {cheat.task.task_id: cheat.task for cheat in chosen}.values():
            runner.honest[task.task_id] = runner.run(Noop(), task=task)
            report.solved[task.task_id] = runner.run(Oracle(), task=task).reward
        with ThreadPoolExecutor(concurrency, thread_name_prefix="openenv-cheat") as pool:
            attempts = [pool.submit(runner.attempt, cheat) for cheat in chosen]
            try:
                for attempt in as_completed(attempts):
                    if on_result is not None:
                        on_result(attempt.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # those that run end, the others do not begin
                raise
        report.results = [attempt.result() for attempt in attempts]
    return report


class _CheatRunner:
    """What all cheats share: the bait, a capture proxy with a scripted model behind it, and a rollout that is over."""

    def __init__(self, backend: Sandboxes, stack: contextlib.ExitStack) -> None:
        self.backend = backend
        self.honest: dict[str, Outcome] = {}
        self._bait: HostBait = stack.enter_context(lay_out())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="openenv-cheat-calls-"))
        script = Script(name="cheats", turns=(Turn(text="No."),))
        model = stack.enter_context(ScriptedModel(script))
        self._model = Model(base_url=model.url, name=model.name)
        self._store = stack.enter_context(RolloutStore(Path(folder)))
        self._capture = stack.enter_context(CaptureServer(self._store.captures))
        self._over = self._capture.open("over", self._model)
        self._over.revoke()

    def run(self, agent: Agent, *, task: Task) -> Outcome:
        with Engine(
            agent=agent, sandbox=self.backend, model=self._model, capture=self._capture, store=self._store
        ) as engine:
            return engine.run(task)

    def attempt(self, cheat: Cheat) -> CheatResult:
        """Run one cheat, and look at what it earned and at what it touched."""
        words = {
            "@PORT@": str(self._bait.port),
            "@ABSTRACT@": self._bait.abstract,
            "@SECRET@": str(self._bait.file),
            "@KEY@": self._over.key,
        }
        lines = [_filled(line, words) for line in cheat.lines]
        if cheat.calls_model:
            lines.insert(0, _ONE_CALL)
        dialect: Dialect | None = "openai_chat" if cheat.calls_model else None
        agent = Shell([*lines, "true"], name=cheat.name, dialect=dialect, strict=False)
        touched = len(self._bait.touched)
        outcome = self.run(agent, task=cheat.task)
        return CheatResult(
            name=cheat.name,
            what=cheat.what,
            status=outcome.status,
            reward=outcome.reward,
            honest=self.honest[cheat.task.task_id].reward,
            breach=self._breach(outcome, touched),
            reason=outcome.reason,
        )

    def _breach(self, outcome: Outcome, touched: int) -> str | None:
        for name in ("agent.log", "worktree.tar"):
            file = self._store.file(outcome.rollout_id, name)
            data = b"" if file is None else file.read_bytes()
            if self._bait.secret.encode() in data or b"LEAK" in data:
                return "it read what only the host has"
        if self._bait.tampered():
            return "it changed a file of the host"
        if len(self._bait.touched) > touched:
            return f"it reached {self._bait.touched[-1]}"
        if self._over.calls():
            return "it called the model with the key of another rollout"
        return None


def _filled(line: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        line = line.replace(word, value)
    return line
