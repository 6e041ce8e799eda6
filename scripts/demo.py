"""The demo: serves the gridworld, lets three policies play it through the typed client, shows rewards and speed; then
lets a real coding agent solve a task in a sandbox (`demo_rollout.py`).

python scripts/demo.py              # plays, then keeps serving until Ctrl-C
python scripts/demo.py --once       # ends after the rollout; the default without a terminal
python scripts/demo.py --svg PATH   # the gridworld only, and saves a picture of the terminal
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import demo_rollout
from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from gridworld_env import GridworldAction, GridworldEnv, GridworldObservation, GridworldState
from gridworld_env.models import OFFSETS, Cell, Move
from openenv.client.env_client import SyncEnvClient
from openenv.types import StepResult

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "envs" / "gridworld_env"
PREFERRED_PORT = 8000
START_LIMIT_S = 60.0
FRAME_S = 0.12
SHOWN_SEED = 2
STYLES = {"●": "bold bright_cyan", "◆": "bold green", "○": "bold red", "█": "grey50", "·": "grey37"}
SNIPPET = """\
from gridworld_env import GridworldAction, GridworldEnv

with GridworldEnv(base_url="{url}").sync() as env:
    print(env.reset(seed=2).observation.board)
    print(env.step(GridworldAction(move="right")).reward)"""

Policy = Callable[[GridworldObservation], Move]
Player = SyncEnvClient[GridworldAction, GridworldObservation, GridworldState]


# -- policies -----------------------------------------------------------------------------------------------------


def make_random(seed: int) -> Policy:
    """Return the policy that goes anywhere."""
    chance = random.Random(seed)
    moves: tuple[Move, ...] = tuple(OFFSETS)
    return lambda _: chance.choice(moves)


def greedy(observation: GridworldObservation) -> Move:
    """Go to the open neighbour that is nearest to the goal as the crow flies; dead ends are its undoing."""
    goal_row, goal_column = find_goal(observation.tiles)
    open_moves = [move for move, _ in neighbours(observation.tiles, observation.position)]
    return min(
        open_moves or OFFSETS,
        key=lambda move: (
            abs(observation.position[0] + OFFSETS[move][0] - goal_row)
            + abs(observation.position[1] + OFFSETS[move][1] - goal_column)
        ),
    )


def shortest_path(observation: GridworldObservation) -> Move:
    """Take the first move of a shortest way around walls and pits (breadth-first search)."""
    goal = find_goal(observation.tiles)
    first: dict[Cell, Move] = {}
    queue = deque([observation.position])
    while queue:
        cell = queue.popleft()
        for move, neighbour in neighbours(observation.tiles, cell):
            if neighbour not in first and neighbour != observation.position:
                first[neighbour] = first.get(cell, move)
                queue.append(neighbour)
    return first[goal]


def find_goal(tiles: list[str]) -> Cell:
    """Find the goal's cell."""
    return next((row, line.index("G")) for row, line in enumerate(tiles) if "G" in line)


def neighbours(tiles: list[str], cell: Cell) -> Iterator[tuple[Move, Cell]]:
    """Iterate over the moves to floor or goal."""
    for move, (rows, columns) in OFFSETS.items():
        row, column = cell[0] + rows, cell[1] + columns
        if 0 <= row < len(tiles) and 0 <= column < len(tiles[row]) and tiles[row][column] in ".G":
            yield move, (row, column)


# -- playing ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stopwatch:
    """Steps taken and the time that the client took for them; what policies think in between does not count."""

    steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Record:
    """What a policy has achieved."""

    rewards: list[float] = field(default_factory=list)
    goals: int = 0
    watch: Stopwatch = field(default_factory=Stopwatch)


def play(
    env: Player, policy: Policy, seed: int, watch: Stopwatch | None = None
) -> Iterator[StepResult[GridworldObservation]]:
    """Play one episode; yields each result, the first one included."""
    watch = watch or Stopwatch()
    result = env.reset(seed=seed)
    yield result
    while not result.done:
        action = GridworldAction(move=policy(result.observation))
        began = time.perf_counter()
        result = env.step(action)
        watch.seconds += time.perf_counter() - began
        watch.steps += 1
        yield result


def compete(env: Player, policies: dict[str, Policy], episodes: int, console: Console) -> dict[str, Record]:
    """Let each policy play the same maps."""
    records = {name: Record() for name in policies}
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=episodes) for name in policies}
        for name, policy in policies.items():
            record = records[name]
            for seed in range(episodes):
                results = list(play(env, policy, seed, record.watch))
                record.rewards.append(sum(float(result.reward or 0.0) for result in results))
                record.goals += results[-1].observation.event == "goal"
                progress.advance(tasks[name])
    return records


# -- showing ------------------------------------------------------------------------------------------------------


def picture(result: StepResult[GridworldObservation], move: int, total: float) -> RenderableType:
    """Draw a board with its caption."""
    text = Text(no_wrap=True)
    for char in result.observation.board:
        text.append(char, STYLES.get(char, "grey50"))
    observation = result.observation
    caption = Text(f" move {move:<3}{observation.event:<8}{total:+.2f}", "bold green" if result.done else "dim")
    return Group(text, caption)


def show_live(env: Player, console: Console) -> None:
    """Watch one episode of the best policy, move by move."""
    total = 0.0
    with Live(console=console, refresh_per_second=20) as live:
        for move, result in enumerate(play(env, shortest_path, SHOWN_SEED)):
            total += float(result.reward or 0.0)
            live.update(picture(result, move, total), refresh=True)
            time.sleep(FRAME_S)


def show_stills(env: Player, console: Console) -> None:
    """Show the beginning, the middle and the end of one episode of the best policy."""
    total, frames = 0.0, []
    for move, result in enumerate(play(env, shortest_path, SHOWN_SEED)):
        total += float(result.reward or 0.0)
        frames.append(picture(result, move, total))
    console.print(Columns([frames[0], frames[len(frames) // 2], frames[-1]], padding=(0, 4)))


def reward_table(records: dict[str, Record]) -> Table:
    """Put the records side by side."""
    table = Table(title="Rewards", title_justify="left", title_style="bold", box=box.ROUNDED)
    table.add_column("policy")
    for title in ("episodes", "success rate", "mean reward", "mean steps"):
        table.add_column(title, justify="right")
    for name, record in records.items():
        played = len(record.rewards)
        table.add_row(
            name,
            str(played),
            f"{record.goals / played:.0%}",
            f"{sum(record.rewards) / played:+.2f}",
            f"{record.watch.steps / played:.1f}",
        )
    return table


def directions(url: str) -> RenderableType:
    """Say where to look and what to type."""
    places = Table.grid(padding=(0, 2))
    places.add_column(style="dim")
    places.add_column(no_wrap=True)
    if has_page(url):
        places.add_row("Web page", f"{url}/web")
    places.add_row("API docs", f"{url}/docs")
    places.add_row("Schemas", f"{url}/schema")
    places.add_row("WebSocket", f"{url.replace('http', 'ws', 1)}/ws")
    snippet = Syntax(SNIPPET.format(url=url), "python", theme="ansi_dark", background_color="default")
    hint = Text(f"\nIn another terminal, in {os.path.relpath(sys.executable)}:", style="dim")
    return Panel(Group(places, hint, snippet), title="Still serving", subtitle="Ctrl-C stops", expand=False)


# -- the server ---------------------------------------------------------------------------------------------------


class ServerFailed(Exception):
    """The server did not come up; the text holds what it said."""


def is_free(port: int) -> bool:
    """Find out whether a port can be had."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def start(log: IO[bytes], port: int) -> subprocess.Popen[bytes]:
    """Start the server; port 0 takes any."""
    command = [sys.executable, "-m", "openenv", "serve", str(FOLDER), "--port", str(port)]
    # Its own process group: Ctrl-C comes to us alone, and we stop it.
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a server, gently first."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Wait for the address that the server announces, and for its health; return the address.

    Raises:
        ServerFailed: It ended, or did not answer in time.
    """
    deadline = time.perf_counter() + START_LIMIT_S
    while True:
        is_running = process.poll() is None
        output = os.pread(log.fileno(), 100_000, 0).decode(errors="replace")
        announced = re.search(r"http://127\.0\.0\.1:\d+", output)
        if is_running and announced and is_healthy(announced.group()):
            return announced.group()
        if not is_running or time.perf_counter() > deadline:
            raise ServerFailed(output.strip() or "no answer in time")
        time.sleep(0.02)


@contextlib.contextmanager
def running(port: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server on a port; it ends with this block, whatever happens in it."""
    with tempfile.TemporaryFile() as log:
        process = start(log, port)
        try:
            yield wait_until_healthy(process, log), process
        finally:
            end(process)


@contextlib.contextmanager
def server(console: Console) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve the gridworld in a process of its own, on the preferred port if that can be had."""
    port = PREFERRED_PORT if is_free(PREFERRED_PORT) else 0
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with console.status("Starting the server ..."):
            try:
                url, process = stack.enter_context(running(port))
            except ServerFailed:
                if port == 0 or is_free(port):
                    raise
                url, process = stack.enter_context(running(0))  # another process took the port
        waited = f"[dim](healthy after {time.perf_counter() - began:.1f} s)[/]"
        console.print(f"[green]✓[/] gridworld_env is served at [bold]{url}[/] {waited}\n")
        yield url, process


def is_healthy(url: str) -> bool:
    """Ask `/health`."""
    return status(f"{url}/health") == 200


def has_page(url: str) -> bool:
    """Find out whether this server has a web page."""
    return status(f"{url}/web") == 200


def status(url: str) -> int | None:
    """Return the status of a GET, or None without an answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as response:
            code: int = response.status
            return code
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError:
        return None


# -- the whole ----------------------------------------------------------------------------------------------------


def demonstrate(console: Console, *, episodes: int, once: bool, with_rollout: bool) -> None:
    """Run the demo."""
    with server(console) as (url, process):
        with GridworldEnv(base_url=url).sync() as env:
            if once:
                show_stills(env, console)
            else:
                show_live(env, console)
            console.print()
            policies = {"random": make_random(0), "greedy": greedy, "shortest path": shortest_path}
            records = compete(env, policies, episodes, console)
            console.print()
            console.print(reward_table(records))
            steps = sum(record.watch.steps for record in records.values())
            speed = steps / sum(record.watch.seconds for record in records.values())
            console.print(f"{steps} steps through the typed client, one at a time: [bold]{speed:,.0f} steps/s[/]")
        if with_rollout:
            show_rollout(console, is_live=not once)
        if not once:
            console.print(directions(url))
            process.wait()
            raise ServerFailed(f"the server ended by itself, with exit code {process.returncode}")


def show_rollout(console: Console, *, is_live: bool) -> None:
    """Let a coding agent solve a task, or say what keeps it from running here."""
    console.print()
    try:
        demo_rollout.demonstrate(console, is_live=is_live)
    except demo_rollout.CannotRun as exc:
        console.print(f"[bold yellow]The rollout cannot run here:[/] {exc}", highlight=False)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Play the gridworld through the client; then run a coding agent in a sandbox."
    )
    parser.add_argument("--once", action="store_true", help="end after the rollout instead of serving on")
    parser.add_argument("--episodes", type=int, default=12, help="maps that each policy plays (default: 12)")
    parser.add_argument("--svg", type=Path, help="save a picture of the gridworld here; implies --once")
    return parser.parse_args()


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Turn a signal into an exit that cleans up."""
    sys.exit(128 + signum)


def main() -> int:
    """Run the demo and return its exit code."""
    options = parse_options()
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), stop)
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("CI", "").lower() not in ("true", "1")
    # A picture shows no animation: the recording console takes itself for a file.
    console = Console(record=True, width=80, force_terminal=False) if options.svg else Console()
    try:
        demonstrate(
            console,
            episodes=max(1, options.episodes),
            once=options.once or bool(options.svg) or not interactive,
            with_rollout=not options.svg,
        )
    except KeyboardInterrupt:
        console.print("\nStopped.")
    except ServerFailed as exc:
        console.print(f"[bold red]The server failed:[/] {exc}", highlight=False)
        return 1
    if options.svg:
        drawing = console.export_svg(title="make demo")
        # The reader's own monospace font will do; a picture should not fetch one.
        options.svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
