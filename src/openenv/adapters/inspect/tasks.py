"""Served environments and rollouts as tasks, solvers and a scorer of Inspect AI. Needs inspect-ai.

    inspect eval openenv/served_env -T url=http://localhost:8000 -T seeds=20 --model openai/gpt-4o
    inspect eval openenv/rollout -T tasks=task.yaml -T agent=opencode --model anthropic/claude-sonnet-4-5

What fails for a reason that is not the model's is an error of the sample: Inspect retries it or leaves it out, and it
never becomes a score of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from openenv.client.env_client import GenericEnvClient
from openenv.client.rewards import reward_history
from openenv.errors import OpenEnvError, RolloutError, install_command, message_of
from openenv.rollout.agents.base import Agent
from openenv.rollout.agents.dialogue import AnswerRefused, Dialogue
from openenv.rollout.agents.served_episode import EpisodeFailed, EpisodeRules, RewardRule, served_dialogue
from openenv.rollout.progress import Cancellation
from openenv.rollout.run.engine import new_rollout_id, run_rollout_async
from openenv.rollout.store.outcome import Outcome, Status
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import Budget, Task, Trust, load_task
from openenv.sandboxes.base import Sandboxes

try:
    from inspect_ai import Task as InspectTask
    from inspect_ai import task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.log import transcript
    from inspect_ai.model import get_model
    from inspect_ai.scorer import Score, Target, mean, scorer, stderr
    from inspect_ai.solver import Generate, Solver, TaskState, solver
    from inspect_ai.util import LimitExceededError

    from .endpoint import InspectEndpoint
    from .messages import Json, from_inspect_answer, to_inspect_messages, to_inspect_tools
except ImportError as exc:
    raise ModuleNotFoundError(f"inspect-ai is required: {install_command('inspect')}", name=exc.name) from exc

STORE_KEY = "openenv"
"""The key of the outcome and the task in a sample's store; `inspect_logs` reads them there."""
_RESET = "reset"
_TASK = "openenv_task"
_CLOSE_S = 10.0
_FAILED: frozenset[Status] = frozenset({"env_failed", "sandbox_failed", "grader_failed", "cancelled"})
"""Statuses that are not the model's doing: errors in Inspect."""


def is_failed(status: Status) -> bool:
    """Say whether an outcome of this status is an error in Inspect, in place of a score."""
    return status in _FAILED


# -- served environments ----------------------------------------------------------------------------------------------


@task  # type: ignore[untyped-decorator]
def served_env(
    url: str,
    seeds: int = 1,
    resets: Sequence[Mapping[str, Any]] | None = None,
    system: str = "",
    max_turns: int = 20,
    reward: RewardRule = "sum",
    wait_s: float = 600.0,
) -> InspectTask:
    """Let the model play episodes of a served environment.

    A token that the server requires comes from `OPENENV_TOKEN`: Inspect writes the arguments of tasks into its logs.

    Args:
        url: The server.
        seeds: How many samples: seeds 0, 1, ... of `reset`. Not used where there are `resets`.
        resets: A sample for each, with the arguments of `reset`.
        system: The instructions for the model.
        max_turns: How many answers an episode has at most; one that is not over then counts with its reward so far.
        reward: `sum` of all rewards of an episode, or the `last` one.
        wait_s: How long a sample waits for a session if the server is full.
    """
    if seeds < 1:
        raise ValueError("seeds must be at least 1")
    starts = [dict(one) for one in resets] if resets else [{"seed": seed} for seed in range(seeds)]
    samples = [
        Sample(input=f"Play an episode of {url}.", id=_start_name(start, number), metadata={_RESET: start})
        for number, start in enumerate(starts)
    ]
    player = play_env(url, system=system, max_turns=max_turns, reward=reward, wait_s=wait_s)
    return InspectTask(dataset=MemoryDataset(samples, name=url, location=url), solver=player, scorer=env_reward())


def _start_name(start: Mapping[str, Any], number: int) -> str:
    return f"seed-{start['seed']}" if list(start) == ["seed"] else str(start.get("episode_id") or f"start-{number}")


@solver  # type: ignore[untyped-decorator]
def play_env(
    url: str,
    system: str = "",
    max_turns: int = 20,
    reward: RewardRule = "sum",
    wait_s: float = 600.0,
) -> Solver:
    """Play one episode of a served environment with the model: by tools if it has them, else by texts.

    The arguments equal the arguments of `served_env`; `reset` receives the sample's `reset` metadata.
    """
    if max_turns < 1:
        raise ValueError("max_turns must be at least 1")
    # The server describes its actions once per solver. The list is the cache: closures cannot assign outer names.
    dialogues: list[Dialogue] = []

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        # Blocking client calls need asyncio; Inspect can also run on trio.
        _require_asyncio()
        episode = _Episode(url, state)
        try:
            # Reading the schemas blocks, so it runs in a thread.
            if not dialogues:
                dialogues.append(await asyncio.to_thread(served_dialogue, url, system, {"wait_s": wait_s}))
            rules = EpisodeRules(dialogues[0], reward, history=reward_history(url))
            async with _session(url, wait_s) as client:
                await episode.play(client, rules, max_turns)
        # A limit is raised after the outcome is stored, so that the sample keeps its reward so far.
        except LimitExceededError as exc:
            episode.end("truncated", message_of(exc))
            raise
        except asyncio.CancelledError:  # a limit of time, or the end of the evaluation
            episode.cancel()
            raise
        except (OpenEnvError, OSError) as exc:
            episode.fail(exc)
            raise
        return state

    return solve


@contextlib.asynccontextmanager
async def _session(url: str, wait_s: float) -> AsyncIterator[GenericEnvClient]:
    """Yield a client after `reset`, and close it even if a limit of Inspect cancels every wait."""
    client = GenericEnvClient(url, wait_s=wait_s)
    try:
        yield client
    finally:
        # Inspect cancels every wait in the scope again and again. The shield gives closing a bounded time.
        with anyio.move_on_after(_CLOSE_S, shield=True), contextlib.suppress(OpenEnvError, OSError):
            await client.close()


class _Episode:
    """One episode, and what Inspect knows of it."""

    def __init__(self, url: str, state: TaskState) -> None:
        self._url = url
        self._state = state
        self._start: Json = dict((state.metadata or {}).get(_RESET) or {})
        self._rules: EpisodeRules | None = None
        # Tells whether a cancellation hit the model (truncated) or the environment (env_failed).
        self._is_model_turn = False
        self._began = time.time()
        self._rollout_id = new_rollout_id()

    async def play(self, client: GenericEnvClient, rules: EpisodeRules, max_turns: int) -> None:
        """Play until the episode is over, the model stops, or the turns are used up.

        Raises:
            EpisodeFailed: The server or the environment failed.
            LimitExceededError: A limit of the sample is reached.
        """
        self._rules, state = rules, self._state
        try:
            first = await client.reset(**self._start)
        except (OpenEnvError, OSError) as exc:
            raise rules.fail(exc) from exc
        rules.begin(first)
        # The opening contains the instructions and the first observation.
        state.messages = to_inspect_messages(rules.dialogue.opening(first.observation))
        tools = to_inspect_tools(rules.dialogue.tools)
        # for ... else: the `else` runs if all turns are used and the episode goes on.
        for _ in range(max_turns):
            if rules.is_over:
                break
            self._is_model_turn = True
            state.output = await get_model().generate(state.messages, tools=tools)
            self._is_model_turn = False
            state.messages.append(state.output.message)
            if not await self._take(client, rules):
                break
        else:
            if not rules.is_over:
                self.end("truncated", f"the episode was not over after {max_turns} answers")
                return
        self.end("ok", None)

    async def _take(self, client: GenericEnvClient, rules: EpisodeRules) -> bool:
        """Take the actions of the last answer; return whether there were any."""
        message = self._state.output.message
        answer = from_inspect_answer(message)
        results: list[str] = []
        try:
            # A model can write invalid JSON as arguments. It gets the error as the reply and may try again.
            problems = [call.parse_error for call in message.tool_calls or () if call.parse_error]
            if problems:
                raise AnswerRefused(f"Error: {problems[0]}")
            actions = rules.dialogue.actions(answer)
            for action in actions:
                if not rules.is_over:
                    results.append(await self._step(client, rules, action))
            has_ended = not actions
        except AnswerRefused as exc:
            results, has_ended = [str(exc)], False
        # Also after the last step, so that the log shows its result.
        self._state.messages += to_inspect_messages(
            [answer, *(rules.dialogue.reply(answer, results) if results else [])]
        )[1:]
        return not has_ended

    async def _step(self, client: GenericEnvClient, rules: EpisodeRules, action: Json) -> str:
        # A refused action is the model's mistake and becomes its next message. Only a broken server ends the sample.
        try:
            result = await client.step(action)
            reply = rules.take(result)
        except EpisodeFailed:
            raise
        except (OpenEnvError, OSError) as exc:
            reply = rules.refuse(exc)
            transcript().info({"action": action, "refused": reply}, source=STORE_KEY)
        else:
            transcript().info({"action": action, "reward": result.reward, "done": result.done}, source=STORE_KEY)
        return reply

    def fail(self, error: Exception) -> None:
        """End it for a reason that is not the model's."""
        self.end("env_failed", f"{type(error).__name__}: {message_of(error)}")

    def cancel(self) -> None:
        """End it in the middle: a server that does not answer is not the model's doing."""
        if self._is_model_turn:
            self.end("truncated", "the sample was cancelled")
        else:
            self.end("env_failed", "the sample was cancelled while it waited for the environment")

    def end(self, status: Status, reason: str | None) -> None:
        """Write down how it ended."""
        state, name = self._state, str(self._state.sample_id)
        outcome = Outcome(
            rollout_id=self._rollout_id,
            task_id=name,
            status=status,
            reason=reason,
            reward=None if is_failed(status) or self._rules is None else self._rules.reward,
            agent="play",
            model=str(get_model()),
            started_at=self._began,
            wall_s=time.time() - self._began,
            metadata={"start": self._start, "url": self._url},
        )
        # For the log: the system and user messages are the closest thing to a task's instruction.
        opening = [message.text for message in state.messages if message.role in ("system", "user")][:2]
        _keep(state, outcome, Task(task_id=name, instruction="\n\n".join(filter(None, opening)) or name))


# -- rollouts ---------------------------------------------------------------------------------------------------------


@task  # type: ignore[untyped-decorator]
def rollout(
    tasks: str | Sequence[str],
    agent: str | Agent = "opencode",
    sandbox: str | Sandboxes = "local",
    store: str | None = None,
    min_trust: Trust | None = None,
    max_calls: int | None = None,
) -> InspectTask:
    """Let a coding agent work on tasks in sandboxes, with the model behind it.

    Args:
        tasks: Task files (YAML or JSON), or folders of them.
        agent: A driver or its name, optionally with a version: `opencode@1.2.3`.
        sandbox: A backend or its name.
        store: A folder of rollouts that also keeps them, with their work trees.
        min_trust: Refuse tasks with a check that can be trusted less.
        max_calls: How many model calls a rollout may make.
    """
    # One path or several: Inspect's command line passes single values as text.
    loaded = _load_tasks([tasks] if isinstance(tasks, str) else tasks)
    samples = [
        # The whole task travels in the metadata, so that a log can be solved again without the files.
        Sample(input=one.instruction, id=one.task_id or str(number), metadata={_TASK: one.model_dump(mode="json")})
        for number, one in enumerate(loaded, 1)
    ]
    run = run_agent(agent, sandbox=sandbox, store=store, min_trust=min_trust, max_calls=max_calls)
    return InspectTask(dataset=MemoryDataset(samples, name="rollouts"), solver=run, scorer=env_reward())


def _load_tasks(paths: Sequence[str]) -> list[Task]:
    files: list[Path] = []
    # A folder of tasks; a single file is a task.
    for path in map(Path, paths):
        inside = sorted(file for file in path.glob("*") if file.suffix in (".yaml", ".yml", ".json"))
        if path.is_dir() and not inside:
            raise RolloutError(f"no task files in {path}: give a task folder, or a folder of task folders")
        files += inside if path.is_dir() else [path]
    return [load_task(file) for file in files]


@solver  # type: ignore[untyped-decorator]
def run_agent(
    agent: str | Agent = "opencode",
    sandbox: str | Sandboxes = "local",
    store: str | None = None,
    min_trust: Trust | None = None,
    max_calls: int | None = None,
) -> Solver:
    """Run a coding agent on the sample in a sandbox; its model calls go to the model of the evaluation.

    The arguments are the same as for `rollout`. A sample of another task has no checks of ours; its
    input is the instruction, and its scorer scores it.
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        _require_asyncio()
        described = (state.metadata or {}).get(_TASK)
        name = str(state.sample_id)
        work = Task.model_validate(described) if described else Task(task_id=name, instruction=state.input_text)
        cancel = Cancellation()
        # A failed model call must end the rollout at once: the agent would retry for minutes.
        endpoint = InspectEndpoint(get_model(), lambda exc: cancel.cancel(f"a model call failed: {message_of(exc)}"))
        async with endpoint:
            # The store is optional. Inspect's log has the outcome in any case.
            with contextlib.nullcontext() if store is None else RolloutStore(store) as rollouts:
                running = asyncio.create_task(
                    run_rollout_async(
                        work,
                        cancel=cancel,
                        agent=agent,
                        sandbox=sandbox,
                        model=endpoint.model,
                        store=rollouts,
                        min_trust=min_trust,
                        budget=Budget(max_calls=max_calls),
                        metadata={"epoch": state.epoch},
                    )
                )
                # Also record the outcome of a cancelled rollout if it has one.
                try:
                    outcome = await _ended(running, cancel)
                except asyncio.CancelledError:
                    if running.exception() is None:
                        _keep(state, running.result(), work)
                    raise
        # A limit of the sample stops the agent. The outcome counts as truncated unless the infrastructure failed first.
        if endpoint.limit is not None and not is_failed(outcome.status):
            outcome = outcome.model_copy(update={"status": "truncated", "reason": message_of(endpoint.limit)})
        if endpoint.messages:
            state.messages, state.output = endpoint.messages, endpoint.output
        _keep(state, outcome, work)
        failure = endpoint.failure or endpoint.limit
        if failure is not None:  # an error of the model's provider, or a limit of the sample, which is scored
            raise failure
        if is_failed(outcome.status):
            raise RolloutError(f"{outcome.status}: {outcome.reason}")
        return state

    return solve


async def _ended(running: asyncio.Task[Outcome], cancel: Cancellation) -> Outcome:
    """Return the outcome of a rollout; a sample that is cancelled ends it first, so that nothing of it is left."""
    # The shield keeps the rollout alive while the cancellation is turned into an orderly end.
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel.cancel("the sample was cancelled")
        with anyio.CancelScope(shield=True):  # Inspect's scopes cancel every wait, again and again
            await asyncio.wait([running])
        raise


# -- what both have in common -----------------------------------------------------------------------------------------


@scorer(metrics=[mean(), stderr()])  # type: ignore[untyped-decorator]
def env_reward() -> Any:
    """Score a sample with the reward of its episode or rollout; one without a reward is not scored."""

    async def score(state: TaskState, target: Target) -> Score:
        # The scorer runs after the solver, maybe in another process: the sample's store is the only connection.
        entry = state.store.get(STORE_KEY)
        if entry is None:
            raise RolloutError("The sample was solved by another solver than openenv/play_env or openenv/run_agent")
        outcome = Outcome.model_validate(entry["outcome"])
        return reward_score(outcome, answer=state.output.completion or None)

    return score


def reward_score(outcome: Outcome, answer: str | None = None) -> Score:
    """Return the reward of an outcome as a score; without one it counts in no mean."""
    # Check results explain a reward in Inspect's viewer.
    checks = [f"{'passed' if check.exit_code == 0 else 'failed'}: {check.title}" for check in outcome.verify_results]
    about: Json = {
        "answer": answer,
        "explanation": "\n".join([*([outcome.reason] if outcome.reason else []), *checks]) or None,
        "metadata": {"status": outcome.status, "trust": outcome.trust, "rollout_id": outcome.rollout_id},
    }
    # Unscored samples are left out of means. A reward of 0 would count as the agent's failure.
    if outcome.reward is None:
        return Score.unscored(reason=outcome.status, **about)
    return Score(value=outcome.reward, **about)


def _keep(state: TaskState, outcome: Outcome, work: Task) -> None:
    document = outcome.model_dump(mode="json", exclude={"turns"})
    state.store.set(STORE_KEY, {"outcome": document, "task": work.model_dump(mode="json")})


def _require_asyncio() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RolloutError("OpenEnv's solvers run on asyncio: unset INSPECT_ASYNC_BACKEND") from None
