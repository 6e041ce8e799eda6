"""Catalogues as files: strict JSON, a digest of the content, writes that are all or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from .models import MAX_CATALOG_BYTES, CatalogError, CatalogSnapshot

_LIMIT = f"the catalogue is larger than {MAX_CATALOG_BYTES // 2**20} MiB"


def parse_json(data: str) -> object:
    """Return a JSON document; names in objects are unique, and numbers finite.

    Raises:
        CatalogError: It is no such document.
    """
    try:
        # Python accepts NaN and repeated names; other readers do not, or choose another value.
        document: object = json.loads(data, object_pairs_hook=_object, parse_constant=_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CatalogError(f"it is not valid JSON: {error}") from error
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise CatalogError(f"a JSON object has a name twice: {', '.join(repeated)}")
    return values


def _constant(word: str) -> NoReturn:
    raise CatalogError(f"{word} is not allowed in JSON")


def catalog_digest(snapshot: CatalogSnapshot) -> str:
    """Return the SHA-256 of everything in a catalogue but its digest, over JSON with sorted names and no spaces."""
    # One canonical text, so that the digest does not depend on formatting.
    content = snapshot.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"digest"})
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def require_complete(snapshot: CatalogSnapshot) -> None:
    """Raise for a catalogue that has errors or was changed.

    Raises:
        CatalogError: It is one of these.
    """
    if not snapshot.complete:
        paths = ", ".join(issue.path for issue in snapshot.issues if issue.severity == "error")
        raise CatalogError(f"the catalogue is incomplete: {paths} had errors. Correct them and build it again")
    if catalog_digest(snapshot) != snapshot.digest:
        raise CatalogError("the catalogue was changed after it was built: its digest is another one. Build it again")


def load_catalog(path: str | Path) -> CatalogSnapshot:
    """Read a complete catalogue; nothing that it refers to is fetched.

    Raises:
        CatalogError: It cannot be read, is incomplete, or was changed.
    """
    try:
        with Path(path).open("rb") as file:
            # One byte more shows that the file is too large.
            data = file.read(MAX_CATALOG_BYTES + 1)
    except OSError as error:
        raise CatalogError(f"the catalogue {path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_CATALOG_BYTES:
        raise CatalogError(_LIMIT)
    try:
        snapshot = CatalogSnapshot.model_validate(parse_json(data.decode("utf-8")))
    except (UnicodeDecodeError, ValidationError) as error:
        raise CatalogError(f"{path} does not follow the profile 0.1-draft: {_first(error)}") from error
    require_complete(snapshot)
    return snapshot


def _first(error: ValueError) -> str:
    """Return the first mistake only; one wrong field of an entry can have many consequences."""
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    return f"{place}: {detail['msg']}" if place else detail["msg"]


def write_catalog(snapshot: CatalogSnapshot, path: str | Path) -> None:
    """Write a catalogue, also an incomplete one; the file has either its old content or all of the new one.

    Raises:
        CatalogError: The digest does not fit, or the file cannot be written.
    """
    if catalog_digest(snapshot) != snapshot.digest:
        raise CatalogError("the catalogue's digest is not that of its content")
    content = snapshot.model_dump(mode="json", by_alias=True, exclude_none=True)
    text = json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if len(text.encode()) > MAX_CATALOG_BYTES:
        raise CatalogError(_LIMIT)
    target = Path(path)
    try:
        # Write beside the target and rename: readers see the old or the new file, never a part.
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                # Rename can reach the disk before the content does.
                os.fsync(file.fileno())
            os.replace(name, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    except OSError as error:
        raise CatalogError(f"the catalogue {path} cannot be written: {error.strerror or error}") from error
