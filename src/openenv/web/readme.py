"""An environment's README: where it is looked for, and how it is shown; metadata of environments that are not built.

Knows files and Markdown. HTML inside of a README is shown as text, so that nothing of it can run.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import settings
from ..env.binding import factory_name
from ..env.environment import Environment
from ..types import EnvironmentMetadata

_FRONT_MATTER = re.compile(r"\A---\s*\n.*?\n---\s*(?:\n|\Z)", re.S)
_MOST_CHARS = 1_000_000


def load_environment_metadata(env: Any, env_name: str | None = None) -> EnvironmentMetadata:
    """Describe an environment: an instance says it itself; of a class or a factory the name is taken, and the README.

    Args:
        env: The environment, or what makes it. Nothing is built.
        env_name: Its name, for the README's place as well.
    """
    if isinstance(env, Environment):
        return env.get_metadata()
    while isinstance(env, functools.partial):
        env = env.func
    label = env.__name__ if inspect.isclass(env) else env_name or factory_name(env)
    return EnvironmentMetadata(
        name=env_name or label,
        description=f"{label} environment",
        version="1.0.0",
        readme_content=find_readme(env_name),
    )


def find_readme(env_name: str | None, folder: Path | None = None) -> str | None:
    """Return the text of an environment's README, if there is one.

    Args:
        env_name: The environment's name.
        folder: The environment's own folder, where it is known.
    """
    for place in _places(env_name, folder):
        try:
            if place.is_file():
                return place.read_text(encoding="utf-8")
        except (OSError, ValueError):  # unreadable, or no text
            continue
    return None


def _places(env_name: str | None, folder: Path | None) -> Iterator[Path]:
    given = settings.readme_path()
    if given is not None:
        yield given
    is_plain = env_name is not None and not {"/", "\\", "\0"}.intersection(env_name) and env_name not in (".", "..")
    if is_plain:
        yield Path("envs") / str(env_name) / "README.md"
    if folder is not None:
        yield folder / "README.md"
    yield Path("/app/env/README.md")
    yield Path("/app/README.md")
    if is_plain:
        yield Path("src/envs") / str(env_name) / "README.md"


def readme_html(text: str | None) -> str | None:
    """Render a README; the block of settings that some begin with is left out."""
    if text is None or not text.strip():
        return None
    from markdown_it import MarkdownIt  # only the page needs it

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.add_render_rule("link_open", _outward_link)
    rendered: str = parser.render(_FRONT_MATTER.sub("", text, count=1)[:_MOST_CHARS])
    return rendered


def _outward_link(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    """Let links open beside the page, which learns nothing of it."""
    if not str(tokens[index].attrGet("href") or "").startswith("#"):
        tokens[index].attrSet("target", "_blank")
        tokens[index].attrSet("rel", "noopener noreferrer")
    rendered: str = renderer.renderToken(tokens, index, options, env)
    return rendered
