"""A user of its own for each local sandbox that root starts."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from openenv.errors import SandboxError, SandboxUnavailable
from openenv.sandboxes import LocalSandboxes, Mount, Sandbox, SandboxSpec
from openenv.sandboxes.local import bubblewrap
from openenv.sandboxes.local import sandbox as local_sandbox
from openenv.sandboxes.local.sandbox import UserIds

pytestmark = pytest.mark.skipif(not bubblewrap.is_privileged(), reason="only root gives sandboxes users of their own")


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    return tmp_path / "ids.lock"


def uid(box: Sandbox) -> int:
    return int(box.exec("id -u").stdout)


def test_each_sandbox_has_a_user_of_its_own(local: LocalSandboxes) -> None:
    with ExitStack() as stack:
        boxes = [stack.enter_context(local.open()) for _ in range(3)]
        uids = [uid(box) for box in boxes]
        assert len(set(uids)) == 3
        for box in boxes:
            done = box.exec('[ "$(id -u)" = "$(id -g)" ] && whoami && stat -c %U ~ . && touch file')
            assert done.stdout == "user\n" * 3


INOTIFY = """
import ctypes
libc = ctypes.CDLL(None)
count = 0
while libc.inotify_init() >= 0: count += 1
print(count, flush=True)
import signal; signal.pause()
"""


def test_a_sandbox_that_uses_up_what_its_user_may_have_harms_no_other(open_local: Callable[..., Sandbox]) -> None:
    greedy, neighbour = open_local(), open_local()
    output: queue.Queue[bytes] = queue.Queue()
    greedy.start_bg(["python3", "-c", INOTIFY], on_output=lambda _, data: output.put(data))
    assert int(output.get(timeout=30)) >= 100
    code = "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)"
    assert greedy.exec(["python3", "-c", code]).stdout == "False\n"
    assert neighbour.exec(["python3", "-c", code]).stdout == "True\n"


def test_files_can_be_mounted_packed_and_unpacked_whoever_the_user_is(local: LocalSandboxes, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("mounted")
    tmp_path.chmod(0o755)
    archive = tmp_path / "tree.tar"
    with local.open(SandboxSpec(mounts=(Mount(tmp_path / "data", "/opt/data"),))) as one, local.open() as two:
        one.exec("cat /opt/data/file > copy; chmod 600 copy; mkdir -m 700 shut; echo 1 > shut/file")
        one.pack(one.workdir, archive)
        two.unpack(archive, two.workdir)
        done = two.exec("cat copy shut/file; echo 2 >> shut/file; stat -c %U copy shut")
        assert done.stdout == "mounted1\nuser\nuser\n"
        one.download("shut", tmp_path / "shut")
        assert (tmp_path / "shut" / "file").stat().st_uid == os.geteuid()


def test_a_user_is_free_again_when_its_sandbox_has_ended(monkeypatch: pytest.MonkeyPatch, lock_file: Path) -> None:
    monkeypatch.setattr(local_sandbox, "LOCK_FILE", lock_file)
    backend = LocalSandboxes(uid=range(70_000, 70_002))
    one, two = backend.open(), backend.open()
    assert {uid(one), uid(two)} == {70_000, 70_001}
    with pytest.raises(SandboxError, match="70000-70001"):
        backend.open()
    assert backend.leftovers() == []
    one.close()
    three = backend.open()
    two.exec("kill -9 -1")
    two.kill()
    backend.open().close()
    del three  # not closed
    backend.open().close()


def test_a_sandbox_that_does_not_start_leaves_no_user_behind(
    local: LocalSandboxes, tmp_path: Path, lock_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sandbox, "LOCK_FILE", lock_file)
    backend = LocalSandboxes(uid=range(70_000, 70_001))
    for _ in range(2):
        with pytest.raises(SandboxError):
            backend.open(SandboxSpec(mounts=(Mount(tmp_path / "missing", "/opt/x"),)))
    backend.open().close()


HOLDER = """
import sys
from pathlib import Path
from openenv.sandboxes.local.sandbox import UserIds
ids = UserIds(range(70_000, 70_003), lock_file=Path(sys.argv[1]))
print(ids.take(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(lock_file: Path) -> Iterator[subprocess.Popen[str]]:
    """Another program that has one of the users 70000 to 70002."""
    argv = [sys.executable, "-c", HOLDER, str(lock_file)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_two_programs_never_use_the_same_user(holder: subprocess.Popen[str], lock_file: Path) -> None:
    assert holder.stdout is not None
    taken = int(holder.stdout.readline())
    one = UserIds(range(70_000, 70_003), lock_file=lock_file)
    other = UserIds(range(70_000, 70_003), lock_file=lock_file)  # a second backend of this program
    assert {taken, one.take(), other.take()} == {70_000, 70_001, 70_002}
    with pytest.raises(SandboxError):
        one.take()
    holder.kill()  # a crash
    holder.wait()
    assert one.take() == taken


def test_users_are_handed_out_once_to_any_number_of_threads(lock_file: Path) -> None:
    ids = UserIds(range(70_000, 70_200), lock_file=lock_file)
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: ids.take(), range(200)))
    assert sorted(taken) == list(range(70_000, 70_200))


def test_without_a_lock_file_this_program_still_uses_none_twice(tmp_path: Path) -> None:
    ids = UserIds(range(70_000, 70_003), lock_file=tmp_path / "missing" / "lock")
    assert sorted(ids.take() for _ in range(3)) == [70_000, 70_001, 70_002]


def test_users_that_do_not_exist_here_are_refused() -> None:
    with pytest.raises(SandboxUnavailable, match="4294967000-4294967999"):
        LocalSandboxes(uid=range(4_294_967_000, 4_294_968_000)).open()


def test_the_range_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_SANDBOX_UIDS", "81000-81009")
    with LocalSandboxes().open() as box:
        assert uid(box) in range(81_000, 81_010)
    with LocalSandboxes(uid=4321).open() as box:
        assert uid(box) == 4321
