"""`openenv collect`: a teacher plays a served environment, and the episodes become a dataset."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit, urlunsplit

import typer

from openenv import settings
from openenv.errors import OpenEnvError, install_command, message_of

from .command import OldName, check_choice, failure, printable, tidy_on_sigterm
from .options import flags_class, options_of

if TYPE_CHECKING:
    from openenv.client.llm_client import LLMClient
    from openenv.rollout.run.agent_sessions import ModelStep
    from openenv.rollout.run.collect import CollectResult, EpisodeRecord, RolloutSerializer
    from openenv.train.served_session import EnvFamily

# scripted needs no model and no key: a first test of a new environment costs nothing.
_PROVIDERS = ("scripted", "openai", "anthropic")
# For language models only. A reply without a tool call earns no reward.
_SYSTEM_PROMPT = (
    "You act in an environment through tools. Read the last observation and call one tool with valid arguments; "
    "go on until the episode is over."
)
# A wrong key or a dead server fails each episode after its retries; stop instead of trying all of them.
_FAILURES_IN_A_ROW = 5


@flags_class
class TeacherFlags:
    """Options of the teacher: the scripted one takes the first legal action, any other is a language model."""

    provider: Annotated[str, typer.Option(metavar="NAME", help="The teacher: scripted, openai or anthropic.")] = (
        "scripted"
    )
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's ID.")] = None
    llm_endpoint: Annotated[
        str | None,
        typer.Option(
            "--llm-url",
            OldName("--llm-endpoint"),
            metavar="URL",
            help="Your own chat completions endpoint; /v1 is added to a bare host.",
        ),
    ] = None
    llm_port: Annotated[int | None, typer.Option(metavar="PORT", help="The endpoint's port, if its URL has none.")] = (
        None
    )
    temperature: Annotated[float, typer.Option(metavar="T", min=0, help="The model's temperature.")] = 0.2
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum tokens of a reply.")] = 200
    system_prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The model's system prompt.")] = None

    @property
    def label(self) -> str:
        """The provider's name in the metadata."""
        return "openai-compatible" if self.llm_endpoint and self.provider != "anthropic" else self.provider

    def check(self) -> None:
        """Raise for options that do not fit together."""
        check_choice("--provider", self.provider, _PROVIDERS)
        # --llm-url alone is enough: except with --provider anthropic, it means an endpoint with OpenAI's API.
        is_model = self.llm_endpoint is not None or self.provider != "scripted"
        if is_model and not self.model:
            raise typer.BadParameter("name the model: --model NAME", param_hint="--model")
        # Without this check, `--model NAME` alone would silently collect episodes of the scripted teacher.
        if not is_model and (self.model or self.system_prompt):
            hint = "--model" if self.model else "--system-prompt"
            raise typer.BadParameter("needs --provider openai or anthropic, or --llm-url URL", param_hint=hint)
        if self.llm_port is not None and self.llm_endpoint is None:
            raise typer.BadParameter("needs --llm-url URL", param_hint="--llm-port")

    def model_step(self) -> ModelStep:
        """Return the function that the harness calls for each turn."""
        from openenv.rollout.run.collect import build_model_step, scripted_model_step

        if self.label == "scripted":
            return scripted_model_step
        return build_model_step(self._client(), system_prompt=self.system_prompt or _SYSTEM_PROMPT)

    def _client(self) -> LLMClient:
        from openenv.client.llm_client import AnthropicClient, OpenAIClient, create_llm_client

        assert self.model is not None
        # The provider's variable first, then API_KEY. Options have no key: other users can read a command line.
        provider_key = settings.anthropic_api_key if self.provider == "anthropic" else settings.openai_api_key
        key = provider_key() or settings.any_api_key()
        options: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        # An endpoint given by URL may need no key; the public providers always do.
        if self.llm_endpoint is not None:
            kind = AnthropicClient if self.provider == "anthropic" else OpenAIClient
            return kind(self.llm_endpoint, self.llm_port, self.model, api_key=key, **options)
        if key is None:
            raise ValueError(f"provider {self.provider!r} needs a key: set {provider_key.name} or API_KEY")
        return create_llm_client(self.provider, self.model, key, **options)


@flags_class
class UploadFlags:
    """Options of the upload to the Hub."""

    push_to_hub: Annotated[
        str | None,
        typer.Option("--push-to-hub", "-H", metavar="REPO", help="Upload to this dataset of the Hugging Face Hub."),
    ] = None
    private: Annotated[bool, typer.Option("--private", help="Make a new dataset private.")] = False
    commit_message: Annotated[str | None, typer.Option(metavar="TEXT", help="The upload's commit message.")] = None

    def check(self) -> None:
        """Raise before the first episode if the upload would fail after the last one."""
        # Hours of episodes come before the upload, so mistakes in its options are found first.
        if self.push_to_hub is None:
            if self.private or self.commit_message:
                hint = "--private" if self.private else "--commit-message"
                raise typer.BadParameter("needs --push-to-hub REPO", param_hint=hint)
            return
        try:
            from huggingface_hub.errors import HFValidationError
            from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
        # huggingface_hub is an extra.
        except ImportError:
            raise failure(f"--push-to-hub needs huggingface_hub: {install_command('hub')}") from None
        try:
            validate_repo_id(self.push_to_hub)
        except HFValidationError as exc:
            raise typer.BadParameter(str(exc), param_hint="--push-to-hub") from None

    def push(self, folder: Path) -> None:
        """Upload a folder's episodes, if the user asked for it."""
        from openenv.rollout.run.collect import push_to_hf_hub

        if self.push_to_hub is None:
            return
        try:
            url = push_to_hf_hub(folder, self.push_to_hub, private=self.private, commit_message=self.commit_message)
        # Every episode was dropped or failed, and results.jsonl was never written.
        except FileNotFoundError:
            raise failure("no episode to upload") from None
        except Exception as exc:  # the Hub's client and the network raise many types; the episodes are safe
            reason = printable(message_of(exc)).splitlines()[0]
            # Running it again collects nothing new (resume) and repeats the upload.
            raise failure(
                f"the upload failed: {reason}. The episodes are in {folder}; run the same command again"
            ) from exc
        typer.echo(f"dataset      {url}")


@flags_class
class CollectFlags:
    """Options of `openenv collect`."""

    env: Annotated[
        str,
        typer.Argument(metavar="ENV", help="The environment: a name, a URL, openspiel:GAME or reasoning_gym:DATASET."),
    ]
    base_url: Annotated[
        str | None,
        typer.Option("--url", OldName("--base-url"), metavar="URL", help="The server's URL, if ENV is a name."),
    ] = None
    output_dir: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            OldName("--output-dir"),
            metavar="FOLDER",
            help="Folder of results.jsonl and metadata.json.",
        ),
    ]
    num_episodes: Annotated[
        int,
        typer.Option(
            "--episodes",
            "-n",
            OldName("--num-episodes"),
            metavar="N",
            min=1,
            help="Number of episodes in the dataset.",
        ),
    ] = 10
    max_turns: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum replies per episode.")] = 9
    episode_id_prefix: Annotated[str, typer.Option(metavar="TEXT", help="Prefix of the episodes' IDs.")] = "ep"
    resume: Annotated[
        bool, typer.Option(help="Skip episodes that the folder has; otherwise start a new results.jsonl.")
    ] = True
    keep_losses: Annotated[bool, typer.Option(help="Also keep episodes with a reward below 0.")] = False
    unrewarded: Annotated[bool, typer.Option(help="Also keep episodes without a reward, as null.")] = False
    teacher: TeacherFlags
    dataset_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Configuration of a reasoning_gym dataset, or arguments of reset."),
    ] = None
    seed: Annotated[
        int | None, typer.Option(metavar="SEED", help="Seed of the first episode; each next one adds 1.")
    ] = None
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Start episodes from the tasks of this split, in order.")
    ] = None
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Number of parallel episodes.")] = 1
    retries: Annotated[int, typer.Option(metavar="N", min=0, help="How often to retry a failed episode.")] = 2
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The server's token; see openenv serve --help.")
    ] = None
    upload: UploadFlags

    def check(self) -> None:
        """Raise for options that do not fit together."""
        self.teacher.check()
        self.upload.check()
        if self.seed is not None and self.split is not None:
            raise typer.BadParameter("cannot be combined with --seed: tasks have seeds", param_hint="--split")


@options_of(CollectFlags)
def collect(flags: CollectFlags) -> None:
    """Let a teacher play a served environment, and keep the episodes as a dataset.

    Each episode is a line of results.jsonl: the conversation in the form of chat templates, the tool calls and the
    reward. The teacher gets the environment's tools; typed actions become tools. To continue, run the same command
    again. Failures of the server or the endpoint are retried and never become episodes; exits with 1 if some episodes
    failed.

    The scripted teacher needs no model: it takes the first legal action, to try an environment out. Keys come from
    OPENAI_API_KEY, ANTHROPIC_API_KEY or API_KEY.

      openenv collect http://localhost:8000 -o episodes
      openenv collect maze --url http://localhost:8000 -o episodes -n 100 \\
          --provider anthropic --model NAME -H me/maze-episodes
    """
    # This process plays; the environment is a server that runs already:
    #
    #   teacher (scripted, or a model endpoint)
    #      │ ▲
    #      ▼ │  tool calls, observations
    #   collect ──sessions──> server of the environment
    #      │
    #      ├──> FOLDER/results.jsonl    one line per episode, appended when it ends
    #      ├──> FOLDER/metadata.json    the settings, without secrets
    #      └──> dataset on the Hub      with -H REPO, after the last episode
    flags.check()
    job = _Job(flags, _address(flags.env, flags.base_url), _json_object("--dataset-config", flags.dataset_config))
    # `openspiel` without a game, or `maze:small`: only two families have variants.
    try:
        # Batch systems send SIGTERM at the time limit: sessions are closed, and complete episodes are in the file.
        with tidy_on_sigterm(), _plain_warnings():
            result = job.run()
    # A server that is not reachable, a missing key, a results.jsonl with an invalid line, a folder without permission.
    except (OpenEnvError, ValueError, OSError) as exc:
        raise failure(printable(message_of(exc))) from None
    # Upload also after failures: the collected episodes are complete, and the exit code reports the failed ones.
    _print(result, flags.output_dir)
    flags.upload.push(flags.output_dir)
    if result.num_failed:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Job:
    """A command's options, with the server's address and the parsed configuration."""

    flags: CollectFlags
    address: str
    config: dict[str, Any] | None

    def run(self) -> CollectResult:
        """Play the episodes that the folder does not have yet."""
        from openenv.rollout.run.agent_sessions import HarnessRunLimits, MCPHarnessAdapter
        from openenv.rollout.run.collect import CollectOptions, CollectRunner, RolloutSerializer
        from openenv.train.served_session import ServedSessionFactory, env_family

        flags, teacher = self.flags, self.flags.teacher
        try:
            family = env_family(flags.env, self.config)
        except ValueError as exc:
            raise typer.BadParameter(str(exc), param_hint="ENV") from None
        # Before the server is asked: a missing key is found without a session.
        model_step = teacher.model_step()
        # Connects once to read the tools, so a wrong address fails before the folder changes.
        factory = ServedSessionFactory(self.address, family, {} if flags.token is None else {"token": flags.token})
        tasks = self._tasks(family)
        folder = RolloutSerializer(flags.output_dir)
        metadata = self._metadata()
        if flags.resume:
            _warn_of_mixture(folder, metadata)
        # The first lines of the output:
        #
        #   server       http://localhost:8000, tools: look, move
        #   teacher      anthropic/NAME
        names = ", ".join(printable(tool.name) for tool in factory.tools)
        typer.echo(f"server       {_public(self.address)}, tools: {names}")
        # The result on standard output, which scripts may read; advice goes to standard error:
        #
        #   collected=98 skipped=0 dropped=1 failed=1
        #   avg_reward=0.910 success_rate=88%
        #   episodes     episodes
        #
        # skipped: the folder had them; dropped: a reward below 0; failed: no reward after all retries.
        typer.echo(f"teacher      {teacher.label}" + (f"/{teacher.model}" if teacher.model else ""))
        # After the warning, which compares with the metadata of the last run.
        folder.write_metadata(metadata)
        runner = CollectRunner(
            session_factory=factory,
            harness_adapter=MCPHarnessAdapter(),
            serializer=folder,
            tasks=tasks,
            limits=HarnessRunLimits(max_turns=flags.max_turns),
        )
        return runner.run(
            model_step=model_step,
            should_keep=None if flags.keep_losses else _is_no_loss,
            num_episodes=flags.num_episodes,
            episode_id_prefix=flags.episode_id_prefix,
            resume=flags.resume,
            options=CollectOptions(
                retries=flags.retries,
                concurrency=flags.concurrency,
                # A broken server fails every episode. One failure of each parallel episode is not yet a pattern.
                give_up_after=max(_FAILURES_IN_A_ROW, flags.concurrency),
                requires_reward=not flags.unrewarded,
            ),
        )

    def _metadata(self) -> dict[str, Any]:
        """Return the settings that make the dataset reproducible; it is uploaded, so it contains no secret."""
        import openenv

        flags, teacher = self.flags, self.flags.teacher
        return {
            "env": _public(flags.env),
            "env_base_url": _public(self.address),
            "provider": teacher.label,
            "model": teacher.model,
            "llm_endpoint": teacher.llm_endpoint and _public(teacher.llm_endpoint),
            "llm_port": teacher.llm_port,
            "num_episodes_requested": flags.num_episodes,
            "temperature": teacher.temperature,
            "keep_losses": flags.keep_losses,
            "max_tokens": teacher.max_tokens,
            "max_turns": flags.max_turns,
            "system_prompt": None if teacher.label == "scripted" else teacher.system_prompt or _SYSTEM_PROMPT,
            "dataset_config": self.config,
            "seed": flags.seed,
            "split": flags.split,
            "openenv_version": openenv.__version__,
        }

    def _tasks(self, family: EnvFamily) -> Iterable[Any] | None:
        """Return the arguments of each reset: a split's tasks in a cycle, increasing seeds, or the family's tasks."""
        split, seed = self.flags.split, self.flags.seed
        if split is not None:
            from openenv.client.task_client import TaskClient

            try:
                with TaskClient(self.address, token=self.flags.token) as client:
                    tasks = list(client.split(split))
            except NotImplementedError:
                # The server runs, but its environment declares no tasks.
                raise ValueError(f"{_public(self.address)} has no task catalogue; leave out --split") from None
            if not tasks or not all(isinstance(task, Mapping) for task in tasks):
                raise ValueError(f"the tasks of split {split!r} are missing or are not arguments of reset")
            # More episodes than tasks repeat the tasks; the runner takes only as many as it needs.
            return itertools.cycle(tasks)
        if seed is not None:
            return ({"seed": number} for number in itertools.count(seed))
        return None if family.tasks is None else family.tasks()


def _print(result: CollectResult, output_dir: Path) -> None:
    typer.echo(
        f"collected={result.num_collected} skipped={result.num_skipped} dropped={result.num_dropped} "
        f"failed={result.num_failed}"
    )
    if result.num_rewarded:
        typer.echo(f"avg_reward={result.avg_reward:.3f} success_rate={result.success_rate:.0%}")
    # This text comes from the runner; the usual reason is a model that answers without a tool call.
    if any("did not produce an environment reward" in reason for reason in result.failures.values()):
        typer.echo("The teacher called no tool with a reward. To keep these episodes, use --unrewarded.", err=True)
    if result.num_left:
        typer.echo(f"Stopped after too many failures in a row; {result.num_left} episodes remain.", err=True)
    if result.num_failed:
        typer.echo("To retry the failed episodes, run the same command again.", err=True)
    typer.echo(f"episodes     {output_dir}")


def _address(env: str, base_url: str | None) -> str:
    """Return the server's address: --url, or ENV if that is a URL."""
    if base_url is not None:
        return base_url
    # http://localhost:8000 is an address, maze and openspiel:chess are names.
    if "://" in env:
        return env
    raise typer.BadParameter(
        f"give the server of {env}: --url http://localhost:8000 (openenv serve starts one)",
        param_hint="--url",
    )


def _json_object(option: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise typer.BadParameter(f"is not valid JSON: {exc}", param_hint=option) from None
    # `--dataset-config 3` is valid JSON, but reset takes keyword arguments.
    if not isinstance(value, dict):
        raise typer.BadParameter('must be a JSON object, such as {"min_terms": 2}', param_hint=option)
    return value


# The default filter: the published collector drops lost games.
def _is_no_loss(record: EpisodeRecord) -> bool:
    return record.reward is None or record.reward >= 0.0


def _public(url: str) -> str:
    """Return an address without its user and password: metadata is uploaded."""
    # https://user:password@host/path becomes https://host/path.
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _warn_of_mixture(folder: RolloutSerializer, metadata: Mapping[str, Any]) -> None:
    """Warn if the folder contains episodes of another environment or teacher: the dataset would mix both."""
    before = folder.read_metadata()
    # A new folder, or an old one after --no-resume.
    if not before or not folder.results_path.exists():
        return
    for key in ("env", "provider", "model"):
        if key in before and before[key] != metadata[key]:
            typer.echo(
                f"Warning: {folder.output_dir} has episodes with {key} {printable(before[key])}; new ones have "
                f"{printable(metadata[key])}. To start a new results.jsonl, use --no-resume.",
                err=True,
            )


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings as plain lines, without a position in our code."""
    with warnings.catch_warnings():
        # Python shows a repeated warning only once per place; each failed episode must be visible.
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"Warning: {printable(message)}", err=True)
        yield
