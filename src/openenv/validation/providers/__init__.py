"""Facade: the published path of `openenv.errors`. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.errors import ProviderError as ProviderError
    from openenv.packaging.validate.served_package import RunningSubject as RunningSubject
    from openenv.packaging.validate.served_package import StartupError as StartupError
    from openenv.packaging.validate.served_package import UnsupportedCapability as UnsupportedCapability
    from openenv.packaging.validate.served_package import ValidationProvider as ValidationProvider
    from openenv.sandboxes.base import ExecResult as ExecResult

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.errors": "ProviderError",
                "openenv.packaging.validate.served_package": """
                RunningSubject StartupError UnsupportedCapability ValidationProvider
            """,
                "openenv.sandboxes.base": "ExecResult",
            }
        ),
    )
