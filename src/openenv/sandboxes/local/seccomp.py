"""The system call filter of local sandboxes: a classic BPF program, assembled here, for x86_64 and aarch64.

A second line of defence behind namespaces, an unprivileged user and no capabilities: it takes away parts of the kernel
that programs under test do not need. In order, for every system call:

    another architecture         kill the process
    x32 number                   ENOSYS
    a call of _DENIED            EPERM
    a call of _ABSENT            ENOSYS, so that programs fall back on the older call
    clone with a new namespace   EPERM
    ioctl TIOCSTI, TIOCLINUX     EPERM: they type into the terminal of others
    socket                       only unix, inet, inet6 and netlink/route; else EAFNOSUPPORT
    everything else              allowed
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6; of AF_NETLINK (16) only the routing protocol (0)."""
_NETLINK, _ROUTE = 16, 0

_DENIED = {
    # name: (x86_64, aarch64)
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
_ABSENT = {
    # programs have a second way when these do not exist
    "clone3": (435, 435),  # its flags lie in memory, where no filter sees them
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
}


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    column: int
    clone: int
    ioctl: int
    socket: int
    second_table: int | None
    """Numbers from here on belong to the second table of calls (x32), which is refused as a whole."""


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 0, clone=56, ioctl=16, socket=41, second_table=0x40000000),
    "aarch64": _Machine(0xC00000B7, 1, clone=220, ioctl=29, socket=198, second_table=None),
}


def supported(machine: str) -> bool:
    """Return whether there is a filter for this kind of processor."""
    return machine in _MACHINES


def program(machine: str) -> bytes:
    """Return the filter as an array of `sock_filter` instructions.

    Raises:
        KeyError: There is none for this kind of processor.
    """
    about = _MACHINES[machine]
    code = [_load(_ARCHITECTURE), _instruction(_JUMP_EQUAL, about.audit, 1, 0), _answer(_KILL), _load(_NUMBER)]
    if about.second_table is not None:
        code += [_instruction(_JUMP_GREATER_EQUAL, about.second_table, 0, 1), _refuse(errno.ENOSYS)]
    for numbers, error in ((_DENIED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for pair in numbers.values():
            number = pair[about.column]
            if number is not None:
                code += [_instruction(_JUMP_EQUAL, number, 0, 1), _refuse(error)]
    code += _only(about.clone, _clone_rule())
    code += _only(about.ioctl, _ioctl_rule())
    code += _only(about.socket, _socket_rule())
    code.append(_answer(_ALLOW))
    return b"".join(code)


def _clone_rule() -> list[bytes]:
    return [_argument(0), _instruction(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refuse(errno.EPERM), _answer(_ALLOW)]


def _ioctl_rule() -> list[bytes]:
    return [
        _argument(1),
        _instruction(_JUMP_EQUAL, _TIOCSTI, 1, 0),
        _instruction(_JUMP_EQUAL, _TIOCLINUX, 0, 1),
        _refuse(errno.EPERM),
        _answer(_ALLOW),
    ]


def _socket_rule() -> list[bytes]:
    code = [_argument(0)]
    for family in _FAMILIES:
        code += [_instruction(_JUMP_EQUAL, family, 0, 1), _answer(_ALLOW)]
    code += [
        _instruction(_JUMP_EQUAL, _NETLINK, 0, 3),
        _argument(2),
        _instruction(_JUMP_EQUAL, _ROUTE, 0, 1),
        _answer(_ALLOW),
        _refuse(errno.EAFNOSUPPORT),
    ]
    return code


def _only(number: int, rule: list[bytes]) -> list[bytes]:
    """Apply a rule, which must end in an answer, to one system call."""
    return [_instruction(_JUMP_EQUAL, number, 0, len(rule)), *rule]


def _argument(index: int) -> bytes:
    return _load(_ARGUMENTS + 8 * index)  # the low half: both processors are little endian


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset)


def _refuse(error: int) -> bytes:
    return _answer(_ERRNO | error)


def _answer(value: int) -> bytes:
    return _instruction(_RETURN, value)


def _instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", code, then, otherwise, value)
