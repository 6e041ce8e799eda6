"""`openenv harbor`: run and serve Harbor's tasks, check the prerequisites, and push a server to a Space."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Annotated

import typer

from openenv import settings
from openenv.errors import OpenEnvError, message_of

from .command import HelpCommand, OldName, check_choice, command_group, failure, printable, printable_lines
from .options import flags_class, options_of

# Processes of `rollout`, for each task in turn, and of `serve`, for each call of run_rollout:
#
#   this process                         sandbox (Docker container or pod)
#   ┌───────────────────────────┐        ┌────────────────────────────┐
#   │ capture server (a thread) │ <───── │ agent, with the proxy's URL │
#   └────────────┬──────────────┘        │ verifier of the task        │
#                ▼                       └────────────────────────────┘
#          model endpoint
#
# Sandboxes know the proxy's address only, never the endpoint's key. With --expose gradio or cloudflare, the proxy gets
# a public address, for sandboxes on other machines.
_EXAMPLES = """
Run Harbor's task folders with token capture, serve them, and check what this machine can run.

  openenv harbor info --dataset tasks
  openenv harbor rollout --dataset tasks --harness oracle --n-tasks 5
  openenv harbor rollout --dataset tasks --llm-url http://localhost:8000/v1
  openenv harbor serve --dataset tasks --llm-url http://localhost:8000/v1

A dataset is a folder of task folders (such as Terminal-Bench's), a dataset repository of the Hugging Face Hub, or
name@version of Harbor's registry, which needs the package harbor.
"""

harbor = command_group(_EXAMPLES)


@flags_class
class EndpointFlags:
    """Options of the model's endpoint and of the datasets, for every command."""

    llm_url: Annotated[str | None, typer.Option(metavar="URL", help="The model's endpoint, with OpenAI's API.")] = None
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model's ID; by default the only one at the endpoint.")
    ] = None
    dataset: Annotated[
        list[str],
        typer.Option(metavar="DATASET", help="A folder, a dataset repository of the Hub, or name@version; repeatable."),
    ] = field(default_factory=list)
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="The endpoint's key; sandboxes never get it. Prefer OPENENV_LLM_API_KEY: other users of this machine "
            "can read options.",
        ),
    ] = None
    auth_header: Annotated[
        str, typer.Option(metavar="NAME", help="The header that contains the key; Authorization adds Bearer.")
    ] = "Authorization"
    env_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A file of variables (NAME=value) to set first; push makes them secrets."),
    ] = None


# None keeps a default that depends on the place: this machine, another address, or a Space
# (`HarborPermissions.of`).
@flags_class
class VisitorFlags:
    """Options of what callers of a server may do, for `serve` and `push`."""

    share_endpoint: Annotated[
        bool | None,
        typer.Option(
            "--share-endpoint/--no-share-endpoint",
            help="Let callers run rollouts on this server's endpoint and key; on by default, off on a Space.",
        ),
    ] = None
    visitor_endpoints: Annotated[
        bool | None,
        typer.Option(
            "--visitor-endpoints/--no-visitor-endpoints", help="Let callers use their own endpoints; on by default."
        ),
    ] = None
    run_visibility: Annotated[
        str | None,
        typer.Option(
            metavar="WHO",
            help="Who sees stored rollouts on the page: all, or own for callers' own results only. By default all on "
            "this machine, own on a Space.",
        ),
    ] = None
    run_history: Annotated[
        bool | None,
        typer.Option("--run-history/--no-run-history", help="Keep rollouts on disk; on by default, off on a Space."),
    ] = None
    add_datasets: Annotated[
        bool | None,
        typer.Option(
            "--add-datasets/--no-add-datasets",
            help="Let callers add datasets of the Hub; by default only on this machine.",
        ),
    ] = None
    rollouts: Annotated[
        bool | None,
        typer.Option("--rollouts/--no-rollouts", help="Let callers run rollouts; otherwise they can only read tasks."),
    ] = None
    reward_key: Annotated[
        str,
        typer.Option(metavar="KEY", help="The reward to report if a task has several; or several keys, in order."),
    ] = ""

    def check(self) -> None:
        """Raise for a visibility that does not exist."""
        check_choice("--run-visibility", self.run_visibility, ("all", "own"))


_Expose = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="How other machines reach the capture proxy: direct, gradio or cloudflare. Local sandboxes need none.",
    ),
]


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (OpenEnvError, OSError, ValueError, IndexError, ImportError, RuntimeError) as exc:
        # OSError: a taken port, an unreadable file. ValueError: an unknown dataset. IndexError: a task number beyond
        # the dataset. ImportError: a missing extra. RuntimeError: the endpoint does not answer.
        raise failure(message_of(exc)) from exc


@flags_class
class InfoFlags:
    """Options of `openenv harbor info`."""

    endpoint: EndpointFlags
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show every agent, and every finding about the endpoint.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@harbor.command("info", cls=HelpCommand)
@options_of(InfoFlags)
def info(flags: InfoFlags) -> None:
    """Show the endpoint, sandboxes, datasets and agents that can run tasks here, and missing prerequisites.

    Exits with 1 if no sandbox can run tasks, or if the endpoint or a dataset that you name does not work.

    Examples:

      openenv harbor info --dataset tasks
      openenv harbor info --llm-url http://localhost:8000/v1 --json
    """
    from openenv.adapters.harbor.capabilities import prepare

    endpoint = flags.endpoint
    with _failures():
        # `require_llm=False`: the summary also reports an endpoint that is down.
        found = prepare(
            llm_url=endpoint.llm_url,
            model=endpoint.model,
            datasets=endpoint.dataset or None,
            env_file=endpoint.env_file,
            require_llm=False,
            quiet=True,
            api_key=endpoint.api_key,
            auth_header=endpoint.auth_header,
        )
    # The text has one section per part:
    #
    #   llm       qwen3-8b  [TRAIN]
    #   sandboxes 1 of 2 usable
    #     [ok]  docker
    #     [--]  kubernetes   no cluster is configured
    #   datasets  1 with 12 tasks
    #     [ok]  tasks  12 tasks
    #
    # TRAIN: the endpoint returns tokens and log-probabilities. EVAL ONLY: text only.
    typer.echo(
        json.dumps(found.to_dict(), indent=2) if flags.as_json else printable_lines(found.render(verbose=flags.verbose))
    )
    # Scripts ask "can I start?"; `EVAL ONLY` endpoints can run tasks, too.
    if not found.is_usable:
        raise typer.Exit(1)


@flags_class
class RolloutFlags:
    """Options of `openenv harbor rollout`."""

    endpoint: EndpointFlags
    task_index: Annotated[int, typer.Option(metavar="N", min=0, help="The number of the first task.")] = 0
    harness: Annotated[str, typer.Option(metavar="AGENT", help="An agent, or module:Class of one.")] = "opencode"
    sandbox: Annotated[str, typer.Option(metavar="BACKEND", help="docker, kubernetes, or module:Class.")] = "docker"
    n_tasks: Annotated[int, typer.Option("--n-tasks", "-n", metavar="N", min=1, help="Number of tasks to run.")] = 1
    port: Annotated[int, typer.Option(metavar="PORT", help="Port of the capture proxy; 0 takes any free one.")] = 0
    expose: _Expose = "direct"
    trials_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Store of the rollouts; by default OPENENV_HARBOR_TRIALS_DIR, else the store of all rollouts.",
        ),
    ] = None
    reward_key: Annotated[
        str,
        typer.Option(metavar="KEY", help="The reward to report if a task has several; or several keys, in order."),
    ] = ""
    keep_sandbox: Annotated[bool, typer.Option("--keep-sandbox", hidden=True)] = False
    force_build: Annotated[
        bool, typer.Option("--force-build", help="Build images again, without the engine's cache.")
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", OldName("--out"), metavar="FILE", help="Write the results to this file, as JSON."
        ),
    ] = None


@harbor.command("rollout", cls=HelpCommand)
@options_of(RolloutFlags)
def rollout(flags: RolloutFlags) -> None:
    """Run tasks of a dataset one after another, and print their results.

    The agents oracle and nop need no model. Exits with 1 if a rollout failed, regardless of its reward.

    Examples:

      openenv harbor rollout --dataset tasks --harness oracle
      openenv harbor rollout --dataset tasks -n 10 -o results.json \\
          --llm-url http://localhost:8000/v1
    """
    from openenv.adapters.harbor.runner import run_batch

    endpoint = flags.endpoint
    with _failures():
        # --task-index counts within one dataset, so several datasets would be ambiguous.
        if len(endpoint.dataset) != 1:
            raise ValueError("give exactly one --dataset")
        # Published runners keep a sandbox for debugging; ours closes it after storing its files.
        if flags.keep_sandbox:
            raise ValueError(
                "sandboxes are always closed: leave --keep-sandbox out, and read the files that the agent changed with "
                "openenv rollouts show ID"
            )
        results = asyncio.run(
            run_batch(
                llm_url=endpoint.llm_url or "",
                dataset=endpoint.dataset[0],
                task_indices=range(flags.task_index, flags.task_index + flags.n_tasks),
                harness=flags.harness,
                sandbox=flags.sandbox,
                model=endpoint.model,
                port=flags.port,
                expose=flags.expose,
                trials_dir=flags.trials_dir,
                reward_key=flags.reward_key,
                force_build=flags.force_build,
                env_file=endpoint.env_file,
                api_key=endpoint.api_key,
                auth_header=endpoint.auth_header,
                report=lambda line: typer.echo(printable(line), err=True),
            )
        )
        # Before the table: a closed pipe (`| head`) must not cost the file.
        if flags.out is not None:
            flags.out.write_text(json.dumps([result.model_dump() for result in results], indent=2))
    # One line per task, with tabs for `cut` and spreadsheets:
    #
    #   hello-world  1  oe-hello-world-1a2b3c4d
    #   fix-tests    -  oe-fix-tests-5e6f7a8b      the rollout has no reward
    for result in results:
        reward = "-" if result.reward is None else f"{result.reward:g}"
        typer.echo(f"{printable(result.task_name)}\t{reward}\t{printable(result.trial_name)}")
    # A reward of 0 is a result and exits with 0; only a failed rollout exits with 1.
    if not all(result.ok for result in results):
        raise typer.Exit(1)


@flags_class
class HarborServeFlags:
    """Options of `openenv harbor serve`."""

    endpoint: EndpointFlags
    max_output_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum tokens of a reply, even if an agent asks for more.")
    ] = 8192
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="PORT", help="Port for callers; 0 takes any free one.")] = 8000
    capture_port: Annotated[
        int,
        typer.Option(metavar="PORT", help="Port of the capture proxy, on this machine; 0 takes any free one."),
    ] = 8100
    expose: _Expose = "direct"
    visitors: VisitorFlags
    private_urls: Annotated[
        bool | None,
        typer.Option(
            "--private-urls/--no-private-urls",
            help="Let callers use endpoints on private or local addresses; by default only on this machine.",
        ),
    ] = None


@harbor.command("serve", cls=HelpCommand)
@options_of(HarborServeFlags)
def serve(flags: HarborServeFlags) -> None:
    """Serve Harbor's tasks: the Task API lists them, the tool run_rollout runs an agent on one.

    Callers use openenv.harbor.client.HarborEnv, any MCP client, or the page. If other machines can reach the address,
    a token is created and printed, unless OPENENV_TOKEN contains one.

    Examples:

      openenv harbor serve --dataset tasks
      openenv harbor serve --dataset tasks --host 0.0.0.0 \\
          --llm-url http://localhost:8000/v1
    """
    from openenv.adapters.harbor.options import HarborPermissions
    from openenv.adapters.harbor.serving import serve_harbor
    from openenv.protocol.addresses import is_loopback

    endpoint, visitors = flags.endpoint, flags.visitors
    visitors.check()
    # `openenv harbor push` gives a Space its datasets as a variable.
    datasets = endpoint.dataset or list(settings.harbor_datasets())
    with _failures():
        if not datasets:
            raise ValueError("give at least one --dataset")
        serve_harbor(
            llm_url=endpoint.llm_url or "",
            datasets=datasets,
            model=endpoint.model,
            host=flags.host,
            port=flags.port,
            capture_port=flags.capture_port,
            expose=flags.expose,
            env_file=endpoint.env_file,
            api_key=endpoint.api_key,
            auth_header=endpoint.auth_header,
            max_output_tokens=flags.max_output_tokens,
            options=HarborPermissions.of(
                # Permissions that are risky for others, such as private URLs, are on by default only on loopback.
                is_local=is_loopback(flags.host),
                shares_endpoint=visitors.share_endpoint,
                takes_endpoints=visitors.visitor_endpoints,
                shows_rollouts=None if visitors.run_visibility is None else visitors.run_visibility == "all",
                keeps_rollouts=visitors.run_history,
                adds_datasets=visitors.add_datasets,
                runs_rollouts=visitors.rollouts,
                takes_private_urls=flags.private_urls,
                reward_key=visitors.reward_key,
            ),
        )


@flags_class
class HarborPushFlags:
    """Options of `openenv harbor push`."""

    endpoint: EndpointFlags
    repo_id: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="The Space to create or update.")] = None
    private: Annotated[bool, typer.Option("--private", help="Make the Space private.")] = False
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help="The Space's hardware, such as cpu-basic.")] = (
        None
    )
    # The published command has these options; our Space works without a bucket and without signing in.
    bucket: Annotated[str | None, typer.Option(metavar="NAME", hidden=True)] = None
    public_bucket: Annotated[bool | None, typer.Option("--public-bucket/--private-bucket", hidden=True)] = None
    hf_login: Annotated[bool, typer.Option("--hf-login/--no-hf-login", hidden=True)] = False
    recreate: Annotated[
        bool, typer.Option("--recreate", help="Delete the Space first, with its variables and secrets.")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and push nothing.")] = False
    visitors: VisitorFlags

    def check(self) -> None:
        """Raise for options that the Space does not support, with the alternative."""
        self.visitors.check()
        # These options exist so that published scripts get this advice instead of "No such option".
        if self.bucket not in (None, "none") or self.public_bucket is not None:
            raise ValueError(
                "the Space uses no bucket: leave --bucket and --public-bucket out; it downloads its datasets itself"
            )
        if self.hf_login:
            raise ValueError("the page has no sign-in: leave --hf-login out; callers send their own key")
        if self.repo_id is None or self.repo_id.count("/") != 1:
            raise ValueError("name the Space with --repo-id OWNER/NAME")


@harbor.command("push", cls=HelpCommand)
@options_of(HarborPushFlags)
def push(flags: HarborPushFlags) -> None:
    """Push a server of Harbor's tasks to a Hugging Face Space.

    The Space serves the catalogue. It has no container engine, so rollouts need a Kubernetes cluster; its
    configuration is a secret of the Space. The endpoint's key and the variables of --env-file become secrets and are
    never printed.

    Examples:

      openenv harbor push --repo-id me/tasks --dataset me/my-tasks --dry-run
      openenv harbor push --repo-id me/tasks --dataset me/my-tasks --env-file .env
    """
    from openenv.packaging.hub.harbor_space import SpacePlan, push_space

    endpoint, visitors = flags.endpoint, flags.visitors
    with _failures():
        # Inside `_failures`, because `check` raises ValueError.
        flags.check()
        assert flags.repo_id is not None
        switches = {
            # Off unless asked for: a Space is public, and every rollout would spend the owner's key.
            "share-endpoint": bool(visitors.share_endpoint),
            "visitor-endpoints": visitors.visitor_endpoints,
            "run-history": bool(visitors.run_history),
            "add-datasets": bool(visitors.add_datasets),
            "rollouts": visitors.rollouts,
        }
        plan = SpacePlan(
            repo_id=flags.repo_id,
            datasets=tuple(endpoint.dataset),
            llm_url=endpoint.llm_url or "",
            model=endpoint.model or "",
            auth_header=endpoint.auth_header,
            private=flags.private,
            hardware=flags.hardware,
            reward_key=visitors.reward_key,
            visibility=visitors.run_visibility or "own",
            switches={name: value for name, value in switches.items() if value is not None},
            api_key=endpoint.api_key or settings.llm_api_key(),
            env_file=None if endpoint.env_file is None else Path(endpoint.env_file),
        )
        # The plan names secrets without their values, so that it can be pasted into an issue.
        if flags.dry_run:
            typer.echo(plan.describe())
            return
        typer.echo(push_space(plan, recreate=flags.recreate, report=lambda line: typer.echo(line, err=True)))
