"""The backend of the page about own backends keeps the contract, and is found by module and class."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from openenv.errors import SandboxUnavailable
from openenv.sandboxes import Sandboxes, backend, self_check

SOURCES = Path(__file__).parents[2] / "docs_src"
CHECKED = ["exec.", "time.daemon", "time.expiry", "stop.", "kill.", "tree.hostile-download", "port.ask", "end."]


@pytest.fixture
def namespaces(monkeypatch: pytest.MonkeyPatch) -> Sandboxes:
    monkeypatch.syspath_prepend(str(SOURCES))
    importlib.invalidate_caches()
    sandboxes = backend("own_sandbox:NamespaceSandboxes")
    try:
        sandboxes.open().close()
    except SandboxUnavailable as exc:
        pytest.skip(str(exc))
    return sandboxes


@pytest.mark.slow
def test_the_backend_of_the_guide_keeps_the_contract(namespaces: Sandboxes) -> None:
    results = self_check(namespaces, only=CHECKED)
    assert {result.id: result.detail for result in results if result.status == "failed"} == {}
    assert sum(result.status == "passed" for result in results) > 20
