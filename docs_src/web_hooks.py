"""The word game with a custom picture and buttons on the web page."""

from __future__ import annotations

from typing import Any

from word_env import WordAction, WordGame

COLORS = {"=": "seagreen", "~": "goldenrod", ".": "lightgray"}


class DrawnGame(WordGame):
    """Guess a word, in colours."""

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """Return HTML that replaces the standard views, or None."""
        squares = [f"<b style='background:{COLORS[mark]}'>&emsp;</b>" for mark in observation["marks"]]
        return " ".join(squares) or None

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Offer buttons: a label, and the fields of an action."""
        return [(f"Try {word!r}", {"guess": word}) for word in ("apple", "eagle")]


if __name__ == "__main__":
    game = DrawnGame()
    game.reset(seed=1)
    seen = game.step(WordAction(guess="cloud")).model_dump()
    print(game.render_web(seen))
    print(game.web_actions(seen)[0])
