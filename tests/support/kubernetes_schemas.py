"""Checks manifests with the schemas of `kubernetes-validate`, strictly: an unknown field is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jsonschema
from kubernetes_validate import utils
from referencing import Registry, Resource

OLDEST = (1, 28)
# Kinds of other projects, for which Kubernetes has no schema.
FOREIGN = ("agents.x-k8s.io", "extensions.agents.x-k8s.io")


def versions() -> list[str]:
    """Return the versions of Kubernetes that manifests must be valid for: 1.28 to the newest that there is."""
    found = {utils.major_minor(one) for one in utils.all_versions()}
    return sorted((one for one in found if _key(one) >= OLDEST), key=_key)


def problems(manifest: Mapping[str, Any], version: str) -> list[str]:
    """Return what is wrong with a manifest."""
    if manifest["apiVersion"].partition("/")[0] in FOREIGN:
        return []
    errors = _validator(version, manifest["apiVersion"], manifest["kind"]).iter_errors(dict(manifest))
    return [f"{'.'.join(str(part) for part in error.path)}: {error.message}" for error in errors]


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@lru_cache(maxsize=64)
def _validator(version: str, api_version: str, kind: str) -> Any:
    # As in `kubernetes_validate.utils.validate`, which reads the files again for every manifest.
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = Resource.from_contents(utils.schema_contents(f"{folder}/{kind.lower()}-{group}.json", version))
    registry = schema @ (_definitions(folder, version) @ Registry())
    return jsonschema.validators.Draft202012Validator(schema.contents, registry=registry)


@lru_cache(maxsize=16)
def _definitions(folder: str, version: str) -> Any:
    return Resource.from_contents(utils.schema_contents(f"{folder}/_definitions.json", version))
