"""TRL: served environments for `GRPOTrainer(environment_factory=...)`, agents in sandboxes for `HarnessRolloutWorker`,
and `openenv train --trainer trl`, whose updates `GRPOTrainer` makes.

Needs trl (1.10 or newer), but does not import it. An infrastructure failure stops the run or drops the sample; it is
never scored.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

from typing_extensions import Self

from openenv.adapters import importing
from openenv.client.llm_client import clean_mcp_schema
from openenv.rollout.agents.dialogue import Dialogue, TextDialogue, ToolDialogue
from openenv.rollout.agents.served_episode import RewardRule, ServedEpisode, action_schema, has_tools, served_tools
from openenv.rollout.run.agent_sessions import build_harness_rollout_func as build_harness_rollout_func

from ..rollout_sessions import RolloutSessionFactory as RolloutSessionFactory

if TYPE_CHECKING:
    from ..learner.recipe import TrainingRun

with importing("trl>=1.10", needed_by="openenv.train.trainers.trl"):
    pass  # only the version is checked: the adapter gives TRL objects, and takes none

OnFailure = Literal["raise", "drop"]

_COLUMNS_OF_TRL = frozenset({"prompt", "image", "images", "environment", "chat_template_kwargs", "tools"})
"""Columns of a dataset that are not for the environment."""
_NOTHING = frozenset({"", "{}"})
"""The text of an observation without fields."""
_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
}
"""TRL's settings for our names."""
_SECTION = re.compile(r"\b(?:Args|Returns|Raises):")


def tool_environment(
    url: str,
    *,
    reward: RewardRule = "sum",
    on_failure: OnFailure = "raise",
    columns: Sequence[str] | None = None,
    action_name: str = "act",
    **client_options: Any,
) -> ToolEnvironments:
    """Make an `environment_factory` for `GRPOTrainer` from a served environment. The model calls its tools.

    Every rollout uses its own session. The columns of a dataset row become arguments of `reset`; with a column `seed`,
    all rollouts of a group have the same start.

    Args:
        url: The server.
        reward: `sum` adds all rewards of an episode, `last` takes the last one. If the model does nothing, it is 0.
        on_failure: The reaction to a failure of the server or the environment during an episode: `raise` ends the run,
            `drop` removes the sample from its group. A failed `reset` always ends the run.
        columns: The columns for `reset`; by default all except TRL's columns, such as `prompt`.
        action_name: The tool's name if the environment has typed actions instead of tools.
        client_options: More arguments of the client, such as `token` or `wait_s`.
    """
    return ToolEnvironments(
        url, reward=reward, on_failure=on_failure, columns=columns, action_name=action_name, options=client_options
    )


class ToolEnvironments:
    """Makes environments for TRL, each with a session. TRL's asynchronous trainer can pickle it.

    `tool_environment` creates it. `close`, or the end of a `with` block, ends the sessions.
    """

    def __init__(
        self,
        url: str,
        *,
        reward: RewardRule = "sum",
        on_failure: OnFailure = "raise",
        columns: Sequence[str] | None = None,
        action_name: str = "act",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if reward not in ("sum", "last"):
            raise ValueError(f"reward must be 'sum' or 'last', not {reward!r}")
        if on_failure not in ("raise", "drop"):
            raise ValueError(f"on_failure must be 'raise' or 'drop', not {on_failure!r}")
        self.url = url
        self._reward: RewardRule = reward
        self._on_failure: OnFailure = on_failure
        self._columns = None if columns is None else frozenset(columns)
        self._action_name = action_name
        self._options = dict(options or {})
        self._reset_state()

    def _reset_state(self) -> None:
        self._lock = threading.Lock()
        self._class: type[_ToolEnvironment] | None = None
        self._episodes: list[ServedEpisode] = []

    def __getstate__(self) -> dict[str, Any]:
        kept = ("url", "_reward", "_on_failure", "_columns", "_action_name", "_options")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_state()

    def __call__(self) -> object:
        """Make an environment.

        Raises:
            RolloutError: The server does not answer.
            ValueError: TRL cannot show a tool's name to a model.
        """
        with self._lock:
            if self._class is None:
                self._class = self._make_class()
        return self._class(self)

    def episode(self, dialogue: Dialogue) -> ServedEpisode:
        """Open a session, which `close` ends."""
        made = ServedEpisode(self.url, dialogue, reward=self._reward, client_options=self._options)
        with self._lock:
            self._episodes.append(made)
        return made

    def start_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `reset` from a row."""
        wanted = self._columns if self._columns is not None else frozenset(row) - _COLUMNS_OF_TRL
        return {name: value for name, value in row.items() if name in wanted and value is not None}

    def reward_of(self, episode: ServedEpisode) -> float | None:
        """Return the reward of an episode; None if it failed and `on_failure` is `drop`.

        Raises:
            EpisodeFailed: It failed, and `on_failure` is `raise`.
            NoRewards: The environment has never given a reward.
        """
        if episode.failure is not None and self._on_failure == "raise":
            raise episode.failure
        return episode.final_reward()

    def close(self) -> None:
        """End all sessions."""
        with self._lock:
            episodes, self._episodes = self._episodes, []
        for episode in episodes:
            episode.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _make_class(self) -> type[_ToolEnvironment]:
        schema = action_schema(self.url, self._options)
        dialogue: Dialogue
        if has_tools(schema):
            tools = served_tools(self.url, self._options)
            dialogue = ToolDialogue(tools)
        else:
            fields = {name: one for name, one in (schema.get("properties") or {}).items() if name != "metadata"}
            description = schema.get("description") or "Take an action in the environment."
            arguments = {**schema, "properties": fields}
            tools = [{"name": self._action_name, "description": description, "input_schema": arguments}]
            dialogue = TextDialogue(action_schema=schema)
        members: dict[str, Any] = {"dialogue": dialogue, "__doc__": f"A session of {self.url}."}
        for tool in tools:
            members[_tool_name(tool["name"], members)] = _tool_method(tool, is_action=not has_tools(schema))
        return type("ToolEnvironment", (_ToolEnvironment,), members)


class _ToolEnvironment:
    """One session in the form for TRL: each public method except `reset` and `get_reward` is a tool."""

    dialogue: Dialogue

    def __init__(self, environments: ToolEnvironments) -> None:
        self._environments = environments
        self._episode = environments.episode(self.dialogue)

    def reset(self, **row: Any) -> str | None:
        """Start an episode; return a text for the end of the prompt's last message.

        Raises:
            ValueError: That is the system message.
        """
        prompt = row.get("prompt")
        if prompt and prompt[-1].get("role") == "system":
            raise ValueError(
                "TRL appends the first observation to the last message of a prompt, and here this is the system "
                "message: add a message of the user to the prompts of the dataset"
            )
        text = self._episode.reset(**self._environments.start_of(row))
        if text in _NOTHING:
            return None
        return f"\n\n{text}" if prompt and prompt[-1].get("content") else text

    def get_reward(self) -> float | None:
        """Return the reward of the episode."""
        return self._environments.reward_of(self._episode)


def _tool_name(name: str, taken: Mapping[str, Any]) -> str:
    """Return the name of a tool.

    Raises:
        ValueError: TRL would not treat the method as a tool.
    """
    if name.startswith("_") or name in taken or hasattr(_ToolEnvironment, name):
        raise ValueError(f"TRL cannot show a tool named {name!r} to a model: rename it")
    return name


def _tool_method(tool: Mapping[str, Any], *, is_action: bool) -> Callable[..., str]:
    """Return a method that takes the step. TRL makes a schema from its signature and docstring."""
    name = str(tool["name"])
    schema = clean_mcp_schema(tool.get("input_schema") or tool.get("inputSchema"))

    def method(self: _ToolEnvironment, **arguments: Any) -> str:
        action = arguments if is_action else {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return self._episode.act(action)

    required = frozenset(schema.get("required") or ())
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    annotations: dict[str, Any] = {}
    lines: list[str] = []
    for key, field in (schema.get("properties") or {}).items():
        if not key.isidentifier():
            raise ValueError(f"the tool {name!r} has a parameter {key!r}, which is not a valid name in Python")
        hint = _hint(field, schema.get("$defs") or {})
        default = inspect.Parameter.empty if key in required else field.get("default")
        parameters.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
        annotations[key] = hint
        lines.append(f"    {key}: {_one_line(field.get('description') or field.get('title') or key)}")
    method.__name__ = name
    method.__qualname__ = f"ToolEnvironment.{name}"
    method.__annotations__ = {**annotations, "return": str}
    method.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    # A description may contain sections such as "Args:", which the docstring parser would read instead of ours.
    purpose = _one_line(_SECTION.split(str(tool.get("description") or ""))[0]) or name
    returns = "\n\nReturns:\n    What the environment answers."
    method.__doc__ = purpose + ("\n\nArgs:\n" + "\n".join(lines) if lines else "") + returns
    return method


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


_TYPES: Mapping[str, Any] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "object": dict, "null": type(None)
}  # fmt: skip


def _hint(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """Return the closest type hint for a JSON schema."""
    if "$ref" in field:
        return _hint(definitions.get(str(field["$ref"]).rpartition("/")[2], {"type": "object"}), definitions)
    if "const" in field or field.get("enum"):
        choices = tuple([field["const"]] if "const" in field else field["enum"])
        if all(isinstance(choice, (str, int, float, bool, type(None))) for choice in choices):
            return Literal[choices]
    variants = field.get("anyOf") or field.get("oneOf")
    if variants is None and isinstance(field.get("type"), list):
        variants = [{**field, "type": kind} for kind in field["type"]]
    if variants:
        return Union[tuple(_hint(one, definitions) for one in variants)]  # noqa: UP007 - of a tuple
    if field.get("type") == "array":
        items = field.get("items")
        return list[_hint(items, definitions)] if isinstance(items, Mapping) and items else list  # type: ignore[misc]
    return _TYPES.get(str(field.get("type")), Any)


def train_with_trl(run: TrainingRun) -> Path:
    """Train, and return the folder of the trained model.

    Raises:
        ValueError: TRL cannot train with these settings.
        PackageUnavailable: TRL is missing.
        EnvironmentError: the model cannot be read.
    """
    if run.env is None:
        raise ValueError("TRL trains on a served environment: give its URL")
    if run.text_only:
        raise ValueError("TRL's model calls tools, so text_only does not apply")
    if run.updates is None:
        raise ValueError("TRL counts updates: give their number, not minutes")
    if run.algorithm not in _LOSSES:
        raise ValueError(f"TRL has no {run.algorithm!r}; choose from {', '.join(_LOSSES)}")
    with importing("trl>=1.0", needed_by="the trainer 'trl'"):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        from ..learner.policy import Policy, PolicyOptions  # needs torch, which the rest of this module does not
    folder = run.tracked.files
    if folder.exists() and not run.resume:
        raise FileExistsError(f"{folder} is from an earlier run: choose another folder, or continue it with --resume")
    policy = Policy.load(run.model, PolicyOptions(device=run.device))
    prompt = [{"role": "user", "content": run.system_prompt or "Use the tools."}]
    first = run.held_out + 1_000_000 * run.seed
    rows = [{"prompt": prompt, "seed": first + number} for number in range(run.updates * run.groups)]
    options: dict[str, Any] = {} if run.token is None else {"token": run.token}
    with tool_environment(run.env, **options) as environment:
        trainer = GRPOTrainer(
            model=policy.model,
            processing_class=policy.tokenizer,
            train_dataset=Dataset.from_list(rows),
            environment_factory=environment,
            args=GRPOConfig(
                output_dir=str(folder),
                max_steps=run.updates,
                per_device_train_batch_size=run.samples,
                gradient_accumulation_steps=run.groups,
                num_generations=run.samples,
                max_completion_length=run.context,
                max_tool_calling_iterations=run.max_turns,
                learning_rate=run.learning_rate,
                seed=run.seed,
                logging_steps=1,
                report_to=list(run.loggers) or "none",
                save_strategy="steps" if run.checkpoint_every else "no",
                save_steps=run.checkpoint_every or 1,
                use_cpu=policy.device.type == "cpu",
                bf16=policy.device.type == "cuda",
                disable_tqdm=True,
                **_LOSSES[run.algorithm],
            ),
        )
        trainer.train(resume_from_checkpoint=run.resume)
        trained = folder / "model"
        trainer.save_model(str(trained))
    return trained
