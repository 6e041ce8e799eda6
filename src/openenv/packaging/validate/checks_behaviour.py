"""The checks of a served environment: each returns `CheckEvidence`, or raises `CheckFailed` or `CheckSkipped`.

The name of each function is the second half of its rule's id in `rules`; a probe brings sessions and episodes.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openenv.errors import (
    NotForkable,
    OpenEnvError,
    ProtocolError,
    ServerError,
    SessionCapacityError,
    UnknownTypeError,
    message_of,
)
from openenv.protocol.json_values import NONFINITE_REWARD_KEY
from openenv.protocol.schema import Unmakeable
from openenv.types import WHY_OVER

from .json_schema import make, shown, violations
from .probe import (
    LIST_TOOLS,
    PLAN,
    Client,
    Moment,
    Probe,
    ProbeEpisode,
    has_tool_actions,
    is_tool_call,
    play,
    reset,
    step,
)
from .report import UNMET, CheckOutcome, skipped
from .rules import RULE, CheckEvidence, CheckFailed, CheckNotApplicable, CheckSkipped, CheckStatus
from .served_package import CLOSE_FAILED, Handles

# Enough sessions to tell a leak per session from caches that fill once.
_SESSIONS = 10
# Threads and sockets end a moment after their session, so counts are read until they settle.
_SETTLE_S = 10.0
# Problems shown per check; the first few name the cause.
_SHOWN = 4
# How long the least action is repeated while no reward comes.
_FLOOR_STEPS = 100
_FLOOR_S = 5.0
_SEEDING = "draw every random number from one random.Random(seed) that reset creates, and keep nothing on the class"
_COPYING = (
    "draw from a generator of your own on self; where an episode changes files or other programs, set "
    "HAS_EXTERNAL_STATE and write snapshot() and restore()"
)
_ALONE = "keep everything that an episode changes on self: nothing in class or module variables"


def run_check(check_id: str, probe: Probe) -> CheckOutcome:
    """Run one check of a served environment."""
    rule = RULE[check_id]
    if rule.skipped is not None:
        # A skipped rule still appears in the report: as "not declared", or with the reason if the package declares it.
        declared = None if probe.manifest is None or rule.needs is None else probe.manifest.capabilities
        is_declared = declared is not None and bool(getattr(declared, str(rule.needs)))
        reason = rule.skipped if is_declared or rule.needs is None else f"{rule.needs} is not declared"
        return skipped(check_id, reason, applies=is_declared)
    # The rule's name is the function's name: "runtime.seed_control" -> seed_control.
    function = globals()[check_id.partition(".")[2]]
    return outcome_of(check_id, lambda: function(probe))


def outcome_of(check_id: str, function: Callable[[], CheckEvidence]) -> CheckOutcome:
    """Run a check and convert its result or exception to an outcome."""
    started = time.monotonic()
    try:
        evidence = function()
        status, texts, fix, measured = CheckStatus.PASS, [evidence.text], None, evidence.measured
    except CheckFailed as failure:
        status, texts, fix, measured = CheckStatus.FAIL, [*failure.problems], failure.fix, failure.measured
    except CheckSkipped as skip:
        return skipped(check_id, str(skip), applies=not isinstance(skip, CheckNotApplicable))
    except Exception as error:  # one check that breaks is a result, not the end of the others
        status, texts, fix, measured = CheckStatus.ERROR, [f"{type(error).__name__}: {message_of(error)}"], None, {}
    duration_s = time.monotonic() - started
    return CheckOutcome(
        check_id=check_id, status=status, measured=measured, evidence=texts, remediation=fix, duration_s=duration_s
    )


def startup(probe: Probe) -> CheckEvidence:
    """The server answers, and its process is alive."""
    # Health first: an open port alone does not mean that the environment can be created.
    health = probe.ask("GET", "/health")
    if not isinstance(health, dict) or health.get("status") != "healthy":
        raise CheckFailed(f"GET /health answered {health!r}")
    _ = probe.schema
    seconds = 0.0 if probe.package is None else probe.package.start_s
    return CheckEvidence(f"served after {seconds:.1f} s", {"start_s": round(seconds, 3)})


def reward_well_formed(probe: Probe) -> CheckEvidence:
    """Rewards are finite numbers within the range, or none."""
    # Without a manifest there is no range to compare with; finiteness is checked anyway.
    limits = probe.manifest.reward.range if probe.manifest is not None else None
    problems = reward_problems(probe.first.moments, limits)
    rewards = probe.first.rewards
    measured = {"rewards": rewards, "range": None if limits is None else list(limits)}
    if problems:
        fix = "bound the reward in step, or declare the range that is meant in openenv.yaml"
        raise CheckFailed(*problems[:_SHOWN], fix=fix, measured=measured)
    paid = sum(reward is not None for reward in rewards)
    return CheckEvidence(f"{paid} of {len(rewards)} steps were rewarded", measured)


def reward_problems(moments: Sequence[Moment], limits: tuple[float, float] | None) -> list[str]:
    """Return the problems of an episode's rewards."""
    problems = []
    for index, moment in enumerate(moments):
        where = _where(index)
        # JSON has no NaN and no infinity. The server sends null and names the original value in the metadata.
        if NONFINITE_REWARD_KEY in moment.metadata:
            problems.append(f"{where}: the reward is {moment.metadata[NONFINITE_REWARD_KEY]}")
        # No reward is fine: many environments pay at the end only.
        elif moment.reward is None:
            continue
        elif not isinstance(moment.reward, int | float) or not math.isfinite(moment.reward):
            problems.append(f"{where}: {moment.reward!r} is no finite number")
        elif limits is not None and not limits[0] <= moment.reward <= limits[1]:
            problems.append(f"{where}: {moment.reward} is not within {limits[0]:g} and {limits[1]:g}")
    return problems


def observation_schema(probe: Probe) -> CheckEvidence:
    """Observations fit the schemas that the server publishes."""
    # A reset may answer with another class than a step.
    of_steps = probe.schema.get("observation")
    of_reset = probe.schema.get("reset_observation") or of_steps
    has_tools = has_tool_actions(probe.schema.get("action") or {})
    checked = 0
    problems: list[str] = []
    for where, value, schema in described_observations(probe.first.moments, of_reset, of_steps, has_tools=has_tools):
        checked += 1
        problems += [f"{where}: {one}" for one in violations(value, schema)]
    if problems:
        fix = "return the class that create_app was given, and change its fields where the data is right"
        raise CheckFailed(*problems[:_SHOWN], fix=fix)
    if not checked:
        raise CheckSkipped(f"no tool is called without a plan; write {PLAN}, such as {_plan_of_one_call(probe)}")
    return CheckEvidence(f"{checked} observations fit", {"observations": checked})


def _plan_of_one_call(probe: Probe) -> str:
    """Return a plan that calls the first tool, to copy and complete."""
    for tool in _served_tools(probe)[:1]:
        schema = tool.get("inputSchema")
        with contextlib.suppress(Unmakeable):
            arguments = make(schema, 0) if isinstance(schema, dict) else {}
            call = {"type": "call_tool", "tool_name": tool.get("name"), "arguments": arguments}
            return json.dumps({"actions": [call]})
    return '{"actions": [{"type": "call_tool", "tool_name": "NAME", "arguments": {}}]}'


def described_observations(
    moments: Sequence[Moment], of_reset: Any, of_steps: Any, *, has_tools: bool
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield where each observation was made, and the observation with its schema.

    Where actions are tool calls, the schema describes the reply to a call and nothing else.
    """
    for index, moment in enumerate(moments):
        # Listing tools answers with a list of tools, which the schema of observations does not describe.
        if has_tools and not is_tool_call(moment.action):
            continue
        schema = of_steps if index else of_reset
        described = schema if isinstance(schema, dict) else {}
        yield _where(index), _without_inherited_ends(moment.whole, described), described


def _without_inherited_ends(observation: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Leave out `terminated` and `truncated` if only `Observation` declares them: such fields are in no schema."""
    fields = schema.get("properties")
    if not isinstance(fields, dict):
        return observation
    inherited = {name for name in WHY_OVER if name not in fields and isinstance(observation.get(name), bool)}
    return {name: value for name, value in observation.items() if name not in inherited}


def state_contract(probe: Probe) -> CheckEvidence:
    """The state has the episode's id, and counts steps from zero."""
    states = probe.first.states
    problems = state_problems(states, probe.plan.reset.episode_id, probe.plan.actions)
    for index, state in enumerate(states):
        problems += [f"{_after(index)}: {one}" for one in violations(state, probe.schema.get("state") or {})]
    if problems:
        fix = "in reset, begin a new State(episode_id=episode_id or ...); in step, add 1 to its step_count"
        raise CheckFailed(*problems[:_SHOWN], fix=fix)
    return CheckEvidence(f"{len(states)} states were read", {"states": len(states)})


def state_problems(states: Sequence[dict[str, Any]], episode_id: str, actions: Sequence[dict[str, Any]]) -> list[str]:
    """Return the problems of the states after the reset and after each action."""
    problems = []
    for index, state in enumerate(states):
        if state.get("episode_id") != episode_id:
            problems.append(
                f"{_after(index)}: episode_id is {state.get('episode_id')!r}, and {episode_id!r} was asked for"
            )
        # The environment counts its steps; `_counts` allows for listed tools.
        if not _counts(state, actions[:index]):
            problems.append(f"{_after(index)}: step_count is {state.get('step_count')!r}")
    return problems


def _where(index: int) -> str:
    return f"step {index}" if index else "reset"


def _after(index: int) -> str:
    return f"after {_where(index)}"


def trajectory_record(probe: Probe) -> CheckEvidence:
    """An episode can be written as JSON lines and read again."""
    text = probe.first.text()
    lines = [json.loads(line) for line in text.splitlines()]
    if lines != [moment.json() for moment in probe.first.moments]:
        raise CheckFailed("an episode that was written down reads differently")
    return CheckEvidence(
        f"{len(lines)} moments, {len(text)} characters", {"moments": len(lines), "characters": len(text)}
    )


def tool_declaration_accuracy(probe: Probe) -> CheckEvidence:
    """The served tools equal the tools in the manifest."""
    promises = probe.promises
    names = sorted(str(tool.get("name")) for tool in _served_tools(probe))
    declared = sorted(promises.capabilities.declared_tools)
    measured = {"declared": declared, "found": names}
    if names != declared:
        fix = f"in openenv.yaml: validation.capabilities.declared_tools: [{', '.join(names)}]"
        raise CheckFailed(f"declared are {declared}, found {names}", fix=fix, measured=measured)
    return CheckEvidence(f"{len(names)} tools" if names else "no tools, as declared", measured)


def _served_tools(probe: Probe) -> list[dict[str, Any]]:
    """Read the tools over MCP, as an agent sees them, and not from the schema of actions."""
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    reply = probe.ask("POST", "/mcp", request)
    tools = (reply.get("result") or {}).get("tools") if isinstance(reply, dict) else None
    return [tool for tool in tools or () if isinstance(tool, dict)]


def task_declaration_accuracy(probe: Probe) -> CheckEvidence:
    """There are as many tasks in each split as the manifest says."""
    promises = probe.promises
    # The first environment of the server; packages serve one.
    names = probe.ask("GET", "/list_environments")
    splits = [one["name"] for one in probe.ask("GET", f"/{names[0]}/splits")]
    counts = {split: probe.ask("POST", f"/{names[0]}/num_tasks", {"split": split})["num_tasks"] for split in splits}
    # Without a declaration the counts are reported, and nothing can be wrong.
    declared = promises.capabilities.declared_task_count
    if declared and declared != counts:
        fix = f"in openenv.yaml: validation.capabilities.declared_task_count: {json.dumps(counts)}"
        raise CheckFailed(f"declared are {declared}, found {counts}", fix=fix, measured={"found": counts})
    return CheckEvidence(f"{sum(counts.values())} tasks in {len(counts)} splits", {"found": counts})


def seed_control(probe: Probe) -> CheckEvidence:
    """The same seed begins the same episode, in one session and in another."""
    plan, first = probe.plan, probe.first.moments[0]
    # Three resets in one session: a seed, another one, the first again. State that survives a reset shows up.
    with probe.session() as env:
        one = reset(env, plan)
        other = reset(env, plan, seed=plan.reset.seed + 1)
        # A difference within the session is a leak between episodes, which another session would not show.
        once_more = reset(env, plan)
    changed = _differing(one.core, once_more.core)
    in_between = _differing(one.core, first.core)
    if changed or in_between:
        where = "in one session" if changed else "in two sessions"
        problem = f"reset(seed={plan.reset.seed}) twice {where}: {', '.join(changed or in_between)} differs"
        raise CheckFailed(problem, fix=_SEEDING)
    # An environment may ignore the seed. That is noted, not failed.
    matters = one.core != other.core
    text = "another seed begins another episode" if matters else "the first observation does not depend on the seed"
    return CheckEvidence(text, {"seed": plan.reset.seed, "another_seed_differs": matters})


def episode_determinism(probe: Probe) -> CheckEvidence:
    """The same seed and actions give the same observations, rewards and end."""
    # Rewards of a language model as judge may differ within the declared tolerance, so they are left out here.
    _compare(probe.first, probe.again, "played twice", rewards=not _is_judged(probe))
    return CheckEvidence(f"{len(probe.again.rewards)} steps, twice the same", {"steps": len(probe.again.rewards)})


def network_policy(probe: Probe) -> CheckEvidence:
    """An environment that may reach everything needs no check."""
    promises = probe.promises
    if promises.network.mode == "public":
        return CheckEvidence("the network is public, so nothing is forbidden", {"mode": "public"})
    raise CheckSkipped(f"{promises.network.mode} is declared; run its image without a network to see that it holds")


def host_containment(probe: Probe) -> CheckEvidence:
    """A container has no privileges, no folders of the host and none of its namespaces."""
    reach = None if probe.package is None else probe.package.containment()
    if reach is None:
        # A process of this machine has no container to contain it.
        raise CheckNotApplicable("the package runs here as a process, not in a container")
    if "privileged" not in reach:
        raise CheckSkipped("the provider does not report the reach of its containers")
    reached = [*reach.get("mounts", ()), *reach.get("host_namespaces", ())]
    problems = [f"the container has {one} of the host" for one in reached]
    if reach["privileged"]:
        problems.append("the container is privileged")
    if problems:
        raise CheckFailed(*problems, fix="run the image without these", measured=reach)
    return CheckEvidence("no privileges, folders or namespaces of the host", reach)


def resource_bounds(probe: Probe) -> CheckEvidence:
    """The server's memory and the slowest episode so far stay within the declared limits."""
    # The first episode is played before memory is read: an idle server says little.
    _ = probe.first
    resources = probe.promises.resources
    memory = probe.package.peak_memory_mb() if probe.package is not None else None
    measured = {"memory_mb": None if memory is None else round(memory, 1), "episode_s": round(probe.slowest_s, 3)}
    problems = []
    if memory is not None and memory > resources.memory_mb:
        problems.append(f"{memory:.0f} MB of memory were used, and {resources.memory_mb} are declared")
    if probe.slowest_s > resources.episode_timeout_s:
        problems.append(f"an episode took {probe.slowest_s:.1f} s, and {resources.episode_timeout_s:g} are declared")
    if problems:
        fix = "declare what is needed in validation.resources, or use less"
        raise CheckFailed(*problems, fix=fix, measured=measured)
    used = "memory is not known here" if memory is None else f"{memory:.0f} MB"
    return CheckEvidence(f"{used}, slowest episode {probe.slowest_s:.2f} s", measured)


resource_envelope = resource_bounds  # the same again, after the episodes of many more checks


def episode_isolation(probe: Probe) -> CheckEvidence:
    """Two sessions at once, step by step in turn: neither sees anything of the other."""
    is_same = _holds(lambda: _compare(probe.first, probe.again, ""))
    episode = ProbeEpisode()
    with probe.session() as env:
        episode.moments.append(reset(env, probe.plan))
        try:
            with probe.open() as neighbour:
                wrong = _play_beside(probe, env, neighbour, episode)
        except SessionCapacityError:
            return CheckEvidence("one session at a time, by its own word", {"sessions": 1})
    if wrong and _holds(lambda: state_contract(probe)):
        raise CheckFailed(*wrong, fix=_ALONE)
    if is_same:
        _compare(probe.first, episode, "played beside another session", fix=_ALONE)
        return CheckEvidence("an episode beside another one is as it is alone", {"sessions": 2})
    return CheckEvidence("states of two sessions stay apart; episodes differ anyhow", {"sessions": 2})


def _play_beside(probe: Probe, env: Client, neighbour: Client, episode: ProbeEpisode) -> list[str]:
    """Continue an episode while a neighbour acts; return the problems of both states."""
    plan = probe.plan
    reset(neighbour, plan, seed=plan.reset.seed + 1, episode_id="neighbour")
    # The neighbour steps once, between our steps: shared class or module state then changes under us.
    for index, action in enumerate(plan.actions):
        if episode.moments[-1].done:
            break
        episode.moments.append(step(env, action))
        if index == 0:
            step(neighbour, plan.actions[-1])
    steps = len(episode.rewards)
    states = (
        (env.state(), plan.reset.episode_id, plan.actions[:steps]),
        (neighbour.state(), "neighbour", plan.actions[-1:] if steps else []),
    )
    return [
        f"the session of {name!r} has the state of {state.get('episode_id')!r} after {state.get('step_count')!r} steps"
        for state, name, actions in states
        if state.get("episode_id") != name or not _counts(state, actions)
    ]


def fork(probe: Probe) -> CheckEvidence:
    """A copy that takes the same steps sees the same, and what another copy does shows in neither."""
    # If the episode is not deterministic by itself, differences between copies prove nothing.
    is_same = _holds(lambda: _compare(probe.first, probe.again, ""))
    plan = probe.plan
    # Fork in the middle: a copy of the beginning could be a fresh reset.
    half = len(probe.first.rewards) // 2
    # Protocol v2, which forks, answers such a step with an error. The fault is the reward, not the copy.
    if any(NONFINITE_REWARD_KEY in moment.metadata for moment in probe.first.moments):
        raise CheckSkipped(f"{UNMET}runtime.reward_well_formed")
    with probe.session("auto") as env:
        reset(env, plan)
        for action in plan.actions[:half]:
            step(env, action)
        # Refusing is allowed. A wrong copy is not.
        try:
            copied, other = env.fork(2)
        except (NotForkable, SessionCapacityError, ProtocolError, UnknownTypeError) as error:
            return CheckEvidence(f"it is refused: {message_of(error)}"[:300], {"forked": False})
        with copied, other:
            # The other copy takes different actions. They must not show in the original or in its first copy.
            elsewhere = _play_on(other, plan.actions[::-1])
            ours, theirs = ProbeEpisode(), ProbeEpisode()
            for action in plan.actions[half:]:
                ours.moments.append(step(env, action))
                theirs.moments.append(step(copied, action))
                if ours.moments[-1].done:
                    break
            states = [one.state() for one in (env, copied)]
            other_state = other.state()
    if is_same:
        _compare(ours, theirs, "in a copy", fix=_COPYING, rewards=not _is_judged(probe))
        if states[0] != states[1]:
            raise CheckFailed(
                f"a copy has the state {shown(states[1])}, and its original {shown(states[0])}", fix=_COPYING
            )
    # The step count shows whether the other copy had only its steps.
    if _holds(lambda: state_contract(probe)) and not _counts(other_state, [*plan.actions[:half], *elsewhere]):
        raise CheckFailed(
            f"a copy counts {other_state.get('step_count')!r} steps, including steps of others", fix=_COPYING
        )
    return CheckEvidence(f"a copy after {half} steps goes on the same", {"forked": True, "steps": len(ours.moments)})


def _play_on(env: Client, actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take actions until the episode ends; return them."""
    taken = []
    for action in actions:
        taken.append(action)
        if step(env, action).done:
            break
    return taken


def step_before_reset(probe: Probe) -> CheckEvidence:
    """A step in a session that was never reset is answered, and the session can be used."""
    _ = probe.first
    action = probe.plan.actions[0]
    with probe.session() as env:
        # Any typed answer is right; a broken session is not.
        try:
            step(env, action)
            answer = "an observation"
        except ServerError as error:
            answer = f"{type(error).__name__}: {message_of(error)}"
        except OpenEnvError as error:
            fix = "make __init__ leave the environment in a state in which step works or raises"
            raise CheckFailed(f"a step before reset: {type(error).__name__}: {message_of(error)}", fix=fix) from error
        # The session must be usable afterwards.
        reset(env, probe.plan)
    return CheckEvidence(f"answered with {answer}"[:200])


def invalid_action(probe: Probe) -> CheckEvidence:
    """An invalid action is refused with a typed error, and the episode continues."""
    _ = probe.first
    with probe.session() as env:
        reset(env, probe.plan)
        # An action with an unknown field. Models that allow extra fields accept it, which is noted.
        before = env.state()
        try:
            step(env, {"no_such_field_of_any_action": 1})
        except ServerError as error:
            # A refused action must change nothing: agents retry.
            if env.state() != before:
                raise CheckFailed("an action that was refused has changed the state") from error
            return CheckEvidence(f"refused with {error.code}", {"code": error.code})
        except OpenEnvError as error:
            raise CheckFailed(f"the session did not survive it: {type(error).__name__}: {message_of(error)}") from error
    return CheckEvidence("unknown fields are accepted by this action class")


def session_cleanup(probe: Probe) -> CheckEvidence:
    """Sessions that have ended free their slots, files, threads and processes; close() raises nothing."""
    _ = probe.first
    package = probe.package
    # Counts of files, threads and children before and after, if the server's process can be read.
    before = package.handles() if package is not None else None
    for _ in range(_SESSIONS):
        with probe.session() as env:
            reset(env, probe.plan)
            step(env, probe.plan.actions[0])
    measured: dict[str, Any] = {"sessions": _SESSIONS}
    if package is not None and before is not None:
        deadline = time.monotonic() + _SETTLE_S
        # At least half a handle per session counts as a leak; a single cache or pool does not.
        while (grown := _grown(probe, before)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if grown:
            raise CheckFailed(
                f"after {_SESSIONS} sessions: {grown}", fix="free them in close(); it is called on every path"
            )
    if package is not None and CLOSE_FAILED in package.output():
        raise CheckFailed(CLOSE_FAILED, fix="let close() work at any time, also after a failed reset, and only once")
    return CheckEvidence(f"{_SESSIONS} sessions came and went", measured)


def floor_gap(probe: Probe) -> CheckEvidence:
    """The least that can be done, again and again, is paid clearly less than the best."""
    promises = probe.promises
    _ = probe.first
    with probe.session() as env:
        # Doing the first action again and again is the least that an agent can do.
        plan = probe.plan.model_copy(update={"actions": [probe.plan.actions[0]] * len(probe.plan.actions)})
        moments, started = play(env, plan).moments, time.monotonic()
        # Many environments pay at the end of an episode only.
        while not (moments[-1].done or _paid(moments)) and len(moments) <= _FLOOR_STEPS:
            if time.monotonic() - started > _FLOOR_S:
                break
            moments.append(step(env, plan.actions[0]))
    paid = _paid(moments)
    if not paid:
        raise CheckSkipped(f"no reward in {len(moments) - 1} steps; write {PLAN} with actions that earn one")
    # The best single step of the floor episode against the top of the declared range.
    floor, best = max(paid), promises.reward.range[1]
    measured = {"floor": floor, "gap": best - floor, "floor_margin": promises.reward.floor_margin}
    if best - floor < promises.reward.floor_margin:
        problem = f"the first action alone earns {floor:g} of {best:g}"
        raise CheckFailed(problem, fix="pay for the intended skill, or declare a wider range", measured=measured)
    return CheckEvidence(f"the first action alone earns {floor:g} of {best:g}", measured)


def _paid(moments: Sequence[Moment]) -> list[int | float]:
    """Return the rewards of the steps that had one."""
    return [moment.reward for moment in moments[1:] if isinstance(moment.reward, int | float)]


def verifier_determinism(probe: Probe) -> CheckEvidence:
    """The same episode earns the same three times."""
    runs = [probe.first.rewards, probe.again.rewards, probe.play().rewards]
    return _same_rewards(probe, runs, "three times")


def verifier_portability(probe: Probe) -> CheckEvidence:
    """The same episode earns the same in another process, where sets have another order."""
    return _same_rewards(probe, [probe.first.rewards, probe.elsewhere.rewards], "in two processes")


def replayability(probe: Probe) -> CheckEvidence:
    """The same episode is the same in another process."""
    fix = "let nothing depend on the order of sets, on hash(), on the clock or on an address"
    _compare(probe.first, probe.elsewhere, "in another process", fix=fix, rewards=not _is_judged(probe))
    return CheckEvidence(f"{len(probe.elsewhere.rewards)} steps, the same", {"steps": len(probe.elsewhere.rewards)})


def _same_rewards(probe: Probe, runs: list[list[Any]], when: str) -> CheckEvidence:
    # Scripts are run by the verifier, not by the environment, so rewards here would be meaningless.
    if probe.manifest is not None and probe.manifest.capabilities.verifier.kind == "script":
        raise CheckSkipped("rewards come from a script, which is not run here")
    # Missing rewards count as 0 so that episodes can be compared step by step.
    numbers = [[0.0 if reward is None else float(reward) for reward in run] for run in runs]
    spread = max((max(step) - min(step) for step in zip(*numbers, strict=False)), default=0.0)
    allowed = probe.manifest.reward.variance_tolerance if probe.manifest is not None and _is_judged(probe) else 0.0
    measured = {"spread": spread, "allowed": allowed, "runs": len(runs)}
    # Episodes of different lengths differ even if their common steps agree.
    if spread > (allowed or 0.0) or len({len(run) for run in runs}) > 1:
        raise CheckFailed(f"the same actions earned {runs[0]} and {runs[-1]} {when}", fix=_SEEDING, measured=measured)
    return CheckEvidence(f"the same rewards {when}", measured)


def _counts(state: dict[str, Any], actions: Sequence[dict[str, Any]]) -> bool:
    """Say whether a state counts these steps; listing tools may count as one, or not."""
    count = state.get("step_count")
    # Some environments count listing tools as a step, others do not. Both are accepted.
    least = sum(action.get("type") != LIST_TOOLS for action in actions)
    # `True` is an int in Python, but not a count.
    return isinstance(count, int) and not isinstance(count, bool) and least <= count <= len(actions)


def _is_judged(probe: Probe) -> bool:
    return probe.manifest is not None and probe.manifest.capabilities.llm_judged


def _holds(check: Callable[[], object]) -> bool:
    try:
        check()
    except CheckFailed:
        return False
    return True


def _compare(one: ProbeEpisode, other: ProbeEpisode, when: str, *, fix: str = _SEEDING, rewards: bool = True) -> None:
    """Raise where two episodes differ; metadata may."""
    # The first difference is reported: later ones usually follow from it.
    for index, (first, second) in enumerate(zip(one.moments, other.moments, strict=False)):
        changed = [name for name in _differing(first.core, second.core) if rewards or name != "reward"]
        if changed:
            name = changed[0]
            values = f"{shown(first.core.get(name))} and {shown(second.core.get(name))}"
            where = _where(index)
            raise CheckFailed(f"{when}: {where} differs in {', '.join(changed)} ({values})", fix=fix)
    if len(one.moments) != len(other.moments):
        raise CheckFailed(f"{when}: it ended after {len(one.rewards)} and {len(other.rewards)} steps", fix=fix)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _grown(probe: Probe, before: Handles) -> str:
    """Describe each resource that grew with at least every second session."""
    now = probe.package.handles() if probe.package is not None else None
    if now is None:
        return ""
    # Compare kinds separately: ten more threads and ten fewer files must not cancel out.
    more = {kind: getattr(now, kind) - getattr(before, kind) for kind in ("files", "threads", "children")}
    return ", ".join(f"{count} more {kind}" for kind, count in more.items() if count >= _SESSIONS // 2)
