"""Pictures of a board: text for terminals and models, SVG for the web page. Knows tiles only."""

from __future__ import annotations

from collections.abc import Sequence

from gridworld_env.models import FLOOR, GOAL, PIT, WALL, Cell

_TEXT = {FLOOR: "· ", WALL: "██", PIT: "○ ", GOAL: "◆ "}
_AGENT = "● "
_SIDE = 36
# For a light page and for a dark one; the frame that shows the picture knows which it is.
_FLOOR = ("#f4f1ea", "#2c2f33")
_COLOURS = {FLOOR: _FLOOR, WALL: ("#3b4252", "#6c7488"), PIT: _FLOOR, GOAL: _FLOOR}


def draw_text(tiles: Sequence[str], position: Cell) -> str:
    """Draw a board with box-drawing characters; ● is the agent, ◆ the goal, ○ a pit."""
    rows = [[_TEXT[tile] for tile in row] for row in tiles]
    rows[position[0]][position[1]] = _AGENT
    line = "─" * (2 * len(tiles[0]) + 1)
    return "\n".join([f"┌{line}┐", *(f"│ {''.join(row)}│" for row in rows), f"└{line}┘"])


def draw_svg(tiles: Sequence[str], position: Cell) -> str:
    """Draw a board as an SVG element."""
    width, height = len(tiles[0]) * _SIDE, len(tiles) * _SIDE
    shapes = [
        _square(row, column, _COLOURS[tile]) + _mark(row, column, tile)
        for row, line in enumerate(tiles)
        for column, tile in enumerate(line)
    ]
    agent = _circle(*position, radius=0.32, style='fill="#2e7de9" stroke="#ffffff" stroke-width="2"')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="Gridworld board">{"".join(shapes)}{agent}</svg>'
    )


def _square(row: int, column: int, colours: tuple[str, str]) -> str:
    x, y, side = column * _SIDE + 1, row * _SIDE + 1, _SIDE - 2
    return f'<rect x="{x}" y="{y}" width="{side}" height="{side}" rx="4" {_fill(colours)}/>'


def _fill(colours: tuple[str, str]) -> str:
    light, dark = colours
    return f'fill="{light}" style="fill:light-dark({light},{dark})"'


def _mark(row: int, column: int, tile: str) -> str:
    if tile == PIT:
        return _circle(row, column, radius=0.3, style=_fill(("#1f2430", "#08090b")))
    if tile == GOAL:
        x, y, half = (column + 0.5) * _SIDE, (row + 0.5) * _SIDE, 0.34 * _SIDE
        points = f"{x},{y - half} {x + half},{y} {x},{y + half} {x - half},{y}"
        return f'<polygon points="{points}" fill="#2da44e"/>'
    return ""


def _circle(row: int, column: int, *, radius: float, style: str) -> str:
    return f'<circle cx="{(column + 0.5) * _SIDE}" cy="{(row + 0.5) * _SIDE}" r="{radius * _SIDE:.1f}" {style}/>'
