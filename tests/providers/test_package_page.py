"""The samples on the package page of openenv-core 0.1 run as they are printed there: client, server, both providers.

The page forgets to import `Any` and leaves `state` out, so the published 0.1.0 refuses its own samples on Python 3.11;
the tests provide `Any`, and our `Environment` has a default state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv.sandboxes.container_cli import ContainerCli
from servers import Serve

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SAMPLES: dict[str, str] = tomllib.loads(Path(__file__).with_name("package_page.toml").read_text(encoding="utf-8"))
SOURCE = Path(__file__).resolve().parents[2] / "src"

pytestmark = [
    pytest.mark.filterwarnings("ignore:openenv_core is the old name"),
    pytest.mark.filterwarnings("ignore:.*keeps no sessions"),
]


def run(code: str) -> dict[str, Any]:
    """Run a sample; return its names."""
    names: dict[str, Any] = {"__name__": "sample", "Any": Any}
    exec(compile(code, "sample", "exec", dont_inherit=True), names)  # without the annotations of this file
    return names


def test_the_client_plays_on_the_server(serve: Serve) -> None:
    url = serve(run(SAMPLES["server"])["app"]).url
    names = run(SAMPLES["client"].partition("# Use with Docker")[0])
    env = names["MyEnvClient"](base_url=url)
    assert env.reset().observation == names["MyObservation"](response="Ready")
    result = env.step(names["MyAction"](text="hello"))
    assert (result.observation.response, result.reward, result.done) == ("Echo: hello", 1.0, False)
    env.close()


@pytest.fixture
def page_image(environment_image: str, engine: ContainerCli, tmp_path: Path) -> Iterator[str]:
    """The image `my-env:latest`, which runs the server of the page with uvicorn, as its last line says."""
    (tmp_path / "module.py").write_text(SAMPLES["server"], encoding="utf-8")
    container = engine.output("create", environment_image).strip()
    try:
        engine.output("cp", str(tmp_path / "module.py"), f"{container}:/app/packages/module.py")
        engine.output("cp", str(SOURCE / "openenv_core"), f"{container}:/app/packages/openenv_core")
        command = 'CMD ["/app/bin/python", "-m", "uvicorn", "module:app", "--host", "0.0.0.0", "--port", "8000"]'
        engine.output("commit", "--change", command, container, "my-env:latest")
    finally:
        engine.output("rm", "--force", container)
    yield "my-env:latest"
    engine.output("rmi", "--force", "my-env:latest")


@pytest.mark.slow
@pytest.mark.usefixtures("use_engine", "page_image")
def test_the_samples_with_docker_play_and_leave_no_container(left_behind: Callable[[], list[str]]) -> None:
    names = run(SAMPLES["client"])
    assert names["result"].observation.response == "Ready"
    assert names["step_result"].observation.response == "Echo: hello"
    assert left_behind() == []
    assert run(SAMPLES["docker"])["base_url"].startswith("http://localhost:")
    assert left_behind() == []


def test_the_sample_with_kubernetes_starts_and_stops_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightkube")
    pytest.importorskip("kubernetes_validate")
    from kubernetes_double import Image, KubernetesDouble

    serving = Image([sys.executable, "-m", "http.server", "8000", "--bind", "{ip}"])
    with KubernetesDouble({"my-env:latest": serving}) as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kubeconfig(tmp_path / "config")))
        names = run(SAMPLES["kubernetes"])
        assert names["base_url"].startswith("http://127.0.0.1:")
        assert names["provider"].namespace == "envs"
        assert names["provider"].urls() == []
        assert double.names() == []
