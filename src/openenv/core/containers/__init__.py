"""Facade: providers. It has no public names; its submodules have them."""

from __future__ import annotations
