"""A counter as an environment package, written against the documented interface alone: it runs on any OpenEnv."""

from .client import CounterEnv
from .models import CounterAction, CounterObservation, CounterState

__all__ = ["CounterAction", "CounterEnv", "CounterObservation", "CounterState"]
