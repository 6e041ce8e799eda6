"""`AutoAction`: the action class of an environment by its name."""

from __future__ import annotations

from typing import Any

from openenv.client.env_client import GenericAction

from .auto_env import AutoEnv as AutoEnv  # existing code imports both names from here
from .hub import InstallInto, installed_from_hub, repo_of
from .installed import get_discovery, print_table


class AutoAction:
    """Finds action classes by name: `AutoAction.from_env("echo")`. Never instantiated."""

    def __new__(cls, *args: object, **kwargs: object) -> AutoAction:
        """Refuse: all methods belong to the class."""
        raise TypeError("AutoAction has no instances: call AutoAction.from_env(name)")

    @classmethod
    def from_env(
        cls,
        name: str,
        skip_install: bool = False,
        *,
        trust_remote_code: bool = False,
        install_into: InstallInto = "own",
    ) -> type[Any]:
        """Return the action class of an environment; with `skip_install` one that takes any fields.

        Args:
            name: An installed package, a Space (`owner/name`) or its address.
            skip_install: Import nothing of the environment.
            trust_remote_code: Install a Space that is not installed, without a question.
            install_into: The place of an installed Space: `own`, a separate folder, or `current`, this environment.

        Raises:
            ValueError: There is no such environment; the text has names that are near.
        """
        if skip_install:
            return GenericAction
        repo = repo_of(name)
        if repo is None:
            return get_discovery().require(name).get_action_class()
        info = installed_from_hub(repo, trust_remote_code=trust_remote_code, install_into=install_into)
        return info.get_action_class()

    @classmethod
    def from_hub(cls, env_name: str, skip_install: bool = False, **kwargs: Any) -> type[Any]:
        """Return an action class as `from_env` does; another name for it."""
        return cls.from_env(env_name, skip_install, **kwargs)

    @classmethod
    def get_action_info(cls, name: str) -> dict[str, Any]:
        """Return the names of an installed environment's classes."""
        info = get_discovery().require(name)
        return {
            "env_key": info.env_key,
            "env_name": info.name,
            "package": info.package_name,
            "action_class": info.action_class_name,
            "observation_class": info.observation_class_name,
            "module": info.client_module_path,
        }

    @classmethod
    def list_actions(cls) -> None:
        """Print the action classes of the installed environments."""
        environments = get_discovery().discover()
        rows = [(key, f"{each.action_class_name} ({each.package_name})") for key, each in environments.items()]
        print_table("Action classes", rows)
