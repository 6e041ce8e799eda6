"""No act of an agent makes its rollout not count: whatever it breaks is a failure of its own, with a reward.

Each of these tries to make a reward of 0 into none at all. The first check of the task is what the agent fails, the
second is free, so that what doing nothing earns is another number than 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import openenv
from openenv.errors import SandboxError
from openenv.rollout import Budget, Cancellation, Model, Outcome, Progress, RolloutStore, Task, run_rollout
from openenv.rollout.agents import Shell
from openenv.rollout.agents.base import AgentRun, Launch
from openenv.rollout.agents.builtin import Noop
from openenv.sandboxes import DockerSandboxes
from openenv.sandboxes.base import Limits, Sandbox, Sandboxes, SandboxSpec
from openenv.sandboxes.local import LocalSandbox

TASK = Task(
    instruction="Write the answer to answer.txt.",
    files={"given.txt": "given\n"},
    setup=("mkdir -p ~/tools; echo tool > ~/tools/tool",),
    verify=("grep -qx 42 answer.txt", "grep -q tool ~/tools/tool"),
    limits=Limits(memory_mb=96, pids=64, cpus=1.0, disk_mb=64),
    agent_timeout_s=30,
)
IDLE = 0.5
"""What doing nothing earns in that task."""


def python(code: str) -> str:
    return f"python3 - <<'END'\n{code}\nEND"


TAKEN = {
    # what the sandbox withstands: the work tree can be taken, and its files count
    "kill-all": "kill -9 -1",
    "interrupt-pid-1": "kill -INT 1; sleep 0.3",
    "terminate-pid-1": "kill -TERM 1; sleep 0.3",
    "every-signal-at-pid-1": "for n in $(seq 1 64); do kill -$n 1; done 2> /dev/null; sleep 0.3",
    "closed-folders": "chmod 0 ~ ~/workdir",
    "closed-files": "mkdir -p a/b; touch a/b/c given.txt; chmod -R 0 a given.txt; chmod 0 .",
    "fork-bomb": "f() { f | f & }; f; exit 1",
    "daemons": "for n in 1 2 3; do (setsid sh -c 'while :; do date > busy; done' > /dev/null 2>&1 &); done",
    "full-disk": "for f in ~/big /tmp/big /dev/shm/big; do head -c 200M /dev/zero > $f; done 2> /dev/null; true",
    "loud": "head -c 200000000 /dev/zero",
    "names": python(
        "import os\n"
        "for name in (b'\\xff\\xfe', b'a\\nb', b'\\x1b[31m', 'bidi \\u202e'.encode(), b'\\xed\\xa0\\x80'):\n"
        "    open(name + b'.txt', 'w').write('text'); os.mkdir(name); os.symlink(name, name + b'.link')\n"
        "open('conftest.py', 'w'); os.mkdir(b'\\xff'); open(b'\\xff/conftest.py', 'w')"
    ),
}
LOST = {
    # what costs the agent its work: it is verified as the setup left it
    "no-folder": "rm -rf ~/workdir",
    "moved-folder": "cd /; mv ~/workdir ~/elsewhere",
    "linked-folder": "cd /; rm -rf ~/workdir; ln -s /usr ~/workdir",
    "file-for-a-folder": "cd /; rm -rf ~/workdir; echo x > ~/workdir",
    "sparse": "truncate -s 1T huge",
    "too-large": "head -c 40M /dev/urandom > large",
    "deep": python("import os\nfor _ in range(3000): os.mkdir('ddd'); os.chdir('ddd')"),
    "out-of-files": python("import resource as r\nr.prlimit(1, r.RLIMIT_NOFILE, (0, 0))"),
    "out-of-processes": python("import resource as r\nr.prlimit(1, r.RLIMIT_NPROC, (0, 0))"),
    "out-of-time": python("import os, resource as r\nr.prlimit(1, r.RLIMIT_CPU, (0, 0))\nwhile True: os.kill(1, 17)"),
}
LIMITED = {
    # what needs a limit on memory, which a user's sandbox may not have
    "shared-memory": python(
        "import ctypes\n"
        "libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p\n"
        "while True:\n"
        "    place = libc.shmat(libc.shmget(0, 8 << 20, 0o1600), None, 0)\n"
        "    if place in (None, 2**64 - 1): break\n"
        "    ctypes.memset(place, 1, 8 << 20)"
    ),
}
SLOW = {
    "many-files": python("for n in range(150_000): open(f'f{n}', 'w').close()"),
    "stopped": "kill -STOP -1; sleep 30",
}


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """The names as parameters, of which only those that are chosen are not slow."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]


@pytest.fixture
def run(local: Sandboxes, leftovers: Callable[[], None], tmp_path: Path) -> Iterator[Callable[..., Outcome]]:
    """Run a rollout that is stored, and see that nothing is left of it on the machine."""

    def run(task: Task = TASK, **arguments: Any) -> Outcome:
        outcome = run_rollout(task, **{"sandbox": local, "store": store, **arguments})
        assert store.get(outcome.rollout_id).outcome == outcome
        leftovers()
        return outcome

    with RolloutStore(tmp_path / "store") as store:
        yield run


@pytest.mark.parametrize("name", quick(TAKEN, "every-signal-at-pid-1", "closed-folders", "names"))
def test_an_agent_that_does_harm_is_verified_all_the_same(run: Callable[..., Outcome], name: str) -> None:
    outcome = run(agent=Shell(["echo 42 > answer.txt", TAKEN[name]]))
    assert outcome.status in ("ok", "policy_failed")
    assert outcome.reward == 1.0


@pytest.mark.parametrize("name", quick(LOST, "linked-folder", "sparse", "out-of-files"))
def test_an_agent_that_destroys_its_work_earns_what_doing_nothing_earns(run: Callable[..., Outcome], name: str) -> None:
    outcome = run(agent=Shell(["echo 42 > answer.txt", LOST[name]]))
    assert (outcome.status, outcome.reward) == ("policy_failed", IDLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITED)
def test_an_agent_that_leaves_no_memory_fails_itself(run: Callable[..., Outcome], name: str) -> None:
    outcome = run(agent=Shell([LIMITED[name]]))
    assert (outcome.status, outcome.reward) == ("policy_failed", IDLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_dodges_that_take_long(run: Callable[..., Outcome], name: str) -> None:
    task = TASK.model_copy(update={"agent_timeout_s": 10, "limits": Limits(memory_mb=512, disk_mb=64)})
    outcome = run(task, agent=Shell([SLOW[name]]))
    assert outcome.status in ("policy_failed", "truncated")
    assert outcome.reward == IDLE


AS_A_USER = """
import json, sys
sys.dont_write_bytecode = True
from openenv.rollout import Task, run_many, run_rollout
from openenv.rollout.agents import Shell
from openenv.sandboxes import LocalSandboxes
given = json.load(sys.stdin)
task = Task.model_validate(given["task"])
for name, line in given["lines"].items():
    agent = Shell(["echo 42 > answer.txt", line])
    outcome = run_rollout(task, agent=agent, sandbox=LocalSandboxes(require_cgroup=False))
    print(json.dumps([name, outcome.status, outcome.reward, outcome.reason]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a user already")
def test_no_dodge_succeeds_where_a_user_without_rights_starts_the_sandboxes(local: Sandboxes, tmp_path: Path) -> None:
    interpreter = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not os.path.exists(interpreter) or shutil.which("setpriv") is None:
        pytest.skip("there is no Python, or no setpriv, that a user without rights can run")
    source = Path(openenv.__file__).parents[1]
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    copy = Path("/tmp") / f"openenv-dodges-{os.getpid()}"  # not below tmp_path, which only root may enter
    shutil.copytree(source, copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(packages, copy / "packages", ignore=shutil.ignore_patterns("__pycache__", "*.pth"))
    become = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "env", "-i", "PATH=/usr/bin:/bin"]
    words = [*become, f"PYTHONPATH={copy}/src:{copy}/packages", interpreter, "-c", AS_A_USER]
    lines = {**TAKEN, **LOST}
    given = {"task": TASK.model_dump(mode="json"), "lines": lines}
    try:
        done = subprocess.run(
            words, input=json.dumps(given), capture_output=True, text=True, timeout=250, cwd="/tmp", check=False
        )
    finally:
        shutil.rmtree(copy)
    if "user namespaces" in done.stderr:
        pytest.skip("this machine forbids user namespaces")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in results] == list(lines), done.stderr
    for name, status, reward, reason in results:
        assert status in ("ok", "policy_failed"), (name, reason)
        assert reward == (1.0 if name in TAKEN else IDLE), (name, reason)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_dodge_succeeds_on_docker(docker_engines: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine())
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        backend = DockerSandboxes("host", engine="docker", host=host)
        for name, line in {**TAKEN, **LOST, **LIMITED}.items():
            outcome = run_rollout(TASK, agent=Shell(["echo 42 > answer.txt", line]), sandbox=backend)
            assert outcome.status in ("ok", "policy_failed"), (name, outcome.reason)
            assert outcome.reward in (1.0, IDLE), (name, outcome.reason)
        dying = Unreliable(backend, fails="exec", times=1)
        outcome = run_rollout(TASK, agent=Shell(["echo 42 > answer.txt"]), sandbox=dying, verify_sandbox=backend)
        assert (outcome.status, outcome.reward) == ("policy_failed", IDLE)
        assert backend.leftovers() == []


# A sandbox that dies under the agent, and one that dies without it


class Unreliable(Sandboxes):
    """A backend around a real one whose sandboxes end when a chosen call is made.

    Args:
        fails: The name of the call.
        times: In how many sandboxes, the first ones.
    """

    def __init__(self, inner: Sandboxes, *, fails: str, times: int) -> None:
        self.name, self._inner, self._fails, self._times = "unreliable", inner, fails, times
        self.opened = 0

    def check(self) -> None:
        pass

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        self.opened += 1
        if self._fails == "open" and self.opened > 1:
            raise SandboxError("no more sandboxes")
        sandbox = self._inner.open(spec)
        if self.opened <= self._times:
            real = getattr(sandbox, self._fails, None)

            def dying(*args: Any, **kwargs: Any) -> Any:
                if self._fails == "close":
                    sandbox.kill()
                    raise SandboxError("its control group cannot be removed")
                if self._fails != "exec" or "on_output" in kwargs or self.opened > 1:  # the agent's, or the control's
                    sandbox.kill()
                assert real is not None
                return real(*args, **kwargs)

            if real is not None:
                setattr(sandbox, self._fails, dying)
        return sandbox


@pytest.mark.parametrize("call", ["exec", "stop_processes"])
def test_a_sandbox_that_dies_under_the_agent_is_the_agents_failure(
    run: Callable[..., Outcome], local: Sandboxes, call: str
) -> None:
    backend = Unreliable(local, fails=call, times=1)
    outcome = run(agent=Shell(["echo 42 > answer.txt"]), sandbox=backend, verify_sandbox=local)
    assert (outcome.status, outcome.reward) == ("policy_failed", IDLE)
    assert outcome.phase == ("agent" if call == "exec" else "collect")
    assert "is gone" in str(outcome.reason)
    assert backend.opened == 2


@pytest.mark.parametrize("call", ["exec", "stop_processes", "open"])
def test_a_sandbox_that_dies_without_the_agent_too_is_not_the_agents_failure(
    run: Callable[..., Outcome], local: Sandboxes, call: str
) -> None:
    agent = Shell(["kill -9 -1"] if call != "open" else [LOST["out-of-files"]])
    backend = Unreliable(local, fails=call, times=2)
    outcome = run(agent=agent, sandbox=backend, verify_sandbox=local)
    assert (outcome.status, outcome.reward) == ("sandbox_failed", None)
    assert "control run without the agent" in str(outcome.reason)


def test_a_sandbox_that_cannot_be_closed_changes_no_outcome(
    run: Callable[..., Outcome], local: Sandboxes, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Unreliable(local, fails="close", times=1)
    outcome = run(agent=Shell(["echo 42 > answer.txt"]), sandbox=backend, verify_sandbox=local)
    assert (outcome.status, outcome.reward) == ("ok", 1.0)
    assert "could not be closed" in caplog.text


def test_a_cancelled_control_run_is_a_cancelled_rollout(run: Callable[..., Outcome]) -> None:
    cancel = Cancellation()

    def on_progress(event: Progress) -> None:
        if "control" in event.message:
            cancel.cancel("enough")

    outcome = run(agent=Shell([LOST["out-of-files"]]), cancel=cancel, on_progress=on_progress)
    assert (outcome.status, outcome.reward, outcome.reason) == ("cancelled", None, "enough")


# What the host does with what an agent printed or left


class Misled(Noop):
    """A driver that fails on what the agent printed."""

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        return Launch(argv=("/bin/sh", "-c", "echo surprise"), cwd=run.workdir)

    def failure(self, exit_code: int, log: str) -> str | None:
        raise RecursionError(log)


def test_a_driver_that_fails_on_what_the_agent_printed_is_the_agents_failure(run: Callable[..., Outcome]) -> None:
    outcome = run(agent=Misled())
    assert (outcome.status, outcome.phase, outcome.reward) == ("policy_failed", "agent", IDLE)
    assert "RecursionError" in str(outcome.reason)


def test_an_agent_log_that_cannot_be_written_ends_no_rollout(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        closed = False

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    from openenv.rollout.run import phases

    real = phases.AgentLog.__init__

    def init(self: phases.AgentLog, path: Path, **options: Any) -> None:
        real(self, path, **options)
        self._file.close()
        self._file = FullDisk()  # type: ignore[assignment]

    monkeypatch.setattr(phases.AgentLog, "__init__", init)
    outcome = run(agent=Shell(["echo 42 > answer.txt", "echo THE END"]))
    assert (outcome.status, outcome.reward, outcome.agent_log_tail) == ("ok", 1.0, "THE END\n")


def test_collecting_ends_in_time(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    from openenv.rollout.run import phases

    monkeypatch.setattr(phases, "COLLECT_S", 5.0)
    real = LocalSandbox.pack
    packed: list[str] = []

    def pack(self: LocalSandbox, path: str, archive: Path, **options: Any) -> None:
        if path.endswith("workdir") and not packed:  # the agent's tree, which takes for ever
            packed.append(path)
            self.exec("sleep 60", timeout=60)
        real(self, path, archive, **options)

    monkeypatch.setattr(LocalSandbox, "pack", pack)
    outcome = run(agent=Shell(["echo 42 > answer.txt"]))
    assert (outcome.status, outcome.phase, outcome.reward) == ("policy_failed", "collect", IDLE)


# Endpoints that fail at what an agent sends, and endpoints that fail


class Endpoint(ThreadingHTTPServer):
    """A model endpoint that misbehaves for requests which hold the word BREAK, or for all after so many `answers`."""

    daemon_threads = True

    def __init__(self, misbehave: str) -> None:
        super().__init__(("127.0.0.1", 0), EndpointHandler)
        self.misbehave = misbehave
        self.answers: int | None = None
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # agents hang up


class EndpointHandler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(json.loads(raw))
        self.server.keys.add(self.headers["authorization"])
        is_down = self.server.answers is not None and len(self.server.bodies) > self.server.answers
        how = self.server.misbehave if b"BREAK" in raw or is_down else "answer"
        message = {"role": "assistant", "content": "yes"}
        answer = {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        if how == "reset":
            self.close_connection = True
        elif how == "hang":
            self.server.over.wait(30)
        elif how == "garbage":
            self.reply(200, b"<html>")
        elif how == "empty":
            self.reply(200, b"{}")
        elif how == "echo":  # as FastAPI does: what it could not validate is quoted
            self.reply(422, json.dumps({"detail": [{"input": json.loads(raw)}]}).encode())
        else:
            self.reply(500 if how == "error" else 200, json.dumps({} if how == "error" else answer).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Callable[[str], Endpoint]]:
    """Start endpoints that misbehave."""
    started: list[tuple[Endpoint, threading.Thread]] = []

    def start(misbehave: str) -> Endpoint:
        server = Endpoint(misbehave)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


CALL = python(
    """import json, os, urllib.request as u
for text in TEXTS:
    message = {"role": "user", "content": text}
    body = json.dumps({"model": "any", "messages": [message], **MORE}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    try:
        u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers), timeout=20).read()
    except OSError:
        pass"""
)


def calls(*texts: str, more: str = "{}") -> str:
    """A line that makes model calls, one after the other."""
    return CALL.replace("TEXTS", repr(texts)).replace("MORE", more)


@pytest.mark.parametrize("misbehave", quick(("error", "reset", "hang", "garbage", "empty"), "error"))
@pytest.mark.parametrize("texts", [("hello", "BREAK"), ("BREAK",)], ids=["last call", "every call"])
def test_a_request_at_which_a_sound_endpoint_fails_is_the_agents_failure(
    run: Callable[..., Outcome], endpoint: Callable[[str], Endpoint], misbehave: str, texts: tuple[str, ...]
) -> None:
    server = endpoint(misbehave)
    model = Model(base_url=server.url, name="m", api_key=SecretStr("the-real-key"), request_timeout_s=1)
    outcome = run(
        agent=Shell([calls(*texts), "exit 3"], dialect="openai_chat"), model=model, budget=Budget(max_calls=2)
    )
    assert (outcome.status, outcome.reward) == ("policy_failed", IDLE)
    assert "3" in str(outcome.reason)
    assert len(outcome.turns) == len(texts)  # the host's own request is no call of the rollout
    assert {body["messages"][0]["content"] for body in server.bodies} > set(texts)
    assert server.keys == {"Bearer the-real-key"}


@pytest.mark.parametrize("misbehave", quick(("error", "reset", "garbage", "empty"), "error"))
def test_an_endpoint_that_fails_the_host_too_is_not_the_agents_failure(
    run: Callable[..., Outcome], endpoint: Callable[[str], Endpoint], misbehave: str
) -> None:
    server = endpoint(misbehave)
    server.answers = 1
    agent = Shell([calls("hello"), calls("again"), "exit 3"], dialect="openai_chat")
    outcome = run(agent=agent, model=Model(base_url=server.url, name="m"))
    assert (outcome.status, outcome.phase, outcome.reward) == ("env_failed", "agent", None)
    assert "1 calls were answered, then it failed" in str(outcome.reason)
    assert "no answer to the host either" in str(outcome.reason)


@pytest.mark.slow
def test_an_agent_that_only_sends_what_fails_is_not_stopped_for_it(
    run: Callable[..., Outcome], endpoint: Callable[[str], Endpoint]
) -> None:
    agent = Shell([calls(*["BREAK"] * 5, "hello"), "echo 42 > answer.txt"], dialect="openai_chat")
    outcome = run(agent=agent, model=Model(base_url=endpoint("reset").url, name="m"))
    assert (outcome.status, outcome.reward) == ("ok", 1.0)


def test_what_an_endpoint_quotes_of_a_request_can_be_stored(
    run: Callable[..., Outcome], endpoint: Callable[[str], Endpoint]
) -> None:
    deep = '{"deep": json.loads("{\\"a\\":" * 150 + "1" + "}" * 150), "odd": chr(0xd800)}'
    model = Model(base_url=endpoint("echo").url, name="m")
    outcome = run(agent=Shell([calls("hello", "BREAK", more=deep)], dialect="openai_chat"), model=model)
    assert (outcome.status, outcome.reward) == ("ok", IDLE)
    assert Outcome.model_validate_json(outcome.model_dump_json()) == outcome


def test_an_agent_cannot_fill_the_disk_with_its_requests(
    run: Callable[..., Outcome], endpoint: Callable[[str], Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    from openenv.rollout.capture import records

    monkeypatch.setattr(records, "MAX_RECORDS", 1 << 20)
    lines = [calls("hello").replace("('hello',)", "[str(n) * 300_000 for n in range(6)] + ['hello']")]
    agent = Shell(lines, dialect="openai_chat")
    outcome = run(agent=agent, model=Model(base_url=endpoint("error").url, name="m"))
    assert (outcome.status, outcome.reward) == ("ok", IDLE)
    assert len(outcome.turns) == 4  # three large ones, and the small one at the end


@pytest.mark.parametrize("times", [1, 2])
def test_a_tree_that_fills_the_hosts_disk_is_the_agents_failure_where_the_setups_does_not(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    real = LocalSandbox.pack
    full = iter([True] * times)

    def pack(self: LocalSandbox, path: str, archive: Path, **options: Any) -> None:
        if path.endswith("workdir") and next(full, False):
            raise OSError(28, "No space left on device")
        real(self, path, archive, **options)

    monkeypatch.setattr(LocalSandbox, "pack", pack)
    outcome = run(agent=Shell(["echo 42 > answer.txt"]))
    expected = ("policy_failed", IDLE) if times == 1 else ("sandbox_failed", None)
    assert (outcome.status, outcome.reward) == expected
    assert "No space left" in str(outcome.reason)
