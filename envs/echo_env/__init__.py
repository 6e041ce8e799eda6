"""Echo: the smallest environment with tools, for trying out a connection."""

from __future__ import annotations

from echo_env.client import EchoEnv
from echo_env.models import EchoAction, EchoObservation

__all__ = ["EchoAction", "EchoEnv", "EchoObservation"]
