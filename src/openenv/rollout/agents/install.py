"""Installing agents: a cache per machine, by name and version, and native programs from npm packages.

Knows folders, locks, npm and ELF files. Must not know any agent.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv.errors import AgentUnavailable
from openenv.rollout.agents.base import Installation
from openenv.sandboxes.base import Mount
from openenv.sandboxes.host import open_locked

INSIDE = "/opt/openenv/agents"
"""The folder of agents inside a sandbox."""
_CPUS = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_TAIL = 2000


def installed(place: Path, build: Callable[[Path], None]) -> Path:
    """Return a folder of the cache. If it is missing, `build` fills it, in one process at a time.

    Raises:
        AgentUnavailable: the cache cannot be written, or `build` raised it.
    """
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle = open_locked(place.with_name(f"{place.name}.lock"))
        try:
            if not place.is_dir():
                _build(place, build)
        finally:
            os.close(handle)
    except OSError as exc:
        raise AgentUnavailable(f"The cache {place.parent} cannot be used: {exc}") from exc
    return place


def run_installer(argv: Sequence[str], *, cwd: Path, what: str, timeout_s: float = 900.0) -> None:
    """Run a package manager.

    Raises:
        AgentUnavailable: it failed; the message has the command and the end of its output.
    """
    command = " ".join(argv)
    try:
        done = subprocess.run(
            list(argv), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError as exc:
        raise AgentUnavailable(f"{what} cannot be installed: {argv[0]} is missing. It would run `{command}`.") from exc
    except subprocess.TimeoutExpired as exc:
        raise AgentUnavailable(f"{what} cannot be installed: `{command}` took more than {timeout_s:g} s.") from exc
    if done.returncode != 0:
        output = (done.stderr or done.stdout).decode("utf-8", "replace")[-_TAIL:].strip()
        raise AgentUnavailable(f"{what} cannot be installed: `{command}` exited with {done.returncode}: {output}")


def _build(place: Path, build: Callable[[Path], None]) -> None:
    # Build in a temporary folder and rename it, so that an interrupted installation never looks complete.
    for left in place.parent.glob(f".{place.name}.*"):  # left by an interrupted installation
        shutil.rmtree(left, ignore_errors=True)
    draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        build(draft)
        draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class NpmProgram:
    """A native program in an npm package: npm fetches it into the cache, sandboxes mount it read-only.

    Only the package of this platform is fetched and none of its scripts run, so a sandbox needs no Node.

    Args:
        name: The agent's name, also in the cache.
        package: The package for npm, with `{platform}` (such as `linux-x64`) and `{version}` in it.
        folder: Where npm puts the package below `node_modules`, with `{platform}` in it.
        program: The program's path in the package, with `{triple}` (such as `x86_64-unknown-linux-musl`) in it.
        tree: The part of the package that is mounted; by default the program alone.
        command: The name of an installed program on the PATH.
    """

    name: str
    package: str
    folder: str
    program: str
    command: str
    tree: str | None = None

    def install(self, cache: Path, version: str, report: Callable[[str], None], *, variant: str = "") -> Installation:
        """Find the program in the cache, or fetch it.

        Raises:
            AgentUnavailable: neither works; the message names the command.
        """
        target = f"linux-{cpu()}{variant}"
        place = cache / "agents" / f"{self.name}-{version}-{target}"
        package = self.package.format(platform=target, version=version)

        def fetch(draft: Path) -> None:
            report(f"installing {self.name} {version} with npm, once per machine")
            flags = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--no-package-lock", "--force")
            run_installer(
                ["npm", "install", "--prefix", str(draft), *flags, package], cwd=draft, what=f"The agent {self.name}"
            )
            program = self._path(draft, target, self.program)
            if not is_native(program):
                raise AgentUnavailable(f"The npm package {package} has no program at {program.relative_to(draft)}")
            program.chmod(0o755)

        root = installed(place, fetch)
        program = self._path(root, target, self.program)
        if self.tree is None:
            return self.mount_file(program, version)
        tree, inside = self._path(root, target, self.tree), f"{INSIDE}/{self.name}"
        executable = f"{inside}/{program.relative_to(tree).as_posix()}"
        return Installation(mounts=(Mount(tree, inside),), executable=executable, version=version)

    def on_path(self) -> Path | None:
        """Return the program if it is already installed and native, else None."""
        command = shutil.which(self.command)
        path = Path(command).resolve() if command else None
        return path if path is not None and is_native(path) else None

    def mount_file(self, path: Path, version: str) -> Installation:
        """Use a program outside the cache."""
        inside = f"{INSIDE}/{self.name}/{self.command}"
        return Installation(mounts=(Mount(path, inside),), executable=inside, version=version)

    def _path(self, root: Path, target: str, path: str) -> Path:
        """Return the path of a package file below npm's target folder."""
        triple = f"{'x86_64' if '-x64' in target else 'aarch64'}-unknown-linux-musl"
        return root / "node_modules" / self.folder.format(platform=target) / path.format(triple=triple)


def cpu() -> str:
    """Return npm's name of the processor.

    Raises:
        AgentUnavailable: the agents do not support it.
    """
    machine = platform.machine().lower()
    if machine not in _CPUS:
        raise AgentUnavailable(f"This agent has no package for {machine}")
    return _CPUS[machine]


def libc_suffix() -> str:
    """Return `-musl` on systems with that C library, else an empty text."""
    return "-musl" if any(Path("/lib").glob("ld-musl-*")) else ""


def needs_baseline_build(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this is an x86 processor without AVX2; some programs have a separate build for those."""
    if cpu() != "x64":
        return False
    try:
        return "avx2" not in cpuinfo.read_text("utf-8", "replace")
    except OSError:
        return False


def is_native(path: Path) -> bool:
    """Return whether a file is a program for Linux, not a script."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False
