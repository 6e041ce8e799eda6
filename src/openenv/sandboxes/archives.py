"""Tar files that a box's own tar made: cleaned of everything but files, folders and links before anybody reads them.

Knows tar, no sandbox. What it reads was made by somebody who may be hostile.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from openenv.errors import SandboxError, SandboxTreeError


def clean_archive(source: Path, archive: Path, *, max_bytes: int) -> None:
    """Copy a tar file without devices, pipes, owners, set-id bits and names that lead outside.

    Raises:
        SandboxError: it is no tar file, or its files hold more than `max_bytes`.
    """
    try:
        _copy_clean(source, archive, max_bytes)
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        archive.unlink(missing_ok=True)
        raise SandboxError(f"The sandbox sent no readable archive: {error}") from error
    except SandboxError:
        archive.unlink(missing_ok=True)
        raise


def _copy_clean(source: Path, archive: Path, max_bytes: int) -> None:
    total = 0
    with (
        tarfile.open(source, "r:", errors="surrogateescape") as old,
        tarfile.open(archive, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as new,
    ):
        for member in old:
            entry = _clean(member)
            if entry is None:
                continue
            total += member.size if member.isreg() else 0
            if total > max_bytes:
                raise SandboxTreeError(f"The tree holds more than {max_bytes} bytes.")
            new.addfile(entry, old.extractfile(member) if member.isreg() else None)


def _clean(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = _inner_name(member.name)
    if name is None or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    entry = tarfile.TarInfo(name)
    entry.type = tarfile.REGTYPE if member.isreg() else member.type
    entry.mode = member.mode & 0o777
    entry.mtime = int(member.mtime)
    entry.size = member.size if member.isreg() else 0
    if member.issym():
        entry.linkname = member.linkname
    elif member.islnk():
        first = _inner_name(member.linkname)
        if first is None:
            return None
        entry.linkname = first
    return entry


def _inner_name(name: str) -> str | None:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        return None
    return "/".join(parts) or "."
