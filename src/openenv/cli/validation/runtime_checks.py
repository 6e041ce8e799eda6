"""Checks of a served environment: one function each, that returns what it has seen, or raises `Fault` or `Skip`.

Knows what environments must and must not do; sessions, episodes and addresses come from the bench.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...errors import OpenEnvError, ServerError, SessionCapacityError, message_of
from ...protocol.json_values import NONFINITE_REWARD_KEY
from .json_schema import misfits
from .probe import (
    LIST_TOOLS,
    PLAN,
    Bench,
    Client,
    Episode,
    Fault,
    Skip,
    has_tool_actions,
    is_tool_call,
    play,
    reset,
    step,
)
from .served_package import CLOSE_FAILED

_SESSIONS = 10
_SETTLE_S = 10.0
_SHOWN = 4
_SEEDING = "draw all chance from one random.Random(seed) that reset makes anew, and keep nothing on the class"
_ALONE = "keep everything that an episode changes on self: nothing in class or module variables"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a check has seen where all is well."""

    evidence: str
    measured: dict[str, Any] = field(default_factory=dict)


Check = Callable[[Bench], Seen]


def startup(bench: Bench) -> Seen:
    """The server answers, and its process is alive."""
    health = bench.ask("GET", "/health")
    if not isinstance(health, dict) or health.get("status") != "healthy":
        raise Fault(f"GET /health answered {health!r}")
    _ = bench.schema
    seconds = 0.0 if bench.subject is None else bench.subject.start_s
    return Seen(f"served after {seconds:.1f} s", {"start_s": round(seconds, 3)})


def reward_well_formed(bench: Bench) -> Seen:
    """Rewards are finite numbers within the range, or none."""
    limits = bench.manifest.reward.range if bench.manifest is not None else None
    problems = []
    for index, moment in enumerate(bench.first.moments):
        where = "reset" if index == 0 else f"step {index}"
        if NONFINITE_REWARD_KEY in moment.metadata:
            problems.append(f"{where}: the reward is {moment.metadata[NONFINITE_REWARD_KEY]}")
        elif moment.reward is None:
            continue
        elif not isinstance(moment.reward, int | float) or not math.isfinite(moment.reward):
            problems.append(f"{where}: {moment.reward!r} is no finite number")
        elif limits is not None and not limits[0] <= moment.reward <= limits[1]:
            problems.append(f"{where}: {moment.reward} is not within {limits[0]:g} and {limits[1]:g}")
    rewards = bench.first.rewards
    measured = {"rewards": rewards, "range": None if limits is None else list(limits)}
    if problems:
        mend = "bound the reward in step, or declare the range that is meant in openenv.yaml"
        raise Fault(*problems[:_SHOWN], mend=mend, measured=measured)
    paid = sum(reward is not None for reward in rewards)
    return Seen(f"{paid} of {len(rewards)} steps were rewarded", measured)


def observation_schema(bench: Bench) -> Seen:
    """Observations fit the schemas that the server publishes."""
    of_steps = bench.schema.get("observation")
    of_reset = bench.schema.get("reset_observation") or of_steps
    problems, checked = [], 0
    has_tools = has_tool_actions(bench.schema.get("action") or {})
    for index, moment in enumerate(bench.first.moments):
        if has_tools and not is_tool_call(moment.action):
            continue  # the schema is that of a called tool
        checked += 1
        schema = of_steps if index else of_reset
        where = f"step {index}" if index else "reset"
        problems += [f"{where}: {one}" for one in misfits(moment.whole, schema if isinstance(schema, dict) else {})]
    if problems:
        mend = "return the class that create_app was given, and change its fields where the data is right"
        raise Fault(*problems[:_SHOWN], mend=mend)
    if not checked:
        raise Skip(f"no tool is called without a plan; write {PLAN} with call_tool actions")
    return Seen(f"{checked} observations fit", {"observations": checked})


def state_contract(bench: Bench) -> Seen:
    """The state has the episode's id, and counts steps from zero."""
    problems = []
    wanted = bench.plan.reset.episode_id
    for index, state in enumerate(bench.first.states):
        where = f"after step {index}" if index else "after reset"
        if state.get("episode_id") != wanted:
            problems.append(f"{where}: episode_id is {state.get('episode_id')!r}, and {wanted!r} was asked for")
        if not _counts(state, bench.plan.actions[:index]):
            problems.append(f"{where}: step_count is {state.get('step_count')!r}")
        problems += [f"{where}: {one}" for one in misfits(state, bench.schema.get("state") or {})]
    if problems:
        mend = "in reset, begin a new State(episode_id=episode_id or ...); in step, add 1 to its step_count"
        raise Fault(*problems[:_SHOWN], mend=mend)
    return Seen(f"{len(bench.first.states)} states were read", {"states": len(bench.first.states)})


def trajectory_record(bench: Bench) -> Seen:
    """An episode can be written as JSON lines and read again."""
    text = bench.first.text()
    lines = [json.loads(line) for line in text.splitlines()]
    if lines != [moment.json() for moment in bench.first.moments]:
        raise Fault("an episode that was written down reads differently")
    return Seen(f"{len(lines)} moments, {len(text)} characters", {"moments": len(lines), "characters": len(text)})


def tool_declaration_accuracy(bench: Bench) -> Seen:
    """The tools that an agent finds are those of the manifest."""
    if bench.manifest is None:
        raise Skip("no tools are declared without a valid manifest")
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    reply = bench.ask("POST", "/mcp", request)
    tools = (reply.get("result") or {}).get("tools") if isinstance(reply, dict) else None
    found = sorted(str(tool.get("name")) for tool in tools or ())
    declared = sorted(bench.manifest.capabilities.declared_tools)
    measured = {"declared": declared, "found": found}
    if found != declared:
        mend = f"in openenv.yaml: validation.capabilities.declared_tools: [{', '.join(found)}]"
        raise Fault(f"declared are {declared}, found {found}", mend=mend, measured=measured)
    return Seen(f"{len(found)} tools" if found else "no tools, as declared", measured)


def task_declaration_accuracy(bench: Bench) -> Seen:
    """There are as many tasks in each split as the manifest says."""
    if bench.manifest is None:
        raise Skip("no tasks are declared without a valid manifest")
    names = bench.ask("GET", "/list_environments")
    splits = [one["name"] for one in bench.ask("GET", f"/{names[0]}/splits")]
    found = {split: bench.ask("POST", f"/{names[0]}/num_tasks", {"split": split})["num_tasks"] for split in splits}
    declared = bench.manifest.capabilities.declared_task_count
    if declared and declared != found:
        mend = f"in openenv.yaml: validation.capabilities.declared_task_count: {json.dumps(found)}"
        raise Fault(f"declared are {declared}, found {found}", mend=mend, measured={"found": found})
    return Seen(f"{sum(found.values())} tasks in {len(found)} splits", {"found": found})


def seed_control(bench: Bench) -> Seen:
    """The same seed begins the same episode, in one session and in another."""
    plan, first = bench.plan, bench.first.moments[0]
    with bench.session() as env:
        one = reset(env, plan)
        other = reset(env, plan, seed=plan.reset.seed + 1)
        once_more = reset(env, plan)
    changed = _differing(one.core, once_more.core)
    in_between = _differing(one.core, first.core)
    if changed or in_between:
        where = "in one session" if changed else "in two sessions"
        problem = f"reset(seed={plan.reset.seed}) twice {where}: {', '.join(changed or in_between)} differs"
        raise Fault(problem, mend=_SEEDING)
    matters = one.core != other.core
    text = "another seed begins another episode" if matters else "the first observation does not depend on the seed"
    return Seen(text, {"seed": plan.reset.seed, "another_seed_differs": matters})


def episode_determinism(bench: Bench) -> Seen:
    """The same seed and actions give the same observations, rewards and end."""
    _compare(bench.first, bench.again, "played twice", rewards=not _is_judged(bench))
    return Seen(f"{len(bench.again.rewards)} steps, twice the same", {"steps": len(bench.again.rewards)})


def network_policy(bench: Bench) -> Seen:
    """An environment that may reach everything needs no check."""
    if bench.manifest is None:
        raise Skip("no network is declared without a valid manifest")
    if bench.manifest.network.mode == "public":
        return Seen("the network is public, so nothing is forbidden", {"mode": "public"})
    raise Skip(f"{bench.manifest.network.mode} is declared; run its image without a network to see that it holds")


def resource_bounds(bench: Bench) -> Seen:
    """The server's memory and the slowest episode are within what is declared."""
    _ = bench.first
    return _within_resources(bench)


def episode_isolation(bench: Bench) -> Seen:
    """Two sessions at once, step by step in turn: neither sees anything of the other."""
    is_same = _is_same(bench.first, bench.again)
    episode = Episode()
    with bench.session() as env:
        episode.moments.append(reset(env, bench.plan))
        try:
            with bench.door.open() as neighbour:
                wrong = _play_beside(bench, env, neighbour, episode)
        except SessionCapacityError:
            return Seen("one session at a time, by its own word", {"sessions": 1})
    if wrong and not _has_state_faults(bench):
        raise Fault(*wrong, mend=_ALONE)
    if is_same:
        _compare(bench.first, episode, "played beside another session", mend=_ALONE)
        return Seen("an episode beside another one is as it is alone", {"sessions": 2})
    return Seen("states of two sessions stay apart; episodes differ anyhow", {"sessions": 2})


def _play_beside(bench: Bench, env: Client, neighbour: Client, episode: Episode) -> list[str]:
    """Go on with an episode while a neighbour does other things; return what is wrong with the states of both."""
    plan = bench.plan
    reset(neighbour, plan, seed=plan.reset.seed + 1, episode_id="neighbour")
    for index, action in enumerate(plan.actions):
        if episode.moments[-1].done:
            break
        episode.moments.append(step(env, action))
        if index == 0:
            step(neighbour, plan.actions[-1])
    steps = len(episode.rewards)
    found = (
        (env.state(), plan.reset.episode_id, plan.actions[:steps]),
        (neighbour.state(), "neighbour", plan.actions[-1:] if steps else []),
    )
    return [
        f"the session of {name!r} has the state of {state.get('episode_id')!r} after {state.get('step_count')!r} steps"
        for state, name, actions in found
        if state.get("episode_id") != name or not _counts(state, actions)
    ]


def step_before_reset(bench: Bench) -> Seen:
    """A step in a session that was never reset is answered, and the session can be used."""
    _ = bench.first
    action = bench.plan.actions[0]
    with bench.session() as env:
        try:
            step(env, action)
            answer = "an observation"
        except ServerError as error:
            answer = f"{type(error).__name__}: {message_of(error)}"
        except OpenEnvError as error:
            mend = "make __init__ leave the environment in a state in which step works or raises"
            raise Fault(f"a step before reset: {type(error).__name__}: {message_of(error)}", mend=mend) from error
        reset(env, bench.plan)
    return Seen(f"answered with {answer}"[:200])


def invalid_action(bench: Bench) -> Seen:
    """A step with what is no action is refused with a typed error, and the episode goes on."""
    _ = bench.first
    with bench.session() as env:
        reset(env, bench.plan)
        before = env.state()
        try:
            step(env, {"no_such_field_of_any_action": 1})
        except ServerError as error:
            if env.state() != before:
                raise Fault("an action that was refused has changed the state") from error
            return Seen(f"refused with {error.code}", {"code": error.code})
        except OpenEnvError as error:
            raise Fault(f"the session did not survive it: {type(error).__name__}: {message_of(error)}") from error
    return Seen("unknown fields are accepted by this action class")


def session_cleanup(bench: Bench) -> Seen:
    """Sessions that have ended free their slots, files, threads and processes; close() raises nothing."""
    _ = bench.first
    subject = bench.subject
    before = subject.handles() if subject is not None else None
    for _ in range(_SESSIONS):
        with bench.session() as env:
            reset(env, bench.plan)
            step(env, bench.plan.actions[0])
    measured: dict[str, Any] = {"sessions": _SESSIONS}
    if subject is not None and before is not None:
        deadline = time.monotonic() + _SETTLE_S
        while (grown := _grown(bench, before)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if grown:
            raise Fault(f"after {_SESSIONS} sessions: {grown}", mend="free them in close(); it is called on every path")
    if subject is not None and CLOSE_FAILED in subject.said():
        raise Fault(CLOSE_FAILED, mend="let close() work at any time, also after a failed reset, and only once")
    return Seen(f"{_SESSIONS} sessions came and went", measured)


def floor_gap(bench: Bench) -> Seen:
    """The least that can be done, again and again, is paid clearly less than the best."""
    if bench.manifest is None:
        raise Skip("no range of rewards is declared without a valid manifest")
    _ = bench.first
    with bench.session() as env:
        plan = bench.plan.model_copy(update={"actions": [bench.plan.actions[0]] * len(bench.plan.actions)})
        paid = [reward for reward in play(env, plan).rewards if isinstance(reward, int | float)]
    if not paid:
        raise Skip("no step was rewarded")
    floor, best = max(paid), bench.manifest.reward.range[1]
    measured = {"floor": floor, "gap": best - floor, "floor_margin": bench.manifest.reward.floor_margin}
    if best - floor < bench.manifest.reward.floor_margin:
        problem = f"the first action alone earns {floor:g} of {best:g}"
        raise Fault(problem, mend="pay for what is to be learnt, or declare a wider range", measured=measured)
    return Seen(f"the first action alone earns {floor:g} of {best:g}", measured)


def verifier_determinism(bench: Bench) -> Seen:
    """The same episode earns the same three times."""
    runs = [bench.first.rewards, bench.again.rewards, bench.play().rewards]
    return _same_rewards(bench, runs, "three times")


def verifier_portability(bench: Bench) -> Seen:
    """The same episode earns the same in another process, where sets have another order."""
    return _same_rewards(bench, [bench.first.rewards, bench.elsewhere.rewards], "in two processes")


def replayability(bench: Bench) -> Seen:
    """The same episode is the same in another process."""
    mend = "let nothing depend on the order of sets, on hash(), on the clock or on an address"
    _compare(bench.first, bench.elsewhere, "in another process", mend=mend, rewards=not _is_judged(bench))
    return Seen(f"{len(bench.elsewhere.rewards)} steps, the same", {"steps": len(bench.elsewhere.rewards)})


def resource_envelope(bench: Bench) -> Seen:
    """After all episodes, memory and the slowest of them are within what is declared."""
    _ = bench.first
    return _within_resources(bench)


def _within_resources(bench: Bench) -> Seen:
    if bench.manifest is None:
        raise Skip("no resources are declared without a valid manifest")
    resources = bench.manifest.resources
    memory = bench.subject.peak_memory_mb() if bench.subject is not None else None
    measured = {"memory_mb": None if memory is None else round(memory, 1), "episode_s": round(bench.slowest_s, 3)}
    problems = []
    if memory is not None and memory > resources.memory_mb:
        problems.append(f"{memory:.0f} MB of memory were used, and {resources.memory_mb} are declared")
    if bench.slowest_s > resources.episode_timeout_s:
        problems.append(f"an episode took {bench.slowest_s:.1f} s, and {resources.episode_timeout_s:g} are declared")
    if problems:
        raise Fault(*problems, mend="declare what is needed in validation.resources, or use less", measured=measured)
    used = "memory is not known here" if memory is None else f"{memory:.0f} MB"
    return Seen(f"{used}, slowest episode {bench.slowest_s:.2f} s", measured)


def _same_rewards(bench: Bench, runs: list[list[Any]], when: str) -> Seen:
    if bench.manifest is not None and bench.manifest.capabilities.verifier.kind == "script":
        raise Skip("rewards come from a script, which is not run here")
    numbers = [[0.0 if reward is None else float(reward) for reward in run] for run in runs]
    spread = max((max(step) - min(step) for step in zip(*numbers, strict=False)), default=0.0)
    allowed = bench.manifest.reward.variance_tolerance if bench.manifest is not None and _is_judged(bench) else 0.0
    measured = {"spread": spread, "allowed": allowed, "runs": len(runs)}
    if spread > (allowed or 0.0) or len({len(run) for run in runs}) > 1:
        raise Fault(f"the same actions earned {runs[0]} and {runs[-1]} {when}", mend=_SEEDING, measured=measured)
    return Seen(f"the same rewards {when}", measured)


def _counts(state: dict[str, Any], actions: list[dict[str, Any]]) -> bool:
    """Say whether a state counts these steps; listing tools may count as one, or not."""
    count = state.get("step_count")
    least = sum(action.get("type") != LIST_TOOLS for action in actions)
    return isinstance(count, int) and not isinstance(count, bool) and least <= count <= len(actions)


def _is_judged(bench: Bench) -> bool:
    return bench.manifest is not None and bench.manifest.capabilities.llm_judged


def _has_state_faults(bench: Bench) -> bool:
    try:
        state_contract(bench)
    except Fault:
        return True
    return False


def _is_same(one: Episode, other: Episode) -> bool:
    try:
        _compare(one, other, "")
    except Fault:
        return False
    return True


def _compare(one: Episode, other: Episode, when: str, *, mend: str = _SEEDING, rewards: bool = True) -> None:
    """Raise where two episodes differ; metadata may."""
    for index, (first, second) in enumerate(zip(one.moments, other.moments, strict=False)):
        changed = [name for name in _differing(first.core, second.core) if rewards or name != "reward"]
        if changed:
            name = changed[0]
            values = f"{_short(first.core.get(name))} and {_short(second.core.get(name))}"
            where = f"step {index}" if index else "reset"
            raise Fault(f"{when}: {where} differs in {', '.join(changed)} ({values})", mend=mend)
    if len(one.moments) != len(other.moments):
        raise Fault(f"{when}: it ended after {len(one.rewards)} and {len(other.rewards)} steps", mend=mend)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _grown(bench: Bench, before: Any) -> str:
    """Say what has grown with every second session, or more."""
    now = bench.subject.handles() if bench.subject is not None else None
    if now is None:
        return ""
    more = {kind: getattr(now, kind) - getattr(before, kind) for kind in ("files", "threads", "children")}
    return ", ".join(f"{count} more {kind}" for kind, count in more.items() if count >= _SESSIONS // 2)
