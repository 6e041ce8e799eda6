"""The cheat suite: agents that try to earn a reward without doing the task, each in an ordinary rollout.

A *win* is a different reward than `noop` earns, or access to something outside the sandbox. A *dodge* turns an earned 0
into a rollout without a reward. The cheats are generated from the families in `red_team/*.yaml`.
"""

# A family is one trick as a shell script, and its variants are the ways to write it:
#
#   shadowed-module:                                 the family
#     what: leaves @name@ (@form@) in @place@ ...    one sentence with the names of parameters
#     task: python                                   from `tasks.yaml`: `noop` earns 0 there, the solution 1
#     aim: win                                       or `dodge`; the suite reports both for every cheat
#     together: true                                 only plants files, so that many variants can share a rollout
#     quick: [...]                                   the IDs for `make test`; by default all that can share a rollout
#     script: "mkdir -p @place@; @form@"             runs like an agent; every line runs, also after a failure
#     texts: {form: {source: cp ..., ...}}           the text of a value in the script, if it is not the value itself
#     variants:                                      each entry is a product; the id is `family/value-value`
#       - {place: [tests, app], name: [json, csv], form: [source, package]}

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import secrets
import shlex
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from openenv.rollout.agents.base import Agent
from openenv.rollout.agents.builtin import Noop, Oracle, Shell
from openenv.rollout.capture.capture_server import CaptureServer
from openenv.rollout.capture.export import sequences
from openenv.rollout.capture.records import Call, Recording
from openenv.rollout.run.engine import Engine, EngineOptions, named_backend
from openenv.rollout.store.exports import recording
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import Dialect, Model, Sampling, Task
from openenv.sandboxes.base import Sandboxes, SandboxSpec
from openenv.testing.scripted import CutFailure, Failure, HangFailure, Script, ScriptedModel, StatusFailure, Turn

Aim = Literal["win", "dodge"]

_MARK = "openenv-cheat"
_FAMILIES = (
    *(
        "reward",
        "operators",
        "python",
        "tools",
        "checks",
        "remote",
        "tree",
        "processes",
        "exhaustion",
        "sandbox",
        "model",
    ),
)
_PAYLOADS = "/tmp/win"
_BATCH = 64
"""The most cheats that share a rollout."""
_TOKEN_CAP = 256


# ---- families and their variants ----


def _read(name: str) -> Any:
    folder = resources.files("openenv.testing") / "red_team"
    return yaml.safe_load((folder / f"{name}.yaml").read_text("utf-8"))


@functools.cache
def _tasks() -> dict[str, tuple[Task, tuple[str, ...]]]:
    """Return the tasks by name, each with its required programs."""
    tasks = _read("tasks")["tasks"]
    return {
        name: (Task.model_validate({"task_id": name, **fields}), tuple(needs))
        for name, fields in tasks.items()
        for needs in [fields.pop("needs", ())]
    }


def _task(name: str) -> Task:
    return _tasks()[name][0]


@dataclass(frozen=True, slots=True)
class Cheat:
    """An attempt to cheat: shell lines that run like an agent. Every line runs, also after a failure.

    The lines may contain `@PORT@` and `@ABSTRACT@` (a port and an abstract socket of the host), `@SECRET@` (a file of
    the host) and `@KEY@` (the key of a finished rollout).
    """

    name: str
    """The ID: the family, a slash, and the parameters of the variant."""
    what: str
    lines: tuple[str, ...]
    task: Task = field(default_factory=lambda: _task("data"))
    calls_model: bool = False
    aim: Aim = "win"
    together: bool = False
    """Whether it only plants files, so that it can share a rollout."""
    quick: bool = False
    """Whether it belongs to the short selection."""

    @property
    def family(self) -> str:
        """The family of the cheat."""
        return self.name.partition("/")[0]


@functools.cache
def all_cheats() -> tuple[Cheat, ...]:
    """Return all cheats in the order of execution."""
    families = (family for name in _FAMILIES for family in _read(name).items())
    return tuple(cheat for name, fields in families for cheat in _variants(name, fields))


def _variants(family: str, fields: Mapping[str, Any]) -> Iterator[Cheat]:
    texts: Mapping[str, Mapping[str, str]] = fields.get("texts", {})
    together = bool(fields.get("together"))
    quick = fields.get("quick", together)
    for product in fields.get("variants", [{}]):
        for chosen in itertools.product(*product.values()):
            values = {name: str(value) for name, value in zip(product, chosen, strict=True)}
            meaning = {name: str(texts.get(name, {}).get(value, value)) for name, value in values.items()}
            name = "/".join([family, *(["-".join(map(_slug, values.values()))] if values else [])])
            script = _filled(fields["script"], meaning)
            yield Cheat(
                name=name,
                what=_filled(fields["what"], values),
                lines=(*_planted(script), script),
                task=_task(_filled(fields["task"], values)),
                calls_model=bool(fields.get("calls_model")),
                aim=fields.get("aim", "win"),
                together=together,
                quick=quick if isinstance(quick, bool) else name in quick,
            )


def _slug(value: str) -> str:
    return re.sub(r"[^\w.+-]+", ":", value.replace("~", "home")).strip(":") or "test"


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replace `@name@`, twice, because a value may contain another parameter."""
    for name, value in (*values.items(), *values.items()):
        text = text.replace(f"@{name}@", value)
    return text


@functools.cache
def _payloads() -> dict[str, str]:
    texts: dict[str, str] = _read("payloads")
    return texts


def _planted(script: str) -> Iterator[str]:
    """Yield lines that write the payloads of a script."""
    for name, text in _payloads().items():
        if f"{_PAYLOADS}/{name}" in script:
            yield f"mkdir -p {_PAYLOADS}; printf %s {shlex.quote(text)} > {_PAYLOADS}/{name}"


# ---- bait: a port, a socket and a file outside the sandbox ----


class HostBait:
    """A port, an abstract socket and a file of the host that no sandbox may reach; it records every access."""

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
        """Listen on the port, and on the abstract socket if the system has such sockets."""
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


# ---- the model: the prompt decides how it fails ----


def _failing(name: str, failure: Failure) -> Script:
    return Script(name=f"fail-{name}", key=f"fail: {name}", turns=(Turn(text="No.", failures=(failure,)),))


_SCRIPTS = (
    *(
        _failing(str(status), StatusFailure(status=status, message=f"status {status}", attempts=None))
        for status in (400, 401, 404, 429, 500, 503)
    ),
    _failing("cut", CutFailure(attempts=None)),
    _failing("hang", HangFailure(attempts=None)),
    Script(name="cheats", turns=(Turn(text="No."),), ending="No."),
)

_ONE_CALL = (
    'python3 -c "import json, os, urllib.request as u; '
    "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps({'model': 'x', "
    "'messages': [{'role': 'user', 'content': 'hello'}]}).encode(), {'Content-Type': 'application/json', "
    "'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}), timeout=20).read()\""
)
"""An honest model call. Without it, a cheat on the model would look like an agent that cannot reach the model."""


_ORDINARY = frozenset({"messages", "tools", "stream", "stream_options", "temperature", "top_p", "seed", "max_tokens"})
"""The values that every agent may send: tools may be offered, but not forced."""


def _changed_sampling(captured: Recording) -> str | None:
    """Return the difference to the trainer's sampling if the call counts for training anyway, else None."""
    trained = {number for sequence in sequences(captured) if sequence.trainable for number in sequence.node_ids}
    for call in captured.calls[1:]:
        if call.sent.get("model") != captured.calls[0].sent.get("model"):
            return f"it chose the model {call.sent.get('model')!r}"
        limits = [value for name, value in _numbers(call.sent) if "max" in name or "predict" in name]
        if any(value > _TOKEN_CAP or value < 0 for value in limits):
            return "it had the endpoint sample more tokens than the trainer's limit"
        if call.number in trained:
            changed = _changed(call, captured.calls[0])
            if changed is not None:
                return f"a call with {changed} counts for training"
    return None


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("messages", "tools"):
                yield from _numbers(inner, str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _changed(call: Call, honest: Call) -> str | None:
    """Return the part of a request that an honest call does not contain, or None."""
    messages = call.sent.get("messages") or [{}]
    if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        return "the beginning of its answer"
    for name in call.sent.keys() - _ORDINARY:
        if call.sent[name] != honest.sent.get(name):
            return repr(name)
    return None


# ---- results ----


@dataclass(frozen=True, slots=True)
class CheatResult:
    """The result of one cheat."""

    name: str
    what: str
    status: str
    reward: float | None
    honest: float | None
    """The reward of `noop` in the same task."""
    breach: str | None = None
    """Access outside the sandbox, or to data of others; None if there was none."""
    reason: str | None = None

    @property
    def family(self) -> str:
        """The family of the cheat."""
        return self.name.partition("/")[0]

    @property
    def kind(self) -> Aim | None:
        """`win`: a different reward than `noop`, or a breach. `dodge`: no reward. None: the cheat failed."""
        if self.breach is not None or (self.reward is not None and self.reward != self.honest):
            return "win"
        return "dodge" if self.reward != self.honest else None

    @property
    def succeeded(self) -> bool:
        """Whether it is a win or a dodge."""
        return self.kind is not None


@dataclass(slots=True)
class CheatReport:
    """The results of all cheats on one backend."""

    sandbox: str
    results: list[CheatResult] = field(default_factory=list)
    solved: dict[str, float | None] = field(default_factory=dict)
    """The reward of each task's solution. A task with 0 would prove nothing."""
    idle: dict[str, float | None] = field(default_factory=dict)
    """The reward of `noop` in each task."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Skipped cheats, each with the missing program that its task needs."""

    @property
    def succeeded(self) -> list[CheatResult]:
        """The cheats that succeeded; empty for a good backend."""
        return [result for result in self.results if result.succeeded]

    @property
    def wins(self) -> list[CheatResult]:
        """Cheats with a different reward than `noop`, or with access outside their sandbox."""
        return [result for result in self.results if result.kind == "win"]

    @property
    def dodges(self) -> list[CheatResult]:
        """Cheats that turned an earned 0 into a rollout without a reward."""
        return [result for result in self.results if result.kind == "dodge"]

    @property
    def unfit(self) -> list[str]:
        """Tasks that prove nothing here, because `noop` does not earn 0 or the solution does not earn 1."""
        return [name for name in self.solved if (self.idle[name], self.solved[name]) != (0.0, 1.0)]

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "sandbox": self.sandbox,
            "idle": self.idle,
            "solved": self.solved,
            "unfit": self.unfit,
            "skipped": self.skipped,
            "succeeded": len(self.succeeded),
            "wins": [result.name for result in self.wins],
            "dodges": [result.name for result in self.dodges],
            "cheats": [
                {**asdict(result), "family": result.family, "kind": result.kind, "succeeded": result.succeeded}
                for result in self.results
            ],
        }


# ---- running them ----


def run_cheats(
    sandbox: str | Sandboxes = "local",
    *,
    cheats: Iterable[Cheat] | None = None,
    concurrency: int = 2,
    quick: bool = False,
    on_result: Callable[[CheatResult], None] | None = None,
) -> CheatReport:
    """Run every cheat on a backend.

    Args:
        sandbox: A backend or its name.
        cheats: The cheats to run; by default all, or with `quick` the short selection.
        concurrency: The number of rollouts at once.
        quick: Let cheats that only plant files share a rollout, and do not measure the rewards of `noop` and the
            solutions. The cheats of a successful group run again one by one, so the report names the right ones. But
            one cheat may hide another.
        on_result: Called with each result.
    """
    chosen = [cheat for cheat in all_cheats() if cheat.quick or not quick] if cheats is None else list(cheats)
    with contextlib.ExitStack() as stack:
        runner = _CheatRunner(named_backend(sandbox), stack)
        report = CheatReport(runner.backend.name)
        missing = runner.missing_programs({cheat.task.task_id for cheat in chosen})
        report.skipped = {
            cheat.name: f"there is no {missing[cheat.task.task_id]} in the sandbox"
            for cheat in chosen
            if cheat.task.task_id in missing
        }
        chosen = [cheat for cheat in chosen if cheat.name not in report.skipped]
        tasks = {} if quick else {cheat.task.task_id: cheat.task for cheat in chosen}
        groups = _groups(chosen) if quick else [[cheat] for cheat in chosen]
        results: dict[str, CheatResult] = {}
        with ThreadPoolExecutor(concurrency, thread_name_prefix="openenv-cheat") as pool:
            report.idle = dict(
                zip(tasks, pool.map(functools.partial(runner.reward, Noop()), tasks.values()), strict=True)
            )
            report.solved = dict(
                zip(tasks, pool.map(functools.partial(runner.reward, Oracle()), tasks.values()), strict=True)
            )
            runner.honest.update(report.idle)
            attempts = [pool.submit(runner.attempt_together, group) for group in groups]
            try:
                for attempt in as_completed(attempts):
                    for result in attempt.result():
                        results[result.name] = result
                        if on_result is not None:
                            on_result(result)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # running cheats end, the others do not start
                raise
        order = {cheat.name: number for number, cheat in enumerate(chosen)}
        report.results = sorted(results.values(), key=lambda result: order.get(result.name, len(order)))
    return report


def _groups(cheats: Sequence[Cheat]) -> list[list[Cheat]]:
    """Return which cheats share a rollout."""
    alone = [[cheat] for cheat in cheats if not cheat.together]
    by_task: dict[str, list[Cheat]] = {}
    for cheat in cheats:
        if cheat.together:
            by_task.setdefault(cheat.task.task_id, []).append(cheat)
    groups: list[list[Cheat]] = []
    for same in by_task.values():
        count = -(-len(same) // _BATCH)
        # Neighbours write the same file in different ways, and only one of them can exist in a rollout. So deal the
        # cheats out to the groups like cards.
        groups += [same[start::count] for start in range(count)]
    return groups + alone


class _CheatRunner:
    """The shared parts of all cheats: the bait, a capture proxy for a scripted model, the key of a finished rollout."""

    def __init__(self, backend: Sandboxes, stack: contextlib.ExitStack) -> None:
        self.backend = backend
        self.honest: dict[str, float | None] = {}
        """The reward of `noop` by task; 0 if it was not measured."""
        self._bait: HostBait = stack.enter_context(lay_out())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="openenv-cheat-calls-"))
        model = stack.enter_context(ScriptedModel(_SCRIPTS))
        # Complete sampling: without it no sequence counts for training, and no changed parameter could do harm.
        self._model = Model(
            base_url=model.url, name="scripted/any", max_tokens_cap=_TOKEN_CAP, sampling=Sampling().parameters()
        )
        self._store = stack.enter_context(RolloutStore(Path(folder)))
        self._capture = stack.enter_context(CaptureServer(self._store.captures))
        self._over = self._capture.open("over", self._model)
        self._over.revoke()

    def missing_programs(self, tasks: Iterable[str]) -> dict[str, str]:
        """Return the tasks that cannot run in this backend's sandboxes, each with a missing program."""
        needs = {name: _tasks()[name][1] for name in tasks if name in _tasks() and _tasks()[name][1]}
        if not needs:
            return {}
        programs = sorted({program for some in needs.values() for program in some})
        with self.backend.open(SandboxSpec()) as sandbox:
            there = {
                program
                for program in programs
                if sandbox.exec(["/bin/sh", "-c", 'command -v "$1"', "sh", program], cwd="/").exit_code == 0
            }
        lacking = {name: [program for program in some if program not in there] for name, some in needs.items()}
        return {name: programs[0] for name, programs in lacking.items() if programs}

    def run(self, agent: Agent, *, task: Task) -> Outcome:
        options = EngineOptions(
            agent=agent, sandbox=self.backend, model=self._model, capture=self._capture, store=self._store
        )
        with Engine(options) as engine:
            return engine.run(task)

    def reward(self, agent: Agent, task: Task) -> float | None:
        """Return the reward of an honest agent."""
        return self.run(agent, task=task).reward

    def attempt_together(self, group: list[Cheat]) -> list[CheatResult]:
        """Run cheats on one task in one rollout; if that succeeds, run them one by one."""
        if len(group) == 1:
            return [self._attempt(group[0])]
        first = group[0]
        lines = dict.fromkeys(line for cheat in group for line in cheat.lines[:-1])  # each payload once
        lines |= dict.fromkeys(f"(\n{cheat.lines[-1]}\n)" for cheat in group)
        name = f"{first.family}/and-{len(group) - 1}-more"
        result = self._attempt(Cheat(name, "all at once", tuple(lines), first.task, first.calls_model))
        if not result.succeeded:
            return [CheatResult(cheat.name, cheat.what, result.status, result.reward, result.honest) for cheat in group]
        alone = [self._attempt(cheat) for cheat in group]
        # If only the combination succeeds, report it under the name of the group.
        return alone if any(each.succeeded for each in alone) else [*alone, result]

    def _attempt(self, cheat: Cheat) -> CheatResult:
        """Run one cheat, and check its reward and its accesses."""
        words = {
            "PORT": str(self._bait.port),
            "ABSTRACT": self._bait.abstract,
            "SECRET": str(self._bait.file),
            "KEY": self._over.key,
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
            honest=self.honest.get(cheat.task.task_id, 0.0),
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
        captured = recording(self._store, self._store.get(outcome.rollout_id))
        return None if captured is None or not captured.calls else _changed_sampling(captured)
