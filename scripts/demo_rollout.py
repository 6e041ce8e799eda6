"""The demo of rollouts: the real OpenCode works in a local sandbox, a scripted model speaks, the result is verified.

python scripts/demo_rollout.py              # shows it live
python scripts/demo_rollout.py --svg PATH   # saves a picture of the terminal

No account, no key, no GPU. What is missing on this machine (bubblewrap, the agent) is installed, or named.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.spinner import Spinner
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from openenv.errors import AgentUnavailable, OpenEnvError, SandboxUnavailable
from openenv.rollout import Model, Outcome, Progress, RolloutStore, RolloutTurn, Task, agent, run_rollout
from openenv.rollout.progress import Phase
from openenv.sandboxes import LocalSandboxes
from openenv.settings import cache_dir, rollout_store
from openenv.testing import ScriptedModel
from openenv.testing.scripted.agent_scripts import binary_search

CHECKS = """\
import random, sys
from binary_search import binary_search as search

def found():
    return [search([1, 3, 5, 7], number) for number in (1, 3, 5, 7)] == [0, 1, 2, 3]

def missing():
    return {search([1, 3, 5, 7], number) for number in (0, 2, 8)} == {-1}

def empty():
    return search([], 1) == -1

def large():
    items = sorted(random.sample(range(10**7), 10**5))
    return all(items[search(items, item)] == item for item in random.sample(items, 1000))

sys.exit(not globals()[sys.argv[1]]())
"""
TASK = Task(
    task_id="binary_search",
    instruction=(
        "Write a Python function binary_search(items, target) into binary_search.py. It returns the index of target "
        "in the sorted list items, or -1. Do not use the bisect module."
    ),
    setup=("python3 --version", "echo 'binary_search.py belongs here' > README.txt"),
    verify=(
        "python3 check.py found",
        "python3 check.py missing",
        "python3 check.py empty",
        "python3 check.py large",
        "! grep -q bisect binary_search.py",
    ),
    verify_files={"check.py": CHECKS},
    agent_timeout_s=120,
)
PHASES: tuple[str, ...] = tuple(phase for phase in get_args(Phase) if phase != "done")
TITLES = {
    "sandbox": "a private sandbox, no network",
    "setup": "setup, before the agent starts",
    "agent": "OpenCode at work",
    "collect": "everything stopped, work tree taken out",
    "verify": "verified in a fresh sandbox",
    "store": "kept on disk",
}
SHOWN_TOKENS = 90
APT = ("apt-get", "install", "-y", "--no-install-recommends")


class CannotRun(Exception):
    """Something is missing here; the text says what to do."""


# -- what the machine needs ---------------------------------------------------------------------------------------


def provide(console: Console) -> None:
    """Make sure that sandboxes and the agent are there, installing what can be.

    Raises:
        CannotRun: Something is missing, and cannot be installed from here.
    """
    try:
        LocalSandboxes().check()
    except SandboxUnavailable as exc:
        if shutil.which("bwrap") is not None or not install(console, "bubblewrap"):
            raise CannotRun(str(exc)) from exc
        try:
            LocalSandboxes().check()
        except SandboxUnavailable as still:
            raise CannotRun(str(still)) from still
    driver = agent("opencode")
    try:
        with console.status("Looking for OpenCode ...") as status:
            driver.install(cache_dir(), lambda message: status.update(f"{message[:1].upper()}{message[1:]} ..."))
    except AgentUnavailable as exc:
        if shutil.which("npm") is not None or not install(console, "npm"):
            raise CannotRun(f"{exc}\nInstall Node.js and npm, for instance: sudo {' '.join((*APT, 'npm'))}") from exc
        with console.status("Installing OpenCode with npm ..."):
            try:
                driver.install(cache_dir(), lambda message: None)
            except AgentUnavailable as still:
                raise CannotRun(str(still)) from still


def install(console: Console, package: str) -> bool:
    """Install a Debian package where that can be done without asking; say whether it was."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    command = [*APT, package]
    with console.status(f"{' '.join(command)} ..."):
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(command, env=environ, capture_output=True, check=False)
        if done.returncode != 0:  # a fresh machine has no package lists yet
            subprocess.run(["apt-get", "update"], env=environ, capture_output=True, check=False)
            done = subprocess.run(command, env=environ, capture_output=True, check=False)
    is_there = done.returncode == 0
    console.print(f"[green]✓[/] installed {package}" if is_there else f"[red]✗[/] {' '.join(command)} failed")
    return is_there


# -- while it runs ------------------------------------------------------------------------------------------------


@dataclass
class Board:
    """What is shown of a running rollout."""

    began: float = field(default_factory=time.monotonic)
    phase: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    is_over: bool = False
    _spinner: Spinner = field(default_factory=lambda: Spinner("dots", style="cyan"))

    def take(self, event: Progress) -> None:
        """Take an event."""
        now = time.monotonic()
        if event.phase != self.phase:
            self.seconds[self.phase] = now - self.began
            self.phase, self.began = event.phase, now
        self.is_over = event.phase == "done"
        self.words[event.phase] = event.message

    def __rich__(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=2)
        grid.add_column(width=41, no_wrap=True)
        grid.add_column(justify="right", width=7)
        grid.add_column(style="dim", no_wrap=True, overflow="ellipsis")
        reached = PHASES.index(self.phase) if self.phase in PHASES else len(PHASES) if self.is_over else -1
        for number, phase in enumerate(PHASES):
            if number > reached:
                grid.add_row(Text("·", "dim"), Text(TITLES[phase], "dim"), "", "")
                continue
            is_running = number == reached and not self.is_over
            elapsed = time.monotonic() - self.began if is_running else self.seconds.get(phase, 0.0)
            mark: RenderableType = self._spinner if is_running else Text("✓", "bold green")
            words = self.words.get(phase, "")
            grid.add_row(mark, Text(TITLES[phase], "bold" if is_running else ""), f"{elapsed:.1f} s", words)
        return grid


def watch(console: Console, *, is_live: bool) -> Outcome:
    """Run the rollout and show how it goes."""
    board = Board()
    with ScriptedModel(binary_search()) as scripted, RolloutStore(rollout_store()) as store:
        model = Model(**scripted.model())

        def report(event: Progress) -> None:
            board.take(event)
            if not is_live and not console.record:
                line = f"  {event.elapsed_s:5.1f} s  {event.phase:<8} {event.message}"
                console.print(line, style="dim", highlight=False)

        shown = Live(board, console=console, refresh_per_second=12) if is_live else contextlib.nullcontext()
        with shown:
            outcome = run_rollout(TASK, agent="opencode", sandbox="local", model=model, store=store, on_progress=report)
        if console.record and not is_live:  # a picture shows how it ended
            console.print(board)
        return outcome


# -- when it is over ----------------------------------------------------------------------------------------------


def verdict(outcome: Outcome) -> RenderableType:
    """Show each check, and the reward."""
    lines = []
    if outcome.verify_results:
        lines.append(Text("Checks, in a sandbox that the agent never touched", "bold"))
    for result in outcome.verify_results:
        mark = Text("✓ ", "bold green") if result.exit_code == 0 else Text("✗ ", "bold red")
        lines.append(Text.assemble(mark, (result.cmd, "dim"), no_wrap=True, overflow="ellipsis"))
    reward = "none" if outcome.reward is None else f"{outcome.reward:.1f}"
    style = "bold green" if outcome.reward == 1.0 else "bold red"
    about = f"  {outcome.status}" + (f": {outcome.reason}" if outcome.reason else "")
    return Group(*lines, Text.assemble("\nReward ", (reward, style), (about, "dim")))


def turn_table(turns: list[RolloutTurn]) -> Table:
    """Put the model calls side by side."""
    title = "Model calls (a script plays the model)"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    table.add_column("call", justify="right")
    table.add_column("ended by")
    for name in ("tokens", "ids", "log-probs", "mean log-prob", "seconds"):
        table.add_column(name, justify="right")
    for turn in turns:
        count = len(turn.per_token_logps)
        mean = sum(turn.per_token_logps) / count if count else math.nan
        table.add_row(
            str(turn.turn),
            turn.finish_reason or "broken off",
            str(len(turn.completion_tokens)),
            str(len(turn.completion_token_ids)),
            str(count),
            f"{mean:.3f}",
            f"{turn.latency_s:.2f}",
        )
    return table


def heat(turn: RolloutTurn) -> RenderableType:
    """Show a call's tokens, coloured by how sure the model was of each."""
    text = Text(overflow="fold")
    shown = list(zip(turn.completion_tokens, turn.per_token_logps, strict=True))[:SHOWN_TOKENS]
    for token, value in shown:
        chance = math.exp(value)
        style = "green" if chance > 0.9 else "yellow" if chance > 0.5 else "red"
        text.append(token.replace("\n", "⏎"), style)
        text.append("│", "grey30")
    left = len(turn.completion_tokens) - len(shown)
    if left > 0:
        text.append(f" … {left} more", "dim")
    ids = " ".join(map(str, turn.completion_token_ids[:12]))
    legend = Text.assemble(
        ("■ ", "green"), "p > 0.9  ", ("■ ", "yellow"), "p > 0.5  ", ("■ ", "red"), "below   ", (f"ids: {ids} …", "dim")
    )
    return Panel(Group(text, legend), title=f"tokens of call {turn.turn}", title_align="left", box=box.ROUNDED)


def files(outcome: Outcome) -> list[RenderableType]:
    """Show what the agent wrote."""
    shown: list[RenderableType] = []
    for path, content in outcome.files.items():
        if path.endswith(".py"):
            code = Syntax(content.rstrip(), "python", theme="ansi_dark", background_color="default", line_numbers=True)
            shown.append(Panel(code, title=path, title_align="left", box=box.ROUNDED))
    return shown


def again(outcome: Outcome) -> RenderableType:
    """Say where the rollout is and how to look at it again."""
    here = Path(sys.executable).parent / "openenv"
    name = os.path.relpath(here) if here.exists() else "openenv"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("kept in", str(rollout_store()).replace(str(Path.home()), "~"))
    grid.add_row("look again", f"{name} rollouts show {outcome.rollout_id[:8]}")
    grid.add_row("verify again", f"{name} rollouts reverify {outcome.rollout_id[:8]}")
    grid.add_row("its tokens", f"{name} rollouts export rollouts.jsonl")
    return grid


def demonstrate(console: Console, *, is_live: bool) -> Outcome:
    """Run the demo.

    Raises:
        CannotRun: Something is missing on this machine.
    """
    console.print(Rule("One rollout: a real coding agent, a scripted model", style="cyan"))
    provide(console)
    console.print(Text.assemble(("Task  ", "bold"), TASK.instruction))
    console.print(
        Text.assemble(
            ("Model ", "bold"),
            ("scripted", "bold yellow"),
            ": plays a given script, so that no key or GPU is needed. ",
            "OpenCode, its tools, the sandbox and the capture of tokens are real.\n",
        )
    )
    outcome = watch(console, is_live=is_live)
    console.print()
    console.print(verdict(outcome))
    console.print(turn_table(outcome.turns))
    for turn in outcome.turns[:1]:
        console.print(heat(turn))
    for shown in files(outcome):
        console.print(shown)
    console.print(again(outcome), highlight=False)
    return outcome


def main() -> int:
    """Run the demo and return its exit code: 0 for a reward of 1."""
    parser = argparse.ArgumentParser(description="One OpenCode rollout in a local sandbox, with a scripted model.")
    parser.add_argument("--svg", type=Path, help="save a picture of the terminal here")
    options = parser.parse_args()
    console = Console(record=True, width=100, force_terminal=False) if options.svg else Console()
    try:
        outcome = demonstrate(console, is_live=console.is_terminal)
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130
    except CannotRun as exc:
        console.print(f"[bold red]The rollout cannot run here:[/] {exc}", highlight=False)
        return 1
    except OpenEnvError as exc:
        console.print(f"[bold red]The rollout failed:[/] {exc}", highlight=False)
        return 1
    if options.svg:
        drawing = console.export_svg(title="make demo")
        # The reader's own monospace font will do; a picture should not fetch one.
        options.svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL), encoding="utf-8")
    return 0 if outcome.reward == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
