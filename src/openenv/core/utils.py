"""Facade: small tools of clients. Re-exports only; the code lives in `openenv.client`."""

from __future__ import annotations

from openenv.client.driver import run_async_safely
from openenv.client.url import (
    convert_to_ws_url,
    hf_space_subdomain,
)

__all__ = [
    "convert_to_ws_url",
    "hf_space_subdomain",
    "run_async_safely",
]
