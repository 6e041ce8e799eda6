"""Proof that a check reached its end, inside a verifier's sandbox: a pytest plug-in, a wrapper for Python that runs a
script, `-c` or unittest, and `begin` for scripts that prove it themselves.

The proof stops code that ends a check early. It does not stop code in the same process that searches the memory for
the secret. Standard library only: this file runs on the sandbox's Python.
"""

# The verifier puts this file into its place in the sandbox, and passes for one use each into another folder:
#
#   start of the check    take a pass, remove its traces from the environment   (no code of the agent is loaded yet)
#                         write mark {"begun": serial}
#   the check             imports and runs the agent's code
#   end of the check      write mark {"ended": serial, "secret": ..., "ok": ...}
#   host                  a serial that began must have ended with the right secret (`verify_lines.Proof`)

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # type checkers treat it as True; importing `typing` would load it into the check's process
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType
    from typing import Any

_NAME = "openenv_proof"
_PLUG_INS, _FOLDER = "PYTEST_PLUGINS", "OPENENV_PROOF"
_SKIPS = ("Skipped", "XFailed", "SkipTest")
_COMMAND = "<command>"
_LOOKS = ("collectonly", "setupplan", "setuponly", "showfixtures", "show_fixtures_per_test", "markers")
"""Options that make pytest run no test."""


class Pass:
    """A permission to prove one end, once."""

    def __init__(self, folder: str, content: dict[str, Any]) -> None:
        self.folder, self.content, self.pid = folder, content, os.getpid()
        self.mark({"begun": content.get("serial")})

    def mark(self, words: dict[str, object]) -> None:
        """Write a mark for the host."""
        if not self.folder:
            return  # no proof was requested
        name = f"mark-{'-'.join(sorted(words))}-{os.getpid()}"
        with open(os.path.join(self.folder, name), "a") as file:
            file.write(json.dumps(words) + "\n")

    def end(self, complaint: str | None = None) -> None:
        """Mark the end of the check. A forked child that continues the parent's code cannot."""
        if os.getpid() == self.pid:
            words = {"ended": self.content.get("serial"), "secret": self.content.get("secret")}
            self.mark({**words, "ok": complaint is None, "why": complaint})

    def foreign(self, traceback: TracebackType | None, test: str) -> str | None:
        """Return a file of the agent in a traceback, or None."""
        while traceback is not None:
            name = traceback.tb_frame.f_code.co_filename
            if self.is_foreign(name if name[:1] == "<" else os.path.abspath(name), test):
                return name
            traceback = traceback.tb_next
        return None

    def is_foreign(self, file: str, test: str) -> bool:
        """Return whether a file seems to be the agent's: in the work folder, and not a test."""
        if file[:1] == "<":  # code without a file; Python has frozen modules
            return file != _COMMAND and not file.startswith("<frozen ")
        root = self.content.get("root", "") + os.sep
        if not file.startswith(root) or file == test or file in self.content.get("ours", ()):
            return False
        return "test" not in file[len(root) :]


def _take() -> Pass | None:
    """Take a pass, or None if no proof was requested."""
    folder = os.environ.pop(_FOLDER, "")
    plug_ins = [name for name in os.environ.pop(_PLUG_INS, "").split(",") if name and name != _NAME]
    if plug_ins:  # a pytest that a test starts needs no proof
        os.environ[_PLUG_INS] = ",".join(plug_ins)
    if not folder:
        return None
    for name in sorted(os.listdir(folder)):
        if name.startswith("pass-"):
            mine = os.path.join(folder, f"taken-{name}")
            try:
                os.rename(os.path.join(folder, name), mine)
            except OSError:
                continue  # another process was quicker
            content: dict[str, Any] = {}
            with open(mine) as file:
                for line in file:
                    content.update(json.loads(line))
            os.unlink(mine)
            return Pass(folder, content)
    return Pass(folder, {})


def _is_program() -> bool:
    """Return whether this process is pytest itself, not a script that calls it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return str(spec.name).split(".")[0] == "pytest"
    return os.path.basename(sys.argv[0] if sys.argv else "") in ("pytest", "py.test")


_taken = _take()
_program = _is_program()


def begin() -> Callable[[], None]:
    """Return the function that a check calls at its end. Call `begin` first, before the agent's code is loaded."""
    global _taken
    taken, _taken = _taken, None
    return _nothing if taken is None else taken.end


def _nothing() -> None:
    """Do nothing: no proof was requested."""


def pytest_addoption(parser: object, pluginmanager: Any) -> None:
    """Register a witness of the session, and remove this module, so that nothing can import it."""
    global _taken
    import pytest  # pytest called this function, so it is installed

    if _taken is not None:
        pytest.hookimpl(hookwrapper=True)(Witness.pytest_runtest_makereport)
        pytest.hookimpl(hookwrapper=True, tryfirst=True)(Witness.pytest_cmdline_main)
        pluginmanager.register(Witness(_taken))
        _taken = None
    sys.modules.pop(_NAME, None)


class Witness:
    """A plug-in that watches the result of each test."""

    def __init__(self, taken: Pass) -> None:
        self.taken = taken
        self.session: Any = None
        self.passed = self.ended = 0
        self.wrong: str | None = None

    def pytest_sessionstart(self, session: object) -> None:
        """Remember the session."""
        self.session = session

    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, object, None]:
        """Refuse a skip that the agent's code raised: a test that it skips is not passed."""
        yield
        if call.excinfo is not None and call.excinfo.type.__name__ in _SKIPS and self.wrong is None:
            file = self.taken.foreign(call.excinfo.value.__traceback__, str(item.fspath))
            self.wrong = None if file is None else f"a test was skipped by {file}"

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the tests."""
        self.passed += report.when == "call" and report.passed
        self.ended += report.when == "teardown"

    def pytest_cmdline_main(self, config: Any) -> Generator[None, Any, None]:
        """Write the proof at the end of the session."""
        outcome = yield
        try:
            status = int(outcome.get_result() or 0)
        except BaseException as error:  # pytest handles it
            if type(error).__name__ == "UsageError":  # the line names a test or option that does not exist
                self.taken.end()
            return
        if os.getpid() != self.taken.pid:
            return
        if status and _program:
            _leave(status, self.taken)
        self.taken.end(None if status else self.complaint(config))

    def complaint(self, config: Any) -> str | None:
        """Return why a successful session does not count, or None."""
        if self.session is None or any(getattr(config.option, name, False) for name in _LOOKS):
            return self.wrong
        if self.passed == 0:
            return "no test passed"
        if self.ended < self.session.testscollected:
            return f"only {self.ended} of {self.session.testscollected} tests were run"
        return self.wrong


def main(arguments: list[str], taken: Pass) -> None:
    """Run Python with these arguments, and prove the end."""
    _before = sys.modules["__main__"]  # keep a reference, or Python would clear its names
    script = os.path.abspath(arguments[0])
    complaint = None
    try:
        if arguments[0] == "-m":
            complaint = _unittest(arguments)
        else:
            _execute(arguments)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if status == 0:
            file = taken.foreign(stop.__traceback__, script)
            taken.end(None if file is None else f"it was ended by {file}")
            return
        if not isinstance(stop.code, int):
            sys.stderr.write(f"{stop.code}\n")
        _leave(status, taken)
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.__excepthook__(type(error), error.with_traceback(traceback), traceback)
        _leave(130 if isinstance(error, KeyboardInterrupt) else 1, taken)
    else:
        taken.end(complaint)


def _leave(status: int, taken: Pass) -> None:
    """End a failed check at once, so that no exit handler of the agent can change the result."""
    taken.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 255)


def _execute(arguments: list[str]) -> None:
    """Run a script, or the text after `-c`, as the main module."""
    name, sys.argv = arguments[0], arguments
    module = type(sys)("__main__")
    if name == "-c":
        source: str | bytes = arguments[1]
        sys.argv, sys.path[0], name = ["-c", *arguments[2:]], "", _COMMAND
    else:
        with open(name, "rb") as file:
            source = file.read()
        sys.path[0], module.__file__ = os.path.dirname(os.path.realpath(name)), name
    sys.modules["__main__"] = module
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)


def _unittest(arguments: list[str]) -> str | None:
    """Run `-m unittest`; return why its end does not count, or None."""
    import unittest

    program = unittest.main(module=None, argv=["python -m unittest", *arguments[2:]], exit=False)
    result = program.result
    if not result.wasSuccessful():
        raise SystemExit(1)
    return None if result.testsRun > len(result.skipped) else "no test passed"


if __name__ == "__main__":
    main(sys.argv[1:], _taken or Pass("", {}))
