"""`openenv collect`: a teacher plays a served environment, and the episodes become a dataset."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import typer

from openenv import settings
from openenv.errors import OpenEnvError, message_of

from .command import check_choice, failure, printable, tidy_on_sigterm

if TYPE_CHECKING:
    from openenv.client.llm_client import LLMClient
    from openenv.rollout.run.agent_sessions import ModelStep
    from openenv.rollout.run.collect import CollectResult, EpisodeRecord, RolloutSerializer
    from openenv.train.served_session import EnvFamily

_PROVIDERS = ("scripted", "openai", "anthropic")
_SYSTEM_PROMPT = (
    "You act in an environment through tools. Read the last observation and call one tool with valid arguments; "
    "go on until the episode is over."
)
_FAILURES_IN_A_ROW = 5


@dataclass(frozen=True, slots=True)
class _Teacher:
    """What plays: the first legal action by itself, or a language model."""

    provider: str
    model: str | None
    endpoint: str | None
    port: int | None
    temperature: float
    max_tokens: int
    system_prompt: str | None

    @property
    def label(self) -> str:
        """The provider as metadata names it."""
        return "openai-compatible" if self.endpoint and self.provider != "anthropic" else self.provider

    def check(self) -> None:
        """Raise for options that do not fit together."""
        check_choice("--provider", self.provider, _PROVIDERS)
        is_model = self.endpoint is not None or self.provider != "scripted"
        if is_model and not self.model:
            raise typer.BadParameter("name the model: --model NAME", param_hint="--model")
        if not is_model and (self.model or self.system_prompt):
            hint = "--model" if self.model else "--system-prompt"
            raise typer.BadParameter("needs --provider openai or anthropic, or --llm-endpoint URL", param_hint=hint)
        if self.port is not None and self.endpoint is None:
            raise typer.BadParameter("needs --llm-endpoint URL", param_hint="--llm-port")

    def model_step(self) -> ModelStep:
        """Return what the harness calls."""
        from openenv.rollout.run.collect import build_model_step, scripted_model_step

        if self.label == "scripted":
            return scripted_model_step
        return build_model_step(self._client(), system_prompt=self.system_prompt or _SYSTEM_PROMPT)

    def _client(self) -> LLMClient:
        from openenv.client.llm_client import AnthropicClient, OpenAIClient, create_llm_client

        assert self.model is not None
        own = settings.anthropic_api_key if self.provider == "anthropic" else settings.openai_api_key
        key = own() or settings.any_api_key()
        options: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        if self.endpoint is not None:
            kind = AnthropicClient if self.provider == "anthropic" else OpenAIClient
            return kind(self.endpoint, self.port, self.model, api_key=key, **options)
        if key is None:
            raise ValueError(f"provider {self.provider!r} needs a key: set {own.name} or API_KEY")
        return create_llm_client(self.provider, self.model, key, **options)


@dataclass(frozen=True, slots=True)
class _Upload:
    """Where the dataset goes on the Hub, if anywhere."""

    repo_id: str | None
    private: bool
    commit_message: str | None

    def check(self) -> None:
        """Raise before anything is played for what would fail after it."""
        if self.repo_id is None:
            if self.private or self.commit_message:
                hint = "--private" if self.private else "--commit-message"
                raise typer.BadParameter("needs --push-to-hub REPO", param_hint=hint)
            return
        try:
            from huggingface_hub.errors import HFValidationError
            from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
        except ImportError:
            raise failure("--push-to-hub needs huggingface_hub: pip install 'openenv[hub]'") from None
        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as exc:
            raise typer.BadParameter(str(exc), param_hint="--push-to-hub") from None

    def push(self, folder: Path) -> None:
        """Upload a folder's episodes."""
        from openenv.rollout.run.collect import push_to_hf_hub

        if self.repo_id is None:
            return
        try:
            url = push_to_hf_hub(folder, self.repo_id, private=self.private, commit_message=self.commit_message)
        except FileNotFoundError:
            raise failure("there is no episode to upload") from None
        except Exception as exc:  # of the Hub's client, or of the network: the episodes are safe
            reason = printable(message_of(exc)).splitlines()[0]
            raise failure(f"the upload failed: {reason}. The episodes are in {folder}; run the same again") from exc
        typer.echo(f"dataset      {url}")


def collect(
    env: str = typer.Argument(
        ...,
        metavar="ENV",
        help="The environment: a name, an address, openspiel:GAME or reasoning_gym:DATASET.",
    ),
    base_url: str | None = typer.Option(None, metavar="URL", help="The server, where ENV is no address."),
    output_dir: Path = typer.Option(
        ..., "--output-dir", "-o", metavar="FOLDER", help="Where results.jsonl and metadata.json go."
    ),
    num_episodes: int = typer.Option(10, "--num-episodes", "-n", metavar="N", min=1, help="How many there are to be."),
    max_turns: int = typer.Option(9, metavar="N", min=1, help="How many answers an episode has at most."),
    episode_id_prefix: str = typer.Option("ep", metavar="TEXT", help="How the ids of episodes begin."),
    resume: bool = typer.Option(True, help="Skip episodes that the folder has; else start a new results.jsonl."),
    keep_losses: bool = typer.Option(False, help="Keep episodes with a reward below 0 too."),
    unrewarded: bool = typer.Option(False, help="Keep episodes without any reward too; theirs is null."),
    provider: str = typer.Option("scripted", metavar="NAME", help="The teacher: scripted, openai or anthropic."),
    model: str | None = typer.Option(None, metavar="NAME", help="The model's id."),
    llm_endpoint: str | None = typer.Option(
        None, metavar="URL", help="An endpoint of your own that speaks chat completions; /v1 is added to a bare host."
    ),
    llm_port: int | None = typer.Option(None, metavar="PORT", help="Its port, where the address has none."),
    temperature: float = typer.Option(0.2, metavar="T", min=0, help="How the model samples."),
    max_tokens: int = typer.Option(200, metavar="N", min=1, help="How many tokens an answer has at most."),
    system_prompt: str | None = typer.Option(None, metavar="TEXT", help="What the model is asked to do."),
    dataset_config: str | None = typer.Option(
        None, metavar="JSON", help="The configuration of a reasoning_gym dataset; else arguments of reset."
    ),
    seed: int | None = typer.Option(None, metavar="SEED", help="The seed of the first episode; the others follow it."),
    split: str | None = typer.Option(None, metavar="NAME", help="Begin with the tasks of this split, in order."),
    concurrency: int = typer.Option(1, metavar="N", min=1, help="How many are played at once."),
    retries: int = typer.Option(2, metavar="N", min=0, help="How often an episode is played again that failed."),
    token: str | None = typer.Option(None, metavar="TOKEN", help="A token of the server; see openenv serve --help."),
    push_to_hub: str | None = typer.Option(
        None, "--push-to-hub", "-H", metavar="REPO", help="Upload to this dataset of the Hugging Face Hub."
    ),
    private: bool = typer.Option(False, "--private", help="Make a new dataset private."),
    commit_message: str | None = typer.Option(None, metavar="TEXT", help="The message of the upload."),
) -> None:
    """Let a teacher play a served environment, and keep the episodes as a dataset.

    Each episode is a line of results.jsonl: the conversation, as chat templates take it, the tool calls and the
    reward. The environment's tools are the teacher's; typed actions become tools. Run the same command again to go
    on. What the server or the endpoint fails at is played again and is no episode; exits with 1 if some have failed.

    The scripted teacher needs no model: it takes the first legal action, for trying an environment out. Keys come
    from OPENAI_API_KEY, ANTHROPIC_API_KEY or API_KEY.

      openenv collect http://localhost:8000 -o episodes
      openenv collect maze --base-url http://localhost:8000 -o episodes -n 100 \\
          --provider anthropic --model NAME -H me/maze-episodes
    """
    teacher = _Teacher(provider, model, llm_endpoint, llm_port, temperature, max_tokens, system_prompt)
    teacher.check()
    upload = _Upload(push_to_hub, private, commit_message)
    upload.check()
    if seed is not None and split is not None:
        raise typer.BadParameter("cannot be combined with --seed: tasks have their own", param_hint="--split")
    job = _Job(
        env=env,
        address=_address(env, base_url),
        config=_json_object("--dataset-config", dataset_config),
        teacher=teacher,
        output_dir=output_dir,
        max_turns=max_turns,
        seed=seed,
        split=split,
        token=token,
    )
    from openenv.rollout.run.collect import CollectOptions

    try:
        with tidy_on_sigterm(), _plain_warnings():
            result = job.run(
                keep_losses=keep_losses,
                num_episodes=num_episodes,
                episode_id_prefix=episode_id_prefix,
                resume=resume,
                options=CollectOptions(
                    retries=retries,
                    concurrency=concurrency,
                    give_up_after=max(_FAILURES_IN_A_ROW, concurrency),
                    requires_reward=not unrewarded,
                ),
            )
    except (OpenEnvError, ValueError, OSError) as exc:
        raise failure(printable(message_of(exc))) from None
    _print(result, output_dir)
    upload.push(output_dir)
    if result.num_failed:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is played, by which teacher, into which folder."""

    env: str
    address: str
    config: dict[str, Any] | None
    teacher: _Teacher
    output_dir: Path
    max_turns: int
    seed: int | None
    split: str | None
    token: str | None

    def run(self, *, keep_losses: bool, **options: Any) -> CollectResult:
        """Play; `options` are those of `CollectRunner.run`."""
        from openenv.rollout.run.agent_sessions import HarnessRunLimits, MCPHarnessAdapter
        from openenv.rollout.run.collect import CollectRunner, RolloutSerializer
        from openenv.train.served_session import ServedSessionFactory, env_family

        try:
            family = env_family(self.env, self.config)
        except ValueError as exc:
            raise typer.BadParameter(str(exc), param_hint="ENV") from None
        model_step = self.teacher.model_step()
        factory = ServedSessionFactory(self.address, family, {} if self.token is None else {"token": self.token})
        tasks = self._tasks(family)
        folder = RolloutSerializer(self.output_dir)
        metadata = self._metadata(keep_losses=keep_losses, num_episodes=options["num_episodes"])
        if options["resume"]:
            _warn_of_mixture(folder, metadata)
        names = ", ".join(printable(tool.name) for tool in factory.tools)
        typer.echo(f"server       {_public(self.address)}, tools: {names}")
        typer.echo(f"teacher      {self.teacher.label}" + (f"/{self.teacher.model}" if self.teacher.model else ""))
        folder.write_metadata(metadata)
        runner = CollectRunner(
            session_factory=factory,
            harness_adapter=MCPHarnessAdapter(),
            serializer=folder,
            tasks=tasks,
            limits=HarnessRunLimits(max_turns=self.max_turns),
        )
        return runner.run(model_step=model_step, should_keep=None if keep_losses else _is_no_loss, **options)

    def _metadata(self, *, keep_losses: bool, num_episodes: int) -> dict[str, Any]:
        import openenv

        teacher = self.teacher
        return {
            "env": _public(self.env),
            "env_base_url": _public(self.address),
            "provider": teacher.label,
            "model": teacher.model,
            "llm_endpoint": teacher.endpoint and _public(teacher.endpoint),
            "llm_port": teacher.port,
            "num_episodes_requested": num_episodes,
            "temperature": teacher.temperature,
            "keep_losses": keep_losses,
            "max_tokens": teacher.max_tokens,
            "max_turns": self.max_turns,
            "system_prompt": None if teacher.label == "scripted" else teacher.system_prompt or _SYSTEM_PROMPT,
            "dataset_config": self.config,
            "seed": self.seed,
            "split": self.split,
            "openenv_version": openenv.__version__,
        }

    def _tasks(self, family: EnvFamily) -> Iterable[Any] | None:
        """Return what episodes begin with: the tasks of a split over and over, seeds, or what the family has."""
        if self.split is not None:
            from openenv.client.task_client import TaskClient

            try:
                with TaskClient(self.address, token=self.token) as client:
                    tasks = list(client.split(self.split))
            except NotImplementedError:
                raise ValueError(f"{_public(self.address)} has no catalogue of tasks; leave out --split") from None
            if not tasks or not all(isinstance(task, Mapping) for task in tasks):
                raise ValueError(f"split {self.split!r} has no tasks that are arguments of reset")
            return itertools.cycle(tasks)
        if self.seed is not None:
            return ({"seed": number} for number in itertools.count(self.seed))
        return None if family.tasks is None else family.tasks()


def _print(result: CollectResult, output_dir: Path) -> None:
    typer.echo(
        f"collected={result.num_collected} skipped={result.num_skipped} dropped={result.num_dropped} "
        f"failed={result.num_failed}"
    )
    if result.num_rewarded:
        typer.echo(f"avg_reward={result.avg_reward:.3f} success_rate={result.success_rate:.0%}")
    if any("did not produce an environment reward" in reason for reason in result.failures.values()):
        typer.echo("The teacher called no tool that brings a reward. --unrewarded keeps such episodes.", err=True)
    if result.num_left:
        typer.echo(f"Stopped: too many failed in a row. {result.num_left} episodes are left.", err=True)
    if result.num_failed:
        typer.echo("Run the same command again to play what failed.", err=True)
    typer.echo(f"episodes     {output_dir}")


def _address(env: str, base_url: str | None) -> str:
    """Return the server's address, which ENV may be."""
    if base_url is not None:
        return base_url
    if "://" in env:
        return env
    raise typer.BadParameter(
        f"say where {env} is served: --base-url http://localhost:8000 (openenv serve starts a server)",
        param_hint="--base-url",
    )


def _json_object(option: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise typer.BadParameter(f"is not valid JSON: {exc}", param_hint=option) from None
    if not isinstance(value, dict):
        raise typer.BadParameter('must be a JSON object, such as {"min_terms": 2}', param_hint=option)
    return value


def _is_no_loss(record: EpisodeRecord) -> bool:
    return record.reward is None or record.reward >= 0.0


def _public(url: str) -> str:
    """Return an address without a password in it: metadata is uploaded."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _warn_of_mixture(folder: RolloutSerializer, metadata: Mapping[str, Any]) -> None:
    """Say so where the folder's episodes are of another environment or teacher: one dataset would have both."""
    before = folder.read_metadata()
    if not before or not folder.results_path.exists():
        return
    for key in ("env", "provider", "model"):
        if key in before and before[key] != metadata[key]:
            typer.echo(
                f"Warning: {folder.output_dir} has episodes with {key} {printable(before[key])} and gets some with "
                f"{printable(metadata[key])}. --no-resume starts a new results.jsonl.",
                err=True,
            )


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings as lines of their own, without the place in our code that they come from."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"Warning: {message}", err=True)
        yield
