"""What is particular to local sandboxes: limits, mounts, rights, errors that help."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import openenv
from openenv.errors import SandboxError, SandboxUnavailable, SandboxUnsupported
from openenv.sandboxes import Limits, LocalSandboxes, Mount, Sandbox, SandboxSpec
from openenv.sandboxes.local import bubblewrap as bwrap
from openenv.sandboxes.local import cgroups

SOURCE = str(Path(openenv.__file__).parents[1])
Open = Callable[..., Sandbox]


def test_a_file_operation_that_is_killed_from_inside_is_an_error_and_not_a_short_file(box: Sandbox) -> None:
    box.exec("head -c 300000000 /dev/zero > zeros")
    each = "p=${p#/proc/}; case $p in 1|$$|$PPID) ;; *) kill -9 $p;; esac"
    killer = f"while :; do for p in /proc/[0-9]*; do {each}; done; done"
    job = box.start_bg(killer)
    try:
        with pytest.raises(SandboxError):
            for _ in range(50):
                assert len(box.read_bytes("zeros")) == 300_000_000
    finally:
        box.stop_processes()
    assert job.wait(30) == 137
    assert len(box.read_bytes("zeros", max_bytes=100)) == 100


def test_what_pretends_to_be_endless_is_not_read_without_a_limit(box: Sandbox) -> None:
    box.exec("truncate -s 1T sparse")
    with pytest.raises(SandboxError, match="max_bytes"):
        box.read_bytes("sparse")
    assert box.read_bytes("sparse", max_bytes=10) == bytes(10)


@pytest.mark.slow
def test_files_and_trees_are_copied_without_holding_them_in_memory(box: Sandbox, tmp_path: Path) -> None:
    size = 100_000_000
    tree = tmp_path / "tree"
    tree.mkdir()
    with (tree / "large").open("wb") as file:
        file.truncate(size)
    tracemalloc.start()
    try:
        box.upload(tree / "large", "file")
        box.download("file", tmp_path / "file")
        box.upload(tree, "tree")
        box.download("tree", tmp_path / "copy")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "file").stat().st_size == (tmp_path / "copy" / "large").stat().st_size == size
    assert peak < size / 4


def test_a_file_that_is_too_large_to_download_leaves_nothing_behind(box: Sandbox, tmp_path: Path) -> None:
    box.exec("truncate -s 1T sparse")
    with pytest.raises(SandboxError):
        box.download("sparse", tmp_path / "sparse")
    assert not (tmp_path / "sparse").exists()


# Limits


def test_running_out_of_memory_is_reported(open_local: Open) -> None:
    box = open_local(limits=Limits(memory_mb=64, disk_mb=32))
    result = box.exec(["python3", "-c", "x = bytearray(400_000_000)"])
    assert (result.exit_code, result.oom) == (137, True)
    assert not box.exec("true").oom


def test_the_first_process_is_not_the_one_that_is_killed_for_memory(open_local: Open) -> None:
    box = open_local(limits=Limits(memory_mb=64, disk_mb=64))
    box.exec("head -c 45000000 /dev/zero > $HOME/file; head -c 100000000 /dev/zero > /tmp/file")
    for _ in range(3):
        box.exec(["python3", "-c", "x = [bytearray(1_000_000) for _ in range(1000)]"])
    assert box.exec("echo alive").stdout == "alive\n"


def test_without_control_groups_a_sandbox_starts_only_on_request(
    local: LocalSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> cgroups.Hierarchy:
        raise SandboxUnavailable("no control groups, use require_cgroup=False")

    monkeypatch.setattr(cgroups, "find", nowhere)
    strict = LocalSandboxes()
    for _ in range(2):  # the second start must not make do with what the first one prepared
        with pytest.raises(SandboxUnavailable, match="require_cgroup=False"):
            strict.open()
    backend = LocalSandboxes(require_cgroup=False)
    with backend.open() as box:
        assert box.exec("echo ok").stdout == "ok\n"
    assert "limits" not in backend.features


# The layout


def test_home_can_be_elsewhere(open_local: Open) -> None:
    for home in ("/workspace", "/root", "/tmp/deep/home"):
        box = open_local(home=home)
        assert box.workdir == f"{home}/workdir"
        assert box.exec("cd; pwd; touch x workdir/x && echo ok").stdout == f"{home}\nok\n"


@pytest.mark.parametrize("home", ["/", "/usr", "relative", "/home/../etc", "/proc/x", "/usr/local/me"])
def test_home_cannot_be_where_the_system_is(local: LocalSandboxes, home: str) -> None:
    with pytest.raises(SandboxUnsupported):
        local.open(SandboxSpec(home=home))


def test_mounts_can_lie_in_the_work_folder(open_local: Open, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "data").write_text("data")
    box = open_local(mounts=(Mount(tmp_path, "/home/user/workdir/input"),))
    assert box.exec("cat input/data; touch new && echo ok").stdout == "dataok\n"


def test_a_mount_that_is_not_there_or_in_the_way_is_refused(local: LocalSandboxes, tmp_path: Path) -> None:
    for mount in (Mount(tmp_path / "missing", "/opt/x"), Mount(tmp_path, "/usr"), Mount(tmp_path, "relative")):
        with pytest.raises(SandboxUnsupported):
            local.open(SandboxSpec(mounts=(mount,)))
    assert local.leftovers() == []


def test_python_inside_is_this_one_without_its_virtual_environment(box: Sandbox) -> None:
    result = box.exec(["python3", "-c", "import sys, ssl, json; print(json.dumps([sys.version, sys.prefix]))"])
    assert json.loads(result.stdout) == [sys.version, sys.base_prefix]
    assert box.exec(["python3", "-c", "import pytest_timeout"]).exit_code != 0 or sys.prefix == sys.base_prefix


def test_what_is_handed_in_at_start_is_not_inherited_by_commands(box: Sandbox) -> None:
    assert sorted(box.exec("ls /proc/self/fd").stdout.split())[:3] == ["0", "1", "2"]
    assert len(box.exec("ls /proc/$$/fd").stdout.split()) <= 4


def test_unneeded_system_calls_are_refused(box: Sandbox) -> None:
    code = """
import ctypes, errno, os, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": [321, 250, 323, 425, 272, 165], "aarch64": [280, 219, 282, 425, 97, 40]}[platform.machine()]
for number in numbers:
    assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS), number
for family in (17, 38, 40, 9):
    try:
        socket.socket(family, socket.SOCK_RAW)
    except OSError as error:
        assert error.errno == errno.EAFNOSUPPORT, error
    else:
        raise AssertionError(family)
try:
    socket.socket(16, socket.SOCK_RAW, 9)
except OSError as error:
    assert error.errno == errno.EAFNOSUPPORT
socket.socket(16, socket.SOCK_RAW, 0)
import threading
threading.Thread(target=print, args=("fine",)).start()
"""
    result = box.exec(["python3", "-c", code])
    assert (result.stdout, result.stderr) == ("fine\n", "")


def test_a_large_request_is_passed_on(box: Sandbox) -> None:
    words = ["x" * 100_000] * 12
    result = box.exec(["/bin/sh", "-c", 'printf "%s" "$@" | wc -c', "sh", *words])
    assert result.stdout.strip() == "1200000"
    assert box.exec(["true", "x" * 3_000_000]).exit_code == 126


def test_a_mount_that_the_user_inside_cannot_read_is_refused(local: LocalSandboxes, tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o700)
    if not bwrap.is_privileged():
        pytest.skip("the sandbox's user is the user of these tests")
    with pytest.raises(SandboxUnsupported, match="chmod"):
        local.open(SandboxSpec(mounts=(Mount(tmp_path / "shut", "/opt/shut"),)))


def test_what_cannot_be_passed_to_a_program_is_refused(box: Sandbox) -> None:
    for refused in (
        lambda: box.exec(["echo", "a\0b"]),
        lambda: box.exec("true", envs={"A=B": "c"}),
        lambda: box.exec("true", envs={"A": "b\0"}),
        lambda: box.exec([]),
    ):
        with pytest.raises(ValueError):
            refused()


def test_a_tree_that_cannot_be_packed_is_an_error_of_the_sandbox(box: Sandbox, tmp_path: Path) -> None:
    box.exec(["python3", "-c", "import os\nfor _ in range(900):\n os.mkdir('deep' * 4); os.chdir('deep' * 4)"])
    with pytest.raises(SandboxError, match="cannot be read"):
        box.pack(box.workdir, tmp_path / "deep.tar")
    assert not (tmp_path / "deep.tar").exists()


def test_files_without_end_do_not_end_the_sandbox(open_local: Open) -> None:
    box = open_local(limits=Limits(memory_mb=48, disk_mb=48))
    many = "import os\nfor i in range(1_000_000): os.close(os.open(f'/tmp/{i}', os.O_CREAT))"
    assert box.exec(["python3", "-c", many]).exit_code != 0
    box.stop_processes()
    assert box.is_alive()  # type: ignore[attr-defined]


# Errors that help


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ('ID=debian\nVERSION_ID="12"\n', "apt-get install -y bubblewrap"),
        ('NAME="Linux Mint"\nID=linuxmint\nID_LIKE="ubuntu debian"\n', "apt-get install -y bubblewrap"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf install -y bubblewrap"),
        ("ID=arch\n", "pacman -S --noconfirm bubblewrap"),
        ("ID=alpine\n", "apk add bubblewrap"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "zypper install -y bubblewrap"),
    ],
)
def test_the_install_command_is_that_of_the_distribution(tmp_path: Path, release: str, command: str) -> None:
    (tmp_path / "os-release").write_text(release)
    assert bwrap.install_command(tmp_path / "os-release").removeprefix("sudo ") == command


def test_an_unknown_distribution_gets_the_name_of_the_package(tmp_path: Path) -> None:
    assert "bubblewrap" in bwrap.install_command(tmp_path / "none")


def test_missing_bubblewrap_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxUnavailable, match=r"bubblewrap, which is not installed. Install it with: \S+"):
        LocalSandboxes().check()


def test_a_bubblewrap_that_fails_says_why(
    local: LocalSandboxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap 0.8.0 && exit\n'
        "echo 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    backend = LocalSandboxes()
    with pytest.raises(SandboxUnavailable, match="uid map"):
        backend.open()
    assert backend.leftovers() == []


def test_an_old_bubblewrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho bubblewrap 0.3.1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    with pytest.raises(SandboxUnavailable, match=r"0\.5"):
        LocalSandboxes().check()


def test_the_user_inside_is_never_root() -> None:
    with pytest.raises(ValueError, match="root"):
        LocalSandboxes(uid=0)


AS_A_USER = """
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
from openenv.sandboxes import LocalSandboxes, self_check
only = sys.argv[2:]
results = self_check(LocalSandboxes(require_cgroup=False), only=only)
for result in results:
    if result.status == "failed":
        print(result.id, result.detail)
print("checked", len(results))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a user already")
@pytest.mark.parametrize(
    "only", ["exec.home isolation. port.ask", pytest.param("tree. snapshot.", marks=pytest.mark.slow)]
)
def test_sandboxes_work_for_users_without_rights(local: LocalSandboxes, tmp_path: Path, only: str) -> None:
    python = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), None)
    if python is None or shutil.which("setpriv") is None:
        pytest.skip("there is no Python, or no setpriv, that a user without rights can run")
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 10))"], capture_output=True)
    if b"True" not in version.stdout:
        pytest.skip(f"{python} is too old")
    copy = Path("/tmp") / f"openenv-test-{os.getpid()}"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        become = [
            "setpriv",
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
            "env",
            "-i",
            "PATH=/usr/bin:/bin",
        ]
        result = subprocess.run(
            [*become, python, "-c", AS_A_USER, str(copy), *only.split()],
            capture_output=True,
            text=True,
            timeout=110,
            cwd="/tmp",
        )
    finally:
        shutil.rmtree(copy)
    if "user namespaces" in result.stderr:
        pytest.skip("this machine forbids user namespaces")
    assert result.stdout.startswith("checked"), result.stdout + result.stderr


def test_what_runs_a_sandbox_refuses_to_run_anywhere_else() -> None:
    init = Path(bwrap.__file__).parent / "init_process.py"
    result = subprocess.run([sys.executable, "-I", "-S", str(init), "0"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "only" in result.stderr
