"""Proof, on the host: which verify lines must show that they came to their own end, and whether they did.

Knows the file `openenv_proof.py`, which writes the proof in the verifier's sandbox. Must not know verdicts.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
import secrets
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path

from openenv.sandboxes.base import Sandbox

_FILE = "openenv_proof.py"
_MODULE = "openenv_proof"
_MAX_BYTES = 1024 * 1024
_READ_S = 30.0
_WORD = re.compile(r"(?<!import )(?<!install )(?<![\w.-])(?:pytest|py\.test)(?![\w./=-])")
_REPEATS = re.compile(r"[$`]|\(\)|(?<![\w.-])(?:for|while|until|xargs|-exec|parallel|eval)(?![\w.-])")
"""What may run a part of a line more than once."""
_PYTHON = re.compile(
    r"(?<![\w./-])((?:[\w.~-]*/)*python[\d.]*)(\s+)(-c(?=\s)|-m\s+unittest(?![\w.])|[\w./-]+\.py(?![\w./-]))"
)
_PATHS = re.compile(r"(?<![\w$])PYTHONPATH=(?=(\s|$)?)")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the host found of a line's proof."""

    seen: bool = False
    """Something in the line asked to prove that it ends; where nothing did, it was out of reach."""
    problem: str | None = None
    """Why the line is not proven, or None when it is."""


@dataclass(slots=True)
class Proof:
    """What one run of one line has to prove with.

    Args:
        line: The line.
        home: The home inside; the proof lies beside the work folder, not in it.
        root: The work folder inside.
        files: The verifier's own files.
    """

    line: str
    home: str
    root: str
    files: Mapping[str, str] = field(default_factory=dict)
    _secrets: list[str] = field(default_factory=list)
    _name: str = field(default_factory=lambda: f".openenv-{secrets.token_hex(8)}")

    @property
    def folder(self) -> str:
        """Return where passes and proofs lie inside."""
        return f"{self.home}/{self._name}"

    def environment(self) -> dict[str, str]:
        """Return what leads pytest, and scripts that ask, to the proof."""
        return {"PYTEST_PLUGINS": _MODULE, "PYTHONPATH": self.folder, "OPENENV_PROOF": self.folder}

    def command(self) -> str:
        """Return the line, with a stand-in where Python runs a check; a PYTHONPATH that it sets keeps the folder."""
        return _PATHS.sub(
            lambda found: f"PYTHONPATH={self.folder}{'' if found[1] is not None else ':'}",
            with_wrapper(self.line, self.files),
        )

    def lay(self, sandbox: Sandbox, archive: Path) -> None:
        """Lay the proof's file and its passes into a sandbox, by way of an archive on the host."""
        places = len(_WORD.findall(self.line)) + len(_PYTHON.findall(self.line))
        count = max(1, places) * (64 if _REPEATS.search(self.line) else 1)
        ours = sorted(posixpath.normpath(posixpath.join(self.root, path)) for path in self.files)
        self._secrets = [secrets.token_hex(16) for _ in range(count)]
        source = resources.files("openenv.rollout").joinpath(_FILE).read_bytes()
        with tarfile.open(archive, "w:") as out:
            _add(out, _FILE, source)
            for serial, secret in enumerate(self._secrets):
                words = {"serial": serial, "secret": secret, "root": self.root, "ours": ours}
                _add(out, f"pass-{serial:03}", json.dumps(words).encode())
        sandbox.unpack(archive, self.folder)

    def read(self, sandbox: Sandbox) -> Evidence:
        """Take the proof out of a sandbox, and judge it."""
        find = ["find", self.folder, "-maxdepth", "1", "-type", "f", "-name", "mark-*", "-size", "-64k"]
        done = sandbox.exec([*find, "-exec", "cat", "{}", "+"], cwd="/", timeout=_READ_S, max_output=_MAX_BYTES)
        marks = [mark for mark in map(_parsed, done.stdout.splitlines()) if mark is not None]
        return self.judge(marks)

    def judge(self, marks: list[dict[str, object]]) -> Evidence:
        """Say what marks are worth: everything that was begun must have been ended, with its own secret."""
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
        """Return which pass an ending was made with, or None for a forged one."""
        serial, secret = mark.get("ended"), mark.get("secret")
        if not isinstance(serial, int) or not 0 <= serial < len(self._secrets) or not isinstance(secret, str):
            return None
        return serial if secrets.compare_digest(secret.encode(), self._secrets[serial].encode()) else None


def with_wrapper(line: str, files: Mapping[str, str]) -> str:
    """Return a line in which Python runs `-c`, unittest and scripts of the verifier by way of the proof."""
    return _PYTHON.sub(partial(_wrapped, files), line)


def _wrapped(files: Mapping[str, str], found: re.Match[str]) -> str:
    what = found[3]
    if what[0] != "-":
        path = posixpath.normpath(what)
        texts = [
            text for name, text in files.items() if f"/{posixpath.normpath(name)}".endswith(f"/{path.lstrip('/')}")
        ]
        if not texts or any(proves_itself(text) or "os._exit" in text for text in texts):
            return found[0]
    return f"{found[1]}{found[2]}-m {_MODULE} {what}"


def runs_pytest(line: str) -> bool:
    """Say whether a shell line names pytest as something to run."""
    return _WORD.search(line) is not None


def proves_itself(text: str) -> bool:
    """Say whether a script, or a line, asks for proof of its own end."""
    return _MODULE in text


def could_not_load(output: str) -> bool:
    """Say whether Python complains that it cannot load the proof: the line keeps the environment from it."""
    return _MODULE in output and ("mport" in output or "No module named" in output)


def _parsed(line: str) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _add(out: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o600
    out.addfile(entry, io.BytesIO(content))
