"""System call filters: that of local sandboxes run by a small interpreter of classic BPF, and that of containers."""

from __future__ import annotations

import errno
import struct
from typing import Any

import pytest

from openenv.sandboxes import seccomp

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PLAIN = {"x86_64": {"read": 0, "clone": 56, "ioctl": 16, "socket": 41, "mount": 165, "clone3": 435, "ptrace": 101}}
PLAIN["aarch64"] = {"read": 63, "clone": 220, "ioctl": 29, "socket": 198, "mount": 40, "clone3": 435, "ptrace": 117}


def decide(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """Run the filter on one system call, as the kernel does."""
    program = seccomp.program(machine)
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, audit or AUDIT[machine], 0, *padded)
    at, accumulator = 0, 0
    while True:
        operation, then, otherwise, value = code[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif operation == 0x06:
            return int(value)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            at += then if holds else otherwise


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_ordinary_calls_are_allowed(machine: str) -> None:
    for name in ("read", "ptrace"):
        assert decide(machine, PLAIN[machine][name]) == ALLOW


def test_dangerous_calls_are_refused(machine: str) -> None:
    assert decide(machine, PLAIN[machine]["mount"]) == REFUSE | errno.EPERM


def test_calls_whose_arguments_cannot_be_seen_seem_not_to_exist(machine: str) -> None:
    assert decide(machine, PLAIN[machine]["clone3"]) == REFUSE | errno.ENOSYS


def test_processes_and_threads_can_be_made_but_no_namespaces(machine: str) -> None:
    clone = PLAIN[machine]["clone"]
    for fine in (17, 0x3D0F00, 0x4111):  # fork, a thread, vfork
        assert decide(machine, clone, fine) == ALLOW
    for namespace in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, clone, namespace | 17) == REFUSE | errno.EPERM


def test_terminals_cannot_be_typed_into(machine: str) -> None:
    ioctl = PLAIN[machine]["ioctl"]
    assert decide(machine, ioctl, 0, 0x5412) == REFUSE | errno.EPERM
    assert decide(machine, ioctl, 0, 0x541C) == REFUSE | errno.EPERM
    assert decide(machine, ioctl, 0, 0x1_0000_5412) == REFUSE | errno.EPERM  # the kernel drops the upper half
    assert decide(machine, ioctl, 0, 0x5401) == ALLOW


def test_only_common_kinds_of_sockets_can_be_made(machine: str) -> None:
    number = PLAIN[machine]["socket"]
    for family in (1, 2, 10):
        assert decide(machine, number, family) == ALLOW
    for family in (9, 17, 29, 38, 40, 44):
        assert decide(machine, number, family) == REFUSE | errno.EAFNOSUPPORT
    assert decide(machine, number, 16, 3, 0) == ALLOW
    assert decide(machine, number, 16, 3, 9) == REFUSE | errno.EAFNOSUPPORT


def test_calls_of_another_kind_of_processor_are_the_end(machine: str) -> None:
    assert decide(machine, 0, audit=0x40000003) == KILL


def test_the_second_table_of_x86_is_closed() -> None:
    assert decide("x86_64", 0x40000000 | 165) == REFUSE | errno.ENOSYS


def test_an_unknown_processor_has_no_filter() -> None:
    assert not seccomp.supported("riscv64")
    with pytest.raises(KeyError):
        seccomp.program("riscv64")


def test_the_program_is_not_too_long_for_the_kernel(machine: str) -> None:
    assert len(seccomp.program(machine)) // 8 < 4096


def test_containers_are_refused_what_local_sandboxes_are_refused() -> None:
    profile = seccomp.container_profile()
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    rules: list[dict[str, Any]] = profile["syscalls"]  # type: ignore[assignment]
    always = [rule["names"] for rule in rules if rule["action"] == "SCMP_ACT_ALLOW" and not rule["args"]]
    allowed = {name for names in always for name in names}
    for machine in ("x86_64", "aarch64"):
        assert not allowed & seccomp.forbidden(machine).keys()
    assert not allowed & {"socket", "clone", "personality", "socketcall"}  # only with some arguments
    assert {"read", "execve", "futex", "ptrace", "inotify_init1", "memfd_create"} <= allowed
