"""`AutoEnv`: a client of an environment by its name; starts a server for it where none is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openenv.client.bootstrap import Provided, provide_container, provide_process
from openenv.client.driver import run_async_safely as run_async_safely  # existing code imports it from here
from openenv.client.env_client import EnvClient, GenericEnvClient
from openenv.client.network import hf_space_subdomain
from openenv.providers.health import ask_health

from .hub import InstallInto, installed_from_hub, repo_of
from .installed import EnvironmentInfo, get_discovery

_ASK_S = 5.0


class AutoEnv:
    """Makes clients by name: `AutoEnv.from_env("echo")`, `AutoEnv.from_env("openenv/echo_env")`. Never instantiated."""

    def __new__(cls, *args: object, **kwargs: object) -> AutoEnv:
        """Refuse: all methods belong to the class."""
        raise TypeError("AutoEnv has no instances: call AutoEnv.from_env(name)")

    @classmethod
    def from_env(
        cls,
        name: str,
        base_url: str | None = None,
        docker_image: str | None = None,
        container_provider: Any = None,
        wait_timeout: float = 30.0,
        env_vars: dict[str, str] | None = None,
        trust_remote_code: bool = False,
        skip_install: bool = False,
        *,
        install_into: InstallInto = "own",
        **kwargs: Any,
    ) -> EnvClient[Any, Any, Any]:
        """Return a client of an environment; closing it stops the server that was started for it.

        Args:
            name: An installed package (`echo`, `echo-env`, `echo_env`), a Space (`owner/name`) or its address.
            base_url: A server that runs already. By default one is started: a container where `docker_image` or
                `container_provider` is given, else the installed package in a separate process.
            docker_image: The image to start.
            container_provider: What starts it; by default the local Docker engine.
            wait_timeout: Seconds until the server has to answer.
            env_vars: Variables of the server that is started.
            trust_remote_code: Install a Space that is not installed, without a question.
            skip_install: Import nothing of the environment: the client takes and returns dicts.
            install_into: The place of an installed Space: `own`, a separate folder, or `current`, this environment.
            kwargs: Passed to the client.

        Raises:
            ValueError: There is no such environment; the text has names that are near.
            ConnectionError: The server at `base_url` does not answer.
        """
        repo = repo_of(name)
        start = _Start(docker_image, container_provider, wait_timeout, env_vars)
        # Without the package there are no models; the generic client works with dicts.
        client_class: type[Any] = GenericEnvClient
        if not skip_install:
            if repo is None:
                info = get_discovery().require(name)
            else:
                info = installed_from_hub(repo, trust_remote_code=trust_remote_code, install_into=install_into)
            client_class = info.get_client_class()
        # Order: a running server, no installation, a container, a process of this machine.
        if base_url is not None:
            provided = _running_server(base_url)
        elif skip_install:
            provided = _without_models(name, repo, start)
        elif start.wants_container:
            provided = start.container(info.default_image)
        else:
            provided = start.process(info)
        client: EnvClient[Any, Any, Any] = client_class(
            base_url=provided.base_url, provider=provided.provider, **kwargs
        )
        return client

    @classmethod
    def from_hub(cls, name: str, *args: Any, **kwargs: Any) -> EnvClient[Any, Any, Any]:
        """Return a client as `from_env` does; another name for it."""
        return cls.from_env(name, *args, **kwargs)

    @classmethod
    def get_env_class(cls, name: str) -> type[Any]:
        """Return the client class of an installed environment."""
        return get_discovery().require(name).get_client_class()

    @classmethod
    def get_env_info(cls, name: str) -> dict[str, Any]:
        """Describe an installed environment."""
        info = get_discovery().require(name)
        return {
            "env_key": info.env_key,
            "name": info.name,
            "package": info.package_name,
            "version": info.version,
            "description": info.description,
            "env_class": info.client_class_name,
            "action_class": info.action_class_name,
            "observation_class": info.observation_class_name,
            "module": info.client_module_path,
            "default_image": info.default_image,
            "spec_version": info.spec_version,
        }

    @classmethod
    def list_environments(cls) -> None:
        """Print the installed environments."""
        get_discovery().list_environments()


@dataclass(frozen=True, slots=True)
class _Start:
    """How a server is started where none is given."""

    docker_image: str | None
    provider: Any
    wait_timeout: float
    env_vars: dict[str, str] | None

    @property
    def wants_container(self) -> bool:
        return self.docker_image is not None or self.provider is not None

    def container(self, default_image: str) -> Provided:
        options: dict[str, Any] = {} if self.env_vars is None else {"env_vars": self.env_vars}
        return provide_container(self.docker_image or default_image, self.provider, options, self.wait_timeout)

    def process(self, info: EnvironmentInfo) -> Provided:
        # Older packages have no manifest, so nothing says how to serve them.
        if info.folder is None or info.manifest is None:
            raise ValueError(
                f"{info.package_name} has no openenv.yaml in its package, so it cannot be served from here: give "
                f"base_url, or docker_image={info.default_image!r}"
            )
        return provide_process(info.folder, self.env_vars, self.wait_timeout)


def _running_server(base_url: str) -> Provided:
    # Ask now: a client connects later, and the error would appear far from its cause.
    reason = ask_health(base_url, _ASK_S)
    if reason is not None:
        raise ConnectionError(f"Server not available at {base_url}: {reason}. Does it run?")
    return Provided(base_url, None)


def _without_models(name: str, repo: str | None, start: _Start) -> Provided:
    """Return the running Space if it answers, else a container of its image."""
    if repo is None and start.docker_image is None:
        raise ValueError(f"With skip_install=True, {name!r} needs base_url or docker_image")
    subdomain = hf_space_subdomain(repo or name)
    space = f"https://{subdomain}.hf.space"
    # A public Space that runs already costs nothing.
    if repo is not None and not start.wants_container and ask_health(space, _ASK_S) is None:
        return Provided(space, None)
    return start.container(f"registry.hf.space/{subdomain}:latest")
