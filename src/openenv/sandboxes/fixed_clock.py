"""A wall clock that stands still for the commands of a sandbox: `fix_clock`.

Linux can shift the monotonic clocks of a sandbox (time namespaces), but not its wall clock. So functions of the C
library are replaced, by a shared library in `LD_PRELOAD`. It is made here, byte by byte: nothing must be installed, and
images need no compiler. Only the wall clock is replaced. `libfaketime` 0.9.10 (Debian 12) replaces more: in Python
3.11, either `time.sleep` or the timeouts of locks fail with it, because both use absolute times of the monotonic clock.

Limits: dynamically linked programs for x86-64. Static programs, such as those in Go, see the real time, and so do times
of files, which the kernel sets.
"""

from __future__ import annotations

import struct
from datetime import datetime, timezone

from openenv.errors import SandboxUnsupported
from openenv.sandboxes.base import Sandbox

# The library, with one page of headers, symbols and code, and one page that the dynamic linker may write to:
#
#   0x0000  ELF header, 4 program headers, symbols, their names, hash table, code        read, execute
#   0x1000  dynamic section                                                              read, write
_PAGE = 0x1000
_SYMBOLS_AT = 64 + 4 * 56
_NAMES = (b"clock_gettime", b"gettimeofday", b"time")
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_READ, _WRITE, _EXECUTE = 4, 2, 1
_HASH_TABLE, _STRINGS, _SYMBOLS, _STRINGS_SIZE, _SYMBOL_SIZE = 4, 5, 6, 10, 11  # tags of the dynamic section
_FUNCTION = 0x12  # global


def clock_seconds(text: str) -> int:
    """Return a time in UTC, such as `2026-01-01 12:00`, in seconds since 1970.

    Raises:
        ValueError: It is not such a time.
    """
    try:
        at = datetime.fromisoformat(text.removesuffix("Z"))
        return int((at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)).timestamp())
    except ValueError:
        raise ValueError(f"clock must be a time such as '2026-01-01 12:00', not {text!r}") from None


def fix_clock(sandbox: Sandbox, seconds: int) -> dict[str, str]:
    """Return environment variables with which the commands of a sandbox see one time, in seconds since 1970.

    Raises:
        SandboxUnsupported: Its programs do not see it.
    """
    place = f"/tmp/.openenv-clock-{seconds}.so"  # its content depends on nothing else
    envs = {"LD_PRELOAD": place}
    try:
        sandbox.write_bytes(place, clock_library(seconds), mode=0o755)
        shown = sandbox.exec(["date", "+%s"], envs=envs)
    except OSError as exc:
        problem = str(exc)
    else:
        if shown.stdout.strip() == str(seconds):
            return envs
        problem = f"`date` says {(shown.stdout + shown.stderr).strip()[:200]!r}"
    raise SandboxUnsupported(
        "The clock of this sandbox cannot be fixed: that needs dynamically linked programs for x86-64, and a writable "
        f"/tmp. {problem}. Run without the option `clock`"
    )


def clock_library(seconds: int) -> bytes:
    """Return a shared library for x86-64 whose wall clock always shows one time."""
    codes = _codes(struct.pack("<q", seconds))
    strings = b"\0" + b"".join(name + b"\0" for name in _NAMES)
    strings_at = _SYMBOLS_AT + 24 * (1 + len(_NAMES))
    hash_at = _aligned(strings_at + len(strings))
    # One bucket, and its chain through all symbols: 1 -> 2 -> 3 -> end.
    table = struct.pack("<2I1I4I", 1, 1 + len(_NAMES), 1, 0, 2, 3, 0)
    code_at = _aligned(hash_at + len(table))
    symbols, code = [bytes(24)], b""
    for name, body in zip(_NAMES, codes, strict=True):
        at = code_at + len(code)
        symbols.append(struct.pack("<IBBHQQ", strings.index(b"\0" + name + b"\0") + 1, _FUNCTION, 0, 1, at, len(body)))
        code += body + b"\xcc" * (_aligned(len(body)) - len(body))
    entries = {
        _HASH_TABLE: hash_at,
        _STRINGS: strings_at,
        _SYMBOLS: _SYMBOLS_AT,
        _STRINGS_SIZE: len(strings),
        _SYMBOL_SIZE: 24,
        0: 0,
    }
    dynamic = b"".join(struct.pack("<qQ", tag, value) for tag, value in entries.items())
    size = code_at + len(code)
    headers = [
        _header(_LOAD, _READ | _EXECUTE, 0, size),
        _header(_LOAD, _READ | _WRITE, _PAGE, len(dynamic)),
        _header(_DYNAMIC, _READ | _WRITE, _PAGE, len(dynamic)),
        _header(_STACK, _READ | _WRITE, 0, 0),  # without it, stacks would become executable
    ]
    # 64 bits, little-endian, System V; a shared object (3) for x86-64 (62), with 4 program headers and no sections.
    start = b"\x7fELF\x02\x01\x01" + bytes(9)
    start += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, len(headers), 64, 0, 0)
    first = b"".join([start, *headers, *symbols, strings])
    first = first.ljust(hash_at, b"\0") + table
    first = first.ljust(code_at, b"\0") + code
    return first.ljust(_PAGE, b"\0") + dynamic


def _codes(seconds: bytes) -> tuple[bytes, ...]:
    """Return the machine code of the functions, in the order of `_NAMES`."""
    load = b"\x48\xb8" + seconds  # mov rax, seconds
    done = b"\x31\xc0\xc3"  # xor eax, eax; ret
    clock_gettime = (
        b"\x85\xff\x74\x15"  # test edi, edi; je fixed             CLOCK_REALTIME
        b"\x83\xff\x05\x74\x10"  # cmp edi, 5; je fixed            CLOCK_REALTIME_COARSE
        b"\xb8\xe4\x00\x00\x00\x0f\x05"  # mov eax, 228; syscall   all other clocks are the kernel's
        b"\x85\xc0\x79\x03"  # test eax, eax; jns end
        b"\x83\xc8\xff"  # or eax, -1                              the kernel knows no such clock
        b"\xc3\x90"  # end: ret; nop
    )
    fixed = load + b"\x48\x89\x06" + b"\x48\xc7\x46\x08\0\0\0\0" + done  # mov [rsi], rax; mov qword [rsi+8], 0
    # test rdi, rdi; je +21: no structure; mov [rdi], rax; mov qword [rdi+8], 0
    gettimeofday = b"\x48\x85\xff\x74\x15" + load + b"\x48\x89\x07" + b"\x48\xc7\x47\x08\0\0\0\0" + done
    time = load + b"\x48\x85\xff\x74\x03" + b"\x48\x89\x07" + b"\xc3"  # test rdi, rdi; je +3; mov [rdi], rax; ret
    return clock_gettime + fixed, gettimeofday, time


def _header(kind: int, rights: int, at: int, size: int) -> bytes:
    """Return a program header; places in the file and in memory are the same."""
    return struct.pack("<IIQQQQQQ", kind, rights, at, at, at, size, size, 16 if kind == _STACK else _PAGE)


def _aligned(position: int) -> int:
    return -(-position // 16) * 16
