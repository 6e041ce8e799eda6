"""Echo: the smallest environment with tools, for trying out a connection."""

from __future__ import annotations

from echo_env.client import EchoEnv

__all__ = ["EchoEnv"]
