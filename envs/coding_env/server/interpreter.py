"""The Python of one episode: `PythonSession` with this environment's limits and messages. Knows no rewards.

Code that takes too long is interrupted, as by Ctrl-C. If it does not stop, or ends the interpreter, its names are lost:
the next piece of code runs in a new interpreter with the same files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from openenv.sandboxes import Limits, Sandboxes
from openenv.sandboxes.python_session import PythonOptions, PythonSession


@dataclass(frozen=True, slots=True)
class InterpreterLimits:
    """Resources for the code of one episode."""

    step_s: float = 10.0
    episode_s: float = 3600.0
    output_bytes: int = 64 * 1024
    sandbox: Limits = field(default_factory=lambda: Limits(memory_mb=512, pids=64, cpus=1.0, disk_mb=256))


@dataclass(frozen=True, slots=True)
class CodeResult:
    """Output and exit code of a piece of code."""

    stdout: str
    stderr: str
    exit_code: int


class PythonInterpreter:
    """Runs pieces of code that share their names and files."""

    def __init__(self, backend: Sandboxes, limits: InterpreterLimits) -> None:
        self._limits = limits
        options = PythonOptions(
            limits=limits.sandbox, life_s=limits.episode_s, output_bytes=limits.output_bytes, prints_values=True
        )
        self._session = PythonSession(backend, options)

    def close(self) -> None:
        """End the sandbox."""
        self._session.close()

    def run(self, code: str, timeout_s: float | None = None) -> CodeResult:
        """Run a piece of code. `timeout_s` can shorten the step limit, not extend it.

        Raises:
            SandboxGone: The sandbox has ended, because the episode took too long.
        """
        seconds = self._limits.step_s if timeout_s is None else min(timeout_s, self._limits.step_s)
        reply = self._session.run(code, seconds, interrupts=True)
        too_long = f"TimeoutError: the code took longer than {seconds:g} s"
        note = {
            "finished": "",
            "interrupted": f"{too_long} and was interrupted.\n",
            "timed out": f"{too_long}. All names are lost; files are kept.\n",
            "process ended": f"The interpreter ended with exit code {reply.exit_code}. "
            "All names are lost; files are kept.\n",
        }[reply.end]
        error = reply.error if not reply.error or reply.error.endswith("\n") else f"{reply.error}\n"
        return CodeResult(reply.stdout, f"{reply.stderr}{error}{note}", reply.exit_code & 0xFF)
