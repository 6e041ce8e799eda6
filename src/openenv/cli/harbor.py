"""`openenv harbor`: run and serve Harbor's tasks, say what can run them here, and put a server on a Space."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from openenv import settings
from openenv.errors import OpenEnvError, message_of

from .command import HelpCommand, check_choice, command_group, failure

_EXAMPLES = """
Run Harbor's task folders with token capture, serve them, and see what can run them here.

  openenv harbor info --dataset tasks
  openenv harbor rollout --dataset tasks --harness oracle --n-tasks 5
  openenv harbor rollout --dataset tasks --llm-url http://localhost:8000/v1
  openenv harbor serve --dataset tasks --llm-url http://localhost:8000/v1

A dataset is a folder of task folders (such as Terminal-Bench's), a dataset repository of the Hugging Face Hub, or
name@version of Harbor's registry, which needs the package harbor.
"""

harbor = command_group(_EXAMPLES)

_LLM_URL = typer.Option(None, "--llm-url", metavar="URL", help="The model's endpoint, OpenAI's API.")
_MODEL = typer.Option(None, "--model", metavar="MODEL", help="The model's id; by default the only one served there.")
_DATASETS = typer.Option(
    [],
    "--dataset",
    metavar="DATASET",
    help="A folder, a dataset repository of the Hub, or name@version. May be repeated.",
)
_API_KEY = typer.Option(
    None,
    "--api-key",
    metavar="KEY",
    help="The endpoint's key. Better set OPENENV_LLM_API_KEY, which others on this machine cannot see. "
    "No sandbox gets it.",
)
_AUTH_HEADER = typer.Option(
    "Authorization", "--auth-header", metavar="NAME", help="The header that has the key; Authorization adds Bearer."
)
_ENV_FILE = typer.Option(None, "--env-file", metavar="FILE", help="A file of variables (NAME=value) to set first.")
_EXPOSE = typer.Option(
    "direct",
    "--expose",
    metavar="HOW",
    help="How machines elsewhere reach the capture proxy: direct, gradio or cloudflare. Sandboxes need none of it.",
)
_SHARE = typer.Option(
    None,
    "--share-endpoint/--no-share-endpoint",
    help="Let callers run rollouts on this server's endpoint and key; by default yes.",
)
_VISITORS = typer.Option(
    None,
    "--visitor-endpoints/--no-visitor-endpoints",
    help="Let callers name an endpoint of their own; by default yes.",
)
_VISIBILITY = typer.Option(
    None,
    "--run-visibility",
    metavar="WHO",
    help="Who sees stored rollouts on the page: all, or own for none but the results of one's own calls. By default "
    "all on this machine, own on a Space.",
)
_HISTORY = typer.Option(
    None, "--run-history/--no-run-history", help="Keep rollouts on disk; by default yes, but not on a Space."
)
_ADD = typer.Option(
    None,
    "--add-datasets/--no-add-datasets",
    help="Let callers add datasets of the Hub; by default only on this machine.",
)
_ROLLOUTS = typer.Option(
    None, "--rollouts/--no-rollouts", help="Let callers run rollouts; without, tasks can only be looked at."
)
_REWARD_KEY = typer.Option(
    "", "--reward-key", metavar="KEY", help="Which of several rewards counts; or several keys, the first that is there."
)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (OpenEnvError, OSError, ValueError, IndexError, ImportError, RuntimeError) as exc:
        raise failure(message_of(exc)) from exc


@harbor.command("info", cls=HelpCommand)
def info(
    llm_url: str | None = _LLM_URL,
    model: str | None = _MODEL,
    dataset: list[str] = _DATASETS,
    api_key: str | None = _API_KEY,
    auth_header: str = _AUTH_HEADER,
    env_file: str | None = _ENV_FILE,
    verbose: bool = typer.Option(False, "--verbose", help="Show every agent, and every finding about the endpoint."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the endpoint, sandboxes, datasets and agents that can run tasks here, and what is missing.

    Examples:

      openenv harbor info --dataset tasks
      openenv harbor info --llm-url http://localhost:8000/v1 --json
    """
    from openenv.adapters.harbor.capabilities import prepare

    with _failures():
        found = prepare(
            llm_url=llm_url,
            model=model,
            datasets=dataset or None,
            env_file=env_file,
            require_llm=False,
            quiet=True,
            api_key=api_key,
            auth_header=auth_header,
        )
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else found.render(verbose=verbose))


@harbor.command("rollout", cls=HelpCommand)
def rollout(
    llm_url: str | None = _LLM_URL,
    model: str | None = _MODEL,
    dataset: list[str] = _DATASETS,
    task_index: int = typer.Option(0, "--task-index", metavar="N", min=0, help="The first task, by its number."),
    harness: str = typer.Option("opencode", "--harness", metavar="AGENT", help="An agent, or module:Class of one."),
    sandbox: str = typer.Option("docker", "--sandbox", metavar="BACKEND", help="docker, kubernetes, or module:Class."),
    n_tasks: int = typer.Option(1, "--n-tasks", "-n", metavar="N", min=1, help="How many tasks to run."),
    port: int = typer.Option(0, "--port", metavar="PORT", help="Port of the capture proxy; 0 takes any free one."),
    expose: str = _EXPOSE,
    trials_dir: Path | None = typer.Option(
        None,
        "--trials-dir",
        metavar="FOLDER",
        help="Where rollouts are stored; by default OPENENV_HARBOR_TRIALS_DIR, else the store of all rollouts.",
    ),
    reward_key: str = _REWARD_KEY,
    keep_sandbox: bool = typer.Option(
        False, "--keep-sandbox", hidden=True, help="Refused: the store keeps the work tree."
    ),
    force_build: bool = typer.Option(False, "--force-build", help="Build images again, without the engine's cache."),
    api_key: str | None = _API_KEY,
    auth_header: str = _AUTH_HEADER,
    env_file: str | None = _ENV_FILE,
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="Write the results there, as JSON."),
) -> None:
    """Run tasks of a dataset one after another, and print what came of each.

    oracle and nop need no model. Exits with 1 if a rollout failed, whatever its reward.

    Examples:

      openenv harbor rollout --dataset tasks --harness oracle
      openenv harbor rollout --dataset tasks -n 10 --out results.json \\
          --llm-url http://localhost:8000/v1
    """
    from openenv.adapters.harbor.runner import run_batch

    with _failures():
        if len(dataset) != 1:
            raise ValueError("give one --dataset")
        results = asyncio.run(
            run_batch(
                llm_url=llm_url or "",
                dataset=dataset[0],
                task_indices=range(task_index, task_index + n_tasks),
                harness=harness,
                sandbox=sandbox,
                model=model,
                port=port,
                expose=expose,
                trials_dir=trials_dir,
                reward_key=reward_key,
                keep_sandbox=keep_sandbox,
                force_build=force_build,
                env_file=env_file,
                api_key=api_key,
                auth_header=auth_header,
                report=lambda line: typer.echo(line, err=True),
            )
        )
        if out is not None:
            out.write_text(json.dumps([result.model_dump() for result in results], indent=2))
    for result in results:
        typer.echo(f"{result.task_name}\t{'-' if result.reward is None else f'{result.reward:g}'}\t{result.trial_name}")
    if not all(result.ok for result in results):
        raise typer.Exit(1)


@harbor.command("serve", cls=HelpCommand)
def serve(
    llm_url: str | None = _LLM_URL,
    model: str | None = _MODEL,
    dataset: list[str] = _DATASETS,
    max_output_tokens: int = typer.Option(
        8192, "--max-output-tokens", metavar="N", min=1, help="The most tokens of one answer, whatever an agent asks."
    ),
    host: str = typer.Option("127.0.0.1", "--host", metavar="ADDRESS", help="Address to listen on."),
    port: int = typer.Option(8000, "--port", metavar="PORT", help="Port for callers; 0 takes any free one."),
    capture_port: int = typer.Option(
        8100, "--capture-port", metavar="PORT", help="Port of the capture proxy, on this machine; 0 takes any free one."
    ),
    expose: str = _EXPOSE,
    api_key: str | None = _API_KEY,
    auth_header: str = _AUTH_HEADER,
    env_file: str | None = _ENV_FILE,
    share_endpoint: bool | None = _SHARE,
    visitor_endpoints: bool | None = _VISITORS,
    run_visibility: str | None = _VISIBILITY,
    run_history: bool | None = _HISTORY,
    add_datasets: bool | None = _ADD,
    rollouts: bool | None = _ROLLOUTS,
    private_urls: bool | None = typer.Option(
        None,
        "--private-urls/--no-private-urls",
        help="Let callers name an endpoint on a private or local address; by default only on this machine.",
    ),
    reward_key: str = _REWARD_KEY,
) -> None:
    """Serve Harbor's tasks: the Task API lists them, the tool run_rollout runs an agent on one.

    Callers use openenv.harbor.client.HarborEnv, any MCP client, or the page. On an address that others reach, a token
    is made and printed unless OPENENV_TOKEN has one.

    Examples:

      openenv harbor serve --dataset tasks
      openenv harbor serve --dataset tasks --host 0.0.0.0 \\
          --llm-url http://localhost:8000/v1
    """
    from openenv.adapters.harbor.options import HarborPermissions
    from openenv.adapters.harbor.serving import serve_harbor
    from openenv.protocol.addresses import is_loopback

    check_choice("--run-visibility", run_visibility, ("all", "own"))
    datasets = dataset or list(settings.harbor_datasets())
    with _failures():
        if not datasets:
            raise ValueError("give at least one --dataset")
        serve_harbor(
            llm_url=llm_url or "",
            datasets=datasets,
            model=model,
            host=host,
            port=port,
            capture_port=capture_port,
            expose=expose,
            env_file=env_file,
            api_key=api_key,
            auth_header=auth_header,
            max_output_tokens=max_output_tokens,
            options=HarborPermissions.of(
                is_local=is_loopback(host),
                shares_endpoint=share_endpoint,
                takes_endpoints=visitor_endpoints,
                shows_rollouts=None if run_visibility is None else run_visibility == "all",
                keeps_rollouts=run_history,
                adds_datasets=add_datasets,
                runs_rollouts=rollouts,
                takes_private_urls=private_urls,
                reward_key=reward_key,
            ),
        )


@harbor.command("push", cls=HelpCommand)
def push(
    llm_url: str | None = _LLM_URL,
    repo_id: str | None = typer.Option(None, "--repo-id", metavar="OWNER/NAME", help="The Space to make or change."),
    model: str | None = _MODEL,
    dataset: list[str] = _DATASETS,
    private: bool = typer.Option(False, "--private", help="Make the Space private."),
    hardware: str | None = typer.Option(None, "--hardware", metavar="NAME", help="The Space's hardware: cpu-basic."),
    api_key: str | None = _API_KEY,
    auth_header: str = _AUTH_HEADER,
    env_file: str | None = typer.Option(
        None, "--env-file", metavar="FILE", help="A file of variables that become the Space's secrets."
    ),
    bucket: str | None = typer.Option(
        None, "--bucket", metavar="NAME", hidden=True, help="Refused: the Space downloads its datasets."
    ),
    public_bucket: bool | None = typer.Option(
        None, "--public-bucket/--private-bucket", hidden=True, help="Refused: the Space downloads its datasets."
    ),
    hf_login: bool = typer.Option(
        False, "--hf-login/--no-hf-login", hidden=True, help="Refused: callers send their key."
    ),
    recreate: bool = typer.Option(False, "--recreate", help="Delete the Space first, with its variables and secrets."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be pushed, and stop."),
    share_endpoint: bool | None = _SHARE,
    visitor_endpoints: bool | None = _VISITORS,
    run_visibility: str | None = _VISIBILITY,
    run_history: bool | None = _HISTORY,
    add_datasets: bool | None = _ADD,
    rollouts: bool | None = _ROLLOUTS,
    reward_key: str = _REWARD_KEY,
) -> None:
    """Put a server of Harbor's tasks on a Hugging Face Space.

    The Space serves the catalogue. It has no container engine: rollouts need a Kubernetes cluster, whose configuration
    is a secret of the Space. The endpoint's key, and the variables of --env-file, become secrets; nothing prints them.

    Examples:

      openenv harbor push --repo-id me/tasks --dataset me/my-tasks --dry-run
      openenv harbor push --repo-id me/tasks --dataset me/my-tasks --env-file .env
    """
    from openenv.packaging.hub.harbor_space import SpacePlan, push_space

    check_choice("--run-visibility", run_visibility, ("all", "own"))
    switches = {
        "share-endpoint": bool(share_endpoint),
        "visitor-endpoints": visitor_endpoints,
        "run-history": bool(run_history),
        "add-datasets": bool(add_datasets),
        "rollouts": rollouts,
    }
    with _failures():
        if bucket not in (None, "none") or public_bucket is not None:
            raise ValueError("the Space downloads its datasets itself: leave --bucket and --public-bucket out")
        if hf_login:
            raise ValueError("the page has no sign-in with Hugging Face: leave --hf-login out")
        if repo_id is None or repo_id.count("/") != 1:
            raise ValueError("name the Space with --repo-id OWNER/NAME")
        plan = SpacePlan(
            repo_id=repo_id,
            datasets=tuple(dataset),
            llm_url=llm_url or "",
            model=model or "",
            auth_header=auth_header,
            private=private,
            hardware=hardware,
            reward_key=reward_key,
            visibility=run_visibility or "own",
            switches={name: value for name, value in switches.items() if value is not None},
            api_key=api_key or settings.llm_api_key(),
            env_file=None if env_file is None else Path(env_file),
        )
        if dry_run:
            typer.echo(plan.describe())
            return
        typer.echo(push_space(plan, recreate=recreate, report=lambda line: typer.echo(line, err=True)))
