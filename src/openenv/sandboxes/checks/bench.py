"""The parts of a check of the sandbox contract. Knows no backend."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from openenv.errors import SandboxGone
from openenv.sandboxes.base import ExecResult, Sandbox, Sandboxes, SandboxSpec


class NotOffered(Exception):
    """The backend or its image lacks a feature that the check needs."""


@dataclass(frozen=True, slots=True)
class ContractCheck:
    """A rule of the contract, and the function that raises when a backend breaks it."""

    id: str
    says: str
    """A sentence that is true if the check passes."""
    run: Callable[[CheckBench], None]
    feature: str | None = None
    """The feature of a backend that this needs, if it is optional."""


CheckFunction: TypeAlias = "Callable[[CheckBench], None]"


class CheckGroup(list[ContractCheck]):
    """The checks of one topic, in the order of their definition.

    Args:
        feature: The optional feature that all of them need, or None.
    """

    def __init__(self, feature: str | None = None) -> None:
        super().__init__()
        self._feature = feature

    def check(
        self, check_id: str, says: str, *, feature: str | None = None
    ) -> Callable[[CheckFunction], CheckFunction]:
        """Add a function as a check: `@FILES.check("file.large", "20 MB go in and come out.")`."""

        def add(run: CheckFunction) -> CheckFunction:
            run.__doc__ = says
            self.append(ContractCheck(check_id, says, run, feature or self._feature))
            return run

        return add


class CheckBench:
    """The tools of a check: a backend, a shared sandbox, new sandboxes, and a folder of the host.

    A context manager.
    """

    def __init__(self, backend: Sandboxes) -> None:
        self.backend = backend
        self._shared: Sandbox | None = None
        self._own: list[Sandbox] = []
        self._temporary = tempfile.TemporaryDirectory(prefix="openenv-check-", ignore_cleanup_errors=True)
        self._has_python: bool | None = None
        self._is_alive = False
        self._folders = 0

    def __enter__(self) -> CheckBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.tidy()
        if self._shared is not None:
            self._shared.close()
        self._temporary.cleanup()

    @property
    def box(self) -> Sandbox:
        """A sandbox that checks share; a check must not kill it."""
        if self._shared is not None and not self._is_alive:
            try:
                self._shared.exists("/")
            except SandboxGone:
                self._shared.close()
                self._shared = None
        if self._shared is None:
            self._shared = self.backend.open(SandboxSpec(timeout_s=3600))
        self._is_alive = True
        return self._shared

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Open a sandbox for one check; it is closed after it."""
        box = self.backend.open(spec or SandboxSpec(timeout_s=600))
        self._own.append(box)
        return box

    def tidy(self) -> None:
        """Close the sandboxes that a check opened, and trust the shared one no longer."""
        self._is_alive = False
        while self._own:
            self._own.pop().close()

    def folder(self) -> Path:
        """Make a new folder of the host."""
        self._folders += 1
        folder = Path(self._temporary.name, str(self._folders))
        folder.mkdir()
        return folder

    def python(self, box: Sandbox, code: str, *, timeout: float = 30) -> ExecResult:
        """Run Python code inside; not every image has it."""
        if self._has_python is None:
            self._has_python = box.exec(["python3", "-c", ""]).exit_code == 0
        if not self._has_python:
            raise NotOffered("python3 is missing inside")
        return box.exec(["python3", "-c", code], timeout=timeout)


def same(actual: object, expected: object, what: str = "") -> None:
    """Fail unless two values are equal."""
    if actual != expected:
        raise AssertionError(f"{what or 'it'} is {_short(actual)}, not {_short(expected)}")


def holds(condition: object, what: str) -> None:
    """Fail unless something is true."""
    if not condition:
        raise AssertionError(what)


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...]) -> Iterator[None]:
    """Fail unless the block raises this."""
    try:
        yield
    except kind:
        return
    names = kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)
    raise AssertionError(f"{names} was not raised")


def seconds() -> str:
    """Return a unique time to sleep, by which a process can be recognised."""
    return str(100_000_000 + secrets.randbelow(800_000_000))


def eventually(condition: Callable[[], bool], what: str, within_s: float = 10.0) -> None:
    """Fail unless something becomes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(what)
        time.sleep(0.02)


def running(box: Sandbox, word: str) -> bool:
    """Return whether a process with this word in its command line runs inside; needs no tool but a shell."""
    lister = (
        'for p in /proc/[0-9]*/cmdline; do c=$(tr "\\0" " " <"$p" 2>/dev/null); '
        'case "$c" in *LISTER*) ;; *"$1"*) echo "$c";; esac; done'
    )
    return word in box.exec(["/bin/sh", "-c", f": LISTER; {lister}", "sh", word]).stdout


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"
