"""The backend of the page about own backends keeps the contract, and is found by module and class."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from openenv.errors import SandboxUnavailable
from openenv.sandboxes import Sandboxes, backend, self_check
from openenv.sandboxes.base import CommandSpec

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


def test_a_shell_that_did_not_start_takes_no_input_from_the_next_attempt(namespaces: Sandboxes) -> None:
    with namespaces.open() as box:
        opened, starts = box._channel, [0]  # type: ignore[attr-defined]

        def fails_at_first(script: str, *, has_input: bool) -> object:
            starts[0] += 1
            return opened("exit 1" if starts[0] == 1 else script, has_input=has_input)

        box._channel = fails_at_first  # type: ignore[attr-defined]
        parts = iter([b"one ", b"two ", b"three"])  # as the frames of a tunnel: what is taken is gone
        command = CommandSpec(["cat"], {}, None, max_output=100)
        run = box._begin(command, lambda: parts)  # type: ignore[attr-defined]
        assert box._finish(run, 20).stdout == "one two three"  # type: ignore[attr-defined]
        assert starts[0] > 1
