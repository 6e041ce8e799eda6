"""DaytonaProvider: the real package against a double whose sandboxes run real servers."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloud_boxes import Boxes
from openenv import GenericEnvClient
from openenv.errors import ProviderError, ProviderUnavailable
from servers import running_server

pytest.importorskip("daytona")

import daytona_double
from openenv.providers.daytona import DaytonaProvider

SECRET = "s3cr3t-value-of-a-variable"


@pytest.fixture(scope="module")
def double(boxes: Boxes) -> Iterator[Any]:
    double = daytona_double.DaytonaDouble(boxes)
    with running_server(double.app, lifespan="off") as server:
        double.url = server.url
        yield double


@pytest.fixture(autouse=True)
def _account(double: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DAYTONA_API_URL", f"{double.url}/api")
    monkeypatch.setenv("DAYTONA_API_KEY", daytona_double.KEY)
    double.fails.clear()
    double.never_starts = False
    yield
    assert double.boxes.alive == [], "a sandbox is left"


def test_a_server_starts_from_openenv_yaml_and_is_played(double: Any) -> None:
    with DaytonaProvider(env_vars={"API_TOKEN": SECRET}) as provider:
        url = provider.start_container("sums")
        assert url.startswith("https://")
        provider.wait_for_ready(url, timeout_s=60)
        with GenericEnvClient(base_url=url).sync() as env:
            env.reset(seed=3)
            assert [env.step({"text": "x"}).reward for _ in range(3)] == [3.0, 30.0, 300.0]
        (listed,) = double.listed.values()
        assert listed.request["env"] == {"API_TOKEN": SECRET}
        assert (listed.request["autoStopInterval"], listed.request["autoDeleteInterval"]) == (15, 0)
        again = provider.refresh_preview_url()
        provider.wait_for_ready(again, timeout_s=20)
        assert SECRET not in repr(provider)
    assert double.listed == {}
    with pytest.raises(RuntimeError, match="No active sandbox"):
        provider.refresh_preview_url()


def test_a_snapshot_a_command_and_a_region_are_passed_on(double: Any) -> None:
    command = "cd /app/env && python -m uvicorn sum_app:app --port 8000"
    options: dict[str, Any] = {"image": "snapshot:sums", "public": True, "auto_stop_interval": 0, "target": "eu"}
    with DaytonaProvider(cmd=command, **options) as provider:
        provider.wait_for_ready(provider.start_container(), timeout_s=60)
        (listed,) = double.listed.values()
        assert (listed.request["snapshot"], listed.request["target"], listed.request["public"]) == ("sums", "eu", True)
        assert not any("find /app" in path for _, path in double.requests)


def test_a_dockerfile_is_built_and_its_command_starts_where_there_is_no_manifest(double: Any, tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    file = tmp_path / "server" / "Dockerfile"
    steps = ["FROM empty", "WORKDIR /tmp", "RUN --mount=type=cache,target=/x \\\n  true"]
    file.write_text("\n".join([*steps, 'CMD ["sh", "-c", "touch health && python -m http.server 8000"]']))
    lines: list[str] = []
    with DaytonaProvider(on_snapshot_create_logs=lines.append) as provider:
        image = DaytonaProvider.image_from_dockerfile(str(file))
        assert image == f"dockerfile:{file}"
        provider.wait_for_ready(provider.start_container(image), timeout_s=60)
        (listed,) = double.listed.values()
        assert "--mount" not in listed.request["buildInfo"]["dockerfileContent"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server"]


@pytest.mark.parametrize(
    ("image", "message"),
    [("empty", "Could not find openenv.yaml"), ("nameless", "does not contain an 'app'")],
)
def test_without_a_command_the_start_fails_and_leaves_nothing(double: Any, image: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DaytonaProvider().start_container(image)
    assert double.listed == {}


def test_a_sandbox_that_never_starts_is_deleted_although_the_package_returned_none(double: Any) -> None:
    double.never_starts = True
    with pytest.raises(ProviderError, match="exceeded timeout"):
        DaytonaProvider(create_timeout=1).start_container("sums")
    assert double.listed == {}


def test_an_interrupt_while_the_sandbox_starts_deletes_it(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    double.never_starts = True
    provider = DaytonaProvider()
    interrupted = threading.Event()

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr("daytona._sync.sandbox.Sandbox.wait_for_sandbox_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        provider.start_container("sums")
    assert interrupted.is_set()
    assert double.listed == {}


def test_a_failed_start_says_when_a_sandbox_may_be_left(double: Any, caplog: pytest.LogCaptureFixture) -> None:
    double.never_starts = True
    double.fails["delete"] = "try later"
    with caplog.at_level(logging.WARNING), pytest.raises(ProviderError):
        DaytonaProvider(create_timeout=1).start_container("sums")
    assert "may be left" in caplog.text
    assert "openenv gc --only daytona" in caplog.text
    double.fails.clear()
    provider = DaytonaProvider()
    (left,) = provider.labelled()
    assert left.owner is not None
    assert not left.owner.is_dead()
    left.delete()


def test_a_key_that_daytona_does_not_know_is_reported_without_it(double: Any) -> None:
    with pytest.raises(ProviderError, match="Invalid credentials") as caught:
        DaytonaProvider(api_key="dtn_wrong_key_of_someone").start_container("sums")
    assert "dtn_wrong_key_of_someone" not in str(caught.value)


def test_no_key_is_an_error_of_the_constructor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DAYTONA_API_KEY")
    with pytest.raises(ProviderUnavailable, match="DAYTONA_API_KEY"):
        DaytonaProvider()


def test_the_snippets_print_what_their_pages_say(double: Any) -> None:
    sources = Path(__file__).resolve().parents[3] / "docs_src"
    for file, printed in (("use_cloud.py", "3.0\n"), ("daytona_sandbox.py", "3 out err\n")):
        done = subprocess.run(
            [sys.executable, str(sources / file)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.stdout == printed, done.stderr
