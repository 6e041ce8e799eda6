"""NovitaSandboxProvider: what only Novita has, templates and users; the real package against a double."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloud_boxes import Boxes
from openenv.errors import ProviderError, ProviderUnavailable
from servers import running_server

pytest.importorskip("novita_sandbox")

import novita_double
from openenv.providers.novita import NovitaSandboxProvider


@pytest.fixture
def double(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    double = novita_double.NovitaDouble(boxes)
    with running_server(double.app, lifespan="off") as server:
        monkeypatch.setenv("NOVITA_API_URL", server.url)
        monkeypatch.setenv("NOVITA_API_KEY", novita_double.KEY)
        yield double
    assert boxes.alive == []


def test_a_dockerfile_of_two_stages_becomes_a_template_that_is_started(double: Any, tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "app.py").touch()
    file = tmp_path / "server" / "Dockerfile"
    file.write_text(
        "ARG BASE=empty\nFROM $BASE AS builder\nWORKDIR /tmp\nCOPY server /app/env\n"
        "RUN --mount=type=cache,target=/c true\nFROM ${BASE}\nCOPY --from=builder /app/env /app/env\nWORKDIR /tmp\n"
        'CMD ["sh", "-c", "touch health && python -m http.server 8000"]\n'
    )
    image = NovitaSandboxProvider.image_from_dockerfile(str(file))
    with NovitaSandboxProvider(image=image, cpu_count=4, memory_mb=2048) as provider:
        provider.wait_for_ready(provider.start_container(), timeout_s=60)
        (build,) = double.builds.values()
        assert (build["request"]["cpuCount"], build["request"]["memoryMB"]) == (4, 2048)
        assert build["startCmd"] == "sleep infinity"
        (listed,) = double.listed.values()
        assert listed.request["timeout"] == 3600


def test_what_novita_makes_of_an_image_runs_as_root_and_a_template_as_its_own_user(double: Any) -> None:
    for image, is_root in (("sums", True), ("template:sums", False)):
        with NovitaSandboxProvider(image=image, cmd="sleep 600", metadata={"team": "x"}) as provider:
            provider.start_container()
            (listed,) = double.listed.values()
            assert listed.request["metadata"]["team"] == "x"
            assert all((user == "cm9vddo=") is is_root for user in listed.end.users)  # `root:`


def test_debug_mode_and_no_key_are_reported(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOVITA_DEBUG", "true")
    with pytest.raises(ProviderError):
        NovitaSandboxProvider(cmd="true").start_container("template:sums")
    monkeypatch.delenv("NOVITA_API_KEY")
    with pytest.raises(ProviderUnavailable, match="NOVITA_API_KEY"):
        NovitaSandboxProvider()
