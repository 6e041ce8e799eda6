"""Servers as child processes: started, awaited, stopped with all that they started, and never outliving their owner."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openenv import GenericEnvClient
from openenv.errors import ProviderError, ProviderUnavailable, ServerDied, ServerNotReady
from openenv.providers import ProcessProvider
from openenv.providers.health import ask_health
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(os.environ.get("GREETING", "").encode())
    def log_message(self, *_): pass
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("child", child.pid, "of", os.getpid(), flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> list[str]:
    """A command that serves, and has a child of its own."""
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return [sys.executable, str(path), "{port}"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary files are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def group(number: int) -> list[int]:
    """The living processes of a process group."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()
            if int(fields[2]) == number and fields[0] not in "ZX":
                pids.append(int(name))
    return pids


def processes_in(log: str) -> list[int]:
    line = next(line for line in log.splitlines() if line.startswith("child"))
    return [int(word) for word in line.split() if word.isdigit()]


def test_an_environment_is_served_and_stepped(temporary: Path) -> None:
    with ProcessProvider(ROOT / "envs" / "echo_env", ready_timeout_s=60) as provider:
        assert provider.base_url.startswith("http://127.0.0.1:")
        with GenericEnvClient(provider.base_url) as client:
            assert client.reset().done is False
        log = provider.log_path
        assert log is not None
        wait_until(lambda: "echo_env is served" in log.read_text())
    assert "Shutting down" in provider.log()
    assert list(temporary.iterdir()) == []
    with pytest.raises(RuntimeError, match="has not been started"):
        _ = provider.base_url


@pytest.mark.slow
def test_a_client_starts_and_stops_the_provider_that_it_is_given(temporary: Path) -> None:
    provider = ProcessProvider(ROOT / "envs" / "echo_env", ready_timeout_s=60)
    with GenericEnvClient(provider=provider) as client:
        assert client.reset().done is False
        url = provider.base_url
    assert ask_health(url, 1) is not None
    assert list(temporary.iterdir()) == []


def test_any_command_may_serve_and_ends_with_all_that_it_started(server: list[str], temporary: Path) -> None:
    provider = ProcessProvider(command=server, env_vars={"GREETING": "one"})
    url = provider.start(env_vars={"GREETING": "two"})
    provider.wait_for_ready(60)
    started = processes_in(provider.log())
    assert all(is_alive(pid) for pid in started)
    with pytest.raises(RuntimeError, match="already running"):
        provider.start()
    provider.stop()
    provider.stop()
    wait_until(lambda: not any(is_alive(pid) for pid in started))
    assert ask_health(url, 1) is not None
    assert list(temporary.iterdir()) == []
    assert provider.start() != ""
    provider.wait_for_ready(60)
    provider.stop()


def test_a_server_that_ignores_signals_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv.providers.server_process.GRACE_S", 0.3)
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
    provider = ProcessProvider(command=[sys.executable, "-c", script + "while True: signal.pause()"])
    provider.start()
    wait_until(lambda: "deaf" in provider.log())
    assert provider._server is not None
    pid = provider._server.pid
    assert len(group(pid)) == 2
    provider.stop()
    wait_until(lambda: group(pid) == [])


def test_a_port_that_was_asked_for_is_the_one_that_is_got(server: list[str], free_port: Callable[[], int]) -> None:
    port = free_port()
    provider = ProcessProvider(command=server)
    try:
        assert provider.start(port) == f"http://127.0.0.1:{port}"
        provider.wait_for_ready(60)
    finally:
        provider.stop()


def test_the_port_is_also_in_a_variable(tmp_path: Path) -> None:
    script = "import http.server, os, pathlib; os.chdir(os.environ['WWW']); http.server.test("
    script += "http.server.SimpleHTTPRequestHandler, port=int(os.environ['PORT']), bind='127.0.0.1')"
    (tmp_path / "health").write_text("ok")
    with ProcessProvider(
        command=[sys.executable, "-c", script], env_vars={"WWW": str(tmp_path)}, ready_timeout_s=60
    ) as provider:
        assert ask_health(provider.base_url, 30) is None


def test_a_server_that_dies_is_reported_at_once_with_its_last_output(temporary: Path) -> None:
    script = "import sys; print('no such module', file=sys.stderr); sys.exit(3)"
    provider = ProcessProvider(command=[sys.executable, "-c", script])
    provider.start()
    with pytest.raises(ServerDied, match=r"exited prematurely with code 3(.|\n)*no such module") as caught:
        provider.wait_for_ready(280)
    assert caught.value.log == "no such module"
    assert provider.log() == "no such module"
    assert list(temporary.iterdir()) == []


def test_a_server_that_a_signal_ends_is_reported(temporary: Path) -> None:
    provider = ProcessProvider(command=[sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    provider.start()
    with pytest.raises(ServerDied, match=r"code 137"):
        provider.wait_for_ready(280)


def test_a_target_that_cannot_be_served_is_reported_as_by_serve(temporary: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ServerDied, match="no folder, file or module"),
        ProcessProvider(tmp_path / "nothing", ready_timeout_s=200),
    ):
        raise AssertionError("it was served")
    assert list(temporary.iterdir()) == []


def test_a_server_that_does_not_answer_is_a_timeout_and_is_stopped(temporary: Path) -> None:
    script = "import os, signal; print('loading', os.getpid(), flush=True); signal.pause()"
    provider = ProcessProvider(command=[sys.executable, "-c", script])
    provider.start()
    wait_until(lambda: "loading" in provider.log())
    with pytest.raises(ServerNotReady, match=r"did not become ready within 0.3 s(.|\n)*loading") as caught:
        provider.wait_for_ready(0.3)
    assert isinstance(caught.value, TimeoutError)
    wait_until(lambda: not is_alive(int(caught.value.log.split()[1])))
    assert list(temporary.iterdir()) == []


def test_a_program_that_is_missing_leaves_nothing(temporary: Path) -> None:
    with pytest.raises(ProviderUnavailable, match="`no-such-program` cannot be started"):
        ProcessProvider(command=["no-such-program"]).start()
    with pytest.raises(ProviderError, match="cannot be started"):
        ProcessProvider(command=[sys.executable], cwd=temporary / "nowhere").start()
    assert list(temporary.iterdir()) == []


def test_a_log_is_kept_where_it_is_wanted(server: list[str], tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("from before\n")
    for _ in range(2):
        with ProcessProvider(command=server, log_path=path, ready_timeout_s=60) as provider:
            assert "from before" not in provider.log()
    assert path.read_text().startswith("from before\nchild")
    assert path.read_text().count("child") == 2


def test_either_a_target_or_a_command_is_needed() -> None:
    for arguments in ({}, {"target": "x", "command": ["y"]}, {"command": "a string"}, {"command": ()}):
        with pytest.raises(ValueError, match="target"):
            ProcessProvider(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Unsupported kwargs for ProcessProvider: workers"):
        ProcessProvider("x").start(workers=3)
    with pytest.raises(ProviderError, match="has not been started"):
        ProcessProvider("x").wait_for_ready()


def test_a_port_stays_reserved_until_the_server_listens(server: list[str]) -> None:
    provider = ProcessProvider(command=[sys.executable, "-c", "import signal; signal.pause()"])
    try:
        port = int(provider.start().rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
    finally:
        provider.stop()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


OWNER = """
import os, signal, sys, threading, time
from openenv.providers import ProcessProvider
provider = ProcessProvider(command=[sys.executable, sys.argv[1], "{port}"], ready_timeout_s=60)
def start():
    provider.start()
    provider.wait_for_ready()
thread = threading.Thread(target=start)  # the end of the thread that started it is not its end
thread.start()
thread.join()
provider.wait_for_ready()
print(provider.log_path, flush=True)
print(provider.log(), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "forks" and os.fork() == 0:
    provider.stop()  # not the fork's to stop
    os._exit(0)
if sys.argv[2] == "forks":
    os.wait()
    provider.wait_for_ready()
    print("still there", flush=True)
"""


@pytest.fixture
def owner(server: list[str]) -> Callable[[str], subprocess.CompletedProcess[str]]:
    def run(how: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        return subprocess.run(
            [sys.executable, "-c", OWNER, server[1], how],
            capture_output=True, text=True, env=environment, timeout=120, check=False,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("how", ["killed", "forgets", "forks"])
def test_a_server_ends_with_its_owner_however_that_ends(
    owner: Callable[[str], subprocess.CompletedProcess[str]], how: str
) -> None:
    done = owner(how)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
    assert ("still there" in done.stdout) == (how == "forks")
    started = processes_in(done.stdout)
    wait_until(lambda: not any(is_alive(pid) for pid in started))
    wait_until(lambda: not Path(done.stdout.splitlines()[0]).parent.exists())


def test_an_interrupt_while_waiting_stops_the_server(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = ProcessProvider(command=[sys.executable, "-c", "import signal; signal.pause()"])
    provider.start()
    server = provider._server
    assert server is not None

    def interrupted(within_s: float) -> str | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        provider.wait_for_ready(60)
    wait_until(lambda: group(server.pid) == [])
    assert list(temporary.iterdir()) == []


def test_a_guardian_that_is_killed_takes_nothing_from_what_stop_ends(server: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        provider = ProcessProvider(command=server)
        stack.callback(provider.stop)
        provider.start()
        provider.wait_for_ready(60)
        started = processes_in(provider.log())
        assert provider._server is not None
        os.kill(provider._server.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in started))
