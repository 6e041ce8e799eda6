"""`openenv skills`: teach this command line to coding agents, with a SKILL.md that they load on demand.

The overview of commands is made from the commands themselves, so it is never older than the program.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .command import HelpCommand, command_group, failure, first_sentence, shown_names, usage_of
from .options import flags_class, options_of

# The folder's name has to be the name in the front matter of SKILL.md.
SKILL = "openenv-cli"
AGENTS = ("claude", "codex", "cursor", "opencode")
# One copy, and links from the agents' folders:
#
#   .agents/skills/openenv-cli/SKILL.md
#   .claude/skills/openenv-cli -> ../../.agents/skills/openenv-cli
_SHARED = Path(".agents/skills")
_HOME_FOLDERS = {"opencode": Path(".config/opencode/skills")}
"""The agents' folders in the home folder, if they differ from the folders in a project."""

_GUIDE = """\
---
name: openenv-cli
description: >-
  Write, serve, check, package and play reinforcement-learning environments with the `openenv` command line. Use this
  when a project has an openenv.yaml or imports openenv, or when the user asks for an environment, a rollout of a coding
  agent, or a dataset of episodes.
---

# The openenv command line

`openenv` serves an environment (a Python class with `reset` and `step`) over WebSocket, HTTP and MCP, lets models and
coding agents work in it, and stores their episodes. openenv {version} wrote this file; after an upgrade, run
`openenv skills add --force` with the same options again. If the command is missing: `pip install openenv=={version}`.

## How to work

1. Start from something that runs: `openenv init maze_env` makes a package with an environment, a client, tests and a
   Dockerfile. For a first try one file is enough (below).
2. Serve it while you write: `openenv serve maze_env --reload`. Use port 0 in scripts (`--port 0`) and read the port
   from the banner. It listens on this machine only; another `--host` needs the token that it prints.
3. Check it before you say that it works: `openenv validate maze_env`. Exit code 0 is a pass; 1 lists the problems, each
   with a hint. `--json` prints the report for programs.
4. Step it: in tests with `openenv.LocalEnv` (no server), else with a client. `openenv client URL` writes a typed one.
5. Let something play it: `openenv collect URL -o FOLDER` plays without a model first; then name one. `openenv play`
   plays many episodes at once and keeps every token for training.
6. Package it: `openenv build`, then `openenv push` for a Space of the Hugging Face Hub, or `openenv deploy` for
   Kubernetes.

An environment in one file, `guess.py`; serve it with `openenv serve guess.py`:

```python
{example}```

## Rules that save time

- Infrastructure failures are retried and never scored. Fix the reason that the command prints and run the same command
  again: collecting and rollouts continue.
- Rewards belong to the environment or to the checks of a task, never to the agent. `openenv rollouts lint` says how far
  the reward of a task can be trusted.
- Sessions are separate: an environment must not keep state in module globals. Say `SUPPORTS_CONCURRENT_SESSIONS = True`
  once instances share nothing.
- If something does not start: `openenv doctor` shows missing prerequisites, `openenv ps` lists running servers and
  sandboxes, `openenv gc` removes the leftovers of dead processes.
- Every command explains itself with examples: `openenv COMMAND --help`. Errors are one line on standard error and exit
  code 1; a wrong option exits with 2, Ctrl-C with 130.
- Never print tokens or keys; pass them as environment variables (`OPENENV_TOKEN`, `OPENENV_MODEL_KEY`).

## Commands

{commands}"""

# A test runs this example; keep it complete.
_EXAMPLE = '''\
from openenv import Action, Environment, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class GuessTheNumber(Environment[Guess, Hint, State]):
    """Guess a number from 1 to 10; the hint says whether it is higher or lower."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Hint:
        self._secret = (seed or 7) % 10 + 1
        self._state = State(episode_id=episode_id)
        return Hint(text="Guess a number from 1 to 10.")

    def step(self, action: Guess) -> Hint:
        self._state.step_count += 1
        if action.number == self._secret:
            return Hint(text="Right.", reward=1.0, done=True)
        hint = "higher" if action.number < self._secret else "lower"
        return Hint(text=hint, reward=0.0, done=self._state.step_count == 5)

    @property
    def state(self) -> State:
        return self._state
'''

skills = command_group(
    """
Teach this command line to coding agents: a skill that Claude Code, Codex, Cursor and OpenCode read when they need it.

  openenv skills preview
  openenv skills add --claude
  openenv skills add --claude --codex --global
"""
)


@skills.command("preview", cls=HelpCommand)
def skills_preview() -> None:
    """Print the skill that `openenv skills add` writes.

    Its overview of commands describes this version.

      openenv skills preview
    """
    typer.echo(skill_text(), nl=False)


@flags_class
class SkillFlags:
    """Options of `openenv skills add`."""

    claude: Annotated[bool, typer.Option("--claude", help="Link it for Claude Code.")] = False
    codex: Annotated[bool, typer.Option("--codex", help="Link it for Codex.")] = False
    cursor: Annotated[bool, typer.Option("--cursor", help="Link it for Cursor.")] = False
    opencode: Annotated[bool, typer.Option("--opencode", help="Link it for OpenCode.")] = False
    global_: Annotated[bool, typer.Option("--global", "-g", help="For all your projects, not only this folder.")] = (
        False
    )
    dest: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write it into this folder of skills instead.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace a skill that is there.")] = False


@skills.command("add", cls=HelpCommand)
@options_of(SkillFlags)
def skills_add(flags: SkillFlags) -> None:
    """Write the skill to .agents/skills, and link it into the folders where agents look.

    Without --global these are folders of the current one, so that the skill can be committed with a project.

      openenv skills add --claude
      openenv skills add --codex --opencode --global
      openenv skills add --dest ~/skills --force
    """
    chosen = [
        agent
        for agent, is_on in zip(AGENTS, (flags.claude, flags.codex, flags.cursor, flags.opencode), strict=True)
        if is_on
    ]
    # --dest names one folder, the other options name several.
    if flags.dest is not None and (chosen or flags.global_):
        raise failure("--dest cannot be combined with --claude, --codex, --cursor, --opencode or --global")
    base = Path.home() if flags.global_ else Path.cwd()
    folder = (base / _SHARED if flags.dest is None else flags.dest.expanduser().absolute()) / SKILL
    links = [base / _agent_folder(agent, is_global=flags.global_) / SKILL for agent in chosen]
    try:
        # Check all paths before the first write, so that a refusal changes nothing.
        for path in (folder, *links):
            _check_free(path, force=flags.force)
        # With --force: replace the link itself and leave its target alone.
        if folder.is_symlink():
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "SKILL.md").write_text(skill_text(), encoding="utf-8")
        typer.echo(f"wrote {folder / 'SKILL.md'}")
        for link in links:
            _link(link, folder)
            typer.echo(f"linked {link}")
    # No permission, or a file in the place of a folder.
    except OSError as exc:
        raise failure(exc) from None


def _agent_folder(agent: str, *, is_global: bool) -> Path:
    # .claude/skills in a project, and the same below the home folder, with exceptions.
    inside = Path(f".{agent}/skills")
    return _HOME_FOLDERS.get(agent, inside) if is_global else inside


def _check_free(path: Path, *, force: bool) -> None:
    """Raise if the path exists and must not be replaced; a folder with foreign files is never replaced."""
    if not (path.exists() or path.is_symlink()):
        return
    if not force:
        raise failure(f"{path} exists already; replace it with --force")
    # --force replaces our file, never files that a person added beside it.
    if path.is_dir() and not path.is_symlink() and {one.name for one in path.iterdir()} - {"SKILL.md"}:
        raise failure(f"{path} contains files that this command did not write; move them away first")


def _link(link: Path, folder: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir() and not link.is_symlink():
        (link / "SKILL.md").unlink(missing_ok=True)
        link.rmdir()
    else:
        link.unlink(missing_ok=True)
    # Relative, so that a project keeps its links when it is moved or cloned.
    link.symlink_to(os.path.relpath(folder, link.parent.resolve()))


def skill_text() -> str:
    """Return the SKILL.md: the guide, and an overview of every command."""
    import openenv

    from .__main__ import build

    # All commands, also of other packages.
    root = typer.main.get_command(build())
    commands = "\n".join(_sections(root, ("openenv",)))
    return _GUIDE.format(version=openenv.__version__, example=_EXAMPLE, commands=commands)


def _sections(group: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield a section for each command: usage, first sentence, examples and the names of its options."""
    for name, command in group.commands.items():
        # A group becomes a heading, and its commands follow with their complete names.
        if hasattr(command, "commands"):
            yield f"### {' '.join((*path, name))}\n\n{first_sentence(command.help or '')}\n"
            yield from _sections(command, (*path, name))
        else:
            yield _section(command, (*path, name))


def _section(command: Any, path: tuple[str, ...]) -> str:
    parameters = [one for one in command.params if not getattr(one, "hidden", False)]
    usage = usage_of(one for one in parameters if one.param_type_name == "argument")
    # The long form: `--port` of `--port, -p`.
    options = [shown_names(one)[0] for one in parameters if one.param_type_name == "option"]
    # Sample:
    #
    #   ### `openenv gc`
    #
    #   Remove leftover servers and sandboxes: ...
    #
    #   ```
    #   openenv gc --dry-run
    #   ```
    #
    #   Options: `--only`, `--dry-run`
    parts = [f"### `{' '.join((*path, *usage))}`", first_sentence(command.help or "")]
    examples = [
        textwrap.dedent(paragraph).strip("\n")
        for paragraph in re.split(r"\n\s*\n", (command.help or "").strip("\n"))
        if paragraph.startswith(" ") and "openenv " in paragraph
    ]
    if examples:
        parts.append("```\n" + "\n".join(examples) + "\n```")
    if options:
        parts.append("Options: " + ", ".join(f"`{option}`" for option in options if option != "--help"))
    return "\n\n".join(parts) + "\n"
