"""Proof that a verify line reached its end: the half on the host.

Knows `openenv_proof.py`, the half that runs in the verifier's sandbox. Must not know verdicts.
"""

# Example: the line `pytest -q tests`. A test imports the agent's `solution.py`, which calls `os._exit(0)`.
#
#   host                                       verifier's sandbox
#   lay:  ~/.openenv-<random>/pass-000         {"serial": 0, "secret": "8d1f...", "root": ..., "ours": [...]}
#   run:  PYTEST_PLUGINS=openenv_proof         the plug-in, from the verifier's place (`inside.py`), reads pass-000 and
#         OPENENV_PROOF=~/.openenv-<random>    deletes it, with its own traces in the environment, before any test is
#                                              imported; writes {"begun": 0} to mark-*
#                                              solution.py ends the process: nothing writes the end
#   read: mark-*                               {"begun": 0} without {"ended": 0, "secret": "8d1f...", "ok": true}
#   -> exit code 0 does not count: "it was ended from within, before its own end"
#
# `python -c`, `python -m unittest` and scripts of the verifier run through the same module: the line becomes
# `python -m openenv_proof SCRIPT`. A pass works once, so a line that starts pytest twice has two.

from __future__ import annotations

import json
import posixpath
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from openenv.rollout.store.archives import write_archive
from openenv.sandboxes.base import Sandbox

_MODULE = "openenv_proof"
_MAX_BYTES = 1024 * 1024
_READ_S = 30.0
_WORD = re.compile(r"(?<!import )(?<!install )(?<![\w.-])(?:pytest|py\.test)(?![\w./=-])")
_REPEATS = re.compile(r"[$`]|\(\)|(?<![\w.-])(?:for|while|until|xargs|-exec|parallel|eval)(?![\w.-])")
"""Shell syntax that may run a part of a line more than once."""
_PYTHON = re.compile(
    r"(?<![\w./-])((?:[\w.~-]*/)*python[\d.]*)(\s+)(-c(?=\s)|-m\s+unittest(?![\w.])|[\w./-]+\.py(?![\w./-]))"
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The proof of a line, as the host read it."""

    seen: bool = False
    """Whether a proof began. If not, the line hides its environment from the proof module."""
    problem: str | None = None
    """Why the line is not proven, or None if it is."""


@dataclass(slots=True)
class Proof:
    """The passes for one run of one line, and the judgement of its marks.

    Args:
        line: The line.
        home: The home inside; the proof lies beside the work folder, not in it.
        root: The work folder inside.
        files: The verifier's files.
    """

    line: str
    home: str
    root: str
    files: Mapping[str, str] = field(default_factory=dict)
    _secrets: list[str] = field(default_factory=list)
    _name: str = field(default_factory=lambda: f".openenv-{secrets.token_hex(8)}")

    @property
    def folder(self) -> str:
        """The folder of passes and marks inside."""
        return f"{self.home}/{self._name}"

    def environment(self) -> dict[str, str]:
        """Return the variables that lead pytest and scripts to the proof."""
        return {"PYTEST_PLUGINS": _MODULE, "OPENENV_PROOF": self.folder}

    def command(self) -> str:
        """Return the line with a wrapper around each Python that runs a check."""
        return with_wrapper(self.line, self.files)

    def lay(self, sandbox: Sandbox, archive: Path) -> None:
        """Copy the passes into a sandbox, through an archive on the host."""
        places = len(_WORD.findall(self.line)) + len(_PYTHON.findall(self.line))
        count = max(1, places) * (64 if _REPEATS.search(self.line) else 1)
        ours = sorted(posixpath.normpath(posixpath.join(self.root, path)) for path in self.files)
        self._secrets = [secrets.token_hex(16) for _ in range(count)]
        files: dict[str, bytes] = {}
        for serial, secret in enumerate(self._secrets):
            words = {"serial": serial, "secret": secret, "root": self.root, "ours": ours}
            files[f"pass-{serial:03}"] = json.dumps(words).encode()
        write_archive(archive, files, mode=0o600)
        sandbox.unpack(archive, self.folder)

    def read(self, sandbox: Sandbox) -> Evidence:
        """Read the marks in a sandbox, and judge them."""
        find = ["find", self.folder, "-maxdepth", "1", "-type", "f", "-name", "mark-*", "-size", "-64k"]
        done = sandbox.exec([*find, "-exec", "cat", "{}", "+"], cwd="/", timeout=_READ_S, max_output=_MAX_BYTES)
        marks = [mark for mark in map(_parsed, done.stdout.splitlines()) if mark is not None]
        return self.judge(marks)

    def judge(self, marks: list[dict[str, object]]) -> Evidence:
        """Judge marks: every serial that begins must end, with its own secret."""
        begun = [mark["begun"] for mark in marks if "begun" in mark]
        if not begun:
            return Evidence(seen=False, problem="nothing in it proved that it came to its end")
        ended = {serial: mark for mark in marks if (serial := self._serial(mark)) is not None}
        for begin in begun:
            mark = ended.get(begin) if isinstance(begin, int) else None
            if mark is None:
                return Evidence(seen=True, problem="it was ended from within, before its own end")
            if mark.get("ok") is not True:
                return Evidence(seen=True, problem=str(mark.get("why") or "it did not run its tests")[:500])
        return Evidence(seen=True)

    def _serial(self, mark: dict[str, object]) -> int | None:
        """Return the serial of the pass that an end mark used, or None for a forged mark."""
        serial, secret = mark.get("ended"), mark.get("secret")
        if not isinstance(serial, int) or not 0 <= serial < len(self._secrets) or not isinstance(secret, str):
            return None
        return serial if secrets.compare_digest(secret.encode(), self._secrets[serial].encode()) else None


def with_wrapper(line: str, files: Mapping[str, str]) -> str:
    """Return the line with `-c`, unittest and scripts of the verifier wrapped in the proof module."""
    return _PYTHON.sub(partial(_wrapped, files), line)


def _wrapped(files: Mapping[str, str], match: re.Match[str]) -> str:
    target = match[3]
    if target[0] != "-":
        path = posixpath.normpath(target)
        texts = [
            text for name, text in files.items() if f"/{posixpath.normpath(name)}".endswith(f"/{path.lstrip('/')}")
        ]
        if not texts or any(proves_itself(text) or "os._exit" in text for text in texts):
            return match[0]
    return f"{match[1]}{match[2]}-m {_MODULE} {target}"


def runs_pytest(line: str) -> bool:
    """Return whether a shell line runs pytest."""
    return _WORD.search(line) is not None


def proves_itself(text: str) -> bool:
    """Return whether a script or a line begins a proof itself."""
    return _MODULE in text


def could_not_load(output: str) -> bool:
    """Return whether Python failed to load the proof module: the line hides the environment from it."""
    return _MODULE in output and ("mport" in output or "No module named" in output)


def _parsed(line: str) -> dict[str, object] | None:
    try:
        mark = json.loads(line)
    except ValueError:
        return None
    return mark if isinstance(mark, dict) else None
