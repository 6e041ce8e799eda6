from typing import Any

from openenv import GenericEnvClient
from openenv.providers import ContainerProvider, ProcessProvider, wait_for_ready


class Folders(ContainerProvider):
    """Serves folders instead of images; start a server in your cluster here."""

    def start_container(
        self, image: str, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any
    ) -> str:
        self._process = ProcessProvider(image)
        return self._process.start(port, env_vars)

    def stop_container(self) -> None:
        self._process.stop()

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        wait_for_ready(base_url, timeout_s, what="The folder's server")


with GenericEnvClient.from_docker_image("word_app.py", provider=Folders()).sync() as env:
    print(env.reset(seed=5).observation["tries_left"])
