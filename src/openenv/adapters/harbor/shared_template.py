"""Images that tasks share. Here they are named after the content that they are built from, so equal ones are one."""

from __future__ import annotations


def enable_shared_templates(name: str = "") -> bool:
    """Return whether tasks with the same environment share an image: always.

    Args:
        name: A common name for templates of E2B, which images named after their content do not need.
    """
    return True
