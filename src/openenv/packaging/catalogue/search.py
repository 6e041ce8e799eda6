"""Search a catalogue by words or identifier, and list the changes between two; works offline."""

from __future__ import annotations

import difflib
import re

from .models import CatalogChanges, CatalogError, CatalogSnapshot, DiscoveryEntry, SearchMatch, SupersededEntry
from .serialization import require_complete

SUPPORTED_FILTERS = frozenset({"name", "license", "provider", "artifact_availability", "tags", "type"})
_MAX_QUERY = 8192
_MAX_RESULTS = 1000


def search_catalog(
    snapshot: CatalogSnapshot, query: str, *, filters: dict[str, str] | None = None, limit: int = 20
) -> list[SearchMatch]:
    """Return the entries that match words of a query, best matches first; without words all entries.

    Args:
        snapshot: A complete catalogue.
        query: Words of a task, matched with names, descriptions, tags, tools and typical questions.
        filters: Exact values of fields, from `SUPPORTED_FILTERS`.
        limit: How many entries at most, 1 to 1000.

    Raises:
        CatalogError: The catalogue is incomplete, or an argument is wrong.
    """
    # Searching a broken catalogue could hide the best match.
    require_complete(snapshot)
    if not 1 <= limit <= _MAX_RESULTS:
        raise CatalogError(f"the limit must be from 1 to {_MAX_RESULTS}, not {limit}")
    if len(query) > _MAX_QUERY:
        raise CatalogError(f"the query is longer than {_MAX_QUERY} characters")
    filters = filters or {}
    for name in sorted(filters.keys() - SUPPORTED_FILTERS):
        # A typo in a filter is an error; ignoring it would return everything.
        near = difflib.get_close_matches(name, SUPPORTED_FILTERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(sorted(SUPPORTED_FILTERS))}"
        raise CatalogError(f"unknown filter {name!r}: {hint}")
    matches = []
    for entry in snapshot.entries:
        if all(value in _values(entry, name) for name, value in filters.items()):
            score = match_score(query, *_texts(entry))
            if score is not None:
                matches.append(SearchMatch(entry=entry, score=score))
    # Ties are ordered by identifier, so results are the same every time.
    matches.sort(key=lambda match: (-match.score, match.entry.identifier))
    return matches[:limit]


def match_score(query: str, *texts: str) -> int | None:
    """Return how many percent of a query's words the texts have: whole words, without case.

    None means that they have no word of it. A query without words matches everything, with 0.
    """
    wanted = _words(query)
    common = wanted & _words(" ".join(texts))
    if wanted and not common:
        return None
    return round(100 * len(common) / len(wanted)) if wanted else 0


def resolve_entry(snapshot: CatalogSnapshot, identifier: str) -> DiscoveryEntry:
    """Return the entry with exactly this identifier.

    Raises:
        CatalogError: There is none, or the catalogue is incomplete.
    """
    require_complete(snapshot)
    by_identifier = {entry.identifier: entry for entry in snapshot.entries}
    if identifier in by_identifier:
        return by_identifier[identifier]
    # Users often pass the name; tell them the identifier instead of guessing.
    named = [entry.identifier for entry in snapshot.entries if entry.display_name == identifier]
    hint = f": {identifier} is the name of {named[0]}" if named else ": `openenv discover` shows the identifiers"
    raise CatalogError(f"no entry has the identifier {identifier!r}{hint}")


def compare_catalogs(previous: CatalogSnapshot, current: CatalogSnapshot) -> CatalogChanges:
    """Return which environments were added, withdrawn, changed by a new commit, or corrected at the same one.

    Raises:
        CatalogError: One is incomplete, or they are not of the same publisher, repository and folder.
    """
    for snapshot in (previous, current):
        require_complete(snapshot)
    # Otherwise every environment would count as added or withdrawn.
    if _scope(previous) != _scope(current):
        raise CatalogError("the catalogues are of different publishers, repositories or folders")
    # The path identifies an environment across commits.
    before = {entry.data.source.path: entry for entry in previous.entries}
    after = {entry.data.source.path: entry for entry in current.entries}
    pairs = [SupersededEntry(previous=before[path], current=after[path]) for path in sorted(before.keys() & after)]
    is_same_card = [pair.previous.identifier == pair.current.identifier for pair in pairs]
    return CatalogChanges(
        added=[after[path] for path in sorted(after.keys() - before)],
        withdrawn=[before[path] for path in sorted(before.keys() - after)],
        superseded=[pair for pair, same in zip(pairs, is_same_card, strict=True) if not same],
        corrected=[
            pair for pair, same in zip(pairs, is_same_card, strict=True) if same and pair.previous != pair.current
        ],
    )


def _scope(snapshot: CatalogSnapshot) -> tuple[str, str, str]:
    return snapshot.publisher, snapshot.source.uri, snapshot.inventory.root


def _words(text: str) -> set[str]:
    """Return the words of a text; `_` separates words, too, as in names."""
    return set(re.findall(r"[^\W_]+", text.casefold()))


def _texts(entry: DiscoveryEntry) -> list[str]:
    hints = [*entry.tags, *entry.capabilities, *entry.representative_queries]
    return [entry.display_name, entry.data.description, *hints]


def _values(entry: DiscoveryEntry, name: str) -> list[str]:
    values: dict[str, list[str]] = {
        "name": [entry.data.name],
        "license": [entry.data.license],
        "provider": [entry.data.source.provider],
        "artifact_availability": [entry.data.artifact_availability],
        "tags": entry.tags,
        "type": [entry.type],
    }
    return values[name]
