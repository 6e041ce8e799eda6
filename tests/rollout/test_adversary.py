"""What an adversary tried against rollouts: each of these once earned a reward, or hid whose fault a failure was."""

from __future__ import annotations

import io
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from openenv.errors import SandboxError
from openenv.rollout import Budget, CaptureServer, Model, Outcome, Progress, Task, run_rollout
from openenv.rollout.agents.builtin import Shell
from openenv.rollout.capture.inbound import InboundLimits as InboundLimits
from openenv.rollout.store.archives import UnusableWorktree
from openenv.rollout.tasks.task import PROTECTED
from openenv.rollout.verify.worktree import LinkResolver, merge
from openenv.rollout.verify.worktree_guard import WorktreeRules
from openenv.sandboxes.base import Limits, Sandboxes, SandboxSpec
from openenv.sandboxes.host import scratch_root
from openenv.sandboxes.local import LocalSandbox

CHECK = "import pathlib\nassert pathlib.Path('answer.txt').read_text() == '42'\n"
WIN = b"import os; os._exit(0)\n"
EXPECTED = {"tests/expected.txt": "42\n"}


def tree(path: Path, files: dict[str, bytes | str]) -> Path:
    """An archive of files; a value that is a text is where a link points."""
    with tarfile.open(path, "w:") as out:
        for name, value in files.items():
            entry = tarfile.TarInfo(name)
            if isinstance(value, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, value
                out.addfile(entry)
            else:
                entry.size = len(value)
                out.addfile(entry, io.BytesIO(value))
    return path


def kept(
    tmp_path: Path, files: dict[str, bytes | str], before: dict[str, bytes | str] | None = None
) -> Callable[..., set[str]]:
    """Merge a work tree of these files, and return the names that the verifier sees."""

    def run(**options: object) -> set[str]:
        work = tree(tmp_path / "work.tar", files)
        baseline = None
        if before is not None:
            baseline = tree(tmp_path / "base.tar", {f"workdir/{name}": value for name, value in before.items()})
        target = tmp_path / "merged.tar"
        rules = WorktreeRules(**{"protected": PROTECTED, **options})  # type: ignore[arg-type]
        merge(work, baseline, target, rules)
        with tarfile.open(target) as merged:
            return set(merged.getnames())

    return run


@pytest.mark.parametrize(
    "target",
    [
        "tests/expected.txt",
        "./tests/../tests/expected.txt",
        "../workdir/tests/expected.txt",
        "/home/user/workdir/tests/expected.txt",
        "/proc/self/cwd/tests/expected.txt",
        "/dev/fd/3",
        "/var/tmp/../home/user/workdir/tests/expected.txt",
        "/usr/bin/X11/../../home/user/workdir/tests/expected.txt",
        "../link-of-the-setup/tests/expected.txt",
        "here/here/away",
        "tests",
        "..",
        "/",
    ],
)
def test_a_link_to_what_only_the_verifier_has_is_dropped(tmp_path: Path, target: str) -> None:
    files: dict[str, bytes | str] = {"answer.txt": target, "here": ".", "away": "tests/expected.txt", "mine": b""}
    assert kept(tmp_path, files)(verify_files=EXPECTED) == {"mine"}
    assert "answer.txt" not in kept(tmp_path, files)(verify_files=EXPECTED, protected=())
    assert "answer.txt" not in kept(tmp_path, files)(verify_files=EXPECTED, keeps_links=["**"])


def test_a_link_that_the_setup_made_stays(tmp_path: Path) -> None:
    names = kept(tmp_path, {"test": "tests", "other": "tests"}, {"test": "tests"})(verify_files=EXPECTED)
    assert names == {"test"}


def test_links_that_take_for_ever_to_follow_make_the_tree_unusable() -> None:
    links = {str(n): "a/../" * 800 + str(n + 1) for n in range(100)}
    resolver = LinkResolver("/home/user/workdir", links)
    with pytest.raises(UnusableWorktree, match="too many links"):
        for name in links:
            resolver.resolve(f"/home/user/workdir/{name}")


@pytest.mark.parametrize(
    "name",
    [
        "pytest.pyc",
        "pytest.cpython-311-x86_64-linux-gnu.so",
        "_pytest.pyc",
        "unittest.pyc",
        "argparse.py",
        "signal.pyc",
        "pygments.py",
        "packaging/__init__.py",
        "py.py",
        "evil-1.0.dist-info/entry_points.txt",
        "EVIL-1.0.DIST-INFO/entry_points.txt",
        "evil.egg-info/entry_points.txt",
        "__init__.py",
        "tests/__init__.py",
        "tests/unit/__init__.py",
        "tests/__init__.pyc",
        "tests/test_other.py",
        "test_at_the_top.py",
        "deep/down/some_test.py",
    ],
)
def test_code_that_would_run_before_the_checks_is_dropped(tmp_path: Path, name: str) -> None:
    files = {"tests/unit/test_answer.py": CHECK}
    assert kept(tmp_path, {name: WIN})(verify_files=files) == set()
    assert kept(tmp_path, {name: WIN}, {name: b"the setup's"})(verify_files=files) == {name}
    assert kept(tmp_path, {name: WIN})(verify_files=files, protected=()) == {name}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("calendar.py", "Write calendar.py."),
        ("queue/__init__.py", "Write the package queue/core.py and what it needs."),
        ("test_mine.py", "Put your tests into test_mine.py."),
        ("statistics.json", ""),
        ("test.sh", ""),
        ("package/json.py", ""),
        ("package/__init__.py", ""),
        ("json/data.txt", ""),
    ],
)
def test_files_that_the_task_names_and_files_without_code_stay(tmp_path: Path, name: str, text: str) -> None:
    files = {"tests/test_answer.py": CHECK}
    assert kept(tmp_path, {name: b"honest"})(verify_files=files, named=(text,)) == {name}


def test_deep_names_are_not_worth_minutes_of_the_host(tmp_path: Path) -> None:
    deep = "d/" * 1900
    with pytest.raises(UnusableWorktree, match="deep"):
        kept(tmp_path, {f"{deep}{n}": b"" for n in range(1200)})()


@pytest.fixture
def run(local: Sandboxes) -> Callable[..., Outcome]:
    """Run lines as the agent on a task."""

    def run(lines: list[str], task: Task, **options: object) -> Outcome:
        dialect = "openai_chat" if "model" in options else None
        agent = Shell(lines, dialect=dialect, strict=False)
        return run_rollout(task, agent=agent, sandbox=local, **options)  # type: ignore[arg-type]

    return run


def test_an_answer_that_is_a_link_to_the_expected_one_earns_nothing(run: Callable[..., Outcome]) -> None:
    task = Task(instruction="x", verify=("cmp answer.txt tests/expected.txt",), verify_files=EXPECTED)
    outcome = run(["ln -s /var/tmp/../home/user/workdir/tests/expected.txt answer.txt"], task)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert outcome.metadata["protected"]["removed"] == ["answer.txt"]
    assert run(["echo 42 > answer.txt"], task).reward == 1.0


def test_python_finds_its_own_modules_in_a_check(run: Callable[..., Outcome]) -> None:
    task = Task(
        instruction="x",
        verify=("python3 -m unittest tests/test_answer.py", "python3 -c 'import json; json.load(open(\"a.json\"))'"),
        verify_files={"tests/test_answer.py": CHECK},
    )
    win = "import os; os._exit(0)"
    lines = [f"mkdir tests; for f in argparse signal json unittest tests/__init__; do echo '{win}' > $f.py; done"]
    assert run(lines, task).reward == 0.0


def test_a_check_runs_on_the_same_python_as_the_agent(run: Callable[..., Outcome]) -> None:
    outcome = run(["command -v python3 > where"], Task(instruction="x", verify=("command -v python3 | cmp - where",)))
    assert outcome.reward == 1.0


def test_a_folder_that_the_setup_shut_does_not_break_the_verifier(run: Callable[..., Outcome]) -> None:
    setup = ("mkdir -p shut/more; touch shut/more/file; chmod 000 shut/more; chmod 555 shut",)
    outcome = run(["true"], Task(instruction="x", setup=setup, verify=("test -e shut/more/file",)))
    assert (outcome.status, outcome.reward) == ("ok", 1.0)


def test_a_hiccup_of_the_sandbox_is_not_the_policys_fault(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LocalSandbox, path: str, archive: Path, **options: object) -> None:
        raise SandboxError("the engine does not answer")

    monkeypatch.setattr(LocalSandbox, "pack", fail)
    outcome = run(["true"], Task(instruction="x", verify=("false",)))
    assert (outcome.status, outcome.reward) == ("sandbox_failed", None)


def test_a_cleaner_of_temporary_files_is_not_the_policys_fault(
    run: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real = LocalSandbox.stop_processes

    def clean(self: LocalSandbox) -> None:
        shutil.rmtree(scratch_root(), ignore_errors=True)
        real(self)

    monkeypatch.setattr(LocalSandbox, "stop_processes", clean)
    outcome = run(["true"], Task(instruction="x", verify=("false",)))
    assert (outcome.status, outcome.reward) == ("env_failed", None)


@contextmanager
def endpoint(status: int, body: bytes, kind: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_CALL = """python3 -c "
import json, os, urllib.request as u
body = json.dumps({'model': 'x', 'stream': STREAM, 'messages': [{'role': 'user', 'content': 'hello'}]}).encode()
headers = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}
try: u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, headers), timeout=20).read()
except OSError: pass
" """


@pytest.mark.parametrize(
    ("status", "body", "stream"),
    [
        (200, b"{}", False),
        pytest.param(200, b'{"choices": []}', False, marks=pytest.mark.slow),
        pytest.param(200, b'{"error": {"message": "the engine died"}}', False, marks=pytest.mark.slow),
        (200, b'data: {"error": {"message": "the engine died"}}\n\ndata: [DONE]\n\n', True),
        pytest.param(200, b"data: [DONE]\n\n", True, marks=pytest.mark.slow),
        (400, b'{"error": {"message": "no such parameter"}}', False),
    ],
)
def test_an_endpoint_that_never_answers_is_not_the_policys_fault(
    run: Callable[..., Outcome], status: int, body: bytes, stream: bool
) -> None:
    kind = "text/event-stream" if stream else "application/json"
    with endpoint(status, body, kind) as url:
        outcome = run(
            [_CALL.replace("STREAM", str(stream))],
            Task(instruction="x", verify=("false",)),
            model=Model(base_url=url, name="x"),
        )
    assert (outcome.status, outcome.reward) == ("env_failed", None)


def test_a_proxy_that_is_stopped_under_the_agent_is_not_the_policys_fault(
    run: Callable[..., Outcome], tmp_path: Path
) -> None:
    answer = b'{"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}]}'
    with endpoint(200, answer, "application/json") as url, CaptureServer(tmp_path / "calls") as server:
        stopped = threading.Event()

        def watch(event: Progress) -> None:
            if event.turn == 1 and not stopped.is_set():
                stopped.set()
                server.stop()

        lines = [_CALL.replace("STREAM", "False"), "sleep 1"]
        task, model = Task(instruction="x", verify=("false",)), Model(base_url=url, name="x")
        outcome = run(lines, task, model=model, capture=server, on_progress=watch)
    assert stopped.is_set()
    assert (outcome.status, outcome.reward) == ("env_failed", None)
    assert "stopped" in str(outcome.reason)


def test_agents_cannot_fill_the_memory_of_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megabyte = b"x" * (1 << 20)
    with CaptureServer(tmp_path / "calls") as server:
        monkeypatch.setattr(server._agents, "limits", InboundLimits(held=8 << 20))
        key = server.open("greedy", Model(base_url="http://127.0.0.1:9/v1", name="x")).key
        assert all(_sent(server.socket, "no-key", 60, megabyte).startswith(b"HTTP/1.1 401") for _ in range(3))
        connections: list[socket.socket] = []
        answers = [_sent(server.socket, key, 6, megabyte, keep=connections) for _ in range(3)]
        for connection in connections:
            connection.close()
        assert answers[0] == b""
        assert answers[-1].startswith(b"HTTP/1.1 429")


def _sent(path: Path, key: str, megabytes: int, piece: bytes, *, keep: list[socket.socket] | None = None) -> bytes:
    """Send most of a request's body; return the answer that comes before its end, or nothing."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.settimeout(1)
    length = f"content-length: {(megabytes + 1) << 20}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{length}\r\n\r\n"
    try:
        connection.sendall(head.encode())
        for _ in range(megabytes):
            connection.sendall(piece)
    except OSError:
        pass
    try:
        return connection.recv(4096)
    except TimeoutError:
        return b""
    except ConnectionError:
        return b"reset"
    finally:
        if keep is None:
            connection.close()
        else:
            keep.append(connection)


def test_a_submodule_does_not_take_the_place_of_the_function_of_its_name() -> None:
    from openenv.rollout import reverify
    from openenv.sandboxes import self_check

    assert not isinstance(reverify, ModuleType)
    assert not isinstance(self_check, ModuleType)


@pytest.mark.parametrize("wrong", [{"agent_timeout_s": 0}, {"verify_timeout_s": -1}, {"limits": {"memory_mb": 0}}])
def test_a_task_that_cannot_work_is_refused_when_it_is_written(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="0"):
        Task.model_validate({"instruction": "x", **wrong})


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300])
@pytest.mark.parametrize("name", ["agent_timeout_s", "setup_timeout_s", "verify_timeout_s"])
def test_a_limit_of_time_is_a_time_that_comes(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Task.model_validate({"instruction": "x", name: value})


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_other_limits_are_finite_too(value: float) -> None:
    for name in ("memory_mb", "pids", "cpus", "disk_mb"):
        with pytest.raises(ValueError, match=name):
            Limits(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cpus"):
        Task.model_validate({"instruction": "x", "limits": {"cpus": value}})
    with pytest.raises(ValueError, match="timeout_s"):
        SandboxSpec(timeout_s=value)
    with pytest.raises(ValueError, match="max_seconds"):
        Budget(max_seconds=value)
    with pytest.raises(ValueError, match="request_timeout_s"):
        Model(base_url="http://127.0.0.1:9/v1", name="m", request_timeout_s=value)
