"""A sandbox that is driven through a shell: the whole protocol on top of one ability, to start `/bin/sh` inside.

Adds files, trees and ports to `shell_commands`, all by commands. Knows no engine.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from openenv.errors import SandboxError, SandboxTreeError, SandboxUnsupported
from openenv.sandboxes import shell_command as shell_script
from openenv.sandboxes import trees
from openenv.sandboxes.archives import clean_archive
from openenv.sandboxes.base import OnOutput, SandboxSpec, Stream
from openenv.sandboxes.shell_command import ShellRun
from openenv.sandboxes.shell_commands import START_S, Input, ShellCommands, ShellJob, slices
from openenv.sandboxes.stdio_tunnel import StdioTunnel, relay_source

_FILE_S = 600.0
_CHUNK = 1 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FILE_TOO_LARGE = 128 + 25  # SIGXFSZ
_NOT_THERE, _FOLDER, _NO_FILE, _FORBIDDEN = 44, 45, 46, 47


class ShellSandbox(ShellCommands):
    """A sandbox of which only a shell is asked. Backends add how one is started, and how the box ends."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self._tunnels: list[StdioTunnel] = []
        self._tunnelled: dict[int, Path] = {}

    def stop_processes(self) -> None:
        """Kill every process inside."""
        super().stop_processes()
        self._close_tunnels()
        for port, socket in self._tunnelled.items():  # the relays inside were killed too
            self._open_tunnel(socket, port)

    def _end(self, reason: str) -> None:
        self._close_tunnels()
        super()._end(reason)

    # Sockets

    def expose(self, socket: Path, *, port: int) -> str:
        """Let `http://127.0.0.1:PORT` inside reach a unix socket of the host, through a relay that runs inside."""
        return self._expose_by_tunnel(socket, port)

    def _expose_by_tunnel(self, socket: Path, port: int) -> str:
        self._open_tunnel(socket, port)
        self._tunnelled[port] = socket
        return f"http://127.0.0.1:{port}"

    def _open_tunnel(self, socket: Path, port: int) -> None:
        tunnel = StdioTunnel(socket)
        run = self._begin(
            ["python3", "-c", relay_source(), str(port)],
            envs={"PATH": _PATH},
            cwd="/",
            stdin=tunnel.frames,
            on_output=tunnel.received,
            max_output=0,
        )
        with self._lock:
            self._tunnels.append(tunnel)
        job = ShellJob(self, run)
        deadline = time.monotonic() + START_S
        while not tunnel.ready.wait(0.02):
            if job.is_over or time.monotonic() > deadline:
                tunnel.close()
                job.kill()
                raise self._tunnel_failure(job, run, port)

    def _tunnel_failure(self, job: ShellJob, run: ShellRun, port: int) -> SandboxError:
        if job.is_over and job.wait() in (126, 127):
            return SandboxUnsupported(
                f"Port {port} cannot be exposed in sandbox '{self.sandbox_id}': its network cannot be entered from "
                "here (that takes root and an engine on this machine), and there is no `python3` inside for a relay. "
                "Use an image with `python3`."
            )
        return SandboxError(f"Port {port} cannot be opened in sandbox '{self.sandbox_id}'.")

    def _close_tunnels(self) -> None:
        with self._lock:
            tunnels, self._tunnels = self._tunnels, []
        for tunnel in tunnels:
            tunnel.close()

    # Files

    def _tool(self, script: str, *, stdin: Input | None = None, on_output: OnOutput | None = None) -> ShellRun:
        """Run a script of our own on files, as the box's user, and raise what its exit code stands for."""
        keep = None if on_output is None else 0
        run = self._begin(
            script, envs={"PATH": _PATH, "LC_ALL": "C"}, cwd="/", stdin=stdin, on_output=on_output, max_output=keep
        )
        result = self._finish(run, _FILE_S)
        if result.exit_code == 0:
            return run
        words = result.stderr.strip() or f"exit code {result.exit_code}"
        errors: dict[int, Exception] = {
            _FILE_TOO_LARGE: SandboxTreeError(f"Sandbox '{self.sandbox_id}': the file that was written is too large."),
            _NOT_THERE: FileNotFoundError(f"There is no such file in sandbox '{self.sandbox_id}'."),
            _FOLDER: IsADirectoryError(f"This is a folder in sandbox '{self.sandbox_id}'."),
            _FORBIDDEN: PermissionError(f"The user of sandbox '{self.sandbox_id}' may not do this: {words}"),
        }
        raise errors.get(result.exit_code) or SandboxError(f"Sandbox '{self.sandbox_id}': {words}")

    def _path(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("A path cannot hold a NUL character.")
        return shlex.quote(shell_script.absolute(path, self.workdir))

    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return a file's content."""
        where = self._path(path)
        read = "cat" if max_bytes is None else f"head -c {max_bytes}"
        return self._tool(
            f"p={where}; [ -d $p ] && exit {_FOLDER}; [ -e $p ] || exit {_NOT_THERE}\n".replace("$p", '"$p"')
            + f'[ -f "$p" ] || {{ echo "no regular file" >&2; exit {_NO_FILE}; }}; [ -r "$p" ] || exit {_FORBIDDEN}\n'
            + f'exec {read} <"$p"'
        ).output("stdout")

    def write_bytes(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file as the sandbox's user, with its parent folders."""
        self._tool(
            f'p={self._path(path)}; [ -d "$p" ] && exit {_FOLDER}; mkdir -p "${{p%/*}}/" || exit {_FORBIDDEN}\n'
            f'[ -e "$p" ] && [ ! -f "$p" ] && {{ echo "no regular file" >&2; exit {_NO_FILE}; }}\n'
            f'cat >"$p" || exit {_FORBIDDEN}; chmod {mode & 0o7777:o} "$p"',
            stdin=partial(slices, content),
        )

    def exists(self, path: str) -> bool:
        """Say whether there is such a file or folder."""
        return self._tool(f"[ -e {self._path(path)} ] && printf yes; :").output("stdout") == b"yes"

    def pack(self, path: str, archive: Path, *, max_bytes: int = 512 * 1024 * 1024) -> None:
        """Write the tree at `path` into a tar file of the host."""
        with _scratch() as folder:
            raw = folder / "tree.tar"
            self._fetch_tree(path, raw, max_bytes)
            clean_archive(raw, archive, max_bytes=max_bytes)

    def unpack(self, archive: Path, path: str) -> None:
        """Unpack a tar file of the host below `path`, inside."""
        self._put_tree(archive, path)

    def upload(self, source: Path, path: str) -> None:
        """Copy a file or a tree of the host into the sandbox."""
        if not source.is_dir():
            self.write_bytes(path, source.read_bytes(), mode=source.stat().st_mode & 0o777)
            return
        with _scratch() as folder:
            with (folder / "tree.tar").open("wb") as file:
                trees.pack(str(source), file)
            self._put_tree(folder / "tree.tar", path)

    def download(self, path: str, target: Path) -> None:
        """Copy a file or a tree to the host."""
        try:
            content = self.read_bytes(path)
        except IsADirectoryError:
            with _scratch() as folder:
                self.pack(path, folder / "tree.tar")
                _unpack_here(folder / "tree.tar", target)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            target.unlink()
        target.write_bytes(content)

    def _tar_out(self, path: str, destination: str = "-") -> str:
        # GNU tar ends with 1 or 2 for files that changed or cannot be read; what it could read is there all the same.
        return (
            f'p={self._path(path)}; [ -e "$p" ] || exit {_NOT_THERE}\n'
            'if [ -d "$p" ]; then cd "$p" && set -- .; else cd "${p%/*}/" && set -- "./${p##*/}"; fi || exit '
            f"{_FORBIDDEN}\n"
            "find . -type d ! -perm -500 -exec chmod u+rx {} \\; 2>/dev/null\n"  # its owner may always do that
            "find . -type f ! -perm -400 -exec chmod u+r {} + 2>/dev/null\n"
            f'tar -cf {shlex.quote(destination)} "$@"; c=$?; [ $c -le 2 ] && c=0; exit $c'
        )

    def _tar_in(self, path: str, source: str = "-") -> str:
        return f'p={self._path(path)}; mkdir -p "$p" && cd "$p" || exit {_FORBIDDEN}; tar -xpf {shlex.quote(source)}'

    def _fetch_tree(self, path: str, raw: Path, max_bytes: int) -> None:
        """Write the tree at `path` into a file of the host as the box's tar makes it."""
        sink = _FileSink(raw, max_bytes)
        try:
            self._tool(self._tar_out(path), on_output=sink)
        finally:
            sink.close()

    def _put_tree(self, archive: Path, path: str) -> None:
        """Let the box's tar unpack a file of the host."""
        with archive.open("rb") as file:
            self._tool(self._tar_in(path), stdin=lambda: iter(lambda: file.read(_CHUNK), b""))


class _FileSink:
    """Writes the output stream to a file, up to a size that no tree of so many bytes has as an archive."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = path.open("wb")
        self._max_bytes = max_bytes
        self._left = max_bytes + max_bytes // 4 + (64 << 20)

    def __call__(self, stream: Stream, data: bytes) -> None:
        if stream == "stderr":
            return
        self._left -= len(data)
        if self._left < 0:
            raise SandboxTreeError(f"The tree holds more than {self._max_bytes} bytes.")
        self._file.write(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _unpack_here(archive: Path, target: Path) -> None:
    with archive.open("rb") as file:
        try:
            trees.unpack(file, str(target), leaving_links=False)
        except ValueError as error:
            raise SandboxError(f"The sandbox sent an archive that cannot be unpacked: {error}") from error


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="openenv-tree-") as folder:
        yield Path(folder)
