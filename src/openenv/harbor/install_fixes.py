"""Facade: the published path of `openenv.adapters.harbor.harbor_package`. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.adapters.harbor.harbor_package import PROVIDER as PROVIDER
    from openenv.adapters.harbor.harbor_package import BaseEnvironment as BaseEnvironment
    from openenv.adapters.harbor.harbor_package import ClineCli as ClineCli
    from openenv.adapters.harbor.harbor_package import ExecInput as ExecInput
    from openenv.adapters.harbor.harbor_package import GeminiCli as GeminiCli
    from openenv.adapters.harbor.harbor_package import InterceptCline as InterceptCline
    from openenv.adapters.harbor.harbor_package import InterceptGeminiCli as InterceptGeminiCli
    from openenv.adapters.harbor.harbor_package import InterceptKimi as InterceptKimi
    from openenv.adapters.harbor.harbor_package import InterceptOpenClaw as InterceptOpenClaw
    from openenv.adapters.harbor.harbor_package import InterceptOpenHands as InterceptOpenHands
    from openenv.adapters.harbor.harbor_package import InterceptPi as InterceptPi
    from openenv.adapters.harbor.harbor_package import InterceptSweAgent as InterceptSweAgent
    from openenv.adapters.harbor.harbor_package import KimiCli as KimiCli
    from openenv.adapters.harbor.harbor_package import OpenClaw as OpenClaw
    from openenv.adapters.harbor.harbor_package import OpenHands as OpenHands
    from openenv.adapters.harbor.harbor_package import Pi as Pi
    from openenv.adapters.harbor.harbor_package import SweAgent as SweAgent
    from openenv.adapters.harbor.harbor_package import build_models_json as build_models_json

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.adapters.harbor.harbor_package": """
                BaseEnvironment ClineCli ExecInput GeminiCli InterceptCline InterceptGeminiCli
                InterceptKimi InterceptOpenClaw InterceptOpenHands InterceptPi InterceptSweAgent
                KimiCli OpenClaw OpenHands PROVIDER Pi SweAgent build_models_json
            """
            }
        ),
    )
