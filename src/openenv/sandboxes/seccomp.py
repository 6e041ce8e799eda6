"""System call filters of sandboxes: one list of forbidden calls, for local sandboxes and for containers.

A second line of defence behind namespaces, an unprivileged user and no capabilities: it takes away parts of the kernel
that programs under test do not need. For every system call:

                                 local: `program`                       containers: `container_profile`
    another architecture         kill the process                       the same
    x32 number                   ENOSYS                                 the same as another architecture
    a call of _DENIED            EPERM                                  EPERM
    a call of _ABSENT            ENOSYS: programs take the older call   ENOSYS
    clone with a new namespace   EPERM                                  EPERM
    socket                       only unix, inet, inet6 and             the same, else EPERM
                                 netlink/route; else EAFNOSUPPORT
    ioctl TIOCSTI, TIOCLINUX     EPERM: they type into the              allowed: commands have no terminal
                                 terminal of others
    everything else              allowed                                only _ALLOWED_IN_CONTAINERS; else EPERM

A profile replaces the engine's profile. The profile of containers therefore lists the allowed calls. It omits every
call that Docker refuses to a container without capabilities, and refuses unknown calls.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from functools import partial

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
    "clone3": (435, 435),  # its flags lie in memory, invisible to filters
    "io_setup": (206, 0),  # its contexts count for the whole machine (fs.aio-max-nr)
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
}
_ALLOWED_IN_CONTAINERS = """
accept accept4 access adjtimex alarm arch_prctl bind brk capget capset chdir chmod chown clock_getres clock_gettime
clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl
epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64
fallocate fanotify_mark fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork
fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_waitv futimesat get_robust_list get_thread_area
getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid
getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid
gettimeofday getuid getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy
io_getevents io_pgetevents io_setup io_submit ioctl ioprio_get ioprio_set kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listxattr llistxattr lremovexattr
lseek lsetxattr lstat madvise membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2
mlockall mmap modify_ldt mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap msgctl
msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat open openat openat2 pause pidfd_open
pidfd_send_signal pipe pipe2 poll ppoll prctl pread64 preadv preadv2 prlimit64 process_mrelease pselect6 ptrace
pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages
removexattr rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid
setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid
setxattr shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs statx symlink
symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime
utimensat utimes vfork wait4 waitid write writev
"""
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux, a 32 bit Linux, both with the version number 2.6, and to ask for the current one."""


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


def forbidden(machine: str) -> dict[str, int]:
    """Return the numbers of the calls that are refused with any arguments.

    Raises:
        KeyError: This kind of processor is not known.
    """
    column = _MACHINES[machine].column
    numbers = {name: pair[column] for name, pair in {**_DENIED, **_ABSENT}.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def program(machine: str) -> bytes:
    """Return the filter of local sandboxes as an array of `sock_filter` instructions.

    Raises:
        KeyError: This kind of processor is not supported.
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


def container_profile() -> dict[str, object]:
    """Return the filter as a profile that Docker and podman take in `--security-opt seccomp=FILE`."""
    family, protocol = partial(_equal, 0), partial(_equal, 2)
    rules = [
        _allow(*sorted(set(_ALLOWED_IN_CONTAINERS.split()) - _DENIED.keys() - _ABSENT.keys())),
        {"names": sorted(_ABSENT), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        _allow("clone", {"index": 0, "op": "SCMP_CMP_MASKED_EQ", "value": _NEW_NAMESPACES, "valueTwo": 0}),
        *(_allow("personality", _equal(0, value)) for value in _PERSONALITIES),
        *(_allow("socket", family(value)) for value in _FAMILIES),
        _allow("socket", family(_NETLINK), protocol(_ROUTE)),
    ]
    # Without the second tables of calls (i386, x32) of the first: `socketcall` there makes any kind of socket.
    machines = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "archMap": [{"architecture": machine, "subArchitectures": []} for machine in machines],
        "syscalls": rules,
    }


def _allow(*parts: str | dict[str, object]) -> dict[str, object]:
    """Allow calls if all conditions on their arguments hold."""
    names = [part for part in parts if isinstance(part, str)]
    conditions = [part for part in parts if not isinstance(part, str)]
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": conditions}


def _equal(index: int, value: int) -> dict[str, object]:
    return {"index": index, "op": "SCMP_CMP_EQ", "value": value}


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
